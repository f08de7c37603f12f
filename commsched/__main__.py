"""`python -m commsched`: the command `commsched`."""

import sys

from commsched.cli import main

sys.exit(main())
