"""A test that is stuck below Python fails; the others run on.

pytest-timeout's exception comes when the main thread runs Python again. Once, a test that never did so kept a
whole run from ending.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TESTS = """
import ctypes

def test_stuck():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

def test_after():
    pass
"""


def test_a_test_that_is_stuck_below_python_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_two.py").write_text(TESTS)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "--timeout", "2", "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_STUCK_GRACE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "FAILED tests/test_two.py::test_stuck" in done.stdout, done.stdout
    assert "1 failed, 1 passed" in done.stdout and "in test_stuck" in done.stderr, done.stdout + done.stderr
