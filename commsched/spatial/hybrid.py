"""A model in stages, the first ones on tiles and the rest on whole images, with replicas and micro-batches.

    trainer = spatial.Hybrid(stages, [spatial.Tiles((2, 2)), spatial.Samples()], loss=F.cross_entropy)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    loss = trainer.step(images, target)       # gradients are whole, the same on all ranks of a stage
    optimizer.step()

``mirrored=True`` adds a second replica on the same ranks in opposite order (GEMS), so that a rank with little
to do in one replica has much to do in the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import commsched
from commsched.spatial.mesh import Mesh, current_mesh
from commsched.spatial.placement import Placement, Samples, Value, as_many, as_one, rank_orders, trace
from commsched.spatial.redistribute import Crossing, by_rank, moves
from commsched.spatial.shard import shard
from commsched.spatial.summation import StageSum
from commsched.spatial.tile import Tile
from commsched.transport.channel import DistChannel, Pending
from scheduler.ir.actions import Action, Kind
from scheduler.pipelines.schedules.mirrored_order import interleaved_replicas, share_of

_DATA_CHANNEL = 6  # connections of our own
Loss = Callable[[Any, Any], Tensor]


@dataclass
class Part:
    """One stage of one replica, on a rank that holds it."""

    module: nn.Module
    ranks: tuple[int, ...]
    mesh: Mesh | None
    taken: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)  # by micro-batch
    returned: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    grads: dict[int, list[Tensor | None]] = field(default_factory=dict)  # of what was taken


@dataclass(frozen=True)
class _Ways:
    """For one size of images: what each stage takes, and this rank's ends of the ways between stages."""

    taken: list[tuple[Value, ...]]
    crossings: dict[tuple[int, int], list[Crossing]]  # by replica and the stage they leave


@dataclass(frozen=True)
class _Batch:
    images: Tensor
    target: Tensor
    size: int  # samples of a micro-batch
    microbatches: int
    ways: _Ways

    def rows(self, replica: int, number: int) -> slice:
        """The samples of one micro-batch of one replica."""
        first = (replica * self.microbatches + number) * self.size
        return slice(first, first + self.size)


class Hybrid:
    """Trains ``stages`` (modules that take and return a tensor or a tuple of them) where ``placements`` say.

    Every rank builds the same stages; those that a rank does not hold are only run without data, for the
    sizes of what they return. ``replicas`` share the samples of a batch on ranks of their own, and each takes
    them in ``microbatches``. ``loss(output, target)`` is a mean over samples. Needs ``commsched.init()``.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        placements: Sequence[Placement],
        *,
        loss: Loss,
        microbatches: int = 1,
        replicas: int = 1,
        mirrored: bool = False,
        overlap: str = "auto",
        fuse_halo: int | str = "auto",
        timeout: float = 60.0,
    ) -> None:
        if len(stages) != len(placements) or not stages:
            raise ValueError(
                f"every stage needs a placement: there are {len(stages)} stages, {len(placements)} placements"
            )
        self.stages, self.placements, self.loss = list(stages), list(placements), loss
        self.microbatches, self.timeout = microbatches, timeout
        self.rank, world = commsched.rank(), commsched.size()
        self.ranks = rank_orders(placements, replicas, mirrored, world)
        self._order = share_of(self.rank, self.ranks, interleaved_replicas(self.ranks, microbatches))
        self._group = commsched.data_group(channel=_DATA_CHANNEL)
        self._options: dict[str, Any] = {"overlap": overlap, "fuse_halo": fuse_halo}
        held = [(r, s) for r, replica in enumerate(self.ranks) for s, ranks in enumerate(replica)
                if self.rank in ranks]  # fmt: skip
        modules = {(r, s): self._module(r, s) for r, s in held}  # all copies before any is given its mesh
        self.parts = {key: self._part(*key, module) for key, module in modules.items()}
        self._sums = StageSum(self.ranks, {s: self.stages[s] for _, s in self.parts}, timeout)
        self._ways: dict[Value, _Ways] = {}
        self._pending: list[Pending] = []

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the stages that this rank holds."""
        for stage in sorted({s for _, s in self.parts}):
            yield from self.stages[stage].parameters()

    def train(self, mode: bool = True) -> None:
        for part in self.parts.values():
            part.module.train(mode)

    def step(self, images: Tensor, target: Tensor) -> float:
        """Forward and backward of a batch that every rank has; the mean loss. Gradients are added to
        ``.grad`` as the sum over tiles, samples and replicas, the same on all ranks that hold a stage.
        """
        batch = self._batch(images, target)
        held = list(self.parameters())
        before = [p.grad for p in held]
        for parameter in held:
            parameter.grad = None
        total = 0.0
        for action in self._order:
            replica, stage = self._place(action)
            if action.kind is Kind.F:
                total += self._forward(replica, stage, action.index, batch)
            else:
                self._backward(replica, stage, action.index, batch)
        self._settle()
        self._sums.reduce()
        for parameter, grad in zip(held, before):
            if grad is not None and parameter.grad is not None:
                parameter.grad += grad
        return self._mean(total)

    @torch.no_grad()
    def evaluate(self, images: Tensor, target: Tensor) -> float:
        """The mean loss in eval mode, without gradients."""
        batch, total = self._batch(images, target), 0.0
        modes = {key: part.module.training for key, part in self.parts.items()}
        self.train(False)
        for action in self._order:
            if action.kind is Kind.F:
                total += self._forward(*self._place(action), action.index, batch)
        self._settle()
        for key, part in self.parts.items():
            part.module.train(modes[key])
        return self._mean(total)

    # -- setting up ------------------------------------------------------------------------------------------

    def _module(self, replica: int, stage: int) -> nn.Module:
        """The first replica here uses the user's module, others a copy that shares its parameters only."""
        module = self.stages[stage]
        if any(self.rank in self.ranks[earlier][stage] for earlier in range(replica)):
            module = copy.deepcopy(module, {id(p): p for p in module.parameters()})
        return module

    def _part(self, replica: int, stage: int, module: nn.Module) -> Part:
        placement, ranks = self.placements[stage], self.ranks[replica][stage]
        if isinstance(placement, Samples):
            return Part(module, ranks, None)
        channel = DistChannel(self._group, ranks, self.timeout)
        shard(module, placement.grid, placement.dims, channel=channel, timeout=self.timeout, **self._options)
        return Part(module, ranks, current_mesh())

    def _batch(self, images: Tensor, target: Tensor) -> _Batch:
        count = len(self.ranks) * self.microbatches
        if len(images) != len(target) or len(images) % count:
            raise ValueError(
                f"a batch for {len(self.ranks)} replicas with {self.microbatches} micro-batches each needs a"
                f" multiple of {count} samples, got {len(images)} images and {len(target)} targets"
            )
        size = len(images) // count
        for number, placement in enumerate(self.placements):
            if isinstance(placement, Samples) and size % placement.size:
                raise ValueError(
                    f"stage {number} shares the samples of a micro-batch among {placement.size} ranks, and"
                    f" {size} do not divide by that"
                )
        value = Value((size, *images.shape[1:]), images.dtype)
        if value not in self._ways:
            self._ways[value] = self._connect(value)
        return _Batch(images, target, size, self.microbatches, self._ways[value])

    def _connect(self, image: Value) -> _Ways:
        """The ways between the stages, for images of this size."""
        plain = [self.parts[0, s].module if (0, s) in self.parts else m for s, m in enumerate(self.stages)]
        taken, returned = trace(plain, self.placements, image)
        found: dict[tuple[int, int], list[Crossing]] = {}
        lane = 0
        for replica, ranks in enumerate(self.ranks):
            for stage in range(len(self.stages) - 1):
                crossings = []
                for here, there in zip(returned[stage], taken[stage + 1]):
                    have = by_rank(ranks[stage], here.boxes(self.placements[stage]))
                    want = by_rank(ranks[stage + 1], there.boxes(self.placements[stage + 1]))
                    name = f"stage {stage} to {stage + 1} of replica {replica}"
                    plan = moves(self.rank, have, want)
                    crossings.append(
                        Crossing(plan, here.dtype, self._group, (lane, lane + 1), self.timeout, name)
                    )
                    lane += 2
                found[replica, stage] = crossings
        return _Ways(taken, found)

    # -- running ---------------------------------------------------------------------------------------------

    def _place(self, action: Action) -> tuple[int, int]:
        assert action.stage is not None
        return divmod(action.stage, len(self.stages))

    def _forward(self, replica: int, stage: int, number: int, batch: _Batch) -> float:
        part = self.parts[replica, stage]
        inputs = self._inputs(replica, stage, number, batch)
        part.taken[number] = inputs
        values = [
            value if part.mesh is None else Tile.make(value, part.mesh, entered.cuts)
            for value, entered in zip(inputs, batch.ways.taken[stage])
        ]
        output = part.module(as_one(values))
        if stage + 1 == len(self.stages):
            return self._end(part, replica, number, output, batch)
        outputs = tuple(o.local if isinstance(o, Tile) else o for o in as_many(output))
        part.returned[number] = outputs
        for crossing, value in zip(batch.ways.crossings[replica, stage], outputs):
            self._pending.append(crossing.send(value.detach()))
        return 0.0

    def _inputs(self, replica: int, stage: int, number: int, batch: _Batch) -> tuple[Tensor, ...]:
        """What a stage takes: the rank's part of the images, or of what the stage before returned."""
        ranks = self.ranks[replica][stage]
        if stage == 0:
            box = batch.ways.taken[0][0].boxes(self.placements[0])[ranks.index(self.rank)]
            images = batch.images[batch.rows(replica, number)]
            return (images[tuple(slice(lo, hi) for lo, hi in box)],)
        before = self.parts.get((replica, stage - 1))
        own = before.returned[number] if before is not None else (None,) * len(batch.ways.taken[stage])
        crossings = batch.ways.crossings[replica, stage - 1]
        received = [c.receive(None if o is None else o.detach()) for c, o in zip(crossings, own)]
        return tuple(value.requires_grad_(torch.is_grad_enabled()) for value in received)

    def _end(self, part: Part, replica: int, number: int, output: Any, batch: _Batch) -> float:
        """The loss of this rank's share; its value counts once."""
        target = batch.target[batch.rows(replica, number)]
        share, counts = 1.0, True
        placement = self.placements[-1]
        if isinstance(placement, Samples):
            each = batch.size // placement.size
            first = part.ranks.index(self.rank) * each
            target, share = target[first : first + each], 1 / placement.size
        else:
            counts = part.ranks.index(self.rank) == 0
        loss = self.loss(output, target) * (share / (len(self.ranks) * self.microbatches))
        part.returned[number] = (loss,)
        value = (loss.local if isinstance(loss, Tile) else loss).item()
        return value if counts else 0.0

    def _backward(self, replica: int, stage: int, number: int, batch: _Batch) -> None:
        part = self.parts[replica, stage]
        outputs = part.returned.pop(number)
        if stage + 1 == len(self.stages):
            outputs[0].backward()
        else:
            after = self.parts.get((replica, stage + 1))
            crossings = batch.ways.crossings[replica, stage]
            own = [None] * len(crossings) if after is None else after.grads.pop(number)
            grads = [c.receive_back(o) for c, o in zip(crossings, own)]
            chosen = [(o, g) for o, g in zip(outputs, grads) if o.requires_grad]
            torch.autograd.backward([o for o, _ in chosen], [g for _, g in chosen])
        if stage:
            taken = part.taken.pop(number)
            part.grads[number] = [torch.zeros_like(t) if t.grad is None else t.grad for t in taken]
            for crossing, grad in zip(batch.ways.crossings[replica, stage - 1], part.grads[number]):
                assert grad is not None
                self._pending.append(crossing.send_back(grad))
            if (replica, stage - 1) not in self.parts:
                part.grads.pop(number)

    def _settle(self) -> None:
        """Everything sent has arrived; nothing is kept."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        for part in self.parts.values():
            for kept in (part.taken, part.returned, part.grads):
                kept.clear()

    def _mean(self, total: float) -> float:
        """All ranks' shares of the loss."""
        value = torch.tensor([total], dtype=torch.float64)
        return float(commsched.allreduce(value, op=commsched.Sum, name="commsched.spatial.loss"))
