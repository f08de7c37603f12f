"""Gradients of a stage's replicas: summed in rank order, whichever way they travel.

``Scattered``: reduce-scatter, step on this rank's shard, all-gather of the parameters, on an engine.
``Replicas``: sums outside the buckets, of parameters that must be whole where they are stepped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

import comm_core
from commsched.backends.cpu import engine_errors_as_comm_errors
from commsched.pipeline.messages import Lane, from_host, receive_tree, send_tree, to_host
from commsched.pipeline.stage import Stage, Version
from scheduler.ir.buckets import Bucket
from scheduler.ir.program import Program, delays


def bucket_parts(
    bucket: Bucket,
    layers: Mapping[int, Sequence[int]],
    leaves: Sequence[Tensor],
    alone: frozenset[int] = frozenset(),
) -> list[list[tuple[int, int, int]]]:
    """(place in ``leaves``, start, stop) of everything in a bucket, which is a list of byte ranges of layers;
    a list for each type of parameter. ``layers``: the places of the parameters of each, which lie one after
    the other. Those in ``alone`` are left out.
    """
    found: defaultdict[torch.dtype, list[tuple[int, int, int]]] = defaultdict(list)
    for piece in bucket.pieces:
        begin = 0
        for place in layers[piece.layer]:
            leaf, item = leaves[place], leaves[place].element_size()
            end = begin + leaf.numel() * item
            # An element belongs to the range in which its first byte lies.
            low, high = (-(-(min(max(at, begin), end) - begin) // item) for at in (piece.start, piece.stop))
            if low < high and place not in alone:
                found[leaf.dtype].append((place, low, high))
            begin = end
    return list(found.values())


@dataclass(frozen=True)
class Shard:
    """This rank's elements ``[start, stop)`` of the parameter at ``place``. ``slot``: the sums of their
    gradients; ``updated``: after the step, the elements for the all-gather.
    """

    place: int
    start: int
    stop: int
    slot: Tensor
    updated: Tensor


class Scattered:
    """One stage's engine: RS of its gradient buckets and AG of what is in the same memory then (stepped
    parameters, or the sums), in the program's order. Parameters of another type than their gradients are
    gathered in memory of their own. ``parts``: of each bucket, which has one type. ``plan``: all RS, then all
    AG. Between them the replicas count which parameters they have gradients of.
    """

    def __init__(
        self,
        transport: Any,
        place: int,
        size: int,
        timeout: float,
        parts: Sequence[Sequence[tuple[int, int, int]]],
        leaves: Sequence[Tensor],
        grad_types: Sequence[torch.dtype],
        plan: Sequence[tuple[str, int]],
    ) -> None:
        self.parts, self.place, self.size, self._flags_bucket = parts, place, size, len(parts)
        self.places = {p for part in parts for p, _, _ in part}
        counts = [sum(stop - start for _, start, stop in part) for part in parts]
        padded = [-(-count // size) * size for count in counts]
        firsts = [part[0][0] for part in parts]
        self.buffers = [torch.zeros(n, dtype=grad_types[p]) for n, p in zip(padded, firsts)]
        self.gathered = [
            b if b.dtype == leaves[p].dtype else b.to(leaves[p].dtype) for b, p in zip(self.buffers, firsts)
        ]
        self.engine = comm_core.Engine(transport, place, size, timeout)
        for number, (buffer, gathered) in enumerate(zip(self.buffers, self.gathered)):
            self.engine.add_bucket(buffer, gathered, needs_update=True, name=f"bucket {number}")
        # A row for each rank, so that one RS brings every rank all sums.
        flags = torch.zeros(size * len(leaves), dtype=torch.int32)
        self._flags = flags.numpy().reshape(size, len(leaves))
        self.engine.add_bucket(flags, name="used parameters")
        reductions = [*plan[: len(parts)], ("RS", self._flags_bucket)]
        self.engine.install([*reductions, *plan[len(parts) :]])
        self._order = [bucket for _, bucket in reductions]
        self.begun = -1
        self._marked: set[int] = set()
        self.shards = list(self._shards())

    def _shards(self) -> Iterator[Shard]:
        """This rank's part of each parameter, as views of the buckets."""
        for buffer, gathered, part in zip(self.buffers, self.gathered, self.parts, strict=True):
            low = self.place * len(buffer) // self.size
            high = (self.place + 1) * len(buffer) // self.size
            at = 0
            for place, start, stop in part:
                first, last = max(low, at), min(high, at + stop - start)
                if first < last:
                    skipped = start - at
                    slots = buffer[first:last], gathered[first:last]
                    yield Shard(place, first + skipped, last + skipped, *slots)
                at += stop - start

    # One period

    def begin(self, period: int) -> None:
        if self.begun < period:
            self.begun = period
            self._marked = set()
            with engine_errors_as_comm_errors:
                self.engine.begin_step()

    def ready(
        self, period: int, bucket: int, grads: Sequence[Tensor | None], zeros: Callable[[int], Tensor]
    ) -> None:
        """The gradient of a bucket is complete; the second time, nothing is to do."""
        self.begin(period)
        if bucket in self._marked:
            return
        self._marked.add(bucket)
        found: dict[int, Tensor] = {}
        for place, _, _ in self.parts[bucket]:
            found[place] = _dense(grads[place], zeros, place)
        parts = [to_host(found[p]).view(-1)[start:stop] for p, start, stop in self.parts[bucket]]
        _pack(parts, self.buffers[bucket])
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
    def leaving(
        self,
        period: int,
        leaves: Sequence[Tensor],
        gradients: Callable[[], Sequence[Tensor | None]],
        zeros: Callable[[int], Tensor],
    ) -> Iterator[None]:
        """Around the backward that completes these parameters' gradients: buckets leave as they fill."""
        missing = [{place for place, _, _ in part} for part in self.parts]

        def filled(place: int) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                for bucket, places in enumerate(missing):
                    if place in places:
                        places.remove(place)
                        if not places:
                            self.ready(period, bucket, gradients(), zeros)

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
                target.copy_(from_host(self.gathered[bucket][at : at + stop - start], target.device))
            at += stop - start

    def close(self) -> None:
        self.engine.close()


class Replicas:
    """This rank's stage on ``hosts`` (groups of ranks), for sums outside the buckets: of the parameters at
    ``places``, of which those in ``sparse`` have sparse gradients.
    """

    def __init__(
        self,
        lane: Lane,
        rank: int,
        hosts: Sequence[Sequence[int]],
        places: Iterable[int],
        sparse: frozenset[int],
    ) -> None:
        self.lane, self.rank, self.hosts = lane, rank, hosts
        self.dense = [place for place in places if place not in sparse]
        self.sparse = [place for place in places if place in sparse]

    def sums(self, grads: Sequence[Tensor | None], stage: Stage) -> list[Tensor | None]:
        """The gradients summed over the replicas; None where no replica has one, as in one process."""
        result = list(grads)
        if self.dense:
            used = torch.tensor([int(grads[place] is not None) for place in self.dense], dtype=torch.int32)
            sums = [_dense(grads[place], stage.zeros, place) for place in self.dense]
            by_masters(self.lane, self.rank, self.hosts, [*sums, used])
            for place, total, count in zip(self.dense, sums, used.tolist(), strict=True):
                result[place] = total if count else None
        if self.sparse:
            everyone = self._everyones([grads[place] for place in self.sparse])
            for number, place in enumerate(self.sparse):
                leaf = stage.versions.newest.leaves[place]
                result[place] = _sum_of_any([mine[number] for mine in everyone], leaf)
        return result

    def _everyones(self, grads: Sequence[Tensor | None]) -> list[list[Any]]:
        """Every rank's gradients, the sparse ones as pairs of indices and values."""
        mine: list[Any] = []
        for grad in grads:
            if grad is not None and grad.is_sparse:
                grad = grad.coalesce()
                mine.append((grad.indices(), grad.values()))
            else:
                mine.append(grad)
        ranks = [rank for host in self.hosts for rank in host]
        pending = [p for peer in ranks if peer != self.rank for p in send_tree(self.lane, peer, mine)]
        found = [mine if rank == self.rank else receive_tree(self.lane, rank) for rank in ranks]
        for sent in pending:
            sent.wait()
        return found


def _dense(grad: Tensor | None, zeros: Callable[[int], Tensor], place: int) -> Tensor:
    if grad is None:
        return zeros(place)
    if grad.is_sparse:
        raise ValueError(
            f"a parameter of shape {tuple(grad.shape)} got a sparse gradient, and no nn.Embedding or"
            " nn.EmbeddingBag with sparse=True holds it: replicas of a stage sum only gradients of these as"
            " sparse ones; use such a module, or make the gradient dense"
        )
    return grad


def _sum_of_any(grads: Sequence[Any], leaf: Tensor) -> Tensor | None:
    """The sum of gradients, which is dense if one of them is. Sparse ones are pairs of indices and values."""
    here = [
        torch.sparse_coo_tensor(grad[0], grad[1], size=leaf.shape, check_invariants=False)
        if type(grad) is tuple
        else grad
        for grad in grads
        if grad is not None
    ]
    if not all(grad.is_sparse for grad in here):
        here = [grad.to_dense() for grad in here]
    return reduce(torch.add, here).to(leaf.device) if here else None


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


# -- parameters that several stages use: every stage gets the sum of all their gradients ---------------------


@dataclass(frozen=True)
class Tie:
    """One parameter on several stages: this rank's (stage, place), all ranks that have it, and the ``first``
    one of its first stage.
    """

    mine: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    first: int


def checked_ties(
    tied: Iterable[Mapping[int, str]], program: Program, stages: Mapping[int, Stage]
) -> list[Tie]:
    """The ties that this rank is part of, in the same order on every rank; asynchronous schedules refuse any.
    ``tied``: of each parameter the stages that use it, with its name there.
    """
    assert program.pipeline is not None
    late, tied = delays(program), list(tied)
    if tied and any(late):
        names = [next(iter(users.values())) for users in tied]
        using = sorted({stage for users in tied for stage in users})
        raise ValueError(
            f"{', '.join(names)} is used by stages {using}, and schedule {program.policy!r} is asynchronous"
            f" (delays {late}): the stages would step it with gradients of different steps; use a synchronous"
            " schedule, cut so that one stage has all its uses, or give the model an output layer of its own"
        )
    ties = []
    for users in tied:
        mine = [(n, stages[n].versions.places[name]) for n, name in users.items() if n in stages]
        if mine:
            ranks = {rank for number in users for rank in program.layout.members(number)}
            ties.append(Tie(tuple(mine), tuple(sorted(ranks)), program.layout.members(min(users))[0]))
    return ties


@torch.no_grad()
def share_ties(ties: Sequence[Tie], stages: Mapping[int, Stage], lane: Lane, rank: int) -> None:
    """All copies of a shared parameter start with the value that its first stage has: ranks that are not
    seeded alike have made others.
    """
    for tie in ties:
        copies = [stages[number].versions.newest.leaves[place].data for number, place in tie.mine]
        if rank == tie.first:
            value = to_host(copies[0])
            for sent in [lane.send(peer, [value]) for peer in tie.ranks if peer != rank]:
                sent.wait()
        else:
            value = torch.empty(copies[0].shape, dtype=copies[0].dtype)
            lane.receive(tie.first, [value]).wait()
        for copy in copies:
            copy.copy_(value)


def sum_ties(ties: Sequence[Tie], stages: Mapping[int, Stage], lane: Lane, rank: int, period: int) -> None:
    """Gives every copy of a shared parameter the sum of all its gradients; None where nobody used it."""
    for tie in ties:
        number, place = tie.mine[0]
        mine = [stages[n].grads[period][p] for n, p in tie.mine]
        # Sparse gradients of an embedding join the dense ones of an output layer.
        grads = [grad.to_dense() for grad in mine if grad is not None]
        total = grads[0] if grads else stages[number].zeros(place)
        for grad in grads[1:]:
            total += grad
        used = torch.tensor([len(grads)], dtype=torch.int32)
        summed_over(lane, rank, tie.ranks, [total, used])
        for number, place in tie.mine:
            stages[number].grads[period][place] = total if used.item() else None
