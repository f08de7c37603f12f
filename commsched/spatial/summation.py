"""Whole gradients: the sum over all ranks that hold a stage, in one reduce-scatter and all-gather."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed import PrefixStore

import comm_core
import commsched
from commsched.collectives.current_carrier import carrier, epoch
from commsched.errors import CommError

Ranks = Sequence[Sequence[Sequence[int]]]
# Every sum has connections of its own; those of the same ranks are made in the same order on all of them.
_calls: defaultdict[tuple[int, tuple[int, ...]], Iterator[int]] = defaultdict(itertools.count)


class StageSum:
    """Sums gradients stage by stage: over tiles, shares of the samples, and replicas at once.

    ``ranks`` are those that hold each stage of each replica, ``modules`` the stages held here. Collective, as
    is ``reduce``.
    """

    def __init__(self, ranks: Ranks, modules: Mapping[int, nn.Module], timeout: float) -> None:
        self._modules, self._timeout, self._steps = dict(modules), timeout, 0
        made: dict[tuple[int, ...], comm_core.Transport | None] = {}
        self._transports: dict[int, comm_core.Transport] = {}
        for stage in range(len(ranks[0])):
            members = tuple(sorted({rank for replica in ranks for rank in replica[stage]}))
            if members not in made:
                made[members] = self._connect(members)
            transport = made[members]
            if stage in self._modules and transport is not None:
                self._transports[stage] = transport

    def _connect(self, members: tuple[int, ...]) -> comm_core.Transport | None:
        """Connections among ``members``; None elsewhere, and where there is nobody to talk to."""
        rank = commsched.rank()
        if len(members) == 1 or rank not in members:
            return None
        meeting, call = carrier().meeting, next(_calls[epoch(), members])
        store = PrefixStore(f"spatial/{'-'.join(map(str, members))}/{call}", meeting.store)
        place = members.index(rank)
        try:
            link = comm_core.tcp_channel(store, place, len(members), meeting.address, self._timeout)
        except RuntimeError as error:
            raise CommError(
                f"rank {rank} could not connect to the other ranks of {members} from {meeting.address}: "
                f"{error}"
            ) from error
        transport = comm_core.DirectTransport(link, place, len(members))
        transport.set_timeout(self._timeout)
        return transport

    def reduce(self) -> None:
        """Every ``.grad`` becomes the whole gradient, with the same bits on every rank."""
        self._steps += 1
        for stage, transport in self._transports.items():
            wanted = [p for p in self._modules[stage].parameters() if p.requires_grad]
            for dtype in dict.fromkeys(p.dtype for p in wanted):
                try:
                    _sum([p for p in wanted if p.dtype == dtype], transport, self._steps)
                except comm_core.EngineError as error:
                    raise CommError(f"sum of the gradients of stage {stage}: {error}") from None


def _sum(parameters: Iterable[nn.Parameter], transport: comm_core.Transport, step: int) -> None:
    chosen = list(parameters)
    count = sum(p.numel() for p in chosen)
    flat = chosen[0].new_zeros(-(-count // transport.size) * transport.size)
    parts: list[Tensor] = list(flat[:count].split([p.numel() for p in chosen]))
    for part, parameter in zip(parts, chosen):
        if parameter.grad is not None:
            part.copy_(parameter.grad.reshape(-1))
    transport.all_reduce(flat.detach(), step=step)
    for part, parameter in zip(parts, chosen):
        parameter.grad = part.detach().view(parameter.shape)
