"""Orders of replicas over groups of ranks: every action once, nothing before what it waits for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.ir.actions import Kind, format_actions
from scheduler.pipelines.schedules.mirrored_order import interleaved_replicas, share_of

MIRRORED = [[(0,), (1,)], [(1,), (0,)]]


def test_mirrored_replicas_as_in_the_picture() -> None:
    order = interleaved_replicas(MIRRORED, 2)
    assert format_actions(share_of(0, MIRRORED, order)) == "0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1"
    assert format_actions(share_of(1, MIRRORED, order)) == "2F0 1F0 1B0 2B0 2F1 1F1 1B1 2B1"


def test_one_replica_is_one_forward_one_backward() -> None:
    holders = [[(0,), (1,), (2,)]]
    order = interleaved_replicas(holders, 4)
    assert format_actions(share_of(0, holders, order)) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert format_actions(share_of(2, holders, order)) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


def test_tiles_and_a_rank_mirrored() -> None:
    """Four ranks of tiles and one more, as --num-spatial-parts 4 --split-size 2 with mirrored replicas."""
    holders = [[(0, 1, 2, 3), (4,)], [(4, 3, 2, 1), (0,)]]
    order = interleaved_replicas(holders, 1)
    assert format_actions(share_of(1, holders, order)) == "0F0 0B0 2F0 2B0"
    assert format_actions(share_of(4, holders, order)) == "1F0 1B0 2F0 2B0"
    assert format_actions(share_of(0, holders, order)) == "0F0 0B0 3F0 3B0"


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_order_can_be_run(stages: int, replicas: int, microbatches: int, random: object) -> None:
    ranks = list(range(5))
    holders = [
        [tuple(random.sample(ranks, random.randint(1, 4))) for _ in range(stages)]  # type: ignore[attr-defined]
        for _ in range(replicas)
    ]
    order = interleaved_replicas(holders, microbatches)
    assert len(set(order)) == len(order) == 2 * stages * replicas * microbatches
    done = set()
    for action in order:
        assert action.stage is not None
        replica, stage = divmod(action.stage, stages)
        if action.kind is Kind.F:
            assert stage == 0 or (Kind.F, replica, stage - 1, action.index) in done
        else:
            assert (Kind.F, replica, stage, action.index) in done
            assert stage == stages - 1 or (Kind.B, replica, stage + 1, action.index) in done
        done.add((action.kind, replica, stage, action.index))
        under_way = sum(1 if kind is Kind.F else -1 for kind, r, s, _ in done if (r, s) == (replica, stage))
        assert under_way <= stages - stage


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="at least 1 micro-batch"):
        interleaved_replicas(MIRRORED, 0)
    with pytest.raises(ValueError, match=r"replicas of \[2, 1\] stages"):
        interleaved_replicas([[(0,), (1,)], [(0,)]], 1)
