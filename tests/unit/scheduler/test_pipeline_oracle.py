"""What programs compute, in one process: a chain of matrices with a quadratic loss, in float64.

``run_program`` executes a program slot by slot with explicit versions; the other trainers are written from
the schedules' formulas and know nothing of programs. Both must end with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from scheduler.ir.actions import Action, Kind
from scheduler.ir.program import Program, version
from scheduler.pipelines import delays, generate
from scheduler.pipelines.replay import replay
from tests.support.version_map import version_map

WIDTH, ROWS, RATE = 3, 12, 0.05
Weights = list[np.ndarray]
Key = tuple[int, int, int]
"""Stage, micro-batch and period."""


def initial(stages: int) -> Weights:
    return [np.eye(WIDTH) + 0.3 * np.random.default_rng(s).normal(size=(WIDTH, WIDTH)) for s in range(stages)]


def batch(period: int, microbatches: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1000 + period)
    inputs, targets = random.standard_normal((2, microbatches, ROWS // microbatches, WIDTH))
    return inputs, targets


def gradients(weights: Weights, inputs: np.ndarray, targets: np.ndarray) -> Weights:
    """Of the mean over the micro-batches of half the squared error per row."""
    found = [np.zeros((WIDTH, WIDTH)) for _ in weights]
    for x, y in zip(inputs, targets, strict=True):
        seen = [x]
        for weight in weights:
            seen.append(seen[-1] @ weight)
        grad = (seen[-1] - y) / len(x) / len(inputs)
        for stage in reversed(range(len(weights))):
            found[stage] += seen[stage].T @ grad
            grad = grad @ weights[stage].T
    return found


def by_formula(stages: int, microbatches: int, periods: int, seen: Callable[[int, int], int]) -> Weights:
    """``W_s(t+1) = W_s(t) - rate * grad_s(W_0(seen(0, t)), ..., W_{S-1}(seen(S-1, t)))``."""
    history = [initial(stages)]
    for period in range(periods):
        used = [history[max(0, seen(stage, period))][stage] for stage in range(stages)]
        grads = gradients(used, *batch(period, microbatches))
        history.append([weight - RATE * grad for weight, grad in zip(history[-1], grads, strict=True)])
    return history[-1]


class Machine:
    """Every action on its own: none sees anything that the ones before it have not made."""

    def __init__(self, stages: int, count: int) -> None:
        self.stages, self.count = stages, count
        self.made = [{0: weight} for weight in initial(stages)]
        self.kept: dict[Key, np.ndarray] = {}
        self.outputs: dict[Key, np.ndarray] = {}
        self.grads: dict[Key, np.ndarray] = {}
        self.total: dict[tuple[int, int], np.ndarray] = {}

    def do(self, action: Action, split: bool) -> None:
        assert action.stage is not None
        key = action.stage, action.index, action.shift
        if action.kind is Kind.STEP:
            made = self.made[action.stage]
            made[action.shift + 1] = made[action.shift] - RATE * self.total.pop((action.stage, action.shift))
        elif action.kind is Kind.F:
            self.forward(key, self.made[action.stage][version(action)])
        else:
            if action.kind is Kind.B:
                self.backward(key, self.made[action.stage][version(action)])
            if action.kind is Kind.W or not split:
                self.accumulate(key)

    def forward(self, key: Key, weight: np.ndarray) -> None:
        stage, index, period = key
        inputs, targets = batch(period, self.count)
        self.kept[key] = self.outputs.pop((stage - 1, index, period)) if stage else inputs[index]
        output = self.kept[key] @ weight
        if stage + 1 < self.stages:
            self.outputs[key] = output
        else:
            self.grads[key] = (output - targets[index]) / len(output) / self.count

    def backward(self, key: Key, weight: np.ndarray) -> None:
        stage, index, period = key
        if stage:
            self.grads[stage - 1, index, period] = self.grads[key] @ weight.T

    def accumulate(self, key: Key) -> None:
        gradient = self.kept.pop(key).T @ self.grads.pop(key)
        where = key[0], key[2]
        self.total[where] = self.total.get(where, 0.0) + gradient


def run_program(program: Program, periods: int) -> Weights:
    """The weights after a run, its actions executed one by one."""
    layout = program.pipeline
    assert layout is not None
    machine = Machine(layout.stages, layout.microbatches)
    split = any(action.kind is Kind.W for action in program.kernel[0]["compute"])
    for slot in replay(program, periods):
        for _, action in slot:
            machine.do(action, split)
    assert not (machine.kept or machine.outputs or machine.grads or machine.total)
    return [made[periods] for made in machine.made]


def equal(one: Weights, other: Weights) -> bool:
    return all(np.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(one, other, strict=True))


SIZES = [(stages, count) for stages in (1, 2, 3, 4) for count in (1, 2, 3, 4, 6)]


@pytest.mark.parametrize(("stages", "count"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_synchronous_schedules_are_plain_training(schedule: str, stages: int, count: int) -> None:
    program = generate(schedule, stages, count)
    total = len(delays(program))
    assert equal(run_program(program, 4), by_formula(total, count, 4, lambda stage, t: t))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["pipedream", "ashpipe"])
def test_pipedream_is_its_formula(schedule: str, stages: int) -> None:
    """``grad_s(W_0(t-S+1), ..., W_{S-1}(t))``."""
    program = generate(schedule, stages)
    wanted = by_formula(stages, 1, 8, lambda stage, t: t - (stages - 1 - stage))
    assert equal(run_program(program, 8), wanted)


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_2bw_is_its_formula(stages: int, count: int) -> None:
    """``W(t+1) = W(t) - lr * grad f(W(t-1))``, the first step undelayed."""
    program = generate("2bw", stages, count)
    assert equal(run_program(program, 6), by_formula(stages, count, 6, lambda stage, t: t - 1))


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_wpipe_is_its_formula_and_no_other(stages: int, count: int) -> None:
    """G0 (stages 0..S-1) is one step old in both gradients, G1 is not."""
    found = run_program(generate("wpipe", stages, count), 6)
    assert equal(found, by_formula(2 * stages, count, 6, lambda stage, t: t - 1 if stage < stages else t))
    assert not equal(found, by_formula(2 * stages, count, 6, lambda stage, t: t - 1))
    assert not equal(found, by_formula(2 * stages, count, 6, lambda stage, t: t))


@pytest.mark.parametrize("periods", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("schedule", "count"), [("pipedream", 1), ("pipedream", 2), ("2bw", 3), ("wpipe", 4), ("1f1b", 2)]
)
def test_delay_vector_says_what_a_run_does(schedule: str, count: int, periods: int) -> None:
    """Also in runs too short to fill the pipeline."""
    program = generate(schedule, 4, count)
    delay = delays(program)
    assert equal(
        run_program(program, periods), by_formula(len(delay), count, periods, lambda s, t: t - delay[s])
    )
    seen = version_map(program, periods)
    assert len(seen) == len(delay) * count * periods
    assert all(number == max(0, period - delay[stage]) for (stage, _, period), number in seen.items())


def test_a_stale_backward_would_be_noticed() -> None:
    """The oracle can tell: another version in one place changes the weights."""
    found = run_program(generate("pipedream", 3), 6)
    assert not equal(found, by_formula(3, 1, 6, lambda stage, t: t))
    assert not equal(found, by_formula(3, 1, 6, lambda stage, t: t - 1))
