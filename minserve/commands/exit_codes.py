"""The process's exit codes, beside 0."""

FAILED = 1  # an answer failed, or something is broken
USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
READER_GONE = 141  # 128 + SIGPIPE
