"""Losses that are sums over tokens: the mean is over those of the whole step, however they are divided."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched.errors import CommError
from commsched.pipeline import Pipeline
from commsched.pipeline.api import Hybrid
from scheduler.ir.layout import Placement, Samples, Tiles
from tests.support.pipeline_runs import (
    WIDTH,
    assert_close,
    batches,
    chain_model,
    differ,
    momentum,
    on_threads,
    replayed,
    sgd,
    train,
)
from tests.support.rounding import rounding
from tests.unit.pipeline.test_pipeline_habits import attempt, in_one_process
from tests.unit.pipeline.test_pipeline_local_batches import SCHEDULES, mine, size_of, train_locally

LENGTH, ROWS = 5, 13
IGNORED = -100
# Sums over the tokens of a batch and over the width; layers forward and backward, and steps.
EXACT = rounding(torch.float64, ROWS * LENGTH * WIDTH, 8 * 12)


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def sum_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


def count(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum()


def texts(rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Batches of so many texts. The first ones of a batch are long, and every other text has no token."""
    dice, found = torch.Generator().manual_seed(3), []
    for number in rows:
        x = torch.randn(number, LENGTH, WIDTH, generator=dice).double()
        y = torch.randint(WIDTH, (number, LENGTH), generator=dice)
        for row in range(number):
            y[row, 0 if row % 2 else max(1, LENGTH - row) :] = IGNORED
        found.append((x, y))
    return found


@pytest.mark.few
@pytest.mark.parametrize(("schedule", "parts", "mesh", "layers"), SCHEDULES)
def test_a_mean_over_tokens_is_that_of_one_process(schedule: str, parts: int, mesh: Any, layers: int) -> None:
    """With short batches, given whole or by rows."""
    model, data = chain_model(layers), texts([11, 11, 8, ROWS, 9])
    options: dict[str, Any] = {"schedule": schedule, "num_microbatches": parts, "mesh": mesh, "count": count}
    weights, losses, pipeline = train(model, data, size_of(mesh), momentum, sum_loss, **options)
    wanted, expected = replayed(model, data, pipeline.program, momentum, sum_loss, count=count)
    assert_close(weights, wanted, EXACT)
    assert losses == pytest.approx(expected, rel=EXACT)
    if not any(pipeline.delays):
        plain, means = in_one_process(model, data, momentum, mean_loss)
        assert_close(weights, plain, EXACT)
        assert losses == pytest.approx(means, rel=EXACT)

    def work(fabric: Any) -> Any:
        pipeline, found, score = train_locally(model, data, fabric, sum_loss, **options)
        state = pipeline.state_dict()
        pipeline.close()
        return state, found, score

    for state, found, score in on_threads(size_of(mesh), work):
        assert_close(state, weights, EXACT)
        assert found == pytest.approx(losses, rel=EXACT)
        plain_model = copy.deepcopy(model)
        plain_model.load_state_dict(state)
        assert score == pytest.approx(mean_loss(plain_model(data[0][0]), data[0][1]).item(), rel=EXACT)


def test_micro_batches_whose_means_are_averaged_give_another_mean() -> None:
    """The fault for which ``count`` is there: the mean of their means is not the mean over all tokens."""
    model, data = chain_model(2), [(x[::2], y[::2]) for x, y in texts([12])]
    wanted, expected = in_one_process(model, data, momentum, mean_loss)
    weights, losses, _ = train(model, data, 2, momentum, mean_loss, num_microbatches=3)
    assert differ(weights, wanted) and losses != pytest.approx(expected, rel=1e-3)
    assert torch.isfinite(torch.tensor(losses)).all()
    weights, losses, _ = train(model, data, 2, momentum, sum_loss, num_microbatches=3, count=count)
    assert_close(weights, wanted, EXACT)
    assert losses == pytest.approx(expected, rel=EXACT)


def test_a_loss_may_leave_out_a_micro_batch_without_terms() -> None:
    """``new_zeros(())``, which has no graph, in the place of a sum over nothing."""

    def some(outputs: Tensor, targets: Tensor) -> Tensor:
        return sum_loss(outputs, targets) if int(count(targets)) else outputs.new_zeros(())

    model, data = chain_model(2), [(x, torch.cat([y[:-5], y[-5:] * 0 + IGNORED])) for x, y in texts([ROWS])]
    wanted, _ = in_one_process(model, data, momentum, mean_loss)
    weights, _, _ = train(model, data, 2, momentum, some, num_microbatches=3, count=count)
    assert_close(weights, wanted, EXACT)


def pixel_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def pixels() -> tuple[nn.Sequential, list[tuple[Tensor, Tensor]]]:
    """Two convolutions, and images of which half have few known pixels."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.Sequential(nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1))]
    model, dice, data = nn.Sequential(*layers).double(), torch.Generator().manual_seed(1), []
    for rows in (9, 8):
        x = torch.randn(rows, 2, 6, 8, generator=dice).double()
        y = torch.randint(3, (rows, 6, 8), generator=dice)
        y[:, :, 3:][: rows // 2] = IGNORED
        data.append((x, y))
    return model, data


# Sums over the pixels of a batch; layers forward and backward, and steps.
OF_PIXELS = rounding(torch.float64, 9 * 6 * 8 * 4, 8 * 3)


@pytest.mark.parametrize("given", ["whole", "mirrored", "local"])
@pytest.mark.parametrize("placements", [(Tiles((1, 2)), Samples(2)), (Samples(), Tiles((1, 2)))])
def test_pixels_on_tiles_and_mirrored_replicas(placements: Sequence[Placement], given: str) -> None:
    model, data = pixels()
    wanted, expected = in_one_process(model, data, momentum, F.cross_entropy)
    replicas = 2 if given == "local" else 1

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            copy.deepcopy(model),
            num_microbatches=2,
            mesh=(2, replicas),
            loss=pixel_loss,
            count=count,
            optimizer=momentum,
            cuts=[0, 1],
            placements=placements,
            mirrored=given == "mirrored",
            fabric=fabric,
        )
        local = given == "local"
        mine_of = [mine(pipeline, batch) if local else batch for batch in data]
        losses = [pipeline.step(batch, local=local) for batch in mine_of]
        found = pipeline.state_dict(), losses, pipeline.evaluate(mine_of[0], local=local)
        pipeline.close()
        return found

    trained = copy.deepcopy(model)
    trained.load_state_dict(wanted)
    scored = F.cross_entropy(trained(data[0][0]), data[0][1]).item()
    for state, losses, score in on_threads(replicas * sum(each.size for each in placements), work):
        assert_close(state, wanted, OF_PIXELS)
        assert losses == pytest.approx(expected, rel=OF_PIXELS)
        assert score == pytest.approx(scored, rel=OF_PIXELS)


def test_stages_of_a_hybrid_may_sum_their_loss() -> None:
    model, data = pixels()
    _, expected = in_one_process(model, data, sgd, F.cross_entropy)

    def work(fabric: Any) -> list[float]:
        stages, placements = copy.deepcopy(list(model)), [Tiles((1, 2)), Samples()]
        trainer = Hybrid(stages, placements, loss=pixel_loss, count=count, microbatches=3, fabric=fabric)
        optimizer, losses = sgd(list(trainer.parameters())), []
        for batch in data:
            optimizer.zero_grad()
            losses.append(trainer.step(*batch))
            optimizer.step()
        trainer.close()
        return losses

    assert on_threads(3, work) == [pytest.approx(expected, rel=OF_PIXELS)] * 3


@pytest.mark.parametrize("local", [False, True])
def test_a_checkpoint_keeps_the_terms_of_steps_in_flight(local: bool) -> None:
    model, data = chain_model(3), texts([11, 8, 12, 9])
    options: dict[str, Any] = {"schedule": "2bw", "num_microbatches": 2, "mesh": (3, [1, 1, 2])}
    options |= {"count": count, "loss": sum_loss, "optimizer": momentum}

    def work(fabric: Any, stops: bool) -> Any:
        pipeline = Pipeline(copy.deepcopy(model), fabric=fabric, **options)
        for number, batch in enumerate(data):
            if stops and number == 2:
                state = pipeline.checkpoint()
                pipeline.close()
                pipeline = Pipeline(copy.deepcopy(model), fabric=fabric, **options)
                pipeline.resume(state)
            pipeline.step(mine(pipeline, batch) if local else batch, local=local)
        pipeline.drain()
        return pipeline.state_dict()

    wanted = on_threads(4, lambda fabric: work(fabric, stops=False))[0]
    for state in on_threads(4, lambda fabric: work(fabric, stops=True)):
        assert all(torch.equal(state[name], value) for name, value in wanted.items())


# -- refused -------------------------------------------------------------------------------------------------


def test_a_step_without_a_term_is_an_error_on_every_rank_and_the_next_one_trains() -> None:
    model, (batch,) = chain_model(2), texts([8])
    nothing = batch[0], torch.full_like(batch[1], IGNORED)
    wanted, _ = in_one_process(model, [batch], momentum, mean_loss)

    def work(fabric: Any) -> Any:
        pipeline = Pipeline(
            copy.deepcopy(model), "1f1b", 2, (2, 1), loss=sum_loss, count=count, optimizer=momentum,
            fabric=fabric,
        )  # fmt: skip
        for use in (pipeline.step, pipeline.evaluate):
            with pytest.raises(ValueError, match=r"count\(targets\) is 0 for all targets of .* no mean"):
                use(nothing)
        assert float(pipeline.evaluate(nothing, lambda outputs, targets: count(targets))) == 0
        pipeline.step(batch)
        return pipeline.state_dict()

    for state in on_threads(2, work):
        assert_close(state, wanted, EXACT)


@pytest.mark.parametrize("refusing", [(1,), (0, 1)])
def test_a_batch_that_is_refused_is_counted_by_nobody(refusing: tuple[int, ...]) -> None:
    """Its terms had been told already, and stood for those of later steps."""
    model, data = chain_model(2), batches(3)

    def run(refused: bool) -> Any:
        def work(fabric: Any) -> list[Any]:
            pipeline = Pipeline(
                copy.deepcopy(model), "1f1b", 1, (1, 2), loss=positive_sum, count=positive, optimizer=sgd,
                fabric=fabric,
            )  # fmt: skip
            losses = []
            for x, y in data:
                rows = pipeline.rows(len(y))
                if refused and fabric.rank in refusing:
                    with pytest.raises(ValueError, match="the same number of rows"):
                        pipeline.step((x[rows][1:], y[rows]), local=True)
                losses.append(pipeline.step((x[rows], y[rows]), local=True))
            pipeline.close()
            return losses

        return on_threads(2, work, 20)[0]

    assert run(True) == run(False)


def positive(targets: Tensor) -> Tensor:
    return (targets > 0).sum()


def positive_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) * (targets > 0)).square().sum()


def test_a_local_step_without_a_term_ends_every_rank() -> None:
    ((x, y),) = texts([8])

    def work(fabric: Any) -> str:
        pipeline = Pipeline(
            chain_model(2), "1f1b", 2, (2, [1, 2]), loss=sum_loss, count=count, optimizer=momentum,
            fabric=fabric,
        )  # fmt: skip
        with pytest.raises((ValueError, CommError)) as caught:
            pipeline.step(mine(pipeline, (x, torch.full_like(y, IGNORED))), local=True)
        return str(caught.value)

    said = on_threads(3, work)
    assert any("count(targets) is 0 for all targets of step 0" in text for text in said[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 5}, "count= must be a function, got 5"),
        ({"count": count, "loss": nn.CrossEntropyLoss()}, "'mean', .* with count= divides a sum .*'sum'"),
        ({"count": count, "loss": F.cross_entropy}, "'mean', .* with count= divides a sum .*'sum'"),
        ({"count": count, "loss": partial(F.nll_loss, ignore_index=0)}, "'mean', .* divides a sum .*'sum'"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "'sum', .* the mean over the rows: .* or count="),
    ],
)
def test_losses_that_are_no_sums_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attempt(**options)


class OverRows(nn.CrossEntropyLoss):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs, targets) / len(targets)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": OverRows(reduction="sum")},
        {"loss": partial(F.cross_entropy, ignore_index=IGNORED)},
        {"loss": partial(F.cross_entropy, reduction="sum"), "count": count},
        {"loss": nn.CrossEntropyLoss(reduction="sum"), "count": count},
    ],
)
def test_losses_that_fit_are_taken(options: dict[str, Any]) -> None:
    attempt(**options).close()


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (lambda targets: targets != IGNORED, r"one number .* got a tensor of shape \(8, 5\)"),
        (lambda targets: -1, "not negative, .* got -1"),
        (lambda targets: None, "got None"),
    ],
)
def test_counts_that_are_no_number_are_refused(counts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attempt(loss=sum_loss, count=counts).step(texts([8])[0])


CLASSES = torch.linspace(0.1, 2.0, WIDTH).double()


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(CLASSES), partial(F.cross_entropy, weight=CLASSES)])
@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {"mesh": (1, 2)}])
def test_a_mean_over_class_weights_needs_their_sum(loss: Any, options: dict[str, Any]) -> None:
    """Parts of a step have different sums of weights. One part, or targets of floats, need no count."""
    dice, model = torch.Generator().manual_seed(1), chain_model(2)
    x = torch.randn(8, WIDTH, generator=dice).double()
    labels = torch.randint(WIDTH, (8,), generator=dice)
    with pytest.raises(ValueError, match=r"class weights, .* \(here 0.5\).* count="):
        train(model, [(x, labels)], 2, loss=loss, **options)
    summed = nn.CrossEntropyLoss(CLASSES, reduction="sum")
    terms = {"count": lambda targets: CLASSES[targets].sum()}
    for targets, given in [
        (labels, {"num_microbatches": 1}),
        (labels, {"loss": summed, **options, **terms}),
        (torch.softmax(x, 1), options),
    ]:
        weights, _, _ = train(model, [(x, targets)], 2, **{"loss": loss, **given})
        assert_close(weights, in_one_process(model, [(x, targets)], sgd, loss)[0], EXACT)
