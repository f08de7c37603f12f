"""A script under the real `srun`, on two emulated hosts with two tasks each, as docs/runtime.md starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dnn_bench.cluster import Cluster
from tests.support.documented_commands import ROOT, of_page
from tests.support.launch import clean_environment
from tests.support.needs import needs, needs_root
from tests.support.slurm import slurm

pytestmark = [
    pytest.mark.dist,
    pytest.mark.root,
    pytest.mark.slow,  # Slurm's own waits take a minute
    needs_root,
    needs("ip", "tc", "srun", "slurmctld", "slurmd"),
]
PROGRAM = Path(__file__).with_name("programs") / "horovod_script.py"
# The batch script itself has most of srun's variables, and must not wait for other ranks.
ALONE = "python -c 'import commsched as hvd; hvd.init(); print(\"alone\", hvd.size())'\n"


def batch_script() -> str:
    """The script of the page."""
    page = "docs/runtime.md"
    (shown,) = [b.text for b in of_page(page, (ROOT / page).read_text()) if "#SBATCH" in b.text]
    return shown.replace("\n\n", "\n\n" + ALONE, 1)


def test_the_batch_script_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_bytes(PROGRAM.read_bytes())
    (tmp_path / "batch").write_text(batch_script())
    (tmp_path / "slurm").mkdir()
    alone = subprocess.check_output([sys.executable, str(PROGRAM)], env=clean_environment(), text=True)
    expected = next(line for line in alone.splitlines() if line.startswith("final loss"))
    with Cluster(2) as cluster, slurm(cluster, tmp_path / "slurm") as environ:
        submit = ["sbatch", "--wait", "--output", str(tmp_path / "out"), "--chdir", str(tmp_path)]
        env = clean_environment(environ | {"PYTHONPATH": str(ROOT)})
        status = cluster.run(0, [*submit, str(tmp_path / "batch")], env).wait(300)
    said = (tmp_path / "out").read_text()
    assert status == 0, said
    lines = said.splitlines()
    assert "alone 1" in lines
    assert expected in lines
    for rank in range(4):
        assert f"rank {rank} of 4 engine torch" in said
