"""Ranks that disagree are told: optimizers with other settings, and models that began from other values.

``docs/exactness.md`` tells which differences are errors, which are warnings, and why.

[Note: when ranks are compared]

    when                          what                                      with
    ----------------------------  ----------------------------------------  ---------------------------------
    wrapped, or other parameters  the optimizer's class, the sizes of its   the planner's agreement on the
                                  groups                                    arguments
    round 1, and every            a digest of the groups' settings and of   the flags, where each rank has an
    COMMSCHED_COMPARE_EVERY       the parameters, taken when the round      entry; ``step()`` waits for them
    rounds                        begins: no update is pending then
    before the update of that     the settings, all bits of all parameters  an exchange of its own
    round, if digests differ

The digests only raise a suspicion: a round begins in the backward, or in ``step()`` on a rank without data,
and scripts may perturb weights (SAM) or call a scheduler meanwhile. The call of ``step()`` is one moment of a
script on all ranks, all of which come to the exchange: the flags have told them of the suspicion. With
``early_step`` parameters have been updated by then, so those count that the round began with. Once a rank has
joined nothing is compared: that rank does not know whether the others step.

No values and settings are compared before the first round: Horovod's scripts broadcast parameters and state
after they have wrapped the optimizer.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from commsched.backends.ranks import Ranks, ranks_text
from commsched.env import settings
from commsched.errors import SettingsError
from commsched.optimizer.gradient import Gradient
from commsched.optimizer.reports import few

Settings = dict[tuple[int, str], Any]
"""Hyperparameters by group, counted among those with trained parameters, and name."""

_FEW = 4096  # elements of each parameter in later digests: all of a large table take longer than a step
_CHUNK = 1 << 20  # elements: torch makes a copy of 8 bytes an element to sum integers
_SHORT = 16  # elements of a tensor that counts as a setting
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OFF = "(COMMSCHED_COMPARE_EVERY=0 on all ranks ends these comparisons)"


class Agreement:
    """Compares the ranks of one optimizer: see [Note: when ranks are compared]."""

    def __init__(self, optimizer: Any, ranks: Ranks) -> None:
        self._optimizer, self._ranks, self.every = optimizer, ranks, settings().compare_every
        self._drifted = False  # parameters differ, and the warning has been given
        self._bits: dict[int, int] = {}  # of the latest digest

    def rule(self, params: Iterable[nn.Parameter]) -> str:
        """Return the optimizer's class and the number of these parameters in each group."""
        if not self.every:
            return "not compared (COMMSCHED_COMPARE_EVERY=0)"
        sizes = ", ".join(str(len(held)) for held in _groups(self._optimizer, params).values())
        name = self._optimizer._base.__qualname__
        return f"{name} with groups of {sizes} parameters, compared every {self.every} rounds"

    def digest(self, number: int, gradients: Sequence[Gradient]) -> int:
        """Return this rank's entry in the flags of round ``number``: 40 bits, not 0."""
        # Other elements each time, so that a difference in few of them is found at last.
        turn = None if number == 1 else number // self.every
        self._bits = {} if self._drifted else bits_of(gradients, turn)
        told = repr((settings_of(self._optimizer, gradients), self._bits)).encode()
        return 1 + int.from_bytes(hashlib.blake2b(told, digest_size=5).digest(), "big")

    def compare(self, number: int, gradients: Sequence[Gradient], early: bool) -> None:
        """Raise, or warn of, what differs in the step of round ``number``, whose digests do. Collective.

        ``early``: updates have been made since the round began.
        """
        mine = settings_of(self._optimizer, gradients), self._bits if early else bits_of(gradients)
        rows = dict(enumerate(self._ranks.all_values(mine)))
        unequal = _unlike({rank: given for rank, (given, _) in rows.items()})
        if unequal:
            groups = list(_groups(self._optimizer, (g.param for g in gradients)).values())
            known = self._optimizer._names()
            what = [
                f"{key} of group {group} (that of {known[groups[group][0]]}) is {_by_rank(values)}"
                for (group, key), values in unequal.items()
            ]
            raise SettingsError(
                f"rank {self._ranks.rank}: the optimizer's settings must be the same on all ranks, or each"
                f" trains another model, but {few(what)}; pass the same arguments on every rank, and change"
                f" settings on all of them before the same step {_OFF}"
            )
        unlike = _unlike({rank: bits for rank, (_, bits) in rows.items()})
        if not unlike or self._drifted:
            return
        names = few([gradients[i].name for i in unlike])
        others = sorted({rank for by in unlike.values() for rank in rows if by[rank] != by[0]})
        told = (
            f"{len(unlike)} of {len(gradients)} parameters ({names}) have other values on"
            f" {ranks_text(others)} than on rank 0"
        )
        self._drifted = True
        if self._ranks.rank == 0:
            why = (
                "the ranks' parameters differ before the first step, so each rank trains a model of its own:"
                " they were neither broadcast nor seeded alike, or code has changed them since on each rank"
                " for itself (weights that are perturbed and restored come back with rounding)"
                if number == 1
                else f"the ranks' parameters have drifted apart by round {number}, and were equal when"
                " training began: ranks on unlike processors or with unlike numbers of threads may round"
                " differently; else code changes parameters on some ranks only"
            )
            warnings.warn(
                f"{why}; {told}. To make them equal, call"
                " commsched.broadcast_parameters(model.state_dict(), root_rank=0) on all ranks. Parameters"
                f" are not compared any more {_OFF}",
                stacklevel=2,
            )


# -- what is compared ----------------------------------------------------------------------------------------


def _groups(optimizer: Any, params: Iterable[nn.Parameter]) -> dict[int, list[nn.Parameter]]:
    """Return these parameters by group; groups without any, as of frozen parameters, may differ."""
    known, groups = set(map(id, params)), optimizer.param_groups
    held = [[p for p in group["params"] if id(p) in known] for group in groups]
    return {number: members for number, members in enumerate(held) if members}


def settings_of(optimizer: Any, gradients: Sequence[Gradient]) -> Settings:
    """Return what the optimizer's class takes as hyperparameters; further keys of groups may differ."""
    numbers = _groups(optimizer, (gradient.param for gradient in gradients))
    groups = [optimizer.param_groups[number] for number in numbers]
    return {
        (place, key): _plain(group.get(key))
        for place, group in enumerate(groups)
        for key in getattr(optimizer, "defaults", ())
    }


def _plain(value: Any) -> Any:
    """Return numbers, text and tuples that are equal where two settings are; None for anything else."""
    if isinstance(value, torch.Tensor):
        value = value.tolist() if value.numel() <= _SHORT else None
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Real):
        return "nan" if value != value else value if isinstance(value, int) else float(value)
    return value if isinstance(value, str) else None


def bits_of(gradients: Sequence[Gradient], turn: int | None = None) -> dict[int, int]:
    """Return by parameter the sum of its elements' bits as whole numbers, in which NaNs count alike.

    Exact whatever the order of the sum, and so whatever the number of threads. ``turn``: of few elements of
    each, other ones in each turn; None: of all.
    """
    off = torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.no_grad()
    with off[0], off[1], off[2], torch._C.DisableTorchFunctionSubclass():
        # A class of its own (not ``pends``) may not let its bits be read.
        sums = {g.number: _sum_of_bits(g.param.detach(), turn) for g in gradients if g.pends}
        return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def _sum_of_bits(param: torch.Tensor, turn: int | None) -> torch.Tensor:
    real = torch.view_as_real(param) if param.is_complex() else param
    flat = real.reshape(-1)
    if turn is not None:
        stride = max(1, len(flat) // _FEW)
        flat = flat[turn % stride :: stride]
    whole = _WHOLE[flat.element_size()]
    sums = [part.view(whole).masked_fill(part != part, 0).sum() for part in flat.split(_CHUNK)]
    return torch.stack(sums).sum()


# -- what differs --------------------------------------------------------------------------------------------


def _unlike(rows: Mapping[int, Mapping[Any, Any]]) -> dict[Any, dict[int, Any]]:
    """Return the values by rank of each key whose values differ between ranks."""
    keys = dict.fromkeys(key for row in rows.values() for key in row)
    columns = {key: {rank: row.get(key) for rank, row in rows.items()} for key in keys}
    return {key: values for key, values in columns.items() if len(set(values.values())) > 1}


def _by_rank(values: Mapping[int, Any]) -> str:
    ranks: defaultdict[Any, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return " and ".join(f"{value} on {ranks_text(of)}" for value, of in ranks.items())
