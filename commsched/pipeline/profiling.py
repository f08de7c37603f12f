"""Measure what the planner needs: each layer of a model as a stage of its own, and the cost of a message."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from comm_core import MessageChannel
from commsched.collectives.compression import Compression
from commsched.pipeline.build import checked_wire
from commsched.pipeline.chain import Chain, ListStage
from commsched.pipeline.factory import keep_freed_memory
from commsched.pipeline.messages import Fabric, Lane, everyones, from_first, receive_object, send_object
from commsched.pipeline.reduction import ReplicaBuckets, StageRanks
from commsched.pipeline.rows import cut, on_device, rows_of, tensors
from commsched.pipeline.stage import GradientTypes, Loss, Stage
from commsched.pipeline.update import Factory, made_by
from scheduler.ir.buckets import Bucket, Piece
from scheduler.ir.link import Link, fit
from scheduler.ir.profile import Layer, Profile

_REPEAT = 5
# Small messages show the start-up. Medium ones may pass a limited link as a burst and hide its rate.
_SIZES = (1 << 8, 1 << 10, 1 << 16, 1 << 18, 1 << 19)
_SHORT_SIZES = (1 << 8, 1 << 10, 1 << 12, 1 << 14, 1 << 16)
_MESSAGES, _BURST = 12, 1 << 19


@dataclass
class _Times:
    """Seconds of one layer, one entry for each repetition."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    inputs_only: list[float] = field(default_factory=list)  # a backward without the weights' gradients
    output_bytes: int = 0


def profile(
    model: nn.Module,
    loss: Loss,
    batch: tuple[Any, Any],
    *,
    optimizer: Factory | None = None,
    repeat: int = _REPEAT,
    inside: Iterable[type[nn.Module]] = (),
    name: str = "",
    master_weights: bool = False,
    compression: Any = Compression.none,
) -> Profile:
    """Measure each layer's seconds, and the bytes of its output and parameters. ``batch``: one micro-batch.
    Half of its rows are timed too: this tells how much time a replica saves that gets fewer rows. The model's
    weights stay as they are; running statistics move, as in training. ``master_weights`` and
    ``compression`` are the pipeline's: what its replicas send depends on them.
    """
    keep_freed_memory()  # as in training
    batch = on_device(batch, next(model.parameters(), torch.empty(0)).device)
    chain = Chain(model, inside, batch[0])
    types = GradientTypes(master_weights, checked_wire(compression))
    stages = [chain.stage(layer, layer + 1) for layer in range(len(chain))]
    times, halves = [_Times() for _ in stages], [_Times() for _ in stages]
    rows = rows_of(batch, "the batch")
    half = cut(batch, (0, rows // 2)) if rows > 1 else batch
    with _accumulating(chain.model):
        for _ in range(repeat + 1):
            _once(stages, chain.arguments(batch[0]), batch[1], loss, times)
            _once(stages, chain.arguments(half[0]), half[1], loss, halves)
    sent = chain.layer_sizes(size=types.rs_bytes)
    summed = chain.layer_sizes(size=lambda p: types.sum_type(p.dtype).itemsize * p.numel())
    sizes = zip(chain.sizes, sent, summed, strict=True)
    measured = zip(chain.names, sizes, times, halves, strict=True)
    layers = [_layer(*row, rows_of(half, "its half") / rows) for row in measured]
    seconds = 0.0 if optimizer is None else _update(model, optimizer, repeat, types)
    per_byte = seconds / max(1, sum(chain.sizes))
    return Profile(name or type(chain.model).__name__, tuple(layers), per_byte, f"measured, {repeat} times")


@contextmanager
def _accumulating(model: nn.Module) -> Iterator[None]:
    """Give each parameter a gradient, as all micro-batches but the first find it: adding takes time, too."""
    before = [(p, p.grad) for p in model.parameters() if p.requires_grad]
    for p, _ in before:
        p.grad = torch.zeros_like(p)
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad


def _layer(name: str, sizes: tuple[int, int, int], times: _Times, fewer: _Times, part: float) -> Layer:
    """Return one layer of the profile.

    ``sizes``: bytes of the parameters, of an RS, and of the gradients. ``fewer``: with ``part`` of the rows.
    """
    size, sent, summed = sizes
    forward, backward, inputs_only = map(_median, (times.forward, times.backward, times.inputs_only))
    weights = max(0.0, backward - inputs_only) if size else 0.0
    fixed = 1.0  # the share of the time that fewer rows do not save; a single row saves nothing
    if part < 1 and forward + backward > 0:
        ratio = (_median(fewer.forward) + _median(fewer.backward)) / (forward + backward)
        fixed = min(1.0, max(0.0, (ratio - part) / (1 - part)))
    layer = Layer(name, forward, backward, size, times.output_bytes, weights, fixed=fixed)
    return replace(layer, rs_share=sent / size, grad_share=summed / size) if size else layer


def _median(values: list[float]) -> float:
    # The first repetition allocates and warms caches.
    return statistics.median(values[1:])


def message_link(fabric: Fabric, largest: float | None = None) -> Link:
    """Measure messages between the first two ranks, in seconds and seconds per byte; every rank must call.

    They go both ways at once, as in RS and AG, and each follows a burst: a link may let a burst pass faster
    than its rate, and gradients come in large numbers. Short messages leave without their receiver's grant;
    only they are measured where none is longer than ``largest`` bytes.
    """
    if fabric.size == 1:
        raise ValueError("a link joins two ranks, this job has one; start it with a launcher on two or more")
    short = largest is not None and largest <= MessageChannel.SHORT
    sizes = _SHORT_SIZES if short else _SIZES
    lane, times = fabric.lane("timing"), []
    for size in sizes if fabric.rank < 2 else ():
        seconds = []
        for _ in range(_MESSAGES):
            _exchange(lane, 1 - fabric.rank, _BURST)
            _exchange(lane, 1 - fabric.rank, 1)  # the other side has all of the burst, too
            start = time.perf_counter()
            _exchange(lane, 1 - fabric.rank, size)
            seconds.append(time.perf_counter() - start)
        times.append(statistics.median(seconds))
    mine = fit(sizes, times) if fabric.rank == 0 else None
    return from_first(lane, fabric.rank, range(fabric.size), mine, send_object, receive_object)


def _exchange(lane: Lane, peer: int, size: int) -> None:
    sent, received = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    for pending in (lane.send(peer, [sent]), lane.receive(peer, [received])):
        pending.wait()


def _once(stages: list[Any], state: tuple[Any, ...], targets: Any, loss: Loss, times: list[_Times]) -> None:
    """Time one forward and backward, each layer cut off from the others."""
    runs = []
    for number, (stage, one) in enumerate(zip(stages, times, strict=True)):
        inputs = tuple(tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), state))
        start = _now(stage)
        output = stage(*inputs)
        if number + 1 == len(stages):
            output = loss(output, targets)
        one.forward.append(_now(stage) - start)
        state = output if isinstance(output, tuple) else (output,)
        one.output_bytes = sum(t.numel() * t.element_size() for t in tensors(state))
        runs.append((inputs, [t for t in tensors(state) if t.requires_grad]))
    for (inputs, outputs), stage, one in reversed(list(zip(runs, stages, times, strict=True))):
        wanted = [t for t in tensors(inputs) if t.requires_grad]
        weights = [p for p in stage.parameters() if p.requires_grad]
        grads = [torch.ones_like(output) for output in outputs]
        one.inputs_only.append(_timed(outputs, wanted, grads, keep=True))
        for tensor in wanted:
            tensor.grad = None
        one.backward.append(_timed(outputs, [*wanted, *weights], grads, keep=False))


def _timed(outputs: list[Tensor], wanted: list[Tensor], grads: list[Tensor], keep: bool) -> float:
    if not wanted or not outputs:
        return 0.0
    start = _now(wanted[0])
    torch.autograd.backward(outputs, grads, retain_graph=keep, inputs=wanted)
    return _now(wanted[0]) - start


def _now(on: Tensor | nn.Module) -> float:
    """Wait for the device of a tensor or module, and return the time."""
    first = on if isinstance(on, Tensor) else next(on.parameters(), torch.empty(0))
    if first.is_cuda:
        torch.cuda.synchronize(first.device)
    return time.perf_counter()


def _update(model: nn.Module, optimizer: Factory, repeat: int, types: GradientTypes) -> float:
    """Return the seconds of one optimizer step, taken on copies."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    copies = {name: nn.Parameter(p.to(types.sum_type(p.dtype), copy=True)) for name, p in trained.items()}
    for copy in copies.values():
        copy.grad = torch.zeros_like(copy)
    stepper, seconds = made_by(optimizer, copies, {}), []
    for _ in range(repeat + 1):
        start = _now(model)
        stepper.step()
        seconds.append(_now(model) - start)
    return _median(seconds)


# -- how much RS and AG slow the computation beside them -----------------------------------------------------

# On hosts whose processors also copy, sum and send, a replica computes more slowly while its RS and AG run.
# The planner must know by how much: on two cores, this is more than what the link itself costs.

_MOST_BYTES, _SECONDS, _COST_REPEAT = 8 << 20, 0.05, 7
_SIDE = 192  # of the matrices that stand for the model's computation


def traffic_cost(fabric: Fabric, link: Link) -> float:
    """Return the seconds that this rank cannot compute for each byte it sends in RS and AG. Collective.

    ``link``: as measured, so that what is sent stays small enough to be hidden under the computation.
    """
    bytes_ = min(_MOST_BYTES, int(_SECONDS / link.beta) if link.beta else _MOST_BYTES)
    elements = max(bytes_, 1 << 12) // 4
    # A stage of one parameter, with a replica on every rank.
    lane, everyone = fabric.lane("traffic"), list(range(fabric.size))
    module = ListStage({"load": nn.ParameterList([torch.zeros(elements)])}, last=True)
    stage, grad = Stage(0, module, None, recompute=False), torch.zeros(elements)
    buckets = ReplicaBuckets(
        fabric.transport("traffic", everyone),
        StageRanks(lane, fabric.rank, everyone),
        fabric.timeout,
        stage,
        [Bucket((Piece(0, 0, 4 * elements),))],
        [("RS", 0), ("AG", 0)],
    )
    enough = 2 * (fabric.size * link.alpha + 4 * elements * link.beta) + 0.01
    rounds = max(1, round(enough / min(_computed(8) for _ in range(3)) * 8))
    differences = []
    try:
        for period in range(_COST_REPEAT):
            everyones(lane, fabric.rank, everyone, None)  # returns once every rank is here
            start = time.perf_counter()
            _computed(2 * rounds)
            alone = time.perf_counter() - start
            everyones(lane, fabric.rank, everyone, None)
            start = time.perf_counter()
            buckets.ready(period, 0, [grad])
            buckets.complete([grad])
            _computed(rounds)  # beside RS
            buckets.wait_reduced()
            buckets.updated(0)
            _computed(rounds)  # beside AG
            buckets.take_in(stage.versions.newest, 0)
            differences.append(time.perf_counter() - start - alone)
    finally:
        buckets.close()
    sent = 2 * (fabric.size - 1) / fabric.size * 4 * elements
    return max(0.0, statistics.median(differences)) / sent


def _computed(rounds: int) -> float:
    """Compute something for so many rounds; return the seconds it took."""
    one = torch.ones(_SIDE, _SIDE)
    start = time.perf_counter()
    for _ in range(rounds):
        one @ one
    return time.perf_counter() - start
