"""Runs a file of examples/ as its first lines tell."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from commsched.process.network import HeldPort
from tests.support.launch import PATIENCE, ROOT, clean_environment, launcher_command

EXAMPLES = ROOT / "examples"
NEED_LIBRARIES = ("lightning_module", "pipeline_huggingface", "trainer")


def train(name: str, folder: Path) -> None:
    """Run it on two ranks; the losses that it prints must fall."""
    path, port = EXAMPLES / f"{name}.py", HeldPort()
    starts_ranks = "torchrun" not in path.read_text()
    launcher = [] if starts_ranks else launcher_command("torchrun", 2, port.number)
    command = [*launcher, sys.executable, str(path)]
    env = clean_environment({"PYTHONPATH": str(ROOT)})
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE)
    port.close()
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    losses = [float(number) for line in done.stdout.splitlines() for number in _losses(line)]
    assert len(losses) > 1 and losses[-1] < losses[0], f"{name} prints no falling losses:\n{done.stdout}"


def _losses(line: str) -> list[str]:
    """Return the numbers after the word "loss" or "losses"."""
    match = re.search(r"\bloss(?:es)?:? \[?([\d.]+(?:, [\d.]+)*)", line)
    return match.group(1).split(", ") if match else []
