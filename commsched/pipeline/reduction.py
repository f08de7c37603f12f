"""Gradients of a stage's replicas: summed in rank order, whichever way they travel.

``Scattered``: reduce-scatter, step on this rank's shard, all-gather of the parameters, on an engine.
``summed_over``: sums on one rank and sends them back; for parameters that must be whole where they are
stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor, nn

import comm_core
from commsched.backends.cpu import engine_errors_as_comm_errors
from commsched.pipeline.fabric import Lane, from_host, to_host
from commsched.pipeline.versions import Version
from scheduler.ir.buckets import Bucket


def bucket_parts(
    bucket: Bucket, layers: Mapping[int, Sequence[int]], leaves: Sequence[Tensor]
) -> list[tuple[int, int, int]]:
    """(place in ``leaves``, start, stop) of everything in a bucket, which is a list of byte ranges of layers.
    ``layers``: the places of the parameters of each, which lie one after the other.
    """
    found = []
    for piece in bucket.pieces:
        item, places = leaves[0].element_size(), layers[piece.layer]
        start, stop = piece.start // item, piece.stop // item
        ends = list(accumulate((leaves[place].numel() for place in places), initial=0))
        for place, begin, end in zip(places, ends, ends[1:]):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                found.append((place, low - begin, high - begin))
    return found


@dataclass(frozen=True)
class Shard:
    """This rank's elements ``[start, stop)`` of the parameter at ``place``; ``grad``: over all replicas."""

    place: int
    start: int
    stop: int
    master: nn.Parameter
    grad: Tensor


class Scattered:
    """One stage's engine: RS of its gradient buckets, AG of its parameter buckets (or, with
    ``gathers_gradients``, of the sums), in the program's order. ``plan``: all RS, then all AG. Between them
    the replicas count which parameters they have gradients of.
    """

    def __init__(
        self,
        transport: Any,
        place: int,
        size: int,
        timeout: float,
        parts: Sequence[Sequence[tuple[int, int, int]]],
        leaves: Sequence[Tensor],
        plan: Sequence[tuple[str, int]],
        gathers_gradients: bool = False,
    ) -> None:
        self.parts, self.place, self.size, self._flags_bucket = parts, place, size, len(parts)
        kind = leaves[0].dtype
        counts = [sum(stop - start for _, start, stop in part) for part in parts]
        padded = [-(-count // size) * size for count in counts]
        self.grads = [torch.zeros(count, dtype=kind) for count in padded]
        self.weights = self.grads if gathers_gradients else [torch.zeros_like(each) for each in self.grads]
        self.engine = comm_core.Engine(transport, place, size, timeout)
        for number, (grads, weights) in enumerate(zip(self.grads, self.weights, strict=True)):
            self.engine.add_bucket(
                grads,
                gather=None if gathers_gradients else weights,
                needs_update=True,
                name=f"bucket {number}",
            )
        # A row for each rank, so that one RS brings every rank all sums.
        flags = torch.zeros(size * len(leaves), dtype=torch.int32)
        self._flags = flags.numpy().reshape(size, len(leaves))
        self.engine.add_bucket(flags, name="used parameters")
        reductions = [*plan[: len(parts)], ("RS", self._flags_bucket)]
        self.engine.install([*reductions, *plan[len(parts) :]])
        self._order = [bucket for _, bucket in reductions]
        self.begun = -1
        self._marked: set[int] = set()
        if not gathers_gradients:
            self.read(leaves)
        self.shards = list(self._shards())

    def _shards(self) -> Iterator[Shard]:
        """This rank's part of each parameter, as views of the buckets."""
        for weights, grads, part in zip(self.weights, self.grads, self.parts, strict=True):
            low = self.place * len(grads) // self.size
            high = (self.place + 1) * len(grads) // self.size
            at = 0
            for place, start, stop in part:
                first, last = max(low, at), min(high, at + stop - start)
                if first < last:
                    skipped = start - at
                    master = nn.Parameter(weights[first:last])
                    yield Shard(place, first + skipped, last + skipped, master, grads[first:last])
                at += stop - start

    def read(self, leaves: Sequence[Tensor]) -> None:
        """Takes the weights as they are."""
        for bucket, buffer in enumerate(self.weights):
            _pack(self._views(bucket, leaves), buffer)

    def _views(self, bucket: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            to_host(tensors[place]).view(-1)[start:stop].detach() for place, start, stop in self.parts[bucket]
        ]

    # One period

    def begin(self, period: int) -> None:
        if self.begun < period:
            self.begun = period
            self._marked = set()
            with engine_errors_as_comm_errors:
                self.engine.begin_step()

    def ready(
        self, period: int, bucket: int, grads: Sequence[Tensor | None], leaves: Sequence[Tensor]
    ) -> None:
        """The gradient of a bucket is complete; the second time, nothing is to do."""
        self.begin(period)
        if bucket in self._marked:
            return
        self._marked.add(bucket)
        found: dict[int, Tensor] = {}
        for place, _, _ in self.parts[bucket]:
            grad = grads[place]
            found[place] = torch.zeros_like(leaves[place]) if grad is None else grad
        parts = [to_host(found[p]).view(-1)[start:stop] for p, start, stop in self.parts[bucket]]
        _pack(parts, self.grads[bucket])
        with engine_errors_as_comm_errors:
            self.engine.mark_ready(bucket)

    def complete(self, grads: Sequence[Tensor | None]) -> None:
        """All gradients of the period are there: tells the replicas which parameters this one has used."""
        if self._flags_bucket not in self._marked:
            self._marked.add(self._flags_bucket)
            self._flags[:] = [grad is not None for grad in grads]
            with engine_errors_as_comm_errors:
                self.engine.mark_ready(self._flags_bucket)

    @contextmanager
    def leaving(self, period: int, leaves: Sequence[Tensor]) -> Iterator[None]:
        """Around the backward that completes these parameters' gradients: buckets leave as they fill."""
        missing = [{place for place, _, _ in part} for part in self.parts]

        def filled(place: int) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                for bucket, places in enumerate(missing):
                    if place in places:
                        places.remove(place)
                        if not places:
                            self.ready(period, bucket, [leaf.grad for leaf in leaves], leaves)

            return hook

        hooks = [leaf.register_post_accumulate_grad_hook(filled(n)) for n, leaf in enumerate(leaves)]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def wait_reduced(self) -> None:
        with engine_errors_as_comm_errors:
            for bucket in range(len(self.parts)):
                self.engine.wait_rs(bucket)
            self.engine.wait_rs(self._flags_bucket)

    def wait_begun(self) -> None:
        """Waits for the sums whose turn has come: the engine takes up a bucket after those before it."""
        with engine_errors_as_comm_errors:
            for bucket in takewhile(self._marked.__contains__, self._order):
                self.engine.wait_rs(bucket)

    @property
    def used(self) -> list[int]:
        """By parameter how many replicas have used it, once the sums have been waited for."""
        counts: list[int] = self._flags[self.place].tolist()
        return counts

    def updated(self, bucket: int) -> None:
        with engine_errors_as_comm_errors:
            self.engine.mark_updated(bucket)

    def take_in(self, version: Version, bucket: int) -> None:
        """Waits for a bucket's all-gather and writes it into the version that it belongs to."""
        self.write(bucket, version.data)
        version.pending.discard(bucket)

    def write(self, bucket: int, tensors: Sequence[Any]) -> None:
        """Waits for a bucket's all-gather and writes its parts where they belong, except to None."""
        with engine_errors_as_comm_errors:
            self.engine.wait_ag(bucket)
        at = 0
        for place, start, stop in self.parts[bucket]:
            if tensors[place] is not None:
                target = tensors[place].view(-1)[start:stop]
                target.copy_(from_host(self.weights[bucket][at : at + stop - start], target.device))
            at += stop - start

    def close(self) -> None:
        self.engine.close()


def summed_over(lane: Lane, rank: int, ranks: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Replaces the tensors by their sums over these ranks, added in the order of ``ranks``."""
    by_masters(lane, rank, [ranks], tensors)


def by_masters(lane: Lane, rank: int, hosts: Sequence[Sequence[int]], tensors: Sequence[Tensor]) -> None:
    """Sums on each host's first rank, then among those, and sends the result back to the host's others."""
    mine = next(host for host in hosts if rank in host)
    buffers = [to_host(tensor) for tensor in tensors]
    if rank == mine[0]:
        _add(lane, mine[1:], buffers)
        if len(hosts) > 1:
            summed_over(lane, rank, [host[0] for host in hosts], buffers)
        for pending in [lane.send(peer, buffers) for peer in mine[1:]]:
            pending.wait()
    else:
        sent = lane.send(mine[0], buffers)
        buffers = [torch.empty_like(buffer) for buffer in buffers]
        received = lane.receive(mine[0], buffers)
        sent.wait()
        received.wait()
    for tensor, buffer in zip(tensors, buffers, strict=True):
        tensor.copy_(buffer)


def _add(lane: Lane, peers: Sequence[int], buffers: list[Tensor]) -> None:
    """Adds what the peers send, in their order."""
    for peer in peers:
        parts = [torch.empty_like(buffer) for buffer in buffers]
        lane.receive(peer, parts).wait()
        torch._foreach_add_(buffers, parts)


@torch.no_grad()
def _pack(parts: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy the vectors, one after the other, to the start of the buffer."""
    torch.cat(list(parts), out=buffer[: sum(map(len, parts))])
