"""Runs the cases of every programs/optimizer_*.py, each on the numbers of ranks that it names.

pytest tests/dist/test_optimizer_cases.py -k optimizer_sparse
"""

from pathlib import Path

import pytest

from tests.support.cases import PROGRAMS, check, parameters
from tests.support.documented_commands import blocks
from tests.support.launch import run_ranks

pytestmark = pytest.mark.dist
NAMES = sorted(path.stem for path in PROGRAMS.glob("optimizer_*.py"))
# What the random programs do on threads, these do over the real transports. The others are left to --all.
QUICK = [f"optimizer_{name}" for name in ("bits", "changes")]


@pytest.mark.parametrize(
    "program, ranks, name",
    parameters(*QUICK, quick=(2,)) + parameters(*(name for name in NAMES if name not in QUICK)),
)
def test_optimizer(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)


def test_the_compiled_model_of_the_page_trains(tmp_path: Path) -> None:
    page = [block for block in blocks(docstrings=False) if block.page == "docs/optimizer.md"]
    script = tmp_path / "script.py"
    script.write_text(next(block.text for block in page if "torch.compile" in block.text))
    run_ranks(script, 2, check=True)
