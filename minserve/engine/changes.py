"""Changes: one change to the engine at a time, and a repair after one that was interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minserve.errors import MinserveError


class Changes:
    """Guards an engine's state: threads change it one after another, and Ctrl-C may fall between any two lines.

    repair: called before the next change if the last one was not completed. at_end: called when one is about to be.
    lock: reentrant, because Python may clean up a stream that nobody holds any more in the middle of a step.
    busy: a change is going on; whoever holds the lock and sees it is inside that change.
    """

    def __init__(self, repair: Callable[[], None], at_end: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self.busy = False
        self._complete = True
        self._repair, self._at_end = repair, at_end

    @contextmanager
    def one(self) -> Iterator[None]:
        """A change. Raises MinserveError inside another one of the same thread."""
        with self.lock:
            if self.busy:
                raise MinserveError(
                    "a listener or a logits processor that runs inside a step can abort requests, but not add any and "
                    "not step; do that between two steps"
                )
            if not self._complete:
                self._repair()
            self._complete = False
            try:
                try:
                    self.busy = True
                    yield
                    self._at_end()
                    self._complete = True
                finally:
                    self.busy = False
            finally:  # once more, for an interrupt just before that line
                self.busy = False
