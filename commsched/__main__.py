"""The command `commsched`, also where no script of that name is installed."""

import sys

from commsched.cli import main

if __name__ == "__main__":
    sys.exit(main())
