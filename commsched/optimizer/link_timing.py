"""The link as the optimizer's own backend shows it: start-up and rate, fitted from timed messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from commsched.backends.interface import Backend
from commsched.optimizer.bucket_layout import Layout
from scheduler.ir.buckets import Bucket
from scheduler.ir.link import Link, fit

# Bytes of the messages that measure the link: six sizes, up to the model's own size.
_SMALLEST, _LARGEST = 1 << 12, 1 << 21


class TimedLink:
    """Times RS and AG of six sizes. Its methods are collective."""

    def __init__(self, backend: Backend, model_bytes: int, wire_share: float = 1.0) -> None:
        """``wire_share``: the part of a gradient's bytes that its messages have. Rates are per own byte."""
        self._backend = backend
        largest = min(max(model_bytes, 16 * _SMALLEST), _LARGEST)
        sizes = [round(_SMALLEST * (largest / _SMALLEST) ** (k / 5)) for k in range(6)]
        self._messages = self._mean(
            [(size, backend.exchange_seconds(round(size * wire_share))) for size in sizes]
        )
        self.link = self._fit(self._messages)

    def refined(self, operations: Sequence[tuple[int, float]]) -> Link:
        """Return the link fitted to these operations' bytes and seconds too, which are larger messages.

        A shaped link sends small messages at full speed, so their times only show the start-up.
        """
        buckets = self._mean(operations)
        fitted = self._fit(self._messages + buckets)
        rest = sum(seconds for _, seconds in buckets) - len(buckets) * fitted.alpha
        total = sum(size for size, _ in buckets)
        return replace(fitted, beta=rest / total) if rest > 0 and total else fitted

    def _mean(self, mine: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        rows = [row for row in self._backend.ranks.all_values(list(mine)) if row]
        return [(column[0][0], sum(t for _, t in column) / len(column)) for column in zip(*rows, strict=True)]

    def _fit(self, messages: Sequence[tuple[int, float]]) -> Link:
        sizes, seconds = zip(*messages, strict=True)
        return fit(sizes, seconds, name=f"{self._backend.name}, measured")


def times_of_buckets(events: Any, buckets: Sequence[Bucket], layout: Layout) -> list[tuple[int, float]]:
    """Return bytes and median seconds of the RS and AG of each bucket that is sent whole.

    A joined rank has none: its operations last until the others have computed.
    """
    times: list[tuple[int, float]] = []
    whole = [(number, bucket) for number, bucket in enumerate(buckets) if not layout.slices[number].row]
    for number, bucket in whole:
        for op in (0, 1):
            took = events[(events["bucket"] == number) & (events["op"] == op)]
            if len(took):
                times.append((bucket.bytes, median((took["end"] - took["start"]).tolist())))
    return times
