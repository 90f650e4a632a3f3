"""`python -m torch_tandem` is the command `tandem`."""

import sys

from torch_tandem.cli import main

if __name__ == "__main__":
    sys.exit(main())
