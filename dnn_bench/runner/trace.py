"""One iteration as a timeline: layers from hooks, the link from its counters."""

from __future__ import annotations

import threading
import time
from typing import Any

from dnn_bench.baselines.trainer import Trainer
from dnn_bench.runner.layers import Spans, recording
from dnn_bench.runner.measure import bytes_sent

SAMPLE_SECONDS = 0.004


class LinkSampler:
    """Samples how many bytes this host has sent, in a thread, while used as a context."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.samples.append((time.perf_counter(), bytes_sent()))

    def __enter__(self) -> LinkSampler:
        self.samples.append((time.perf_counter(), bytes_sent()))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def trace_iteration(trainer: Trainer) -> dict[str, Any]:
    """Spans of an iteration between two others, in seconds from its start, and the bytes sent meanwhile."""
    batch = trainer.job.local_batch(trainer.rank)
    trainer.record_operations()
    trainer.iteration(*batch)
    trainer.barrier()
    trainer.operations()  # those of earlier iterations
    with recording(trainer.module) as recorder, LinkSampler() as sampler:
        trainer.iteration(*batch)
        recorder.clear()
        stamps = trainer.iteration(*batch)
        spans = Spans.of(recorder, stamps.forward, stamps.end - stamps.backward)
        end = trainer.iteration(*batch).start
    trainer.finish()
    trainer.barrier()

    def relative(pairs: Any) -> list[list[float]]:
        return [[a - stamps.start, b - stamps.start] for a, b in pairs]

    inside = [(t - stamps.start, n) for t, n in sampler.samples if stamps.start <= t <= end]
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
