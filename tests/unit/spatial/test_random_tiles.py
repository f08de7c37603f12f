"""Random convolutional models and random calls on tiles compute what one process computes."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

from commsched.spatial.tile import HANDLERS, ON_ALL
from tests.checker.calls import faults, functions
from tests.checker.tiles import Case, Step, draw, failure

PARTS, PROGRAMS = 8, 8


@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(2, PARTS))]
)
def test_random_tiles(part: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in range(1 + part * PROGRAMS, 1 + (part + 1) * PROGRAMS):
        case = draw(seed)
        reason = failure(case)
        assert not reason, f"python -m tests.checker.tiles --programs 1 --seed {seed}\n{case}\n{reason}"


PLAIN = Case(
    0, (("residual", 0),), "image", (8, 9), (1, 2), {"overlap": "off"}, "momentum",
    clip=False, input_gradient=False, channels_last=False, steps=(Step(2), Step(2)),
)  # fmt: skip
FOUND = [
    # One sample in channels_last, of which the interior is computed by itself: wrong gradients of the weight.
    {
        "layers": (("conv", 891634),), "image": (10, 8), "grid": (2, 2), "channels_last": True,
        "options": {"overlap": "on"}, "steps": (Step(rows=1),),
    },
    # Pixel unshuffle was refused.
    {"layers": (("shuffle", 0), ("residual", 0)), "image": (6, 10)},
]  # fmt: skip


@pytest.mark.parametrize("changed", FOUND)
def test_what_random_tiles_have_found(changed: dict[str, object]) -> None:
    case = dataclasses.replace(PLAIN, **changed)  # type: ignore[arg-type]
    assert not failure(case), failure(case)


WITH_HANDLER = [function for function in functions() if function in HANDLERS or function in ON_ALL]
BY_NAME = [function for function in functions() if function not in WITH_HANDLER]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "some",
    [WITH_HANDLER[part::PARTS] for part in range(2)]
    + [pytest.param(WITH_HANDLER[part::PARTS], marks=pytest.mark.thorough) for part in range(2, PARTS)]
    + [pytest.param(BY_NAME[part::PARTS], marks=pytest.mark.thorough) for part in range(PARTS)],
    ids=lambda some: f"{some[0].__name__} and {len(some) - 1} more",
)
def test_calls_with_every_argument(some: list[Any]) -> None:
    """Calls that were refused or gathered lost arguments, and some handlers ignored an argument."""
    torch.set_num_threads(1)
    found = [fault for function in some for fault in faults(function)]
    assert not found, "\n".join(found)
