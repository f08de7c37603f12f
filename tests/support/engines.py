"""Several engines in one process, one thread per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from comm_core import DirectTransport, Engine, RingTransport, local_channels

T = TypeVar("T")


def on_ranks(size: int, call: Callable[[int], T]) -> list[T]:
    """The results of call(rank) for every rank, called at the same time."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(call, rank) for rank in range(size)]]


@contextmanager
def local_engines(
    size: int,
    timeout: float | Sequence[float] = 200.0,
    segment_bytes: int = 64,
    depth: int = 2,
    ring: bool = False,
) -> Iterator[list[Engine]]:
    """An engine for each of `size` ranks, with one time-out or one for each; small segments by default, so
    that small buckets have many.
    """
    kind = RingTransport if ring else DirectTransport
    timeouts = timeout if isinstance(timeout, Sequence) else [timeout] * size
    engines = [
        Engine(kind(channel, rank, size, segment_bytes, depth), rank, size, timeouts[rank])
        for rank, channel in enumerate(local_channels(size))
    ]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.close()


def run_step(engine: Engine, buckets: Sequence[int]) -> None:
    """One step in which all gradients are there at once and the caller wants everything."""
    engine.begin_step()
    for bucket in buckets:
        engine.mark_ready(bucket)
    engine.wait_all()


def ordered_sum(parts: Sequence[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    """The sum in rank order, formed in float for half types and rounded once, as direct exchange promises."""
    wide = torch.float32 if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    if scale != 1.0:
        total = total * scale
    return total.to(parts[0].dtype)
