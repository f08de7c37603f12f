"""Runs the commands that the pages show, with smaller sizes.

``tests/unit/foundation/test_documented_commands.py`` parses every one; ``tests/support/documented_runs.py``
lists which are not run and why, and how the others are made smaller.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.documented_commands import Block, Call, blocks, calls
from tests.support.documented_runs import blocks_to_run, is_quick, prepare, reason, run

pytestmark = pytest.mark.dist
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
needs_tools = pytest.mark.skipif(
    not (shutil.which("tc") and shutil.which("sshd")), reason="needs Debian's iproute2 and openssh-server"
)


def marked(block: Block) -> Any:
    """Blocks with emulated hosts need root and their tools."""
    hosts = re.search(r"--hosts|--link \d+mbit", block.text)
    return pytest.param(
        block, id=block.place, marks=[pytest.mark.root, needs_root, needs_tools] if hosts else []
    )


def expanded(shown: list[Block], tmp_path: Path) -> list[Call]:
    (tmp_path / "calls").mkdir()
    return calls(shown, tmp_path / "calls")


def run_all(chosen: list[Call], tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    prepare(tmp_path / "here")
    failed = [str(ran) for ran in run(chosen, tmp_path / "here") if ran.status]
    assert not failed, "\n".join(failed)


def once(chosen: list[Call]) -> list[Call]:
    """Without repetitions, such as those with other seeds."""
    return list({call.words: call for call in reversed(chosen)}.values())[::-1]


def test_quick_commands(tmp_path: Path) -> None:
    shown = [block for block in blocks() if block.kind in ("shell", "inline")]
    chosen = [call for call in expanded(shown, tmp_path) if is_quick(call) and not reason(call)]
    assert len(chosen) >= 5
    run_all(once(chosen), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", [marked(block) for block in blocks_to_run()])
def test_commands_of_a_block(block: Block, tmp_path: Path) -> None:
    """All of a block, since later ones read what earlier ones have written."""
    chosen = [call for call in expanded([block], tmp_path) if not reason(call)]
    assert chosen
    run_all(once(chosen), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.root
@needs_root
@needs_tools
def test_commands_within_sentences_and_docstrings(tmp_path: Path) -> None:
    known = {call.words for call in expanded([b for b in blocks() if b.kind == "shell"], tmp_path)}
    (tmp_path / "more").mkdir()
    inline = expanded([b for b in blocks() if b.kind == "inline"], tmp_path / "more")
    run_all(once([c for c in inline if c.words not in known and not reason(c) and not is_quick(c)]), tmp_path)
