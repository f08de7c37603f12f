"""The collectives benchmark with real ranks."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.commands import run_module
from tests.support.needs import skip_without_horovod

pytestmark = pytest.mark.dist


def test_every_transport_is_checked_timed_and_fitted(tmp_path: Path) -> None:
    skip_without_horovod()
    path = tmp_path / "out.json"
    sizes = "1k,4k,16k,64k,256k"
    done = run_module("dnn_bench", "collectives", "--local", "2", "--sizes", sizes, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["problems"] == {}
    operations = dict.fromkeys(("direct", "ring", "tiers"), 3) | dict.fromkeys(
        ("operations", "gloo", "horovod"), 5
    )
    measured = {(row["transport"], row["operation"]) for row in report["rows"]}
    assert Counter(transport for transport, _ in measured) == operations
    assert len(report["rows"]) == 5 * len(measured)
    assert {row["bytes"] for row in report["rows"]} == {1024, 4096, 16384, 65536, 262144}
    assert len(report["fits"]) == len(measured)
    assert "bus MB/s" in done.stdout
