"""`python -m onecard` is the `onecard` command, for environments whose scripts are not on the path."""

import sys

from onecard.cli import main

if __name__ == "__main__":
    sys.exit(main())
