"""Random windows, splits and grids with integer values: the same bits as the unsharded operation."""

from __future__ import annotations

from collections import Counter

import pytest

from commsched.spatial.ops import windows
from tests.support.spatial_cases import (
    KINDS,
    RANDOM_OVER_PROCESSES,
    check,
    draw,
    on_threads,
    process_cases,
    traits,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


def run_cases(ranks: int, seeds: range, kinds: tuple[str, ...], overlap: str = "off") -> None:
    cases = [draw(seed * 7 + ranks, ranks, kinds) for seed in seeds]
    on_threads(ranks, lambda channel: [check(case, channel, overlap) for case in cases])


def test_the_cases_over_processes_are_of_every_kind() -> None:
    cases = [case for size, n in RANDOM_OVER_PROCESSES.items() for case, _ in process_cases(size, n)]
    seen = Counter(trait for case in cases for trait in traits(case))
    wanted = {*KINDS, "1-D grid", "2-D grid", "1-D image", "2-D image", "3-D image", "groups", "empty tile"}
    wanted |= {"uneven tiles", "tile smaller than the halo", "reflect", "replicate", "circular", "constant"}
    for name, most in (("kernel", 6), ("stride", 4), ("dilation", 3)):
        wanted |= {f"{name} {value}" for value in range(1, most + 1)}
    assert len(cases) == 550 and min(seen[trait] for trait in wanted) >= 3, seen


@pytest.mark.few
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_integers_bit_for_bit(kind: str, ranks: int) -> None:
    run_cases(ranks, range(40), (kind,))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_interior_first_gives_the_same_bits(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    original = windows.overlapped
    monkeypatch.setattr(windows, "overlapped", lambda *args: used.append(1) or original(*args))
    run_cases(ranks, range(500, 620), ("conv", "max_pool", "avg_pool"), overlap="on")
    assert len(used) > 20


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_more(kind: str, ranks: int, overlap: str) -> None:
    run_cases(ranks, range(1000, 1500), (kind,), overlap)
