"""Runs a file of examples/ as its first lines tell."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.launch import PATIENCE, ROOT, clean_environment, run_ranks

EXAMPLES = ROOT / "examples"
NEED_LIBRARIES = ("lightning_module", "pipeline_huggingface", "trainer")


def train(name: str, folder: Path) -> None:
    """Run it on two ranks; the losses that it prints must fall."""
    path = EXAMPLES / f"{name}.py"
    if "torchrun" in path.read_text():
        # torchrun itself imports torch, for seconds: elsewhere ranks get the variables that it would set.
        launcher = "torchrun" if name in ("torchrun_loop", *NEED_LIBRARIES) else "torchrun-env"
        output = run_ranks(path, 2, launcher=launcher, check=True)[0].stdout
    else:  # it starts ranks itself
        env = clean_environment({"PYTHONPATH": str(ROOT)})
        command = [sys.executable, str(path)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr[-4000:]
        output = done.stdout
    print(output)
    losses = [float(number) for line in output.splitlines() for number in _losses(line)]
    assert len(losses) > 1 and losses[-1] < losses[0], f"{name} prints no falling losses:\n{output}"


def _losses(line: str) -> list[str]:
    """Return the numbers after the word "loss" or "losses"."""
    match = re.search(r"\bloss(?:es)?:? \[?([\d.]+(?:, [\d.]+)*)", line)
    return match.group(1).split(", ") if match else []
