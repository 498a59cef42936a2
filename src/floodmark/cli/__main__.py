"""`python -m floodmark.cli`: the command, where the script is not on the path."""

import sys

from floodmark.cli import main

if __name__ == "__main__":
    sys.exit(main())
