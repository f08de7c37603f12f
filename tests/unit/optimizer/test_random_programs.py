"""Random programs of ordinary actions give what plain PyTorch with averaged gradients gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checker.__main__ import on_threads, warm_up
from tests.checker.allowed import ROWS
from tests.checker.programs import PLAINEST, Program, Tally, draw, run_on_threads, shrink

FIRST, PARTS, PROGRAMS = 1, 20, 25
"""The seeds are fixed. pytest-xdist shares the parts between its processes."""

PAGE = Path(__file__).parents[3] / "docs" / "exactness.md"


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    torch.set_num_threads(1)
    warm_up()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int) -> None:
    first = FIRST + part * PROGRAMS
    print(f"seeds {first} to {first + PROGRAMS - 1}")
    for seed in range(first, first + PROGRAMS):
        ranks = 3 if seed % 5 == 0 else 2
        program = draw(seed, ranks)
        failure = run_on_threads(program)
        if failure is not None:
            small, reason = shrink(program, failure, on_threads, 30.0)
            pytest.fail(
                f"seed {seed} differs from plain PyTorch"
                f" (python -m tests.checker --ranks {ranks} --replay {seed} --shrink):\n{small}\n{reason}"
            )


# -- the listed errors ---------------------------------------------------------------------------------------

Steps = list[tuple[str, dict[str, Any]]]
LOSS: dict[str, Any] = {"loss": {}}
BACKWARD, STEP = ("backward", LOSS), ("step", {})
TRAIN = ("train", {"loss": {}, "steps": 2, "clear": "optimizer", "first": False})
AT_ONCE = ("train", {"loss": {}, "steps": 1, "clear": "optimizer", "first": False})
SHARDS = {"gather": "parameters"}
EARLY = SHARDS | {"early_step": True, "lateness": 0.0}
FREEZE, ADD = ("freeze", {"place": 4, "what": "module", "on": True}), ("add_group", {})
USED_TWICE = ("backward", {"loss": {"twice": True, "checkpointed": "reentrant"}})

ENDS_WITH: list[tuple[str, dict[str, Any], Steps]] = [
    ("not gathered", SHARDS, [BACKWARD, ("read_grads", {"how": "norm", "gathered": False})]),
    ("gradient gone", SHARDS, [BACKWARD, STEP, ("read_grads", {"how": "norm", "gathered": False})]),
    # The first read of such a gradient completed its parameter, and then saw None.
    (
        "gradient gone",
        SHARDS,
        [BACKWARD, STEP, ("read_grads", {"how": "one", "place": 10, "gathered": False})],
    ),
    ("gradient gone", SHARDS, [BACKWARD, STEP, BACKWARD]),
    ("gradient gone", SHARDS, [BACKWARD, STEP, STEP]),
    ("second gradient", SHARDS | {"bucket_mb": 0.0003}, [TRAIN, USED_TWICE, STEP]),
    # Ranks that came to the two optimizers in another order waited for each other.
    ("second gradient", {"two": True, "bucket_mb": 0.0003}, [TRAIN, USED_TWICE, STEP]),
    ("converted", SHARDS, [("to_dtype", {"to": "float32"}), BACKWARD, STEP]),
    ("early step", EARLY, [BACKWARD, BACKWARD]),
    ("early step", EARLY, [BACKWARD, ("synchronize", {})]),
    # Each rank's own part of the parameters stayed updated, and the other parts did not.
    *(
        ("early step", EARLY, [BACKWARD, ("clear_grads", {"how": how})])
        for how in ("optimizer", "model", "del")
    ),
    *(
        ("early step", EARLY, [BACKWARD, action])
        for action in (
            ADD,
            ("change_grads", {"how": "assign", "places": [3], "gathered": False}),
            ("read_params", {"how": "clone"}),
            ("optimizer_state", {"load": False}),
        )
    ),
    ("early step", EARLY, [BACKWARD, ("set_rate", {"factor": 0.5}), STEP]),
    ("early step", EARLY, [TRAIN, ("failing_backward", LOSS | {"bomb": 0, "clear": "optimizer"})]),
    (
        "sum changed",
        {"op": "sum"},
        [BACKWARD, ("change_grads", {"how": "mul_", "places": [0], "gathered": False}), BACKWARD],
    ),
    # One to which the backward does not add counted as added to, and was lost on the other rank.
    (
        "sum changed",
        {"op": "sum"},
        [
            BACKWARD,
            ("change_grads", {"how": "mul_", "places": [11], "gathered": True}),
            ("backward_inputs", LOSS | {"places": [6]}),
        ],
    ),
    (
        "sum changed",
        {"op": "sum"},
        [
            BACKWARD,
            ("read_grads", {"how": "norm", "gathered": False}),
            ("penalty", LOSS | {"way": "create_graph"}),
        ],
    ),
    ("backward raised", {}, [("failing_backward", LOSS | {"bomb": 1, "clear": None}), STEP]),
    ("backward raised", SHARDS, [("failing_backward", LOSS | {"bomb": 1, "clear": None}), BACKWARD]),
    ("inside its backward", {}, [TRAIN, ("add_hook", {"kind": "peek", "place": 1}), BACKWARD]),
    ("closed", {}, [("close_and_go_on", {}), ("use_closed", {})]),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options", "steps"), ENDS_WITH)
def test_a_listed_error_is_raised(name: str, options: dict[str, Any], steps: Steps) -> None:
    tally = Tally()
    numbered = tuple((action, salt, True, arguments) for salt, (action, arguments) in enumerate(steps))
    failure = run_on_threads(Program(1, {**PLAINEST, **options}, numbered), tally=tally)
    assert failure is None, failure
    assert set(tally.listed) == {name}


WEIGHTED = (
    "weighted",
    LOSS | dict(samples=2, passes=1, odd=None, idle=None, local=False, then="step", clear="optimizer"),
)
CLIP: tuple[str, dict[str, Any]] = ("clip", {"how": "optimizer", "sync": False})
ASSIGN = ("change_grads", {"how": "assign", "places": [3], "gathered": False})
FAILING = ("failing_update", LOSS | {"how": "rate"})
TRAIN_AGAIN = ("train", {"loss": {}, "steps": 1, "clear": "optimizer", "first": True})
OTHER = ("other_model", {"kind": "parametrized", "steps": 1})
AGAIN = ("freeze", {"place": 2, "what": "module", "on": True})
LOCAL = ("no_sync", LOSS | {"local": 1, "then": "nothing"})
BEFORE = ("no_sync", LOSS | {"local": 2, "then": "nothing"})
FOUND: list[tuple[dict[str, Any], Steps]] = [
    # A norm of no gradients begins no round, which the rank without data would step alone.
    (
        SHARDS,
        [
            ("clip", {"how": "optimizer", "sync": True}),
            ("idle_rank", LOSS | {"rank": 1, "then": "step"}),
        ],
    ),
    # A raised backward ends for the others too, with the last gradient that is cleared.
    (
        {"two": True},
        [
            ("failing_backward", LOSS | {"bomb": 3, "clear": "del"}),
            ("idle_rank", LOSS | {"rank": 1, "then": "sync"}),
        ],
    ),
    # A gradient that is assigned after all have been cleared is not one of the failed batch.
    (
        SHARDS,
        [
            ("failing_rank", LOSS | {"bomb": 0, "rank": 1, "clear": "model"}),
            ("change_grads", {"how": "assign", "places": [3], "gathered": False}),
            BACKWARD,
        ],
    ),
    # Gradients that have been cleared cannot come too late.
    (
        SHARDS,
        [
            ("failing_backward", LOSS | {"bomb": 0, "clear": "model zero"}),
            USED_TWICE,
            ("keep_old_grads", LOSS | {"clear": "model"}),
        ],
    ),
    # A new plan between two passes, at the end, after a tie, in another memory format.
    ({"passes": 2}, [BACKWARD, ("add_group", {}), BACKWARD]),
    ({"passes": 2}, [BACKWARD, ADD, ("synchronize", {}), BACKWARD]),
    ({}, [BACKWARD, ("add_group", {}), BACKWARD, ("close_and_go_on", {})]),
    (SHARDS, [("tie_data", {"places": [0, 1]}), WEIGHTED]),
    (
        SHARDS | {"kind": "image", "optimizer": "decay", "profile": False},
        [STEP, ("to_format", {"last": True}), TRAIN, TRAIN],
    ),
    # Zeros of a parameter that only a local backward has used since the sum.
    (
        {},
        [
            ("backward_inputs", LOSS | {"places": [10]}),
            ("no_sync", LOSS | {"local": 1, "then": "nothing"}),
            ("clear_grads", {"how": "model zero"}),
        ],
    ),
    # An update that raises in step() on one rank, and on another where a parameter is read, or in a new plan.
    ({"lateness": 0.0}, [FAILING, BACKWARD] * 8),
    ({"profile": False, "lateness": 0.0}, [TRAIN, TRAIN, FAILING] * 4),
    (SHARDS | {"stream": True, "bucket_mb": 0.0003}, [FAILING, TRAIN]),
    (SHARDS | {"early_step": True, "lateness": 0.0}, [FAILING, TRAIN]),
    # A hook of user code that is older than ours reads the sum, to which autograd has just added.
    (
        {},
        [
            ("add_hook", {"kind": "log", "place": 3}),
            ("wrap_again", {"gather": "gradients", "device": None, "another": False}),
            ("no_sync", LOSS | {"local": 2, "then": "backward"}),
            ("no_sync", LOSS | {"local": 1, "then": "nothing"}),
        ],
    ),
    # What came after a sum, in another type than the sum: the sum was sent again.
    (
        {"op": "sum"},
        [
            ("idle_rank", LOSS | {"rank": 0, "then": "sync"}),
            ("to_dtype", {"to": "float32"}),
            BACKWARD,
        ],
    ),
    # A parameter that no plan contains yet, with a gradient on the other rank alone: it read as None here.
    (
        {},
        [
            ("freeze", {"place": 5, "what": "module", "on": True}),
            ("add_group", {}),
            BACKWARD,
            ("freeze", {"place": 5, "what": "module", "on": False}),
            ("backward", {"loss": {"branch": "by rank"}}),
        ],
    ),
    # Gradients that were shown by synchronize() and then deleted: the next round was not begun here.
    (
        {},
        [
            ("no_sync", LOSS | {"local": 1, "then": "nothing"}),
            ("synchronize", {}),
            ("clear_grads", {"how": "del"}),
            ("idle_rank", LOSS | {"rank": 0, "then": "sync"}),
        ],
    ),
    # A parameter that is frozen when a new plan is made: its used-up gradient, its sum, its local gradient.
    (SHARDS, [BACKWARD, FREEZE, STEP, ADD, ("clear_grads", {"how": "optimizer zero"})]),
    ({"op": "sum"}, [BACKWARD, ADD, FREEZE, STEP, ("unfreeze", {}), STEP]),
    ({"passes": 3}, [("no_sync", LOSS | {"local": 2, "then": "nothing"}), ADD, FREEZE, TRAIN]),
    (SHARDS, [BACKWARD, ADD, FREEZE, ("clip", {"how": "optimizer", "sync": True})]),
    (SHARDS | {"compression": "bf16"}, [FREEZE, *(TRAIN for _ in range(6))]),
    # One that is frozen, has a gradient, and shares its memory with one that is not.
    *(
        (
            SHARDS | {"optimizer": name},
            [
                BACKWARD,
                ADD,
                ("freeze", {"place": place, "what": "module", "on": True}),
                ("tie_data", {"places": [0, 2]}),
                STEP,
            ],
        )
        for name in ("sgd", "decay", "adamw")
        for place in (1, 3)
    ),
    # p.grad, q.grad = q.grad, p.grad: the first was written over the second.
    (SHARDS, [BACKWARD, ("change_grads", {"how": "swap", "places": [6], "gathered": True}), STEP]),
    # Clipping's factor, by which the next step multiplies, also met gradients that user code had set.
    *(
        (SHARDS, [BACKWARD, *between, STEP])
        for between in ([CLIP, ASSIGN], [ASSIGN, CLIP], [CLIP, ASSIGN, CLIP], [ASSIGN, CLIP, ASSIGN])
    ),
    # New plans of two optimizers: one rank came to them in its step, the other one in its forward.
    (
        {"two": True, "frozen": 1},
        [("unfreeze", {}), ("idle_rank", LOSS | {"rank": 1, "then": "step"})],
    ),
    # Of a cleared gradient, what came later under no_sync() counted as a sum of all ranks.
    *(
        (
            SHARDS | {"op": "sum"},
            [
                BACKWARD,
                ("clear_some", {"place": 3, "way": "none"}),
                ("no_sync", LOSS | {"local": local, "then": then}),
                STEP,
            ],
        )
        for local, then in ((1, "backward"), (2, "backward"), (2, "nothing"))
    ),
    # Reduced gradients travelled, and nobody showed one that had come under no_sync() alone.
    (
        SHARDS,
        [
            BACKWARD,
            ("add_hook", {"kind": "clip", "place": 13}),
            ("no_sync", {"loss": {"branch": "by rank"}, "local": 2, "then": "nothing"}),
        ],
    ),
    # Another optimizer's step made the first one's plan, and averaged what was local still.
    *(
        ({"passes": 2}, [BACKWARD, ADD, *more, OTHER, ("read_grads", {"how": "clone", "gathered": False})])
        for more in ([], [BACKWARD, BACKWARD])
    ),
    # One that is outside of the plan, and trained for a while within one accumulation.
    *(
        (options | {"frozen": 1}, [BEFORE, ("unfreeze", {}), *between, STEP])
        for options in ({}, SHARDS, {"op": "sum"}, {"passes": 3})
        for between in ([LOCAL, AGAIN], [LOCAL], [BACKWARD, BACKWARD], [BACKWARD, AGAIN, LOCAL])
    ),
    # One that is frozen between a backward and its step keeps its gradient, though all others are cleared.
    *(
        (options, [BACKWARD, FREEZE, ("clear_grads", {"how": "none where trained"}), *then])
        for options in ({}, SHARDS, {"frozen": 1})
        for then in ([BACKWARD], [STEP], [("read_grads", {"how": "clone", "gathered": True})])
    ),
    # The old gradient of a frozen parameter lay in the memory that the round of a failed backward gave back.
    ({}, [TRAIN_AGAIN, FREEZE, ("failing_backward", LOSS | {"bomb": 1, "clear": "model zero"})]),
    # They had been gathered, and clipping, which made a new plan, left them on shards.
    (SHARDS, [("add_by_hand", LOSS), ADD, ("clip", {"how": "optimizer", "sync": True})]),
    # A changed sum was refused on one rank alone, by close(): the other one took half of a sum.
    (
        {"op": "sum"},
        [
            BACKWARD,
            ("change_grads", {"how": "mul_", "places": [9], "gathered": False}),
            ADD,
            ("close_and_go_on", {}),
        ],
    ),
    # One rank learned of a second gradient in its step, the other one when it next read a parameter.
    (
        {"two": True, "groups": 2},
        [
            STEP,
            (
                "train",
                {"loss": USED_TWICE[1]["loss"] | {"branch": "by rank"}}
                | {"steps": 1, "clear": "optimizer", "first": True},
            ),
        ],
    ),
    # A backward to given inputs turned off what lets its hooks see gradients that are on their way.
    (
        SHARDS | {"passes": 3},
        [
            *[BACKWARD] * 5,
            ("add_hook", {"kind": "peek", "place": 7}),
            ("backward_inputs", LOSS | {"places": [7]}),
            ("read_log", {}),
        ],
    ),
    # After three passes of three, the later ones before a step are reduced as well.
    (
        SHARDS | {"passes": 3},
        [
            *[BACKWARD] * 6,
            ("add_hook", {"kind": "peek", "place": 7}),
            ("backward_inputs", LOSS | {"places": [7]}),
            ("read_log", {}),
        ],
    ),
    # Nobody had read what close() could still reduce: a second gradient beside another optimizer.
    (
        {"two": True},
        [BACKWARD, USED_TWICE, ("wrap_again", {"gather": "gradients", "device": None, "another": False})],
    ),
    # Gradients that had been gathered were used up by a step in which a new plan was made.
    (SHARDS, [BACKWARD, ("synchronize", {}), ADD, STEP, BACKWARD]),
]
"""Programs that failed once, drawn at random."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("options", "steps"), FOUND)
def test_what_random_programs_have_found(options: dict[str, Any], steps: Steps) -> None:
    numbered = tuple((action, salt, False, arguments) for salt, (action, arguments) in enumerate(steps))
    failure = run_on_threads(Program(1, {**PLAINEST, **options}, numbered))
    assert failure is None, failure


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, SHARDS, {"op": "sum"}, SHARDS | {"optimizer": "adamw"}])
def test_a_block_is_frozen_for_one_step(options: dict[str, Any]) -> None:
    test_what_random_programs_have_found(
        options, [TRAIN, FREEZE, AT_ONCE, ("unfreeze", {}), AT_ONCE, AT_ONCE]
    )


IN_SPITE: list[tuple[dict[str, Any], Steps]] = [
    ({}, [("failing_backward", LOSS | {"bomb": 0, "clear": None})]),
    (SHARDS, [("to_dtype", {"to": "float32"}), BACKWARD]),
]
"""What makes the next use of an optimizer an error."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("options", "steps"), IN_SPITE)
def test_another_optimizer_goes_on_beside_one_that_raises(options: dict[str, Any], steps: Steps) -> None:
    all_steps = [*steps, ("other_model", {"kind": "parametrized", "steps": 2})]
    numbered = tuple((action, salt, True, arguments) for salt, (action, arguments) in enumerate(all_steps))
    failure = run_on_threads(Program(1, {**PLAINEST, **options}, numbered))
    assert failure is None, failure


def test_every_listed_error_has_a_program() -> None:
    assert {name for name, _, _ in ENDS_WITH} == {row.name for row in ROWS}


def test_the_page_lists_the_same_errors() -> None:
    """A line of the page: | name | when | type: `part of the text`, `another part` | way out |"""
    listed = {}
    for line in PAGE.read_text().splitlines():
        match = re.match(r"\| ([\w ]+) \| [^|]+ \| `(\w+)`(?: or `(\w+)`)?: (.*) \| [^|]+ \|$", line)
        if match:
            name, *types, texts = match.groups()
            listed[name] = ({each for each in types if each}, set(re.findall(r"`([^`]+)`", texts)))
    assert listed == {row.name: ({each.__name__ for each in row.error}, set(row.says)) for row in ROWS}
    assert len(listed) <= 10
