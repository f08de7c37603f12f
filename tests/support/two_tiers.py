"""The exchange in two tiers in one process, and the order of its sums in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from comm_core import Engine, TwoTierTransport, local_channels, two_tier_transport
from commsched.collectives.private_groups import hosts_of
from tests.support.engines import on_ranks
from tests.support.oracle import Oracle

HALVES = (torch.float16, torch.bfloat16)


def tier_transports(
    hosts: Sequence[int], segment_bytes: int = 64, depth: int = 2, timeout: float = 200.0
) -> list[TwoTierTransport]:
    """A transport for each rank; small segments by default, so that small buckets have many."""
    channels = local_channels(len(hosts))
    return on_ranks(
        len(hosts),
        lambda rank: two_tier_transport(channels[rank], rank, hosts, segment_bytes, depth, timeout),
    )


@contextmanager
def tier_engines(
    hosts: Sequence[int], timeout: float = 200.0, segment_bytes: int = 64, depth: int = 2
) -> Iterator[list[Engine]]:
    """An engine for each rank."""
    transports = tier_transports(hosts, segment_bytes, depth)
    engines = [Engine(each, rank, len(hosts), timeout) for rank, each in enumerate(transports)]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.close()


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor lies in the file that neighbours have mapped, too."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return "memfd:commsched gradients" in line
    raise AssertionError("the memory is not mapped")


def tier_sum(
    parts: Sequence[torch.Tensor],
    hosts: Sequence[int],
    wire: torch.dtype | None = None,
    before: float = 1.0,
    after: float = 1.0,
) -> torch.Tensor:
    """The sum before it is gathered: in rank order inside each host, rounded to the wire type,
    then in host order; with one host, parts are rounded. See "order of sums in two tiers" in `two_tier.h`.
    """
    dtype, several = parts[0].dtype, len(set(hosts)) > 1
    travels = wire if wire is not None and len(hosts) > 1 and not several else dtype
    most = max(list(hosts).count(host) for host in hosts)
    room = 2.0 ** (most - 1).bit_length() if several and (wire or dtype) == torch.float16 else 1.0
    wide = torch.float32 if dtype in HALVES else dtype
    parts = [(part if before == 1.0 else part.to(wide) * before).to(travels) for part in parts]
    sums = []
    for host in sorted(set(hosts)):
        own = [part for part, of in zip(parts, hosts, strict=True) if of == host]
        total = _added(own, wide)
        total = total if room == 1.0 else total / room
        sums.append(total.to(wire or dtype) if several else total)
    total = _added(sums, wide)
    return (total if after * room == 1.0 else total * (after * room)).to(dtype)


def tier_gathered(total: torch.Tensor, hosts: Sequence[int], wire: torch.dtype | None) -> torch.Tensor:
    """What every rank has after the all-gather of these sums."""
    return total if wire is None or len(hosts) == 1 else total.to(wire).to(total.dtype)


def _added(parts: Sequence[torch.Tensor], wide: torch.dtype) -> torch.Tensor:
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total


class TierOracle(Oracle):
    """Adds in the order of the hosts."""

    wire: torch.dtype | None = None

    def reduced(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        dense = [grad for grad in grads if grad is not None]
        if not dense:
            return None
        assert len(dense) == self.ranks
        hosts = hosts_of()
        wire = self.wire if dense[0].dtype in (torch.float32, torch.float64) else None
        return tier_gathered(tier_sum(dense, hosts, wire, after=self.scale), hosts, wire)
