"""The state of the whole model, which is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from commsched.pipeline.chain import Chain
from commsched.pipeline.fabric import Fabric, Lane
from commsched.pipeline.messages import receive_object, receive_tree, send_object, send_tree
from commsched.pipeline.stage import Stage
from commsched.pipeline.weights import save_index, save_shard
from scheduler.ir.layout import Layout


class FullState:
    """Reads each stage from its first rank. ``newest`` lets modules hold the newest weights."""

    def __init__(
        self,
        layout: Layout,
        fabric: Fabric,
        lane: Lane,
        chain: Chain,
        stages: dict[int, Stage],
        newest: Callable[[], None],
    ) -> None:
        self.layout, self.fabric, self.lane, self.stages, self.newest = layout, fabric, lane, stages, newest
        self.owners = [ranks[0] for ranks in layout.ranks]
        state = chain.model.state_dict()
        self.keys = tuple(state)
        held = chain.stage(0, len(chain)).state_dict().keys()
        # Tensors that no stage uses never change.
        self.spare = {key: value.clone() for key, value in state.items() if key not in held}

    @property
    def _peers(self) -> list[int]:
        return [peer for peer in range(self.fabric.size) if peer != self.fabric.rank]

    def state_dict(self) -> dict[str, Tensor]:
        self.newest()
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

    def save(self, folder: str | Path) -> None:
        """Writes a file of safetensors for each stage, by its first rank, and their index."""
        self.newest()
        folder, count = Path(folder), len(self.owners)
        mine = {}
        for number, owner in enumerate(self.owners):
            if owner == self.fabric.rank:
                state = self.stages[number].module.state_dict()
                mine[number] = save_shard(folder, state | (self.spare if number == 0 else {}), number, count)
        pending = []
        if self.fabric.rank:
            pending = send_object(self.lane, 0, mine)
        else:
            for peer in self._peers:
                mine |= receive_object(self.lane, peer)
            save_index(folder, [mine[number] for number in range(count)])
        for sent in pending:
            sent.wait()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        missing = [key for key in self.keys if key not in state]
        if missing:
            raise ValueError(f"the state has no {', '.join(missing[:4])}; it must be the whole model's")
        self.newest()
        for stage in self.stages.values():
            stage.load(state)
        for key, value in self.spare.items():
            value.copy_(state[key])


def on_device(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(device)
    if type(tree) is tuple:  # the usual case, once for every micro-batch: no walk over a pytree
        return tuple(on_device(part, device) for part in tree)
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)
