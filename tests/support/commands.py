"""Runs `python -m MODULE ...` without importing torch anew: forked, and so are the ranks that it starts."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from dnn_bench import fork_server
from dnn_bench.launch import spawn_rank
from tests.support.launch import PATIENCE, ROOT, clean_environment


def run_module(
    module: str, *arguments: str, ranks: int = 2, patience: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Its first `ranks` local ranks come from servers that stay for later tests."""
    environment = clean_environment()
    for index in range(ranks):
        fork_server.server(index, environment)
    program = ["-m", module, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        with output.open("wb") as first, errors.open("wb") as second:
            process = spawn_rank(0, program, environment, environment, ROOT, first, second)
            try:
                code = process.wait(patience)
            finally:
                process.kill()
        return subprocess.CompletedProcess(program, code, output.read_text(), errors.read_text())
