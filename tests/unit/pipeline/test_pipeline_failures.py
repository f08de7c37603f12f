"""What goes wrong is said: by whom, where, what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from comm_core import EngineError
from commsched.errors import CommError
from commsched.pipeline import Chain, Pipeline, ThreadWorld
from commsched.pipeline.messages import ThreadFabric, to_host
from scheduler.ir.link import Cluster, Link
from scheduler.ir.profile import Layer, Profile
from scheduler.pipelines import generate
from scheduler.pipelines.partition import partition
from tests.support import one_process
from tests.support.pipeline_runs import WIDTH, assert_close, batches, chain_model, loss_of, on_threads, sgd


def make(fabric: Any, model: Any = None, **options: Any) -> Pipeline:
    """Each rank has a model of its own, as in a process: it writes into the weights of its stages."""
    model = chain_model(2) if model is None else copy.deepcopy(model)
    return Pipeline(model, fabric=fabric, **{"loss": loss_of, "optimizer": sgd, **options})


def one_step(fabric: Any, model: Any = None, batch: Any = None, **options: Any) -> Any:
    return make(fabric, model, **options).step(batches(1)[0] if batch is None else batch)


def profile_of(model: nn.Module) -> Profile:
    chain = Chain(model)
    layers = tuple(Layer(n, 1e-3, 2e-3, s, 96) for n, s in zip(chain.names, chain.sizes))
    return Profile("little", layers)


def test_a_stage_that_cannot_take_its_input() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH + 1, WIDTH)).double()
    with pytest.raises(
        ValueError, match=r"stage 1 on rank 1 failed in the forward of micro-batch 0 of step 0"
    ):
        on_threads(2, lambda fabric: one_step(fabric, model))


class Moody(nn.Module):
    """Puts out another width every time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)[:, : WIDTH - self.calls]


def test_a_stage_whose_output_changes_its_shape() -> None:
    def work(fabric: Any) -> None:
        model = nn.Sequential(Moody(), nn.LazyLinear(WIDTH)).double()
        model[1](torch.zeros(1, WIDTH - 1).double())
        one_step(fabric, model, num_microbatches=2)

    with pytest.raises(ValueError, match=r"stage 0 put out .*\(6, 4\), .* and .*\(6, 5\), .* for an earlier"):
        on_threads(2, work)


def test_a_stage_that_dies() -> None:
    """The other rank ends at once, long before the time-out, and says for what it waited."""

    def work(fabric: Any) -> str:
        pipeline = make(fabric)
        if fabric.rank == 1:
            fabric.abort("it has died")
            return ""
        with pytest.raises(CommError) as caught:
            pipeline.step(batches(1)[0])
        with pytest.raises(CommError, match="has failed before"):
            pipeline.step(batches(1)[0])
        return str(caught.value)

    said = on_threads(2, work, timeout=900.0)[0]
    assert "rank 0 waits for 0RECVB0<1" in said and "micro-batch 0" in said and "look for" in said


def test_what_is_made_after_the_end_waits_for_nobody() -> None:
    """A rank that came late to a world that had ended waited for the time-out."""
    world = ThreadWorld(2, timeout=900.0)
    world.abort()
    fabric, buffer = world.fabric(0), torch.ones(4)
    with pytest.raises(CommError, match="heard nothing of rank 1"):
        fabric.lane("late").receive(1, [buffer]).wait()
    with pytest.raises(EngineError, match="another rank has ended"):
        fabric.transport("late", (0, 1)).all_reduce(buffer)


def test_a_failing_loss_and_a_batch_too_small() -> None:
    with pytest.raises(ValueError, match="must return one number"):
        on_threads(2, lambda fabric: one_step(fabric, loss=lambda out, y: (out - y).square()))
    with pytest.raises(ValueError, match="every replica needs at least 1 row"):
        on_threads(
            2, lambda fabric: one_step(fabric, batch=batches(1, rows=3)[0], num_microbatches=4, mesh=(2, 1))
        )
    with pytest.raises(ValueError, match="same number of rows"):
        x, y = batches(1)[0]
        on_threads(1, lambda fabric: one_step(fabric, batch=(x, y[:3])))


def test_ranks_that_make_different_pipelines() -> None:
    def work(fabric: Any) -> None:
        make(fabric, num_microbatches=2 + fabric.rank)

    with pytest.raises(CommError, match="all ranks must make the same pipeline, but rank 0 has"):
        on_threads(2, work)


def test_arguments_that_would_have_no_effect() -> None:
    with pytest.raises(ValueError, match="weights= belong to the Chain that you passed"):
        on_threads(1, lambda fabric: make(fabric, Chain([nn.Linear(2, 2)], elements=True), weights={}))
    for option in ({"on_step": lambda *_: None}, {"master_weights": True}):
        with pytest.raises(ValueError, match="are for steps of the pipeline: pass optimizer="):
            on_threads(1, lambda fabric, option=option: make(fabric, optimizer=None, **option))


def test_a_model_that_is_converted_afterwards() -> None:
    """It trained nothing."""

    def work(fabric: Any) -> None:
        model = chain_model(2)
        pipeline = Pipeline(model, loss=loss_of, optimizer=sgd, fabric=fabric)
        pipeline.step(batches(1)[0])
        model.float()
        x, y = batches(1)[0]
        pipeline.step((x.float(), y.float()))

    with pytest.raises(ValueError, match="has been converted from torch.float64 to torch.float32 since"):
        on_threads(2, work)


def test_weights_that_are_written_behind_the_pipelines_back() -> None:
    """The model's own tensors, while other replicas' parts are under way: the change was lost."""

    def work(fabric: Any) -> None:
        pipeline = make(fabric, mesh=(1, 2), bucket_bytes=100)
        kept = list(pipeline.parameters())
        for batch in batches(3):
            pipeline.step(batch)
            for parameter in kept:
                parameter.data.clamp_(-0.01, 0.01)

    with pytest.raises(
        ValueError, match="was written to while other replicas' parts .*pipeline.parameters()"
    ):
        on_threads(2, work)


class Renaming(nn.Sequential):
    """Saved as its inner module, as wrappers do."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        return {f"model.{key}": value for key, value in state.items()}


def test_a_model_that_renames_its_state() -> None:
    """What was saved were copies from the start."""
    with pytest.raises(ValueError, match="has no model.0.weight.*, which its state_dict.. renames"):
        on_threads(2, lambda fabric: make(fabric, Renaming(*chain_model(2))))


def test_values_travel_and_not_their_views() -> None:
    x = torch.complex(torch.ones(2), torch.ones(2)).conj()
    for view in (x, x.imag):
        sent = to_host(view)
        assert not sent.is_conj() and not sent.is_neg() and torch.equal(sent, view)


def replicas_train_as_one_rank(model: nn.Module) -> None:
    """In buckets so small that a step has several under way."""

    def work(fabric: Any) -> dict[str, Tensor]:
        size = {"mesh": (1, fabric.size), "bucket_bytes": 100} if fabric.size > 1 else {}
        pipeline = make(fabric, model, **size)
        for batch in batches(4):
            pipeline.step(batch)
        return pipeline.state_dict()

    (wanted,) = on_threads(1, work)
    for found in on_threads(2, work):
        assert_close(found, wanted)


def test_hooks_that_read_weights_see_the_new_ones() -> None:
    """Pruning computes a layer's weight in a hook, which ran before the one that waits for the weights."""

    model = chain_model(2)
    with torch.no_grad():  # else the model cannot be copied
        for layer in (layer for layer in model if isinstance(layer, nn.Linear)):
            prune.random_unstructured(layer, "weight", amount=0.5)

    replicas_train_as_one_rank(model)


class Borrowing(nn.Module):
    """Reads weights of a module that it does not call, and of one that it calls later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, self.first.weight))
        return self.second(F.linear(self.third(x), self.second.weight) * self.first.bias)


def test_weights_that_are_read_outside_of_their_modules_are_the_new_ones() -> None:
    """Each forward waited for a module's weights where that module was called: others read old ones."""
    torch.manual_seed(0)
    model = Borrowing().double()

    replicas_train_as_one_rank(model)


class Reentering(nn.Module):
    """Uses one block twice, each time in a backward inside of the backward."""

    def __init__(self, reenters: bool) -> None:
        super().__init__()
        self.first, self.block, self.reenters = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), reenters

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, torch.tanh(self.first(x)), use_reentrant=True)
        return checkpoint(self.block, torch.tanh(x), use_reentrant=True) if self.reenters else self.block(x)


def test_every_gradient_of_a_backward_is_sent() -> None:
    """A bucket left with the first one of two gradients."""

    with one_process.seed(0):
        right, wrong = (nn.Sequential(Reentering(reenters)).double() for reenters in (True, False))
    replicas_train_as_one_rank(right)
    with pytest.raises(ValueError, match="gradient of 0.block.* after it was sent .* use_reentrant=False"):
        replicas_train_as_one_rank(wrong)


def test_a_mesh_for_another_number_of_ranks() -> None:
    with pytest.raises(ValueError, match=r"need 4 ranks, and there are 2"):
        on_threads(2, lambda fabric: make(fabric, mesh=(2, 2)))
    with pytest.raises(ValueError, match="2 layers .* cannot be cut into 3 stages"):
        on_threads(3, lambda fabric: make(fabric))


def test_a_program_and_a_plan_for_another_model(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="for a model of 3 layers, this model has 2"):
        on_threads(3, lambda fabric: make(fabric, schedule=generate("1f1b", 3)))
    other = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)).double()
    plan = partition(profile_of(other), Cluster.flat(2, Link(1e-6, 1e-12)), "gpipe", microbatches=2)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="the plan is for 'little', whose layer 0 has"):
        on_threads(2, lambda fabric: make(fabric, plan=tmp_path / "plan.json"))


def test_a_plan_runs_and_impossible_memory_is_refused(tmp_path: Any) -> None:
    model = chain_model(4)
    cluster = Cluster.flat(2, Link(1e-6, 1e-12))
    partition(profile_of(model), cluster, "2bw", microbatches=2).save(tmp_path / "plan.json")
    losses = on_threads(2, lambda fabric: [one_step(fabric, model, plan=tmp_path / "plan.json")])
    assert losses[0] == losses[1]
    # It trained without clipping.
    for how in ({"plan": tmp_path / "plan.json"}, {"schedule": generate("1f1b", 2)}):
        with pytest.raises(ValueError, match="no option 'max_nrom'; did you mean 'max_norm'"):
            on_threads(2, lambda fabric, how=how: make(fabric, max_nrom=1.0, **how))
    small = Cluster.flat(2, Link(1e-6, 1e-12), memory=100)
    with pytest.raises(ValueError, match="memory"):
        partition(profile_of(model), small, "2bw", microbatches=2)


def test_arguments_that_others_decide(tmp_path: Any) -> None:
    """A plan or program was used as it is, and ``mesh=`` beside ``ranks=`` was not read."""
    cluster = Cluster.flat(2, Link(1e-6, 1e-12))
    partition(profile_of(chain_model(2)), cluster, "2bw", microbatches=2).save(tmp_path / "plan.json")
    program = generate("1f1b", 2, 2)
    for given, said in (
        ({"plan": tmp_path / "plan.json", "num_microbatches": 4}, "plan= decides .* num_microbatches="),
        ({"plan": tmp_path / "plan.json", "schedule": "gpipe"}, "plan= decides .* schedule="),
        ({"schedule": program, "recompute": True, "mesh": (2, 1)}, "a Program decides .* mesh=, recompute="),
        ({"ranks": [[0], [1]], "mesh": (2, 3)}, "ranks= decides .* mesh="),
        ({"ranks": [[1], [0]], "mirrored": True}, "mirrored .* nobody chooses the ranks; got .*1.*0"),
        ({"mesh": (2, [1, 1]), "mirrored": True}, r"mirrored .* as many, .* replicas \[1, 1\]"),
    ):
        with pytest.raises(ValueError, match=said):
            on_threads(2, lambda fabric, given=given: make(fabric, **given))


def test_what_one_stage_is_refused_every_rank_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of other stages went on, and told of a lost rank in the first step."""
    made = ThreadFabric.transport
    reason = "transport='tiers' is not possible: ranks 2 and 3 share no memory"

    def transport(fabric: ThreadFabric, name: str, ranks: Any) -> Any:
        if name == "stage 1":
            raise CommError(reason)
        return made(fabric, name, ranks)

    monkeypatch.setattr(ThreadFabric, "transport", transport)

    def work(fabric: Any) -> str:
        with pytest.raises(CommError) as raised:
            make(fabric, mesh=(2, 2))
        return str(raised.value)

    said = on_threads(4, work)
    told = f"rank 2 cannot exchange with the replicas of its stage: {reason}"
    assert said == [told, told, reason, reason]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_forward_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="0 layers .* cannot be cut into 2 stages; .* a list of modules"):
        Chain(Branches()).even_cuts(2)
    assert len(Chain([nn.Linear(2, 2), Branches(), nn.Linear(2, 2)])) == 2


class Sizes(nn.Module):
    """Hands on something that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x), {len(x)}


def test_only_tensors_and_constants_cross_a_border() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, both: Any) -> Tensor:
            return self.inner(both[0])

    model = nn.Sequential(Sizes(), Takes()).double()
    with pytest.raises(ValueError, match="only tensors, numbers, strings and None can cross"):
        on_threads(2, lambda fabric: one_step(fabric, model))
