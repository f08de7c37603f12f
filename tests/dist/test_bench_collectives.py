"""The collectives benchmark with real ranks."""

import json
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
    transports = {"direct", "ring", "tiers", "gloo", "horovod"}
    assert {row["transport"] for row in report["rows"]} == transports
    assert len(report["rows"]) == 5 * 3 * len(transports)
    assert {row["bytes"] for row in report["rows"]} == {1024, 4096, 16384, 65536, 262144}
    assert len(report["fits"]) == 3 * len(transports)
    assert "bus MB/s" in done.stdout
