"""Random convolutional models on tiles compute what one process computes."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from tests.checker.tiles import Case, Step, draw, failure

PARTS, PROGRAMS = 8, 8


@pytest.mark.parametrize(
    "part", [0, 1, 2, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(3, PARTS))]
)
def test_random_tiles(part: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in range(1 + part * PROGRAMS, 1 + (part + 1) * PROGRAMS):
        case = draw(seed)
        reason = failure(case)
        assert not reason, f"python -m tests.checker.tiles --programs 1 --seed {seed}\n{case}\n{reason}"


PLAIN = Case(
    0, (("residual", 0),), "image", (8, 9), (1, 2), {"overlap": "off", "fuse_halo": "off"}, "momentum",
    clip=False, input_gradient=False, channels_last=False, steps=(Step(2), Step(2)),
)  # fmt: skip
FUSED = {"overlap": "off", "fuse_halo": 3}
FOUND = [
    # A forward that raised did so in the dry run for its halos: what it changes before stayed unchanged.
    {
        "layers": (("norm", 2), ("residual", 0)),
        "options": FUSED,
        "steps": (Step(2, "forward that raises"), Step(2)),
    },
    # A dry run for halos met a tensor with data that the forward had made.
    {"layers": (("shapes", 6), ("residual", 0)), "options": FUSED},
    # Pixel unshuffle was refused.
    {"layers": (("shuffle", 0), ("residual", 0)), "image": (6, 10)},
]  # fmt: skip


@pytest.mark.parametrize("changed", FOUND)
def test_what_random_tiles_have_found(changed: dict[str, object]) -> None:
    case = dataclasses.replace(PLAIN, **changed)  # type: ignore[arg-type]
    assert not failure(case), failure(case)
