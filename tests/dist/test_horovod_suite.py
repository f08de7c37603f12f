"""tests/horovod_suite.py, on a checkout of four tests: what each system passes, and where they differ."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests import horovod_suite

CHECKOUT = """
import unittest

import torch

import horovod.torch as hvd

from common import doubled


class TorchTests(unittest.TestCase):
    def test_sum(self):
        hvd.init()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == doubled([1.0, 1.0])

    def test_on_one_rank_only(self):
        hvd.init()
        assert hvd.rank() == 0

    def test_of_a_gpu(self):
        self.skipTest("No GPUs available")

    def test_who(self):
        assert hvd.__name__ == "horovod.torch"
"""


def written(checkout: Path) -> Path:
    (checkout / "test/parallel").mkdir(parents=True)
    (checkout / "test/utils").mkdir()
    (checkout / "test/utils/common.py").write_text("def doubled(values): return [2 * v for v in values]\n")
    path = "import sys, os\nsys.path.append(os.path.join(os.path.dirname(__file__), os.pardir, 'utils'))\n"
    (checkout / "test/parallel/test_torch.py").write_text(path + CHECKOUT)
    return checkout


@pytest.mark.dist
@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_the_same_tests_over_both_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert horovod_suite.main([str(written(tmp_path))]) == 1  # test_who passes with Horovod alone
    *differences, seconds, last = capsys.readouterr().out.splitlines()
    assert differences == [
        "test_on_one_rank_only: commsched failed, Horovod failed",
        "test_who: commsched failed, Horovod passed",
    ]
    assert seconds.startswith("seconds: commsched ") and "; Horovod " in seconds
    assert last == "commsched 1 of 3, Horovod 2 of 3"


def test_a_rank_without_a_report_failed_everything(tmp_path: Path) -> None:
    (tmp_path / "0").write_text('<testsuite><testcase name="test_a"/></testsuite>')
    assert horovod_suite.outcomes([tmp_path / "0"]) == {"test_a": "passed"}
    assert horovod_suite.outcomes([tmp_path / "0", tmp_path / "1"]) == {"test_a": "failed"}


def test_of_several_runs_the_worst_outcome_counts() -> None:
    first, second = {"test_a": "passed", "test_b": "failed"}, {"test_a": "failed", "test_b": "passed"}
    assert horovod_suite.worst(horovod_suite.worst({}, first), second) == dict.fromkeys(first, "failed")


def test_nothing_run_is_no_success() -> None:
    assert horovod_suite.compare({"commsched": {}, "Horovod": {}}) == ("commsched 0 of 0, Horovod 0 of 0", 1)
    assert horovod_suite.compare({"commsched": {"test_a": "passed"}, "Horovod": {}})[1] == 1


def test_a_source_package_has_no_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        horovod_suite.main([str(tmp_path)])
    assert "test_torch.py is missing: a source package leaves the tests out" in capsys.readouterr().err
