"""python -m minserve"""

import sys

from minserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
