"""PipeDream's and AshPipe's ``hybrid_conf.json`` (also ``dp_conf.json``, ``mp_conf.json``).

An entry of ``module_to_stage_map`` is one stage module of the partitioned graph, not a layer of the model;
the last entry is the loss. So the file says which ranks hold which stage, and the partitioned graph
(``gpus=N.txt``) says which layers a stage module has::

    {"module_to_stage_map": [0, 1, 1],                   # two stage modules and the loss
     "stage_to_rank_map": {"0": [0, 1, 2], "1": [3]},    # three replicas of the first
     "stage_to_depth_map": {"0": 1, "1": 0},             # minibatches that a stage is ahead (optional)
     "recompute_stage": []}                              # AshPipe's (optional)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from scheduler.ir.codec import read_json

OURS = "commsched"
"""Our own field, for the parts of a plan that the format has no field for; other runtimes ignore it."""


@dataclass(frozen=True)
class HybridConf:
    """``modules``: the stage of each stage module, without the loss. ``ranks``: of each stage. ``depths``:
    how many minibatches each stage is ahead, None where the file does not say. ``recompute``: by stage.
    """

    modules: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    depths: tuple[int, ...] | None = None
    recompute: tuple[bool, ...] = ()
    ours: Mapping[str, Any] = field(default_factory=dict)
    where: str = "hybrid_conf.json"

    @property
    def stages(self) -> int:
        return len(self.ranks)

    def cuts(self, starts: Sequence[int], graph: str) -> tuple[int, ...]:
        """The first layer of each stage, from that of each stage module in ``graph``."""
        if len(starts) != len(self.modules):
            raise ValueError(
                f"{self.where}: field 'module_to_stage_map' has {len(self.modules) + 1} entries, so it is for"
                f" {len(self.modules)} stage modules and the loss, but {graph} has {len(starts)} stages; take"
                " two files of the same conversion"
            )
        return tuple(starts[self.modules.index(stage)] for stage in range(self.stages))

    def cuts_alone(self, layers: int) -> tuple[int, ...]:
        """The first layer of each stage of a model, without the graph: only where all layers are in one
        stage, or there is one stage module for each layer.
        """
        if self.stages == 1:
            return (0,)
        if len(self.modules) == layers:
            return self.cuts(range(layers), "the model")
        raise ValueError(
            f"{self.where}: field 'module_to_stage_map' puts {len(self.modules)} stage modules (and the loss)"
            f" into {self.stages} stages; which of the model's {layers} layers are in which module stands in"
            " the partitioned graph only: give it with --graph gpus=N.txt (the optimizers of PipeDream and"
            " AshPipe and `commsched convert` write it)"
        )

    def text(self) -> str:
        numbered = {"stage_to_rank_map": self.ranks, "stage_to_depth_map": self.depths}
        data = {
            "module_to_stage_map": [*self.modules, self.modules[-1]],
            **{
                name: {str(stage): value for stage, value in enumerate(values)}
                for name, values in numbered.items()
                if values is not None
            },
            "recompute_stage": [stage for stage, again in enumerate(self.recompute) if again],
            **({OURS: self.ours} if self.ours else {}),
        }
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in data.items())
        return f"{{\n{lines}\n}}\n"


def read_hybrid_conf(path: str | Path) -> HybridConf:
    """Read a file; a ``ValueError`` names the file, the field and the wrong value."""
    return parse_hybrid_conf(read_json(path), str(path))


def parse_hybrid_conf(data: Any, where: str = "hybrid_conf.json") -> HybridConf:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(data).__name__}")
    modules = _modules(data, where)
    stages = modules[-1] + 1
    depths = data.get("stage_to_depth_map")
    if depths is not None:
        rows = _by_stage(data, "stage_to_depth_map", stages, where)
        if not all(type(row) is int and row >= 0 for row in rows):
            raise ValueError(f"{where}: field 'stage_to_depth_map' must have whole numbers, got {depths!r}")
    again = _numbers(data.get("recompute_stage") or [], "recompute_stage", where)
    if again and max(again) >= stages:
        raise ValueError(f"{where}: field 'recompute_stage' names stages 0 to {stages - 1}, got {again}")
    ours = data.get(OURS, {})
    if not isinstance(ours, dict):
        raise ValueError(f"{where}: field {OURS!r} must be an object, got {ours!r}")
    return HybridConf(
        modules=modules,
        ranks=_ranks(data, stages, where),
        depths=None if depths is None else tuple(rows),
        recompute=tuple(stage in again for stage in range(stages)),
        ours=ours,
        where=where,
    )


def _modules(data: Mapping[str, Any], where: str) -> tuple[int, ...]:
    stages = _numbers(data.get("module_to_stage_map"), "module_to_stage_map", where)
    if len(stages) < 2 or stages[0] != 0 or any(b - a not in (0, 1) for a, b in pairwise(stages)):
        raise ValueError(
            f"{where}: field 'module_to_stage_map' must start with stage 0, rise by at most 1 and end with"
            f" the loss, got {stages}"
        )
    *modules, loss = stages
    if loss != modules[-1]:
        raise ValueError(
            f"{where}: the last entry of field 'module_to_stage_map' is the loss, and stage {loss} would have"
            f" nothing else; put it into stage {modules[-1]}, with the last stage module"
        )
    return tuple(modules)


def _ranks(data: Mapping[str, Any], stages: int, where: str) -> tuple[tuple[int, ...], ...]:
    name = "stage_to_rank_map"
    ranks = [
        tuple(_numbers(row, f"{name}[{stage}]", where))
        for stage, row in enumerate(_by_stage(data, name, stages, where))
    ]
    if not all(ranks):
        raise ValueError(f"{where}: field {name!r} gives stage {ranks.index(())} no rank; each needs one")
    uses = Counter(rank for row in ranks for rank in row)
    twice = [rank for rank, count in uses.items() if count > 1]
    if twice:
        users = [stage for stage, row in enumerate(ranks) if twice[0] in row]
        raise ValueError(
            f"{where}: field {name!r} uses rank {twice[0]} twice (stages {users}); a rank holds one stage"
        )
    missing = sorted(set(range(len(uses))) - set(uses))
    if missing:
        raise ValueError(
            f"{where}: field {name!r} names {len(uses)} ranks, so they must be 0 to {len(uses) - 1};"
            f" {', '.join(map(str, missing))} missing, got {sorted(uses)}"
        )
    return tuple(ranks)


def _by_stage(data: Mapping[str, Any], name: str, stages: int, where: str) -> list[Any]:
    found = data.get(name)
    names = [str(stage) for stage in range(stages)]
    if not isinstance(found, dict) or set(found) != set(names):
        raise ValueError(
            f"{where}: field {name!r} must have an entry for each of the stages 0 to {stages - 1} of"
            f" 'module_to_stage_map', got {found!r}"
        )
    return [found[stage] for stage in names]


def _numbers(values: Any, field: str, where: str) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{where}: field {field!r} must be a list of whole numbers, got {values!r}")
    return values
