"""Bandwidth definitions, fits, and the check that comes before any timing."""

from types import SimpleNamespace

import pytest
import torch

from dnn_bench import collectives
from dnn_bench import transports as measure
from dnn_bench.transports import Collectives


def sample(operation: str, size: int, seconds: float) -> dict[str, object]:
    return {"operation": operation, "bytes": size, "seconds": seconds, "cpu": seconds / 2}


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """1 GB in 0.5 s on 4 ranks: algorithm 2 GB/s; bus 2 * 2 * 3/4 for all-reduce, 2 * 3/4 for its halves."""
    size = 10**9
    ranks = [[sample("all_reduce", size, t), sample("all_gather", size, t)] for t in (0.5, 0.4, 0.3, 0.2)]
    reduce, gather = collectives.combine("x", ranks)
    assert reduce["algorithm_bandwidth"] == gather["algorithm_bandwidth"] == 2e9
    assert (reduce["bus_bandwidth"], gather["bus_bandwidth"]) == (3e9, 1.5e9)
    assert reduce["seconds"] == 0.5 and reduce["cpu"] == 0.25  # the slowest rank's
    reduce, gather = collectives.combine("x", ranks, per_host=2)  # a link carries what two ranks would send
    assert (reduce["bus_bandwidth"], gather["bus_bandwidth"]) == (2e9, 1e9)


def test_the_fit_finds_the_line() -> None:
    sizes = [2**k for k in (10, 14, 18, 20, 22)]
    rows = collectives.combine("x", [[sample("all_gather", n, 1e-3 + 2e-9 * n) for n in sizes]] * 2)
    (fit,) = collectives.fits(rows)
    assert fit["alpha"] == pytest.approx(1e-3, rel=1e-6) and fit["beta"] == pytest.approx(2e-9, rel=1e-6)
    assert collectives.fits(rows[:4]) == []


class Alone(Collectives):
    """One rank of two whose peer is imagined; `broken` does nothing."""

    rank, size = 0, 2

    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if not self.broken:
            tensor += measure.pattern(1, tensor.numel())

    def reduce_scatter(self, tensor: torch.Tensor) -> None:
        if not self.broken:
            self.shard(tensor).add_(measure.pattern(1, tensor.numel()).view(2, -1)[0])

    def all_gather(self, tensor: torch.Tensor) -> None:
        if not self.broken:
            tensor.view(2, -1)[1].copy_(measure.pattern(1, tensor.numel()).view(2, -1)[1])

    def all_reduce_50(self, tensor: torch.Tensor) -> None:
        self.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        if not self.broken:
            tensor.copy_(measure.pattern(1, tensor.numel()))


@pytest.mark.parametrize("operation", measure.OPERATIONS)
def test_wrong_results_are_found_before_timing(operation: str) -> None:
    measure.check(Alone(broken=False), operation, 20)
    with pytest.raises(measure.WrongResult, match=rf"{operation} of 20 numbers on 2 ranks: element \d+ is"):
        measure.check(Alone(broken=True), operation, 20)


@pytest.mark.parametrize("count", [16, 50, 64, 120, 1000])
def test_fifty_operations_are_fifty(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`chunk(50)` makes 16 parts of 16 numbers, and 32 of 64."""
    sent: list[int] = []

    def all_reduce(part: torch.Tensor, async_op: bool) -> SimpleNamespace:
        sent.append(part.numel())
        part += 1
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(measure.dist, "all_reduce", all_reduce)
    tensor = torch.zeros(count)
    measure.Gloo.all_reduce_50(SimpleNamespace(), tensor)  # type: ignore[arg-type]
    assert len(sent) == 50 and min(sent) > 0
    assert torch.equal(tensor, torch.ones(count))  # each number once


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "big"], "--sizes: cannot read 'big'"),
        (["--transports", "tcp"], "unknown transport 'tcp'"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert collectives.main(["--local", "2", *arguments]) == 2
    assert message in capsys.readouterr().err
