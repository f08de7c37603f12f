"""A test that is stuck below Python fails; the others run on.

pytest-timeout's exception comes when the main thread runs Python again. Once, a test that never did so kept a
whole run from ending.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


PASS = "def test_pass(): pass\n"


def run(folder: Path, files: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "tests").mkdir()
    for name, text in files.items():
        (folder / "tests" / name).write_text(text)
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--timeout", "2", *options, "tests"],
        cwd=folder,
        env={**os.environ, "PYTEST_STUCK_GRACE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.thorough
def test_a_test_that_is_stuck_below_python_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    done = run(tmp_path, {"test_two.py": TESTS}, "-n", "1")
    assert "FAILED tests/test_two.py::test_stuck" in done.stdout, done.stdout
    assert "1 failed, 1 passed" in done.stdout and "in test_stuck" in done.stderr, done.stdout + done.stderr


@pytest.mark.thorough
def test_the_last_worker_is_stuck_and_the_run_ends(tmp_path: Path) -> None:
    files = {"test_a.py": PASS, "test_b.py": PASS, "test_c.py": PASS, "test_two.py": TESTS}
    done = run(tmp_path, files, "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")
    assert "FAILED tests/test_two.py::test_stuck" in done.stdout, done.stdout
    assert "3 passed" in done.stdout, done.stdout + done.stderr


STATES = """
import gc, threading, time
import tests.support.one_process
import torch

class Finalized:
    def __del__(self):
        time.sleep(0.0001)  # lets another thread run

def ask():
    for _ in range(300):
        cycle = Finalized()
        cycle.cycle = cycle
        states.append(torch.random.get_rng_state())

states = []
gc.set_threshold(20)
threads = [threading.Thread(target=ask) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(states))
"""


def test_threads_take_the_state_of_random_numbers_while_garbage_is_collected() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STATES], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "1200\n", done.stderr
