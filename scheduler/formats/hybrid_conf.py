"""PipeDream's and AshPipe's ``hybrid_conf.json``: which module is in which stage, which ranks hold a stage.

cuts, ranks = read_hybrid_conf("hybrid_conf.json")
program = generate("ashpipe", len(cuts), ranks=ranks, cuts=cuts, profile=profile)
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from scheduler.ir.profile import read_json

Stages = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""The first module of each stage, and the ranks that hold it."""


def read_hybrid_conf(path: str | Path) -> Stages:
    """The stages in a file; a ``ValueError`` names the file, the field and the value at fault."""
    return parse_hybrid_conf(read_json(path), str(path))


def parse_hybrid_conf(data: Any, where: str = "hybrid_conf") -> Stages:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(data).__name__}")
    stages = _numbers(data, "module_to_stage_map", where)
    if stages[:1] != [0] or any(after - before not in (0, 1) for before, after in pairwise(stages)):
        raise ValueError(
            f"{where}: field 'module_to_stage_map' must start with stage 0 and rise by at most 1,"
            f" got {stages}"
        )
    cuts = tuple(stages.index(stage) for stage in range(stages[-1] + 1))
    held = data.get("stage_to_rank_map")
    if not isinstance(held, dict) or set(held) != {str(stage) for stage in range(len(cuts))}:
        raise ValueError(
            f"{where}: field 'stage_to_rank_map' must list the ranks of stages 0 to {len(cuts) - 1},"
            f" got {held!r}"
        )
    return cuts, tuple(tuple(_numbers(held, str(stage), where)) for stage in range(len(cuts)))


def _numbers(data: dict[str, Any], field: str, where: str) -> list[int]:
    values = data.get(field)
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{where}: field {field!r} must be a list of whole numbers, got {values!r}")
    return values
