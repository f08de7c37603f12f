"""Stages on tiles and on whole samples, in replicas and mirrored: programs, their rules, and their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.ir.actions import format_actions, parse_action
from scheduler.ir.layout import Layout, Placement, Samples, Tiles, place
from scheduler.ir.link import Link
from scheduler.ir.profile import Border, Layer, Profile
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, Program
from scheduler.pipelines import generate
from scheduler.simulate.simulator import simulate
from scheduler.validate import validate, violations

FOUR_AND_ONE = (Tiles((2, 2)), Samples())
CASES: list[Sequence[Placement]] = [
    FOUR_AND_ONE,
    (Tiles((1, 2)), Tiles((2, 2)), Samples(2)),
    (Tiles((3, 2)),),
    (Tiles((1, 2)), Tiles((1, 2)), Samples(), Samples()),
    (Samples(), Samples(), Samples()),
    (Tiles((1, 3)), Samples(2)),
]
LINK = Link(1e-3, 1e-6)


def profile(layers: int, size: int = 1000) -> Profile:
    each = (Layer(str(n), 1.0, 2.0, 400, activation_bytes=size) for n in range(layers))
    return Profile("placed", tuple(each))


def lane(program: Program, rank: int, name: str = COMPUTE_LANE) -> str:
    return format_actions(program.kernel[rank][name])


# -- who holds what ------------------------------------------------------------------------------------------


def test_ranks_are_numbered_replica_by_replica() -> None:
    placed = place(FOUR_AND_ONE, replicas=2, mirrored=True)
    assert placed.ranks == ((0, 1, 2, 3, 5, 6, 7, 8), (4, 9))
    assert placed.mirror == ((4, 3, 2, 1, 9, 8, 7, 6), (0, 5))
    assert placed.tiles == (Tiles((2, 2)), None)


def test_who_computes_and_who_holds() -> None:
    layout = generate("1f1b", 2, 3, placements=FOUR_AND_ONE, mirrored=True).layout
    assert layout.microbatches == 6 and layout.world == 5
    assert [layout.holders(0, index) for index in (2, 3)] == [(0, 1, 2, 3), (4, 3, 2, 1)]
    assert (layout.members(0), layout.members(1)) == ((0, 1, 2, 3, 4), (0, 4))
    assert (layout.held_by(1), layout.held_by(4)) == ((0,), (0, 1))
    assert layout.computed_by(4, 0) == (3, 4, 5) and layout.computed_by(1, 0) == (0, 1, 2, 3, 4, 5)
    assert layout.place(0, 3, 0) == (0, 3) and layout.place(0, 3, 5) == (0, 1)


def test_shares_of_a_micro_batch() -> None:
    """Every pair's share follows from its rows and its pixels, and a rank's shares are what it holds."""
    placements = (Tiles((1, 2)), Tiles((2, 2)), Tiles((2, 2)), Samples(3))
    layout = generate("gpipe", 4, 1, placements=placements, replicas=2).layout
    first = layout.ranks[1][:4]
    assert layout.overlaps(0, 0, 1) == {
        first[0]: 1 / 8,
        first[1]: 0.0,
        first[2]: 1 / 8,
        first[3]: 0.0,
    }
    assert layout.overlaps(1, first[2], 2) == {layout.ranks[2][2]: 1 / 8}
    thirds = dict.fromkeys(layout.ranks[2][:4], 1 / 24)
    assert layout.overlaps(3, layout.ranks[3][0], 2) == pytest.approx(thirds)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"tiles": (Tiles((2, 2)), None)},
            "stage 0 is on 4 tiles, so its ranks must be a multiple of that, got 2",
        ),
        ({"mirror": ((2,), (0, 1))}, "mirrored replicas need as many ranks"),
        ({"mirror": ((2, 1), (0,)), "microbatches": 3}, "an even number of micro-batches"),
        ({"mirror": ((2, 1), (0,)), "placement": "eager"}, "placement 'bubble'"),
    ],
)
def test_layouts_that_cannot_be(fields: dict, said: str) -> None:
    base = {
        "cuts": (0, 1),
        "ranks": ((0, 1), (2,)),
        "microbatches": 2,
        "versions": (1, 1),
        "activations": (1, 1),
    }
    with pytest.raises(ValueError, match=said):
        Layout(**{**base, **fields})


def test_placements_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="a part count of at least 1 for each of the dimensions"):
        Tiles((2, 2, 2))
    with pytest.raises(ValueError, match="2 positions is.*got 1 placements"):
        generate("1f1b", 2, placements=[Samples()])
    with pytest.raises(ValueError, match="whole samples needs at least 1 rank, got 0"):
        Samples(0)
    for placements, replicas in (((), 1), ((Samples(),), 0)):
        with pytest.raises(ValueError, match="at least 1 replica of at least 1 stage"):
            place(placements, replicas)
    with pytest.raises(ValueError, match="every step ends before the next one begins"):
        generate("2bw", 2, 2, placements=[Samples(), Samples()], mirrored=True)


# -- orders --------------------------------------------------------------------------------------------------


def test_mirrored_replicas_as_in_the_picture() -> None:
    program = generate("1f1b", 2, 2, mirrored=True)
    assert lane(program, 0) == "0F0 1F2 1B2 0B0 0F1 1F3 1B3 0B1 1STEP 0STEP"
    assert lane(program, 1) == "0F2 1F0 1B0 0B2 0F3 1F1 1B1 0B3 1STEP 0STEP"


def test_mirrored_gpipe_keeps_all_forwards_first() -> None:
    program = generate("gpipe", 2, 2, mirrored=True)
    assert lane(program, 0) == "0F0 1F2 0F1 1F3 1B2 0B0 1B3 0B1 1STEP 0STEP"


def test_tiles_and_a_rank_mirrored() -> None:
    """Four ranks of tiles and one more, as --num-spatial-parts 4 --split-size 2 with mirrored replicas."""
    program = generate("1f1b", 2, 1, placements=FOUR_AND_ONE, mirrored=True)
    assert lane(program, 1) == "0F0 0B0 0F1 0B1 0STEP"
    assert lane(program, 4) == "1F0 1B0 0F1 0B1 1STEP 0STEP"
    assert lane(program, 0) == "0F0 0B0 1F1 1B1 1STEP 0STEP"
    assert lane(program, 4, LINK_LANE).startswith("1SENDB0>0 1SENDB0>1 1SENDB0>2 1SENDB0>3 0HALO1 0SENDF1>0")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_mirrored_programs_are_valid(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    placements = [data.draw(st.sampled_from([Samples(n), Tiles((1, n))])) for n in sizes]
    schedule = data.draw(st.sampled_from(["1f1b", "gpipe", "zero_bubble"]))
    microbatches, replicas = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    program = generate(
        schedule, len(sizes), microbatches, placements=placements, replicas=replicas, mirrored=True
    )
    validate(program)
    assert max(program.layout.activations) <= 2 * microbatches


# -- rules ---------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("placements", CASES)
@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "zero_bubble", "interleaved", "pipedream", "2bw", "wpipe"]
)
def test_programs_are_valid_and_simulated(schedule: str, placements: Sequence[Placement]) -> None:
    for replicas, mirrored in ((1, False), (2, False), (2, True)):
        if mirrored and schedule in ("pipedream", "2bw", "wpipe"):
            continue
        program = generate(
            schedule, len(placements), 3, placements=placements, replicas=replicas, mirrored=mirrored
        )
        validate(program)
        assert Program.from_dict(program.to_dict()) == program
        assert simulate(program, profile(program.layers), LINK).period > 0


def test_what_tiles_exchange_belongs_to_the_program() -> None:
    program = generate("1f1b", 2, 1, placements=FOUR_AND_ONE)
    link = program.kernel[1][LINK_LANE]
    assert lane(program, 1, LINK_LANE).startswith("0HALO0 0SENDF0>4 0HALOB0")
    for missing in ("0HALO0", "0SENDF0>4"):
        lanes = [dict(each) for each in program.kernel]
        lanes[1][LINK_LANE] = tuple(a for a in link if a != parse_action(missing))
        found = violations(replace(program, kernel=tuple(lanes)))
        assert [each.message for each in found] == [
            f"rank 1 never does {missing}; every period needs it once"
        ]


def test_tiles_in_different_orders_deadlock() -> None:
    """Rank 1 is a tile of both directions; its order must be that of the other tiles."""
    program = generate("1f1b", 2, 1, placements=FOUR_AND_ONE, mirrored=True)
    lanes = [dict(each) for each in program.kernel]
    order = [parse_action(text) for text in "0F1 0B1 0F0 0B0 0STEP".split()]
    lanes[1][COMPUTE_LANE] = tuple(order)
    assert {each.rule for each in violations(replace(program, kernel=tuple(lanes)))} == {"deadlock"}


# -- time ----------------------------------------------------------------------------------------------------


def test_tiles_divide_the_work_and_the_messages() -> None:
    program = generate("gpipe", 2, 1, placements=FOUR_AND_ONE)
    result = simulate(program, profile(2), {"link": Link(0.0, 0.0), "send": Link(0.0, 1e-3)})
    starts = {(event.rank, event.name): (event.start, event.end) for event in result.timeline}
    assert starts[0, "0F0"] == (0.0, 0.25)
    assert starts[0, "0SENDF0>4"] == pytest.approx((0.25, 0.5))  # a quarter of 1000 bytes
    assert starts[4, "1F0"] == pytest.approx((0.5, 1.5))


def test_halos_that_interiors_do_not_hide_take_time() -> None:
    """Forward 0.25 s on each tile, half of it interior: a halo of 0.2 s shows 0.075 s."""
    wires = {"link": Link(0.0, 0.0), "halo": Link(0.0, 1e-3)}

    def period(*borders: Border | None) -> float:
        program = generate("gpipe", 2, 1, placements=FOUR_AND_ONE, borders=borders)
        validate(program)
        return simulate(program, profile(2), wires).period

    bare = period()
    assert period(Border(200.0, 0.0, 0.5), None) == pytest.approx(bare + 0.075)
    assert period(Border(100.0, 0.0, 0.5), None) == pytest.approx(bare)
    assert period(Border(0.0, 1000.0, 1.0), None) == pytest.approx(bare + 1.0)


def test_mirrored_replicas_fill_each_others_gaps() -> None:
    """As many micro-batches on the same ranks: the other direction computes while one waits."""

    def idle(program: Program) -> float:
        result = simulate(program, profile(4), Link(0.0, 0.0))
        return 1 - result.compute / result.period

    alone = generate("1f1b", 4, 2)
    both = generate("1f1b", 4, 1, mirrored=True)
    assert alone.layout.microbatches == both.layout.microbatches == 2
    assert idle(both) < idle(alone)
