"""How many calls a gradient and an update take, traced in real ranks, and listed in docs/engine.md."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import run_ranks

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]
HOOK, STEP = "commsched/optimizer/round.py: on_grad", "commsched/optimizer/distributed.py: step"
MOST_FROM_HOOK, MOST_IN_CPP, MOST_FROM_STEP = 11, 6, 8
MOST_FILES, MOST_CLASSES = 12, 12
Lists = dict[str, list[str]]


@cache
def found() -> dict[str, Any]:
    program = Path(__file__).with_name("programs") / "call_counts.py"
    printed: dict[str, Any] = json.loads(run_ranks(program, 2, check=True)[0].stdout)
    return printed


def traced() -> dict[str, tuple[Lists, Lists]]:
    """By ``gather=``: the calls on the stack when a goal was reached, and all calls until then."""
    traces: dict[str, tuple[Lists, Lists]] = found()["traces"]
    return traces


def documented() -> list[list[str]]:
    text = (ROOT / "docs" / "engine.md").read_text()
    section = text.split("## The calls of one gradient")[1].split("\n## ")[0]
    return [block.split("\n") for block in re.findall(r"```\n(.*?)\n```", section, re.DOTALL)]


def shown(title: str, calls: list[str]) -> list[str]:
    print(f"\n{title}: {len(calls)} calls", *calls, sep="\n  ")
    return calls


@pytest.mark.thorough
@pytest.mark.parametrize("gather", ["gradients", "parameters"])
def test_from_the_hook_to_the_binding(gather: str) -> None:
    chains, calls = traced()[gather]
    of_last = shown(f"the last gradient of a bucket, gather={gather}", calls[f"mark_ready from {HOOK}"])
    assert len(of_last) <= MOST_FROM_HOOK and of_last == documented()[0]
    assert set(chains[f"mark_ready from {HOOK}"]) <= set(of_last)


def test_from_the_binding_to_the_socket() -> None:
    """Each function is in its file and calls the next; marking wakes the thread that waits in ``run_op``."""
    listed = shown("in C++", documented()[1])
    assert len(listed) <= MOST_IN_CPP
    names = [line.split("::")[1] for line in listed]
    for line, following in zip(listed, [*names[1:], "sendmsg"], strict=True):
        path, name = line.split(": ", 1)
        definition = re.search(rf"^\S.* {name}\(.*?^}}", (ROOT / path).read_text(), re.DOTALL | re.MULTILINE)
        assert definition, line
        called = "thread_wakes_.notify_one" if following == "run_op" else f"{following}("
        assert called in definition[0], f"{line} does not call {called}"
    run_op = (ROOT / "comm_core/csrc/engine/engine_thread.cpp").read_text().split("EngineCore::run_op")[1]
    assert "thread_wakes_.wait" in run_op.split("\n}")[0]


@pytest.mark.parametrize(("place", "gather"), [(2, "gradients"), (3, "parameters")])
def test_from_step_to_the_update(place: int, gather: str) -> None:
    chains, _ = traced()[gather]
    chain = shown(f"from step() to an updated parameter, gather={gather}", chains[f"update from {STEP}"])
    assert len(chain) <= MOST_FROM_STEP and chain == documented()[place]


def test_a_step_passes_through_few_files_and_classes() -> None:
    calls, files, classes = found()["step"]
    print(f"\na step with 12 parameters: {calls} calls in {len(files)} files and {len(classes)} classes")
    print(*files, *classes, sep="\n  ")
    assert len(files) <= MOST_FILES and len(classes) <= MOST_CLASSES
