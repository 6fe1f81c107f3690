"""``python -m recpo``: the command line."""

import sys

from recpo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
