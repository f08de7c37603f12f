"""Measurements that each rank takes of itself: iterations, the link, and layers timed in place by hooks."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from dnn_bench.baselines.peers import Exchange
from dnn_bench.baselines.trainer import Trainer
from scheduler.ir.profile import Layer, Profile

# As large as buckets are: a fit that also has to meet messages of a few KB, whose time is the kernel's timers
# and switches, misses the rate of large ones by a tenth.
LINK_SIZES = tuple(k * 2**18 for k in (2, 3, 4, 6, 8, 16))
LINK_BYTES = 2**21  # at least this much is sent for each size
LEAST_REPEATS = 2
SAMPLE_SECONDS = 0.004


def settle(trainer: Trainer, least: int, most: int = 400) -> bool:
    """Trains at least so many iterations, until no plan is searched any more; returns whether it is so."""
    batch, done = trainer.job.local_batch(trainer.rank), 0
    while done < least or (done < most and not trainer.is_settled()):
        trainer.iteration(*batch)
        done += 1
    trainer.finish()
    return trainer.is_settled()


def run_block(trainer: Trainer, warmup: int, iterations: int) -> dict[str, Any]:
    """Times consecutive iterations of this rank, in seconds per iteration.

    A schedule that finishes an iteration during the next one is counted whole, since each measured iteration
    also waits for what the one before it left.
    """
    batch = trainer.job.local_batch(trainer.rank)
    # Resets the peak; not allowed everywhere, and then it is that of the process's whole life.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    trainer.barrier()
    for _ in range(warmup):
        trainer.iteration(*batch)
    cpu, sent = time.process_time(), bytes_sent()
    stamps = [trainer.iteration(*batch) for _ in range(iterations)]
    trainer.finish()
    starts = [stamp.start for stamp in stamps] + [time.perf_counter()]
    cpu, sent = time.process_time() - cpu, bytes_sent() - sent
    trainer.barrier()
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return {
        "iterations": [b - a for a, b in zip(starts, starts[1:], strict=False)],
        "forward": statistics.mean(stamp.forward - stamp.start for stamp in stamps),
        "backward": statistics.mean(stamp.backward - stamp.forward for stamp in stamps),
        "step": statistics.mean(stamp.end - stamp.backward for stamp in stamps),
        "cpu": cpu / iterations,  # processor time of the whole process
        "sent": sent / iterations,  # bytes this host sent
        "memory": peak,  # largest resident size meanwhile
    }


def time_link(trainer: Trainer) -> list[tuple[int, float]]:
    """(message bytes, seconds of one reduce-scatter or all-gather of it) for several sizes.

    Exchanges, one of each, follow each other without a pause, and some go before: a link that has rested lets
    the first bytes through faster than its rate.
    """
    timed = []
    for size in LINK_SIZES:
        exchange = Exchange(size)
        repeats = max(LEAST_REPEATS, LINK_BYTES // size)
        for _ in range(repeats):
            exchange()
        start = time.perf_counter()
        for _ in range(repeats):
            exchange()
        timed.append((size, (time.perf_counter() - start) / repeats / 2))
    return timed


def bytes_sent() -> int:
    """Bytes that left this host since it exists; ranks on one host see the same number."""
    devices = psutil.net_io_counters(pernic=True, nowrap=False)
    return sum(counters.bytes_sent for name, counters in devices.items() if name != "lo")


@dataclass
class Recorder:
    """When the forward reached each layer (a module that owns parameters), when the layer began to compute,
    and when it had its gradients.

    Between ``reached`` and ``began`` other hooks ran: they wait for parameters that are still on the link. A
    tied weight is in the ``parameters`` of its first owner, with whose part its gradient is whole.
    """

    parameters: dict[str, list[nn.Parameter]]
    reached: dict[str, float] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    ready: dict[str, float] = field(default_factory=dict)

    def clear(self) -> None:
        for times in (self.reached, self.began, self.ready):
            times.clear()

    def homes(self) -> dict[str, str]:
        """For each layer with gradients, itself if it was called, or the called layer before it.

        Attention modules use the weights of their parts without calling these.
        """
        homes, home = {}, min(self.began, key=lambda name: self.began[name])
        for name in self.parameters:
            home = name if name in self.began else home
            if name in self.ready:
                homes[name] = home
        return homes


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Times the layers of one iteration at a time; call `clear()` in between."""
    recorder, seen = Recorder({}), set[int]()
    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():
            trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if not trained:
                continue
            name = path or "model"
            recorder.parameters[name] = [p for p in trained if id(p) not in seen]
            seen.update(map(id, trained))
            reach, begin = (partial(_keep_first, times, name) for times in (recorder.reached, recorder.began))
            hooks.enter_context(module.register_forward_pre_hook(reach, prepend=True))
            hooks.enter_context(module.register_forward_pre_hook(begin))
            for parameter in recorder.parameters[name]:
                done = partial(_keep_last, recorder.ready, name)
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(done))
        yield recorder


def _keep_first(times: dict[str, float], name: str, *arguments: Any) -> None:
    times.setdefault(name, time.perf_counter())


def _keep_last(times: dict[str, float], name: str, parameter: Any) -> None:
    times[name] = time.perf_counter()


@dataclass(frozen=True)
class Spans:
    """One iteration: layers in forward order, each with its forward and backward (start, end)."""

    names: tuple[str, ...]
    forward: tuple[tuple[float, float], ...]
    backward: tuple[tuple[float, float], ...]
    update: float

    @classmethod
    def of(cls, recorder: Recorder, forward_end: float, update: float) -> Spans:
        ready: dict[str, float] = {}
        for name, home in recorder.homes().items():
            ready[home] = max(ready.get(home, 0.0), recorder.ready[name])
        names = sorted(ready, key=lambda name: recorder.began[name])
        starts = [recorder.began[name] for name in names]
        ends = [*(recorder.reached[name] for name in names[1:]), forward_end]
        forward = tuple(zip(starts, ends, strict=True))
        backward, last = [], forward_end
        # Branches finish out of order; a layer counts as done when those above are.
        for name in reversed(names):
            end = max(last, ready[name])
            backward.append((last, end))
            last = end
        return cls(tuple(names), forward, tuple(reversed(backward)), update)


def profile_of(trainer: Trainer, iterations: int) -> dict[str, Any]:
    """The scheduler's profile of the job in this rank: medians over some iterations after a first one."""
    batch = trainer.job.local_batch(trainer.rank)
    spans = []
    with recording(trainer.module) as recorder:
        for _ in range(iterations + 1):
            recorder.clear()
            stamps = trainer.iteration(*batch)
            spans.append(Spans.of(recorder, stamps.forward, stamps.end - stamps.backward))
    trainer.finish()
    sizes: dict[str, int] = defaultdict(int)
    for name, home in recorder.homes().items():
        sizes[home] += sum(p.numel() * p.element_size() for p in recorder.parameters[name])
    layers = []
    for index, name in enumerate(spans[0].names):
        forward, backward = (
            statistics.median(times[index][1] - times[index][0] for times in kind)
            for kind in ([s.forward for s in spans[1:]], [s.backward for s in spans[1:]])
        )
        layers.append(Layer(name, forward, backward, sizes[name]))
    total = sum(layer.bytes for layer in layers)
    update = statistics.median(s.update for s in spans[1:])
    source = "measured, all ranks computing"
    return Profile(trainer.job.model, tuple(layers), update / total, source).to_dict()


@contextlib.contextmanager
def sampled_link() -> Iterator[list[tuple[float, int]]]:
    """Samples, in a thread, how many bytes this host has sent."""
    samples = [(time.perf_counter(), bytes_sent())]
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            samples.append((time.perf_counter(), bytes_sent()))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def prediction(trainer: Trainer) -> float | None:
    """Return what rank 0's plan expects of an iteration."""
    return trainer.prediction() if trainer.rank == 0 else None


def trace_iteration(trainer: Trainer) -> dict[str, Any]:
    """Spans of an iteration between two others, in seconds from its start, and the bytes sent meanwhile."""
    batch = trainer.job.local_batch(trainer.rank)
    trainer.record_operations()
    trainer.iteration(*batch)
    trainer.barrier()
    trainer.operations()  # those of earlier iterations
    with recording(trainer.module) as recorder, sampled_link() as samples:
        trainer.iteration(*batch)
        recorder.clear()
        stamps = trainer.iteration(*batch)
        spans = Spans.of(recorder, stamps.forward, stamps.end - stamps.backward)
        end = trainer.iteration(*batch).start
    trainer.finish()
    trainer.barrier()

    def relative(pairs: Any) -> list[list[float]]:
        return [[a - stamps.start, b - stamps.start] for a, b in pairs]

    inside = [(t - stamps.start, n) for t, n in samples if stamps.start <= t <= end]
    return {
        "layers": list(spans.names),
        "forward": relative(spans.forward),
        "backward": relative(spans.backward),
        "update": relative([(stamps.backward, stamps.end)])[0],
        "end": end - stamps.start,
        "operations": [
            [label, begin - stamps.start, finish - stamps.start, size]
            for label, begin, finish, size in trainer.operations()
            if finish > stamps.start and begin < end
        ],
        "sent": [[t, n - inside[0][1]] for t, n in inside] if inside else [],
    }
