"""Pipelines from PipeDream's and AshPipe's files: a partitioned graph and a hybrid_conf.json."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commsched.cli import training as command
from commsched.pipeline import Chain
from commsched.pipeline.build import planned
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.link import Cluster, Link
from scheduler.ir.profile import Layer, Profile
from scheduler.pipelines.convert import read_plan
from scheduler.pipelines.partition import partition
from tests.support.pipeline_runs import WIDTH, batches, by_delays, chain_model, stage_of_tensors, train

LINEAR = 8 * (WIDTH * WIDTH + WIDTH)


def files(folder: Path, stages: str, conf: str) -> tuple[Path, Path]:
    """``conf``, and a chain of an input and Linear and Tanh in turn, with these stages."""
    rows = [
        f"node{n} -- {'Input0' if n == 0 else 'Linear' if n % 2 else 'Tanh()'} -- forward_compute_time=1.0,"
        f" backward_compute_time=2.0, activation_size=8.0, parameter_size={LINEAR if n % 2 else 0}.000"
        f" -- stage_id={stage}"
        for n, stage in enumerate(stages)
    ]
    # The other systems write the input last.
    rows = [*rows[1:], rows[0], *(f"\tnode{n - 1} -- node{n}" for n in range(1, len(stages)))]
    graph, path = folder / "gpus=5.txt", folder / "hybrid_conf.json"
    graph.write_text("\n".join(rows))
    path.write_text(conf)
    return path, graph


FIVE = '{"module_to_stage_map": [0, 1, 2, 2], "stage_to_rank_map": {"0": [2, 0], "1": [1, 4], "2": [3]}}'


def test_stages_are_those_of_the_graph(tmp_path: Path) -> None:
    """As AshPipe's AlexNet: a stage of one module without weights, itself replicated. Ranks in any order."""
    plan = read_plan(*files(tmp_path, "0000122", FIVE))
    assert (plan.cuts, plan.replicas) == ((0, 4, 5), (2, 2, 1))
    model, data = chain_model(3), batches(5)
    weights, losses, pipeline = train(model, data, 5, plan=plan)
    assert pipeline.layout.cuts == (0, 3, 4) and pipeline.delays == (2, 1, 0)
    expected, told = by_delays(model, data, 1, lambda name: 0 if name.startswith("4") else 2)
    assert losses == pytest.approx(told, rel=1e-12)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("schedule", "options"), [("wpipe", {}), ("interleaved", {"virtual": 3})])
def test_a_plan_with_several_stages_on_a_rank(schedule: str, options: dict[str, int], tmp_path: Path) -> None:
    """The planner's cuts, through a file, train as the schedule's delays say."""
    model, data = chain_model(6), batches(4)
    chain = Chain(model)
    layers = tuple(Layer(n, 1e-3, 2e-3, s, 96) for n, s in zip(chain.names, chain.sizes))
    cluster = Cluster.flat(2, Link(1e-6, 1e-5))
    plan = partition(Profile("chain", layers), cluster, schedule, microbatches=2, **options)
    assert len(plan.replicas) == 2 and len(plan.cuts) == 2 * options.get("virtual", 2)
    plan.save(tmp_path / "plan.json")
    weights, losses, pipeline = train(model, data, 2, plan=tmp_path / "plan.json")
    stages = stage_of_tensors(plan.cuts, model)
    expected, told = by_delays(model, data, 2, lambda name: pipeline.delays[stages[name]])
    assert losses == pytest.approx(told, rel=1e-12)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-14)


class Pair(nn.Module):
    """One layer of a model here, three nodes of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


def test_layers_that_are_coarser_than_nodes(tmp_path: Path) -> None:
    model = nn.Sequential(Pair(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    two = '{"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0], "1": [1]}}'
    # The second stage starts with the Tanh behind the pair, which computes with the pair.
    program, chain = planned(read_plan(*files(tmp_path, "0000111", two)), Chain(model))
    assert program.pipeline is not None and program.pipeline.cuts == (0, 1) and len(chain) == 2
    with pytest.raises(ValueError, match=f"starts inside layer 0 .* {LINEAR} bytes"):
        planned(read_plan(*files(tmp_path, "0001111", two)), Chain(model))
    with pytest.raises(ValueError, match="of 7 layers, this model has 4"):
        planned(read_plan(*files(tmp_path, "0000111", two)), Chain(chain_model(4)))


def test_the_command_takes_both_files_or_a_plan(tmp_path: Path) -> None:
    def given(**words: Any) -> PipelinePlan:
        names = ("plan", "conf", "graph", "cuts", "stages", "replicas", "microbatches", "across")
        empty = dict.fromkeys(names)
        return command._plan(argparse.Namespace(**(empty | words)), chain_model(3))

    conf, graph = files(tmp_path, "0000122", FIVE)
    plan = given(conf=conf, graph=graph)
    assert plan == read_plan(conf, graph)
    plan.save(tmp_path / "plan.json")
    assert given(plan=tmp_path / "plan.json") == plan
    with pytest.raises(ValueError, match="--graph belongs to --conf"):
        given(plan=tmp_path / "plan.json", graph=graph)
    with pytest.raises(ValueError, match="--cuts belongs to --schedule"):
        given(conf=conf, graph=graph, cuts="2")
    # Three stage modules on three layers: one reading fits.
    assert given(conf=conf).cuts == (0, 1, 2)
    conf.write_text(FIVE.replace("[0, 1, 2, 2]", "[0, 0, 1, 2, 2]"))
    with pytest.raises(ValueError, match="which of the model's 3 layers .* give it with --graph gpus=N.txt"):
        given(conf=conf)
