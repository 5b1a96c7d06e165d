"""`python -m ttprun`: the same as `ttprun`."""

import sys

from ttprun.cli.main import main

if __name__ == "__main__":  # multiprocessing imports this module again in what it spawns
    sys.exit(main())
