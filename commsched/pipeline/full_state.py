"""The whole model, spread over ranks: its state, and a forward outside of the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from commsched.pipeline.chain import Chain
from commsched.pipeline.fabric import Fabric, Lane
from commsched.pipeline.messages import receive_tree, send_tree
from commsched.pipeline.rows import cut
from commsched.pipeline.stage import Stage
from scheduler.ir.layout import Layout


class Whole:
    """Every stage speaks through its first replica. Stages' modules must hold the weights that are meant."""

    def __init__(
        self, layout: Layout, fabric: Fabric, lane: Lane, chain: Chain, stages: dict[int, Stage]
    ) -> None:
        self.layout, self.fabric, self.lane, self.stages = layout, fabric, lane, stages
        self.owners = [ranks[0] for ranks in layout.ranks]
        state = chain.model.state_dict()
        self.keys = tuple(state)
        held = set()
        for number in range(layout.stages):
            layers = layout.layers(number, len(chain))
            held |= set(chain.stage(layers.start, layers.stop).state_dict())
        # What no stage computes with stays as it is.
        self.spare = {key: value.clone() for key, value in state.items() if key not in held}

    @property
    def _peers(self) -> list[int]:
        return [peer for peer in range(self.fabric.size) if peer != self.fabric.rank]

    def state_dict(self) -> dict[str, Tensor]:
        found = {key: value.clone() for key, value in self.spare.items()}
        pending = []
        for number, owner in enumerate(self.owners):
            if owner == self.fabric.rank:
                state = self.stages[number].module.state_dict()
                mine = {key: value.detach().clone() for key, value in state.items()}
                pending += [p for peer in self._peers for p in send_tree(self.lane, peer, mine)]
            else:
                mine = receive_tree(self.lane, owner)
            found.update(mine)
        for sent in pending:
            sent.wait()
        return {key: found[key] for key in self.keys}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        missing = [key for key in self.keys if key not in state]
        if missing:
            raise ValueError(f"the state has no {', '.join(missing[:4])}; it must be the whole model's")
        for stage in self.stages.values():
            for key, value in stage.module.state_dict().items():
                value.copy_(state[key])
        for key, value in self.spare.items():
            value.copy_(state[key])

    @torch.no_grad()
    def evaluate(
        self, arguments: Callable[[Any], Any], inputs: Any, targets: Any, rows: int, parts: int
    ) -> float:
        """The mean loss; one replica of each stage computes, micro-batch by micro-batch."""
        total, pending = 0.0, []
        with self._evaluating():
            for part in range(parts):
                span = part * rows // parts, (part + 1) * rows // parts
                loss, sent = self._forward(arguments(cut(inputs, span)), cut(targets, span))
                total += loss * (span[1] - span[0]) / rows
                pending += sent
        value = torch.tensor([total], dtype=torch.float64)
        if self.fabric.rank == self.owners[-1]:
            pending += [self.lane.send(peer, [value]) for peer in self._peers]
        else:
            self.lane.receive(self.owners[-1], [value]).wait()
        for sent in pending:
            sent.wait()
        return float(value)

    def _forward(self, state: Any, targets: Any) -> tuple[float, list[Any]]:
        pending: list[Any] = []
        for number, owner in enumerate(self.owners):
            if owner != self.fabric.rank:
                continue
            stage = self.stages[number]
            if number and self.owners[number - 1] != owner:
                state = receive_tree(self.lane, self.owners[number - 1])
            state = stage.module(*on_device(state, stage.device))
            if number + 1 == self.layout.stages:
                assert stage.loss is not None
                return float(stage.loss(state, on_device(targets, stage.device))), pending
            if self.owners[number + 1] != owner:
                pending += send_tree(self.lane, self.owners[number + 1], state)
        return 0.0, pending

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(m, m.training) for stage in self.stages.values() for m in stage.module.modules()]
        for module, _ in modes:
            module.training = False
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def on_device(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(device)
    if type(tree) is tuple:  # the usual case, once for every micro-batch: no walk over a pytree
        return tuple(on_device(part, device) for part in tree)
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)
