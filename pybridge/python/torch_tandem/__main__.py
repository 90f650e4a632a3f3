"""Runs the command `tandem` for `python -m torch_tandem`."""

import sys

from torch_tandem.cli import main

if __name__ == "__main__":
    sys.exit(main())
