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
from commsched.flow.shards import Part, Shards

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


class FusedShards(Shards):
    """Shards that know the kernels for SGD, Adam and AdamW."""

    launcher: Launcher | None = None

    def __init__(
        self, optimizer: Any, base: Any, params: Sequence[nn.Parameter], *where: Any, **more: Any
    ) -> None:
        self._updates: dict[int, ShardUpdate] = {}
        self._steps: dict[nn.Parameter, int] = {}  # Adam's, as the host knows them without asking the device
        self._base = base
        super().__init__(optimizer, base, params, *where, **more)
        self._adam = base in _ADAMS
        self._known = self._adam or base is torch.optim.SGD
        if self.launcher is None and params:
            self.launcher = launcher_for(params[0].device)

    def take_state(self, full: dict[Any, Any]) -> None:
        super().take_state(full)
        self._updates.clear()  # they point to the state that was
        self._steps.clear()

    def update(self, bucket: int, used: Sequence[int] | Mapping[int, int]) -> None:
        parts = self.parts[bucket]
        groups = self._optimizer.param_groups
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        numbers = [group_of[id(self.params[part.param])] for part in parts]
        covered = self._known and self.launcher is not None and bool(parts)
        if not (covered and all(used[part.param] for part in parts) and self._fits(parts, numbers)):
            self._forget(bucket)
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

    def _forget(self, bucket: int) -> None:
        """The optimizer's own code goes on from here: it may replace state, and counts steps by itself."""
        self._updates.pop(bucket, None)
        for part in self.parts[bucket]:
            self._steps.pop(part.leaf, None)

    def _fits(self, parts: Sequence[Part], numbers: Sequence[int]) -> bool:
        """Whether one launch gives what torch would: settings that the kernels know, float32, equal steps."""
        groups = [self._optimizer.param_groups[number] for number in set(numbers)]
        for group in groups:
            lr = group["lr"]
            on_device = isinstance(lr, torch.Tensor) and lr.device.type != "cpu"
            if not group.get("fused") or group.get("amsgrad") or on_device:
                return False
        if any(part.leaf.dtype != torch.float32 for part in parts):  # halves without masters
            return False
        ages: dict[int, set[int]] = {}
        for part, number in zip(parts, numbers, strict=True):
            ages.setdefault(number, set()).add(self._age(part))
        return all(len(found) == 1 for found in ages.values())

    def _age(self, part: Part) -> int:
        """How many steps the part's state has seen; for SGD, whether it has seen any."""
        state = self.state.get(part.leaf, {})
        if not self._adam:
            return int(state.get("momentum_buffer") is not None)
        if part.leaf not in self._steps:
            self._steps[part.leaf] = int(state["step"]) if "step" in state else 0
        return self._steps[part.leaf]

    def _adam_hypers(self, parts: Sequence[Part], numbers: Sequence[int]) -> list[Hyper]:
        hypers = self._empty()
        for part, number in zip(parts, numbers, strict=True):
            state, weight = self.state[part.leaf], part.leaf.detach()
            if "step" not in state:
                state["step"] = torch.zeros((), device=weight.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
            self._steps[part.leaf] += 1
            group = self._optimizer.param_groups[number]
            # In newer versions of torch AdamW is an Adam that says so in its groups.
            decoupled = bool(group.get("decoupled_weight_decay", self._base is torch.optim.AdamW))
            hypers[number] = Hyper.adam(group, self._steps[part.leaf], decoupled)
        torch._foreach_add_([self.state[part.leaf]["step"] for part in parts], 1.0)
        return hypers

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
                kept = state["exp_avg"], state["exp_avg_sq"]
            else:
                kept = state.get("momentum_buffer"), None
            made.append(KernelPart(part.grad, part.weight, *kept, part.master, number))
        rule = "adam" if self._adam else "sgd"
        return ShardUpdate(rule, made, len(self._optimizer.param_groups), self.launcher)  # type: ignore[arg-type]
