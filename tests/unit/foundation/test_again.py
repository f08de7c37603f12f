"""Which failed tests continuous integration may repeat."""

import os
import subprocess
import sys

import pytest

from tests.again import verdict
from tests.support.launch import ROOT

STEADY, PROCESSES, EXACT = {"slow"}, {"dist", "root"}, {"dist", "exact"}


def test_a_test_of_processes_may_be_repeated():
    assert verdict(["a"], {"a": PROCESSES}) == ""


@pytest.mark.parametrize(
    ("failed", "marks", "said"),
    [
        ([], {}, "no test is known to have failed"),
        (["a", "b", "c"], dict.fromkeys("abc", PROCESSES), "3 tests failed; at most 2"),
        (["a", "b"], {"a": PROCESSES, "b": STEADY}, "b does not depend"),
        (["a"], {"a": EXACT}, "a does not depend"),
        (["a"], {}, "a can not be collected"),
    ],
)
def test_whatever_else_failed_stays_failed(failed, marks, said):
    assert said in verdict(failed, marks)


@pytest.mark.parametrize(("body", "code"), [("pass", 0), ("assert 0", 1)])
def test_what_failed_is_run_again(tmp_path, body, code):
    """With pytest's own files: failures are read, marks collected, and every repetition is real."""

    def run(test, module):
        (tmp_path / "test_it.py").write_text(f"import pytest\n@pytest.mark.dist\ndef test_a(): {test}\n")
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", module]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)

    assert run("assert 0", "pytest").returncode == 1
    again = run(body, "tests.again")
    assert again.returncode == code, again.stdout + again.stderr
    assert ("UNSTEADY: test_it.py::test_a" in again.stdout) == (code == 0)
