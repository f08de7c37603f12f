"""Bandwidths as nccl-tests defines them, and the alpha-beta fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scheduler.ir.link import FEWEST_SIZES, fit


def bus_factor(operation: str, ranks: int) -> float:
    """The factor from algorithm bandwidth (bytes of the whole tensor per second) to bus bandwidth.

    The bus bandwidth is what the slowest link carries if the algorithm is the best one, so it can be compared
    with the link's rate whatever the operation and the number of ranks.
    """
    share = (ranks - 1) / ranks
    return 2 * share if operation == "all_reduce" else share


def combine(transport: str, samples: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per operation and size from every rank's samples: an operation ends when its last rank does."""
    ranks = len(samples)
    rows = []
    for same in zip(*samples, strict=True):
        seconds = max(sample["seconds"] for sample in same)
        operation, size = same[0]["operation"], same[0]["bytes"]
        algorithm = size / seconds
        rows.append(
            {
                "transport": transport,
                "operation": operation,
                "bytes": size,
                "seconds": seconds,
                "cpu": max(sample["cpu"] for sample in same),
                "algorithm_bandwidth": algorithm,
                "bus_bandwidth": algorithm * bus_factor(operation, ranks),
            }
        )
    return rows


def fits(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """alpha + beta * bytes for each transport and operation with enough sizes."""
    found = []
    for key in dict.fromkeys((row["transport"], row["operation"]) for row in rows):
        points = [
            (row["bytes"], row["seconds"]) for row in rows if (row["transport"], row["operation"]) == key
        ]
        if len({size for size, _ in points}) >= FEWEST_SIZES:
            link = fit([size for size, _ in points], [seconds for _, seconds in points])
            names = {"transport": key[0], "operation": key[1]}
            found.append({**names, "alpha": link.alpha, "beta": link.beta, "error": link.error})
    return found
