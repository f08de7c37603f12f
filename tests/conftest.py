"""What every test gets: one thread, and no launcher's variables from the shell it was started in."""

import os
import sys
from pathlib import Path

# Ranks started by tests share few cores; set before anything imports torch or numpy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
