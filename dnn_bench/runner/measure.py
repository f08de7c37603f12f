"""Measurements that each rank takes of itself."""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from dnn_bench.baselines.limits import Exchange
from dnn_bench.baselines.trainer import Trainer

# As large as buckets are: a fit that also has to meet messages of a few KB, whose time is the kernel's timers
# and switches, misses the rate of large ones by a tenth.
LINK_SIZES = tuple(k * 2**18 for k in (2, 3, 4, 6, 8, 16))
LINK_BYTES = 2**21  # at least this much is sent for each size
LEAST_REPEATS = 2


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
    if trainer.job.device.startswith("cuda"):
        torch.cuda.synchronize()
    starts = [stamp.start for stamp in stamps] + [time.perf_counter()]
    cpu, sent = time.process_time() - cpu, bytes_sent() - sent
    trainer.finish()
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
    found = []
    for size in LINK_SIZES:
        exchange = Exchange(size)
        repeats = max(LEAST_REPEATS, LINK_BYTES // size)
        for _ in range(repeats):
            exchange()
        start = time.perf_counter()
        for _ in range(repeats):
            exchange()
        found.append((size, (time.perf_counter() - start) / repeats / 2))
    return found


def bytes_sent() -> int:
    """Bytes that left this host since it exists; ranks on one host see the same number."""
    devices = psutil.net_io_counters(pernic=True, nowrap=False)
    return sum(counters.bytes_sent for name, counters in devices.items() if name != "lo")
