"""Stock scripts under every launcher, the script of docs/integrations.md, and programs/huggingface*.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from commsched.process.network import HeldPort
from tests.support.cases import check, parameters
from tests.support.documented_commands import blocks
from tests.support.launch import PATIENCE, clean_environment, launcher_command

pytestmark = [pytest.mark.models, pytest.mark.trainers]
EXAMPLES = Path(__file__).parent / "examples"
ARGUMENTS = """
    --use_cpu True --max_steps 3 --logging_steps 1 --report_to none --disable_tqdm True --save_strategy no
""".split()
SAY = """
print("rank", trainer.args.process_index, "of", trainer.args.world_size, trainer.state.log_history[2]["loss"])
"""


@pytest.mark.parametrize("program, ranks, name", parameters("huggingface", "huggingface_overlap"))
def test_huggingface(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name, launcher="torchrun")


def started(launcher: str, port: int) -> list[str]:
    if launcher == "accelerate":
        accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
        more = "--multi_gpu --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port"
        return [*accelerate, *more.split(), str(port)]
    return [*launcher_command(launcher, 2, port), sys.executable]


def output(command: Sequence[str], folder: Path) -> list[str]:
    """What the ranks printed; their processes must have ended well."""
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line[line.index("rank ") :] for line in done.stdout.splitlines() if "rank " in line]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "horovodrun", "alone"])
def test_the_job_is_joined_and_left(launcher: str, tmp_path: Path) -> None:
    """No script calls ``init()`` or ``shutdown()``. One process does what transformers does."""
    text = (EXAMPLES / "text_classification.py").read_text() + SAY
    (tmp_path / "stock.py").write_text(text)
    line = "from transformers import Trainer"
    (tmp_path / "script.py").write_text(text.replace(line, "from commsched.huggingface import Trainer"))
    port = HeldPort()
    said = sorted(output([*started(launcher, port.number), "script.py", *ARGUMENTS], tmp_path))
    port.close()
    if launcher == "alone":
        assert said == output([sys.executable, "stock.py", *ARGUMENTS], tmp_path)
    else:
        losses = {row.split()[-1] for row in said}
        assert [row.split()[:4] for row in said] == [["rank", str(i), "of", "2"] for i in range(2)], said
        assert len(losses) == 1, said


def test_the_documented_script_runs(tmp_path: Path) -> None:
    page = [b for b in blocks(docstrings=False) if b.page == "docs/integrations.md" and b.kind == "python"]
    script = next(block.text for block in page if "commsched.huggingface" in block.text)
    (tmp_path / "script.py").write_text(f"{script}\nprint('rank trained', trainer.state.global_step)\n")
    port = HeldPort()
    said = output([*started("torchrun", port.number), "script.py"], tmp_path)
    port.close()
    assert said == ["rank trained 3"] * 2
