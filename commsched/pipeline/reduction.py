"""Gradients of a stage's replicas, summed in an order that does not depend on when they arrive.

``ReplicaBuckets``: reduce-scatter, step on this rank's shard, all-gather of the parameters, on a backend. Its
transport decides the order of sums: rank order, or in two tiers rank order inside each host, then host order.
``Replicas``: sums outside the buckets, of parameters that must be whole where they are stepped, in rank order
or, with ``reduction="masters"``, by host too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from comm_core.cuda.tables import BLOCK
from commsched.backends.cpu import EngineBuckets
from commsched.backends.interface import Scaling, StepWork
from commsched.channels import Staging
from commsched.optimizer.buckets import Buffers, build_layout
from commsched.optimizer.gradient import OptimizerState, Residuals
from commsched.optimizer.round import inside_a_backward
from commsched.optimizer.sharded_step import ShardView
from commsched.pipeline.messages import Lane, everyones, receive_tree, send_tree, to_host
from commsched.pipeline.stage import Stage, Version
from scheduler.ir.buckets import Bucket, Piece
from scheduler.ir.program import Program, delays

_HOST = torch.device("cpu")  # where messages travel from, also of stages on GPUs


class StageRanks:
    """The ranks of one stage, as the optimizer package's shards and residuals need them (``Members``)."""

    def __init__(self, lane: Lane, rank: int, ranks: Sequence[int]) -> None:
        self._lane, self._here, self._ranks = lane, rank, ranks
        self.rank, self.size = list(ranks).index(rank), len(ranks)

    def all_values(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return everyones(self._lane, self._here, self._ranks, value)

    def add_up(self, tensor: Tensor, name: str) -> None:
        summed_over(self._lane, self._here, self._ranks, [tensor])


def kinds_of(stage: Stage) -> list[tuple[torch.dtype, bool]]:
    """Of each parameter its type and whether its gradient is quantised: a bucket holds one kind."""
    return [(leaf.dtype, stage.types.quantises(leaf)) for leaf in stage.versions.newest.leaves]


def of_parameters(
    bucket: Bucket, layers: Mapping[int, Sequence[int]], stage: Stage, alone: frozenset[int]
) -> list[Bucket]:
    """A bucket of bytes of layers as buckets of bytes of parameters, one for each kind; groups count kinds.
    ``layers``: the places of each layer's parameters, which lie one after the other. Those in ``alone`` are
    left out.
    """
    leaves, kinds = stage.versions.newest.leaves, kinds_of(stage)
    groups = list(dict.fromkeys(kinds))
    found: defaultdict[int, list[Piece]] = defaultdict(list)
    for piece in bucket.pieces:
        begin = 0
        for place in layers[piece.layer]:
            leaf, item = leaves[place], leaves[place].element_size()
            end = begin + leaf.numel() * item
            # An element belongs to the range in which its first byte lies.
            low, high = (-(-(min(max(at, begin), end) - begin) // item) for at in (piece.start, piece.stop))
            if low < high and place not in alone:
                found[groups.index(kinds[place])].append(Piece(place, low * item, high * item))
            begin = end
    return [Bucket(tuple(pieces), group) for group, pieces in found.items()]


class ReplicaBuckets:
    """One stage's buckets, in memory that the optimizer package lays out, on its backend: RS of gradients
    (``sums``) and AG of what is in ``gathered`` then, stepped parameters or the sums, in the program's order.
    Both are the same memory, except where gradients have another type than their parameters.

    ``buckets``: of parameters; cuts inside them move to where ranks have equal shards. ``plan``: all RS, then
    all AG. Between them the replicas count which parameters they have gradients of. ``parameters`` and
    ``state`` are the optimizer's: residuals of quantised gradients come from there.
    """

    def __init__(
        self,
        transport: Any,
        ranks: StageRanks,
        timeout: float,
        stage: Stage,
        buckets: Sequence[Bucket],
        plan: Sequence[tuple[str, int]],
        parameters: Sequence[nn.Parameter] = (),
        state: Callable[[], OptimizerState] = dict,
        staging: Staging | None = None,
    ) -> None:
        self.stage, leaves = stage, stage.versions.newest.leaves
        self._staging = staging
        self._handed: Future[Any] | None = None  # the latest copies to the host
        self.ranks, size = ranks, ranks.size
        sizes = [leaf.element_size() for leaf in leaves]
        kinds = list(dict.fromkeys(kinds_of(stage)))
        blocks = {group: BLOCK for group, (_, quantised) in enumerate(kinds) if quantised}
        numels = [leaf.numel() for leaf in leaves]
        self.layout = build_layout(numels, sizes, buckets, size, alignment=blocks)
        self.places = set(self.layout.slots)
        groups = {group: kinds[group][0] for group in self.layout.lengths}
        sums = {group: (stage.types.sum_type(kind), _HOST) for group, kind in groups.items()}
        self.sums = Buffers(self.layout, sums, torch.zeros if staging is None else staging.host_zeros)
        apart = {group: (kind, _HOST) for group, kind in groups.items() if sums[group][0] != kind}
        self.gathered = Buffers(self.layout, apart)
        self.gathered.flat = self.sums.flat | self.gathered.flat
        self._slots = {
            place: self.sums.view(torch.empty(leaves[place].shape, device="meta"), slot)
            for place, slot in self.layout.slots.items()
        }
        self._here = self.sums
        self._flags_bucket = len(buckets)
        # A row for each rank, so that one RS brings every rank all sums.
        flags = torch.zeros(size * len(leaves), dtype=torch.int32)
        self._flags = flags.numpy().reshape(size, len(leaves))
        reductions = [*plan[: len(buckets)], ("RS", self._flags_bucket)]
        self._order = [bucket for _, bucket in reductions]
        slots = sorted(self.layout.slots.items())
        quantised = {place: parameters[place] for place, slot in slots if slot.group in blocks}
        # Whatever is gathered travels as it is, so no sums are rounded.
        self.residuals = Residuals(quantised, min(blocks, default=0), ranks, 1.0, False, state)
        self.residuals.install(self.sums)
        self._before: list[Tensor] = []  # the residuals with which this period's sums began
        order, scaling = [*reductions, *plan[len(buckets) :]], Scaling(wire_dtype=stage.types.wire)
        lost = self.residuals.by_bucket()
        self.backend = EngineBuckets(ranks.rank, size, transport, timeout)
        self.backend.install(StepWork(order, self.sums, [flags], self.gathered, scaling, lost))
        self.begun = -1
        self._marked: set[int] = set()
        self._written: set[int] = set()  # the parameters whose gradients are in their slots

    # One period

    def begin(self, period: int) -> None:
        if self.begun < period:
            self.begun = period
            self._marked, self._written = set(), set()
            if self.stage.stays:
                self._before = [lost.clone() for lost in self._residuals()]
            self.backend.begin_step()
            for bucket in self.layout.empty():
                self._mark(bucket)

    def _mark(self, bucket: int, copies: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """``copies``: gradients, and where they go before the bucket leaves."""
        self._marked.add(bucket)
        if self._staging is None:
            for grad, slot in copies:
                slot.copy_(grad)
            self.backend.mark_ready(bucket)
        else:
            self._handed = self._staging.copy_out(copies, partial(self.backend.mark_ready, bucket))

    @torch.no_grad()
    def ready(self, period: int, bucket: int, grads: Sequence[Tensor | None]) -> None:
        """The gradient of a bucket is complete; the second time, nothing is to do."""
        self.begin(period)
        if bucket in self._marked:
            return
        copies = []
        for place in self.layout.slices[bucket].params:
            if place not in self._written:
                self._written.add(place)
                grad = grads[place]
                if grad is None:
                    self._slots[place].zero_()
                else:
                    copies.append((checked_dense(grad), self._slots[place]))
        self._mark(bucket, copies)

    def complete(self, grads: Sequence[Tensor | None]) -> None:
        """All gradients of the period are there: tells the replicas which parameters this one has used."""
        if self._flags_bucket not in self._marked:
            self._flags[:] = [grad is not None for grad in grads]
            self._mark(self._flags_bucket)

    @contextmanager
    def leaving(self, period: int, version: Version) -> Iterator[None]:
        """Around the backward that completes a version's gradients: buckets leave as they fill. A backward
        inside of it (a reentrant checkpoint) may be one of several that reach a parameter: its gradients
        leave at the end.
        """
        missing = [set(piece.params) for piece in self.layout.slices]
        left: set[int] = set()  # parameters in buckets that have been sent

        def filled(place: int) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                if place in left:
                    raise ValueError(
                        f"stage {self.stage.number}, replica {self.ranks.rank}: a backward added to the"
                        f" gradient of {self.stage.versions.names[place]} after it was sent to the other"
                        " replicas: the parameter is used inside of a reentrant checkpoint and outside of"
                        " it; pass use_reentrant=False to checkpoint()"
                    )
                if inside_a_backward():
                    return
                for bucket, places in enumerate(missing):
                    if place in places:
                        places.remove(place)
                        if not places:
                            grads = self.stage.gradients(version, self.stage.grads[period])
                            self.ready(period, bucket, grads)
                            left.update(self.layout.slices[bucket].params)

            return hook

        trained = [(place, leaf) for place, leaf in enumerate(version.leaves) if leaf.requires_grad]
        hooks = [leaf.register_post_accumulate_grad_hook(filled(place)) for place, leaf in trained]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def wait_reduced(self) -> None:
        self._wait_handed()
        for bucket in self._order:
            self.backend.wait_reduced(bucket)

    def wait_begun(self) -> None:
        """Waits for the sums whose turn has come: the engine takes up a bucket after those before it."""
        self._wait_handed()
        for bucket in takewhile(self._marked.__contains__, self._order):
            self.backend.wait_reduced(bucket)

    def _wait_handed(self) -> None:
        """Waits until the buckets that were marked last are in host memory."""
        if self._handed is not None and self._staging is not None:
            self._staging.device.synchronize(self._handed.result())

    def keep_unread(self) -> None:
        """Sends sums of residuals again where no replica has a gradient: nobody steps with them."""
        used = self.used
        self.residuals.give_back([i for i in self.residuals.params if not used[i]], self.sums)
        self._before = []

    def _residuals(self) -> list[Tensor]:
        return [sent for sent, _ in self.residuals.by_bucket().values()]

    def state(self) -> list[Tensor]:
        """This rank's residuals, for a checkpoint, which repeats the sums that are under way."""
        return self._before or [lost.clone() for lost in self._residuals()]

    def load(self, state: Sequence[Tensor]) -> None:
        for lost, value in zip(self._residuals(), state, strict=True):
            lost.copy_(value)

    def sums_on(self, device: torch.device) -> Buffers:
        """The sums where a stage computes: the same memory, unless that is a GPU."""
        if device != _HOST:
            kinds = {group: (flat.dtype, device) for group, flat in self.sums.flat.items()}
            self._here = Buffers(self.layout, kinds)
        return self._here

    def bring_shards(self) -> None:
        """Copies this rank's sums to where the stage computes."""
        if self._here is not self.sums:
            for piece in self.layout.slices:
                shard = slice(*piece.shard(self.ranks.rank, self.ranks.size))
                self._here.flat[piece.group][shard] = self.sums.flat[piece.group][shard]

    def give(self, parts: Sequence[Sequence[ShardView]]) -> None:
        """Takes the stepped shards of each bucket for the all-gathers."""
        for piece, shards in zip(self.layout.slices, parts, strict=True):
            for shard in shards:
                offset = self.layout.slots[shard.gradient.number].offset
                target = self.gathered.flat[piece.group][offset + shard.start : offset + shard.stop]
                shard.bind()
                target.copy_(shard.weight)

    @property
    def used(self) -> list[int]:
        """By parameter how many replicas have used it, once the sums have been waited for."""
        return self._flags[self.ranks.rank].tolist()

    def updated(self, bucket: int) -> None:
        self.backend.mark_updated(bucket)

    def take_in(self, version: Version, bucket: int) -> None:
        """Waits for a bucket's all-gather and writes it into the version that it belongs to."""
        self._check_unwritten(version, bucket)
        self.write(bucket, version.data)
        version.pending.discard(bucket)

    def _check_unwritten(self, version: Version, bucket: int) -> None:
        """``ValueError`` if a script has written to this rank's own part, which all get as it was."""
        piece = self.layout.slices[bucket]
        begin, end = piece.shard(self.ranks.rank, self.ranks.size)
        flat = self.gathered.flat[piece.group]
        for place in piece.params:
            slot, tensor = self.layout.slots[place], version.data[place]
            start, stop = max(begin, slot.offset), min(end, slot.offset + slot.numel)
            if start < stop and tensor.device == _HOST:
                mine = tensor.view(-1)[start - slot.offset : stop - slot.offset]
                if not torch.equal(mine.view(torch.uint8), flat[start:stop].view(torch.uint8)):
                    name = self.stage.versions.names[place]
                    text = "was written to while other replicas' parts of it were on their way"
                    raise ValueError(
                        f"{name} {text}; write to pipeline.parameters(), called anew after each step"
                    )

    def write(self, bucket: int, tensors: Sequence[Any]) -> None:
        """Waits for a bucket's all-gather and writes its parts where they belong, except to None."""
        self.backend.wait_gathered(bucket)
        piece = self.layout.slices[bucket]
        for place in piece.params:
            if tensors[place] is not None:
                slot, flat = self.layout.slots[place], self.gathered.flat[piece.group]
                start, stop = max(piece.start, slot.offset), min(piece.stop, slot.offset + slot.numel)
                target = tensors[place].view(-1)[start - slot.offset : stop - slot.offset]
                target.copy_(flat[start:stop])

    def close(self) -> None:
        self.backend.engine.close()


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
            sums = [
                stage.zeros(place) if (grad := grads[place]) is None else checked_dense(grad)
                for place in self.dense
            ]
            by_masters(self.lane, self.rank, self.hosts, [*sums, used])
            for place, total, count in zip(self.dense, sums, used.tolist(), strict=True):
                result[place] = total if count else None
        if self.sparse:
            mine = [_sendable(grads[place]) for place in self.sparse]
            ranks = [rank for host in self.hosts for rank in host]
            everyone = everyones(self.lane, self.rank, ranks, mine, send_tree, receive_tree)
            for place, *same in zip(self.sparse, *everyone, strict=True):
                result[place] = _sum_of_any(same, stage.versions.newest.leaves[place])
        return result


def _sendable(grad: Tensor | None) -> Any:
    """The gradient; of a sparse one, its indices and values."""
    if grad is None or not grad.is_sparse:
        return grad
    grad = grad.coalesce()
    return grad.indices(), grad.values()


def checked_dense(grad: Tensor) -> Tensor:
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
