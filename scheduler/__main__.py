"""Runs `scheduler.table`, the package's only program: every policy on every profile, beside its bound."""

import sys

from scheduler.table import main

if __name__ == "__main__":
    sys.exit(main())
