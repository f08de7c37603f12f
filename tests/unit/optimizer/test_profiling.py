"""From the moments of an iteration to the times of its layers."""

from __future__ import annotations

from typing import Any

import pytest

from commsched.optimizer.measuring import Sample, Watch, across_ranks, combine, iteration_times

# Three modules; the second owns two parameters.
OWNERS: Any = [(None, (0,)), (None, (1, 2)), (None, (3,))]
ORDER = [0, 1, 2, 3]
MARKS = {"begin": 0.0, "backward_end": 16.0, "enter": 17.0, "step": 18.0, "end": 20.0}


def watch(delays: tuple[tuple[float, float], ...] = ()) -> Watch:
    """Forwards of 1, 2 and 1 seconds from second 1 on, the turn, and a gradient every two seconds; then what
    waited: (moment, how long), all later ones shifted by it.
    """
    seen = Watch()
    now = sorted(delays)

    def shifted(moment: float) -> float:
        return moment + sum(length for start, length in now if start < moment)

    seen._marked.forwards = [(number, shifted(moment)) for number, moment in ((0, 1.0), (1, 2.0), (2, 4.0))]
    seen._marked.grads = [(i, shifted(moment)) for i, moment in ((3, 7.0), (2, 9.0), (1, 11.0), (0, 13.0))]
    seen._marked.marks = {name: shifted(moment) for name, moment in MARKS.items()}
    for start, length in now:
        seen.wait(shifted(start), shifted(start) + length)
    return seen


def test_times_of_layers_by_hand() -> None:
    sample = iteration_times(watch().compute(), OWNERS, ORDER)
    assert sample is not None
    forward, backward, outside = sample
    assert forward == pytest.approx([1.0, 0.0, 2.0, 1.0])  # a module's time is its last parameter's
    assert backward == pytest.approx([2.0, 2.0, 2.0, 2.0])
    assert outside == pytest.approx(1.0 + 4.0 + 2.0)  # before, behind the last gradient, within the step


def test_the_forward_of_a_tied_head_is_no_embedding() -> None:
    """The fourth module has no parameter but the first one's: its half second is the third module's, then."""
    seen = watch()
    seen._marked.forwards.append((3, 4.5))
    sample = iteration_times(seen.compute(), [*OWNERS, (None, (0,))], ORDER)
    assert sample is not None
    # Of the 2.5 seconds up to the first gradient a third is forward.
    assert sample.forward == pytest.approx([1.0, 0.0, 2.0, 0.5 + 2.5 / 3])


def test_waits_are_no_work() -> None:
    """In a forward before its module computes, between gradients, and in the step."""
    waits = ((1.0, 5.0), (2.0, 0.5), (10.0, 3.0), (18.5, 1.0))
    waited, plain = (iteration_times(seen.compute(), OWNERS, ORDER) for seen in (watch(waits), watch()))
    assert waited is not None and plain is not None
    for mine, wanted in zip(waited, plain, strict=True):
        assert mine == pytest.approx(wanted)


def test_what_is_no_whole_iteration_is_no_sample() -> None:
    for spoil in ("forwards", "grads"):
        seen = watch()
        setattr(seen._marked, spoil, [])
        assert iteration_times(seen.compute(), OWNERS, ORDER) is None
    seen = watch()
    del seen._marked.marks["step"]
    assert iteration_times(seen.compute(), OWNERS, ORDER) is None


def test_the_slowest_rank_of_each_layer_counts() -> None:
    """The others wait for it there, and a rank that is slow later may catch up with it."""
    order = [1, 0]  # of the forward; times are by parameter
    slow_everywhere = Sample([2.0, 4.0], [6.0, 8.0], 2.0)
    fast = Sample([1.0, 2.0], [3.0, 4.0], 1.0)
    for rows in ([slow_everywhere, fast], [fast, slow_everywhere]):
        assert across_ranks(rows, order) == slow_everywhere
    slow_first = Sample([1.0, 9.0], [1.0, 1.0], 1.0)
    slow_last = Sample([1.0, 1.0], [9.0, 1.0], 1.0)
    # The layers end at 9, 10, 11 and 12 on one rank, at 1, 2, 11 and 12 on the other.
    assert across_ranks([slow_first, slow_last], order) == ([1.0, 9.0], [1.0, 1.0], 1.0)


def test_medians() -> None:
    rows = [([1.0], [4.0], 1.0), ([2.0], [9.0], 0.0), ([6.0], [5.0], 2.0)]
    assert combine([Sample(*row) for row in rows]) == ([2.0], [5.0], 1.0)
