"""Random pipelines of ordinary models compute what one process computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from commsched.pipeline import Chain
from tests.checker.stages import COMPILED, Case, batches_of, draw, failure, model_of

PARTS, PROGRAMS = 8, 8


@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(2, PARTS))]
)
def test_random_pipelines(part: int) -> None:
    torch.set_num_threads(1)
    for seed in range(1 + part * PROGRAMS, 1 + (part + 1) * PROGRAMS):
        case = draw(seed)
        reason = failure(case)
        assert not reason, f"python -m tests.checker.stages --programs 1 --seed {seed}\n{case}\n{reason}"


PLAIN = Case(
    0, ("plain",) * 4, "list", "tensor", "sgd",
    {"schedule": "1f1b", "num_microbatches": 2, "mesh": (2, 1)}, 2, ((8, ""),) * 4,
)  # fmt: skip
ZERO_BUBBLE = {"schedule": "zero_bubble", "mesh": (2, 1), "num_microbatches": 2}
REPLICAS = {"schedule": "1f1b", "mesh": (1, 2), "num_microbatches": 2}
PIPEDREAM = {"schedule": "pipedream", "mesh": (4, 1)}
FOUND = [
    # A dry run wrote into the batch, for each forward once more; so did the search for the layers' order.
    {"kinds": ("begins in place", "plain", "plain")},
    {"kinds": ("begins in place", "plain", "plain"), "inputs": "dict"},
    # A checkpointed block is computed again in the backward: with the version of its forward.
    *(
        {"kinds": ("checkpoint",) * 4, "style": style, "options": PIPEDREAM, "size": 4}
        for style in ("sequential", "list")
    ),
    # A stage that waits for new parameters within its forward counted that as operations of the model.
    {
        "kinds": ("begins in place", *["plain"] * 3),
        "options": {"schedule": "1f1b", "mesh": (1, 2), "num_microbatches": 2, "bucket_bytes": 128},
    },
    # A scale that is read first and last, a constant that every block reads.
    {"style": "early and late scale"},
    {"style": "constant"},
    # A batch norm that averages over all batches was refused: its forward reads their number.
    {"kinds": ("batch norm by count", *["plain"] * 3)},
    # Ranks that were not seeded alike kept their own buffers where several stages have one, and unsaved ones.
    {"style": "constant", "apart": True},
    {"style": "module of a constant", "apart": True},
    {"kinds": ("unsaved buffer",) * 4, "options": REPLICAS, "apart": True},
    # An evaluation wrote into replicas' statistics, which graphs in flight had saved for their backward.
    *(
        {
            "kinds": ("batch norm", *["plain"] * 3),
            "style": style,
            "options": {"schedule": "2bw", "mesh": (2, 2), "num_microbatches": 2},
            "size": 4,
            "steps": ((8, ""), (8, "evaluate"), (8, "")),
        }
        for style in ("sequential", "list")
    ),
    # A reentrant checkpoint refuses to compute some gradients now and others later.
    {"kinds": ("plain", "reentrant") * 2, "options": ZERO_BUBBLE},
    {"kinds": ("plain", "reentrant") * 2, "options": ZERO_BUBBLE, "style": "sequential"},
    # The wait for new parameters was compiled into a block, a part of it twice.
    *(
        {"kinds": (kind,) * 4, "style": "sequential", "options": REPLICAS | {"bucket_bytes": 128}}
        for kind in COMPILED
    ),
    {
        "style": "sequential",
        "options": REPLICAS | {"bucket_bytes": 128},
        "steps": ((8, ""), (8, "compile"), (8, ""), (8, "")),
    },
    # A backward that repeats a forward read tensors that a script had set since, attributes that it had set
    # for the first time, and in checkpointed blocks buffers that it had written; so did resuming.
    *(
        {
            "kinds": ("plain",) * 4, "style": style, "options": PIPEDREAM | {"recompute": again}, "size": 4,
            "steps": ((8, ""), (8, ""), *((8, "attribute"),) * 2, (8, then), (8, ""), (8, "")),
        }
        for style, again, then in (
            ("checkpointed", False, ""), ("list", True, ""), ("list", False, "checkpoint"),
            ("attribute", True, "drain"),
        )
    ),
    *(
        {
            "kinds": ("unsaved buffer",) * 4, "style": style, "size": 4,
            "options": PIPEDREAM | {"recompute": again},
            "steps": ((8, ""), (8, ""), (8, "buffer"), (8, "buffer"), (8, then), (8, ""), (8, "")),
        }
        for style, again, then in (
            ("checkpointed", False, ""), ("checkpointed", False, "checkpoint"), ("list", True, ""),
            ("checkpointed", False, "evaluate"),
        )
    ),
    # A buffer of which a stage knows only the shape has no values to compare.
    {"style": "constant", "options": PLAIN.options | {"recompute": True}},
    # One process evaluated with weights to which the script wrote later.
    {
        "options": {"schedule": "2bw", "mesh": (2, 1), "num_microbatches": 2},
        "steps": ((8, "evaluate"), (8, "change")),
    },
    # Hooks of blocks that came and went in flight: a backward that repeats a forward called those that a
    # script had registered since.
    *(
        {
            "kinds": ("plain",) * 4, "style": style, "options": PIPEDREAM | {"recompute": again}, "size": 4,
            "steps": tuple((8, then) for then in ("", "", "hook", "", "hook", "hook", "", "")),
        }
        for style, again in (("checkpointed", False), ("list", True), ("sequential", True))
    ),
    # Parameters that a script freezes between steps, where the gradients of the weights come later.
    {"options": ZERO_BUBBLE, "steps": tuple((8, then) for then in ("", "freeze", "", "freeze", ""))},
    # There, hooks of tensors changed the gradients of weights twice.
    {"options": ZERO_BUBBLE, "kinds": ("hooks",) * 4},
    # Modes, numbers and weights that a script changes while micro-batches are in flight. The backward of a
    # forward in evaluation mode read statistics to which later forwards, in training, had written.
    *(
        {
            "kinds": ("plain", "batch norm", "plain", "norm"), "style": style, "options": options, "size": 4,
            "steps": tuple((8, then) for then in ("", "change", "mode", "change", "attribute", "mode", "")),
        }
        for style in ("attribute", "trained or not")
        for options in (
            PIPEDREAM | {"recompute": True},
            {"schedule": "2bw", "mesh": (2, 2), "num_microbatches": 2},
            {"schedule": "wpipe", "mesh": (2, 2), "num_microbatches": 2},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("changed", FOUND)
def test_what_random_pipelines_have_found(changed: dict[str, object]) -> None:
    case = dataclasses.replace(PLAIN, **changed)  # type: ignore[arg-type]
    assert not failure(case), failure(case)


def test_layers_that_the_example_drops_keep_their_place() -> None:
    """They came last, and forwards that ran them were refused. Ranks on threads cannot drop layers alike."""
    case = dataclasses.replace(PLAIN, kinds=("plain",) * 6, style="layer drop")
    chain = Chain(model_of(case), example=batches_of(case)[0][0])
    assert chain.names == tuple(f"blocks.{number}" for number in range(6))
