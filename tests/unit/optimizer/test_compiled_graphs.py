"""Compiled graphs on ranks that are threads: each piece waits for its own parameters; nothing recompiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from commsched.optimizer import hooks
from commsched.optimizer.hooks import Hooks
from commsched.optimizer.pending import CompiledParameter
from commsched.optimizer.round import Round
from commsched.optimizer.whole_step import WholeStep, deferred_update
from tests.support.local_backend import Channels, local_backend, mean_of, round_of, run_threads

RANKS, LAYERS, STEPS = 2, 4, 5
BYTES = 2000  # of a bucket; a layer has 31 * 32 * 4


def _new(layers: int = LAYERS) -> nn.Module:
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(31, 31), nn.Tanh())))


STATE = _new().state_dict()


@pytest.fixture(scope="module", autouse=True)
def nothing_compiled_afterwards() -> Iterator[None]:
    """Parameters keep a class of their own as long as there are compiled graphs that may read them."""
    yield
    torch._dynamo.reset()
    counters.clear()


def mlp() -> nn.Module:
    model = _new()
    model.load_state_dict(STATE)
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 31, generator=torch.Generator().manual_seed(100 * step + rank))


def plain(backend: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Rank 0's losses, and the parameters, of all ranks' training in one process."""
    model = mlp()
    compiled: Any = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(STEPS):
        grads = []
        for rank in range(RANKS):
            optimizer.zero_grad()
            loss = compiled(batch(rank, step)).square().mean()
            loss.backward()
            losses += [loss.item()] * (rank == 0)
            grads.append([p.grad for p in model.parameters()])
        for p, *all_ranks in zip(model.parameters(), *grads, strict=True):
            p.grad = mean_of(all_ranks)
        optimizer.step()
    return losses, [p.detach().clone() for p in model.parameters()]


class Rank:
    """One rank's model, compiled, and its optimizer; the ranks compile before any parameter is pending."""

    def __init__(self, rank: int, channels: Channels, model: nn.Module, compiled: Any) -> None:
        self.rank, self.model, self.compiled = rank, model, compiled
        self.round: Round
        self.hooks: Hooks
        self.round, self.hooks = round_of(model, local_backend(channels, rank), bucket_bytes=BYTES)
        assert isinstance(self.round.mode, WholeStep)
        self.mode = self.round.mode
        self.hooks.graph_bytes = BYTES
        self.params = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.params, 0.1)

    def step(self, step: int, meet: Callable[[], Any]) -> float:
        loss: torch.Tensor = self.compiled(batch(self.rank, step)).square().mean()
        meet()
        loss.backward()
        self.mode.defer(deferred_update(self.optimizer, torch.optim.SGD, self.params))
        self.round.clear_grads(True)
        return loss.item()

    def close(self) -> None:
        self.round.drain()
        self.hooks.remove()
        self.round.backend.close()
        self.round.close()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)]
)
def test_training_is_that_of_one_process_without_recompiling(backend: str) -> None:
    meeting = threading.Barrier(RANKS, timeout=300)

    def body(rank: int, channels: Channels) -> tuple[list[float], list[torch.Tensor], list[int]]:
        model = mlp()
        one = Rank(rank, channels, model, torch.compile(model, backend=backend))
        losses, graphs = [], []
        for step in range(STEPS):
            losses.append(one.step(step, meeting.wait))
            graphs.append(counters["stats"]["unique_graphs"])
        assert all(type(p) is CompiledParameter for p in one.params)
        assert len(one.hooks._graphs) == LAYERS, "a piece for each layer"
        assert {i for params in one.hooks._graphs for i in params} == set(range(2 * LAYERS))
        one.close()
        assert all(type(p) is nn.Parameter for p in one.params)
        return losses, [p.detach().clone() for p in one.params], graphs

    results = run_threads(RANKS, body, failed=meeting.abort)
    assert all(graphs == [RANKS] * STEPS for _, _, graphs in results), [r[2] for r in results]
    losses, params = plain(backend)
    close = {"rtol": 1e-5, "atol": 1e-6} if backend == "inductor" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(results[0][0], losses, **close)
    for _, found, _ in results:
        torch.testing.assert_close(found, params, **close)


class _Recorder:
    """Stands for an optimizer whose parameters arrive when a piece is about to read them."""

    def __init__(self) -> None:
        self.graph_bytes = BYTES
        self.seen: list[tuple[int, ...]] = []
        self.looked_up: list[tuple[int, ...]] = []

    def before_tracing(self) -> None:
        self.seen.append(())

    def before_graph(self, params: tuple[int, ...], looked_up: tuple[int, ...]) -> None:
        self.seen.append(params)
        self.looked_up.append(looked_up)

    def after_graph(self, params: tuple[int, ...], looked_up: tuple[int, ...], outputs: Any) -> None:
        assert params == self.seen[-1]
        assert all(isinstance(out, torch.Tensor) for out in outputs)


def test_each_piece_waits_for_its_own_parameters_alone() -> None:
    model, reader = mlp(), _Recorder()
    assert hooks.follow(reader, list(model.parameters()))
    compiled: Any = torch.compile(model, backend="aot_eager")
    compiled(batch(0, 0))
    assert reader.seen[0] == (), "tracing does not meet a pending parameter"
    reader.seen.clear()
    compiled(batch(0, 0))
    assert reader.seen == [(2 * i, 2 * i + 1) for i in range(LAYERS)]
    assert counters["aot_autograd"]["total"] == LAYERS
    hooks.unfollow(reader)
    reader.seen.clear()
    compiled(batch(0, 0))
    assert reader.seen == []


def test_pieces_near_the_input_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their backward ends last, and the next forward begins with them. The first to send is small, too.

    A GPT-2 had its first layer and its embedding in one piece, 2.9 of 14.7 MB, and exposed 1.4 times the
    communication of its eager self.
    """
    size = 4 * 31 * 32
    monkeypatch.setattr(hooks, "SMALLEST_PIECE", 4 * size)
    monkeypatch.setattr(hooks, "FIRST_PIECE", size)
    model, reader = _new(12), _Recorder()
    reader.graph_bytes = 0
    assert hooks.follow(reader, list(model.parameters()))
    compiled: Any = torch.compile(model, backend="eager")
    for _ in range(2):
        reader.seen.clear()
        compiled(batch(0, 0))
    assert [len(params) // 2 for params in reader.seen] == [1, 1, 2, 3, 4, 1]
    hooks.unfollow(reader)


class _Tied(nn.Module):
    """A language model whose output matrix is its embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(40, 31), mlp(), nn.Linear(31, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(ids)))  # type: ignore[no-any-return]


def test_readers_learn_which_piece_looks_rows_up() -> None:
    """The other one that reads a tied weight is the head's."""
    model, reader = _Tied(), _Recorder()
    assert hooks.follow(reader, list(model.parameters()))
    compiled: Any = torch.compile(model, backend="aot_eager")
    ids = torch.arange(8)
    compiled(ids)
    reader.seen.clear()
    reader.looked_up.clear()
    compiled(ids)
    assert [0 in params for params in reader.seen] == [True, *[False] * LAYERS, True]
    assert reader.looked_up == [(0,), *[()] * (LAYERS + 1)]
    hooks.unfollow(reader)


def test_graphs_without_modules_wait_too() -> None:
    """A compiled moving average or penalty reads parameters outside of every forward."""
    model, reader = mlp(), _Recorder()
    assert hooks.follow(reader, list(model.parameters()))

    @torch.compile(backend="eager")
    def penalty(module: nn.Module) -> torch.Tensor:
        return torch.stack([p.square().sum() for p in module.parameters()]).sum()

    for _ in range(3):
        reader.seen.clear()
        penalty(model)
        assert sorted(i for params in reader.seen for i in params) == list(range(2 * LAYERS))
    hooks.unfollow(reader)


def test_a_graph_compiled_before_the_wrapping_is_compiled_again() -> None:
    model, reader = mlp(), _Recorder()
    compiled: Any = torch.compile(model, backend="eager")
    compiled(batch(0, 0))
    assert hooks.follow(reader, list(model.parameters()))
    for _ in range(2):
        reader.seen.clear()
        compiled(batch(0, 0))
        assert [params for params in reader.seen if params] == [(2 * i, 2 * i + 1) for i in range(LAYERS)]
    hooks.unfollow(reader)


def test_an_exported_graph_stays_whole() -> None:
    model, reader = mlp(), _Recorder()
    assert hooks.follow(reader, list(model.parameters()))
    exported = torch.export.export(model, (batch(0, 0),), strict=True)
    assert torch.equal(exported.module()(batch(0, 1)), model(batch(0, 1)))
    assert sum("linear" in str(node.target) for node in exported.graph.nodes) == LAYERS
    hooks.unfollow(reader)


def test_a_torch_without_the_entry_points_updates_inside_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks then notice that a forward is compiled, and the driver's ``step()`` waits for everything."""
    monkeypatch.setattr(hooks, "_wrap_dynamo", lambda: False)

    def body(rank: int, channels: Channels) -> None:
        model = mlp()
        now, hooks = round_of(model, local_backend(channels, rank))
        assert not hooks.graphs_wait and not hooks.compiled
        compiled: Any = torch.compile(model, backend="eager")
        compiled(batch(rank, 0))
        assert hooks.compiled
        hooks.remove()
        now.backend.close()
        now.close()

    run_threads(1, body)
