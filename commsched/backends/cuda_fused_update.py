"""Shards updated by one launch per bucket, where the wrapped optimizer was made with ``fused=True``.

State stands where torch keeps it, so checkpoints do not tell the difference. Whatever the kernels do not
cover is left to the optimizer's own code, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from comm_core.cuda import Hyper, Launcher, ShardUpdate
from comm_core.cuda import Part as KernelPart
from comm_core.cuda.launchers import launcher_for
from commsched.optimizer.shards import Part, Shards

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


class FusedShards(Shards):
    """Shards that know the kernels for SGD, Adam and AdamW."""

    launcher: Launcher | None = None

    def __init__(
        self, optimizer: Any, base: Any, params: Sequence[nn.Parameter], *where: Any, **more: Any
    ) -> None:
        self._updates: dict[int, ShardUpdate] = {}
        self._base = base
        super().__init__(optimizer, base, params, *where, **more)
        self._adam = base in _ADAMS
        self._known = self._adam or base is torch.optim.SGD
        if self.launcher is None and params:
            self.launcher = launcher_for(params[0].device)

    def take_state(self, full: dict[Any, Any]) -> None:
        super().take_state(full)
        self._updates.clear()  # they point to the state that was

    def update(self, bucket: int, used: Sequence[int] | Mapping[int, int]) -> None:
        parts = self.parts[bucket]
        groups = self._optimizer.param_groups
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        numbers = [group_of[id(self.params[part.param])] for part in parts]
        covered = self._known and self.launcher is not None and bool(parts)
        if not (covered and all(used[part.param] for part in parts) and self._fits(parts, numbers)):
            self._updates.pop(bucket, None)  # the optimizer's own code may replace state
            super().update(bucket, used)
            return
        hypers = self._adam_hypers(parts, numbers) if self._adam else self._sgd_hypers(parts, numbers)
        if bucket not in self._updates:
            self._updates[bucket] = self._update_of(parts, numbers)
        skip = self._optimizer.__dict__.get("found_inf")
        self._updates[bucket](hypers, self._gradient_factor(), skip)
        self._keep_masters(parts)

    def _gradient_factor(self) -> torch.Tensor | None:
        """What gradients count, on the device: unscaled (GradScaler tells fused optimizers), and clipped."""
        scale = self._optimizer.__dict__.get("grad_scale")
        if scale is None:
            return None if self.factor is None else self.factor.float()
        return scale.reciprocal() if self.factor is None else self.factor.float() / scale

    def _fits(self, parts: Sequence[Part], numbers: Sequence[int]) -> bool:
        """Whether one launch gives what torch would: settings that the kernels know, float32, and (SGD) every
        momentum of a group begins, or none.
        """
        groups = [self._optimizer.param_groups[number] for number in set(numbers)]
        for group in groups:
            lr = group["lr"]
            on_device = isinstance(lr, torch.Tensor) and lr.device.type != "cpu"
            if not group.get("fused") or group.get("amsgrad") or on_device:
                return False
        if any(part.leaf.dtype != torch.float32 for part in parts):  # halves without masters
            return False
        if self._adam:
            return True
        begun: dict[int, set[bool]] = {}
        for part, number in zip(parts, numbers, strict=True):
            there = self.state.get(part.leaf, {}).get("momentum_buffer") is not None
            begun.setdefault(number, set()).add(there)
        return all(len(found) == 1 for found in begun.values())

    def _adam_hypers(self, parts: Sequence[Part], numbers: Sequence[int]) -> list[Hyper]:
        hypers = self._empty()
        for part, number in zip(parts, numbers, strict=True):
            self._begin_adam(part)
            group = self._optimizer.param_groups[number]
            # In newer versions of torch AdamW is an Adam that says so in its groups.
            decoupled = bool(group.get("decoupled_weight_decay", self._base is torch.optim.AdamW))
            hypers[number] = Hyper.adam(group, decoupled)
        return hypers

    def _begin_adam(self, part: Part) -> None:
        """Makes the state that is missing, and moves a count that was loaded to the device."""
        state, weight = self.state[part.leaf], part.leaf.detach()
        if "step" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32, device=weight.device)

    def _sgd_hypers(self, parts: Sequence[Part], numbers: Sequence[int]) -> list[Hyper]:
        hypers = self._empty()
        for part, number in zip(parts, numbers, strict=True):
            group, state = self._optimizer.param_groups[number], self.state[part.leaf]
            first = group["momentum"] != 0 and state.get("momentum_buffer") is None
            if first:
                state["momentum_buffer"] = torch.zeros_like(part.leaf.detach())
            hypers[number] = Hyper.sgd(group, first_step=first)
        return hypers

    def _empty(self) -> list[Hyper]:
        return [Hyper(lr=0.0) for _ in self._optimizer.param_groups]

    def _update_of(self, parts: Sequence[Part], numbers: Sequence[int]) -> ShardUpdate:
        made = []
        for part, number in zip(parts, numbers, strict=True):
            state = self.state[part.leaf]
            if self._adam:
                kept = state["exp_avg"], state["exp_avg_sq"], part.master, state["step"]
            else:
                kept = state.get("momentum_buffer"), None, part.master, None
            made.append(KernelPart(part.grad, part.weight, *kept, number))
        rule = "adam" if self._adam else "sgd"
        return ShardUpdate(rule, made, len(self._optimizer.param_groups), self.launcher)  # type: ignore[arg-type]
