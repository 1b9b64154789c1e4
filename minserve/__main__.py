"""python -m minserve"""

import sys

if __name__ == "__main__":
    try:
        from minserve.cli import main

        code = main()
    except KeyboardInterrupt:  # before `main` could look after it
        code = 130
    sys.exit(code)
