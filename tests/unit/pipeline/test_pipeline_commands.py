"""Profiles of torch models, and the command lines around them."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from comm_core import MessageChannel
from commsched.cli import main
from commsched.pipeline import Job, Pipeline, ThreadWorld, profile
from commsched.pipeline.interpreter import Span, handling
from commsched.pipeline.job import load_job
from commsched.pipeline.profiling import message_link
from dnn_bench import models
from dnn_bench.pipeline import cli
from dnn_bench.pipeline.jobs import job_of, paced
from dnn_bench.pipeline.worker import default_rows
from scheduler import profiles
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.actions import Action, Kind
from scheduler.ir.link import Cluster, Link, fit
from scheduler.ir.profile import Profile
from scheduler.pipelines.build import generate
from scheduler.simulate.lowering import lower_pipeline
from scheduler.simulate.simulator import run
from tests.support.documented_runs import CONF, partitioned
from tests.support.pipeline_runs import (
    WIDTH,
    adam,
    assert_close,
    batches,
    chain_model,
    loss_of,
    on_threads,
    replayed,
    sgd,
    train,
)


def little() -> Job:
    data = batches(3)
    return Job(chain_model(4), loss_of, lambda rows: iter([(x[:rows], y[:rows]) for x, y in data]))


@pytest.fixture
def sleeps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only sleeping moves: what else a machine does in the meantime takes no time."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now)


@pytest.mark.usefixtures("sleeps_count")
def test_a_profile_tells_times_and_sizes() -> None:
    model = paced(3, width=8, seconds=0.004).double()
    batch = torch.zeros(5, 8).double(), torch.zeros(5, 8).double()
    made = profile(model, loss_of, batch, repeat=2)
    assert [layer.bytes for layer in made.layers] == [64, 64, 64]
    assert [layer.activation_bytes for layer in made.layers] == [5 * 8 * 8, 5 * 8 * 8, 8]
    for number, layer in enumerate(made.layers):
        assert layer.forward == pytest.approx(0.004)
        # The first layer has no input gradient to compute.
        assert layer.backward == pytest.approx(0.008 if number else 0.004)
        assert layer.weight_backward == pytest.approx(0.004)


def test_a_profile_tells_what_an_update_takes() -> None:
    assert profile(chain_model(2), loss_of, batches(1)[0], optimizer=sgd, repeat=1).update_per_byte > 0


class PerRow(nn.Module):
    """Takes its time for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.004 * len(x))
        return x + self.bias


@pytest.mark.usefixtures("sleeps_count")
def test_a_profile_tells_what_fewer_rows_save() -> None:
    model = nn.Sequential(paced(1, width=8, seconds=0.004).double(), PerRow())
    batch = torch.zeros(6, 8).double(), torch.zeros(6, 8).double()
    constant, rising = profile(model, loss_of, batch, repeat=2).layers
    assert constant.fixed == pytest.approx(1.0)
    assert rising.fixed == pytest.approx(0.0, abs=1e-9)


def test_a_message_between_two_ranks_is_timed_and_known_to_all() -> None:
    found = on_threads(3, message_link)
    assert found[0] == found[1] == found[2]
    assert found[0].alpha + found[0].beta > 0
    with pytest.raises(ValueError, match="a link joins two ranks"):
        message_link(ThreadWorld(1).fabric(0))


@pytest.mark.parametrize(("largest", "short"), [(None, False), (1 << 10, True), (1 << 20, False)])
def test_messages_are_timed_in_the_way_they_will_go(
    largest: float | None, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fitted(sizes: Any, times: Any) -> Any:
        asked.append(max(sizes) <= MessageChannel.SHORT)
        return fit(sizes, times)

    monkeypatch.setattr("commsched.pipeline.profiling.fit", fitted)
    on_threads(2, lambda fabric: message_link(fabric, largest))
    assert asked == [short]


def test_handling_is_what_lies_between_actions_without_the_waits() -> None:
    action = Action(Kind.F, 0, 0)
    spans = [
        Span(action, 0.0, 1.0, 0.0),
        Span(action, 1.25, 2.0, 0.0),  # 0.25 without a wait
        Span(action, 4.0, 5.0, 1.5),  # 2, of which 1.5 were waited
        Span(action, 5.25, 6.0, 1.5),
        Span(action, 36.25, 37.0, 31.5),
    ]
    assert handling(spans) == pytest.approx(0.25)
    assert handling(spans[:1]) == 0.0


def test_a_running_pipeline_tells_when_it_waited() -> None:
    """The second rank waits for the first one's forwards, not the other way round.

    Each of these forwards sleeps for 30 ms once the second rank waits for it.
    """
    waits = threading.Semaphore(0)

    def sleep_while_it_waits(*_: Any) -> None:
        assert waits.acquire(timeout=100)
        time.sleep(0.03)

    def train(fabric: Any) -> tuple[float, float]:
        model = paced(2, width=8, seconds=0.0).double()
        pipeline = Pipeline(
            model, "gpipe", 3, (2, 1), loss=loss_of, optimizer=sgd, fabric=fabric, cuts=(0, 1)
        )
        pipeline._interpreter.spans = []
        if fabric.rank == 0:
            model[0].register_forward_pre_hook(sleep_while_it_waits)
        else:
            inbox: Any = pipeline._interpreter.exchange.inbox
            take = inbox.take
            inbox.take = lambda action: (waits.release(), take(action))[1]
        pipeline.step((torch.zeros(6, 8).double(), torch.zeros(6, 8).double()))
        spans = pipeline._interpreter.spans
        forwards = [span for span in spans if span.action.kind is Kind.F]
        return forwards[-1].waited - forwards[0].waited, spans[-1].end - spans[0].start

    (first, _), (second, whole) = on_threads(2, train)
    assert first < 0.03 < second < whole


def test_a_profile_leaves_the_weights_alone() -> None:
    model = chain_model(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    profile(model, loss_of, batches(1)[0], optimizer=sgd, repeat=1)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_from_a_profile_to_a_plan(tmp_path: Path, capsys: Any) -> None:
    where = f"{__name__}:little"
    import sys

    sys.modules.setdefault(__name__, sys.modules[little.__module__])
    files = tmp_path / "p.json", tmp_path / "graph.txt", tmp_path / "plan.json"
    words = ["profile", "--job", where, "--rows", "6", "--repeat", "1"]
    assert main([*words, "-o", str(files[0]), "--graph", str(files[1])]) == 0
    made, graph = Profile.load(files[0]), profiles.find(str(files[1]))
    assert made.sizes == graph.sizes == (8 * (WIDTH * WIDTH + WIDTH),) * 4
    words = ["partition", "--profile", str(files[0]), "--devices", "2", "--link", "10gbit"]
    assert main([*words, "--schedule", "2bw", "--microbatches", "2", "-o", str(files[2])]) == 0
    assert PipelinePlan.load(files[2]).sizes == made.sizes
    assert "written to" in capsys.readouterr().out


def halved() -> Job:
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(1)]
    return Job(chain_model(2).bfloat16(), loss_of, lambda rows: iter(data), master_weights=True)


def test_a_jobs_profile_says_what_its_replicas_send(tmp_path: Path, capsys: Any) -> None:
    """Sums of masters are float32. A plan counted them in bfloat16."""
    import sys

    sys.modules.setdefault(__name__, sys.modules[halved.__module__])
    file = tmp_path / "p.json"
    words = ["profile", "--job", f"{__name__}:halved", "--rows", "12", "--repeat", "1"]
    assert main([*words, "-o", str(file)]) == 0
    made = Profile.load(file)
    assert [(layer.rs_share, layer.grad_share) for layer in made.layers] == [(2.0, 2.0)] * 2
    before = Profile(made.name, tuple(replace(layer, rs_share=1.0) for layer in made.layers))
    # Where only traffic takes time, RS takes two of three parts of it, and took one of two.
    slow = Cluster.flat(2, Link(0.0, 1.0))
    periods = [
        run(lower_pipeline(generate("1f1b", 1, replicas=2, profile=each), each, slow)).period
        for each in (made, before)
    ]
    assert periods[0] == pytest.approx(1.5 * periods[1], rel=1e-3)
    capsys.readouterr()


def test_a_plan_that_leaves_devices_out_says_so(capsys: Any) -> None:
    """The documented launch of one rank on every device failed without a word about why."""
    assert main("partition --profile bert_base --devices 3 --link 1mbit".split()) == 0
    assert "1 of 3 devices are used: start 1 rank" in capsys.readouterr().out
    assert main("partition --profile bert_base --devices 2 --link 100gbit".split()) == 0
    assert "devices are used" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("job", "said"),
    [("nothing", "must look like"), ("no_such_module:f", "no_such_module"), ("os:getpid", "must return")],
)
def test_jobs_that_are_none(job: str, said: str, capsys: Any) -> None:
    assert main(["profile", "--job", job, "--rows", "2"]) == 2
    assert said in capsys.readouterr().err


def test_models_of_the_registry_are_jobs() -> None:
    job = load_job("dnn_bench.pipeline.jobs:mlp_tiny")
    x, y = next(job.batches(3))
    assert len(x) == 3 and isinstance(job.model, nn.Module)
    assert float(job.loss(job.model(x), y).detach()) > 0
    assert len(job_of("paced", 5).model) == 5


def options(*words: str) -> Any:
    return cli.options_of(cli.parse(list(words)))


@pytest.mark.parametrize(
    ("words", "model"),
    [
        # BERT's pre-training ties its word embedding to the last stage, which asynchronous schedules refuse.
        ("--schedule wpipe --depth 4 --num-data-parallel 2 --model bert_tiny", "bert_tiny_classifier"),
        ("--schedule 2bw --model BERT-base", "bert_base_classifier"),
        ("--schedule 2bw --model bert_base --task pretraining", "bert_base"),
        ("--schedule 1f1b --model bert_tiny", "bert_tiny"),
        ("--schedule 1f1b --model bert_tiny --task classification", "bert_tiny_classifier"),
        ("--schedule pipedream --depth 1 --model bert_tiny", "bert_tiny"),
        # GPT-2 is a language model; nobody asks for it and means a classifier.
        ("--schedule 2bw --model gpt2_tiny", "gpt2_tiny"),
        ("--schedule 2bw --model gpt2_tiny --task classification", "gpt2_tiny_classifier"),
        ("--schedule 2bw --model vgg_tiny --task classification", "vgg_tiny"),
    ],
)
def test_the_head_follows_the_schedule(words: str, model: str) -> None:
    assert options(*words.split()).model == model


def test_cuts_and_bundles_across_hosts() -> None:
    assert options("--model", "bert_tiny", "--cuts", "3,blocks.2").cuts == [0, 3, "blocks.2"]
    found = options("bundle", "--num-hp", "2", "--world-size", "2", "--across")
    assert found.ranks == [[0, 1], [2, 3]] and found.host_ranks == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="--cuts cannot be combined with --config or --plan"):
        options("--cuts", "3", "--plan", "plan.json")


def test_a_plan_tells_its_schedule(tmp_path: Path) -> None:
    pair = (False, False)
    for schedule, model in (("1f1b", "bert_tiny"), ("2bw", "bert_tiny_classifier")):
        plan = PipelinePlan("", (4, 4), schedule, 2, (0, 1), (1, 1), pair, "bubble", (0, 1), 1.0, 1.0, (8, 8))
        plan.save(tmp_path / "plan.json")
        made = options("--plan", str(tmp_path / "plan.json"), "--model", "bert_tiny")
        # Costs were measured for a fourth of a step's rows, whatever the plan's micro-batches.
        assert (made.model, made.schedule, made.microbatches) == (model, schedule, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--plan plan.json --num-microbatches 8", "--num-microbatches: --plan decides it"),
        ("--plan plan.json --num-data-parallel 2", "--num-data-parallel: --plan decides it"),
        ("--plan plan.json --recompute", "--recompute: --plan decides it"),
        ("--plan plan.json --hop 2", "--hop: --plan decides it"),
        ("--config conf.json --num-data-parallel 2", "--num-data-parallel: --config decides it"),
        ("--graph gpus=4.txt", "--graph: it belongs to --config"),
        ("--world-size 2", "--world-size: it belongs to bundle"),
        ("bundle --num-hp 2 --depth 4", "--depth: bundle decides it"),
        ("bundle --num-data-parallel 2", "--num-data-parallel: bundle decides it"),
        ("bundle --schedule gpipe", "--schedule: bundle decides it"),
        ("--model mlp_tiny --layers 12", "--layers: it belongs to --model paced"),
    ],
)
def test_options_that_would_change_nothing_are_refused(words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        options(*words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model vgg_tiny --task pretraining", "'vgg_tiny' has no pre-training head"),
        ("--model paced --task classification", "'paced' has no head"),
        ("--schedule 3f1b --model bert_tiny", "no pipeline schedule '3f1b'"),
    ],
)
def test_heads_that_are_none(words: str, said: str, capsys: Any) -> None:
    assert cli.main(words.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bert_tiny_classifier", "gpt2_tiny_classifier"])
def test_classifiers_train_under_weight_groups(name: str) -> None:
    """The papers' task under WPipe's schedule, against one process that replays its weight versions."""
    torch.manual_seed(0)
    model = models.build(name, vocab_size=32, dim=8, heads=2, dropout=0.0).double()
    dice = torch.Generator().manual_seed(1)
    batch = models.sample_batch(name, 8, generator=dice, seq_len=5, vocab_size=32)
    loss = functools.partial(models.loss, name)
    weights, losses, pipeline = train(
        model, [batch] * 8, 2, adam, loss, schedule="wpipe", num_microbatches=2, mesh=(2, 1)
    )
    assert pipeline.delays == (1, 1, 0, 0)
    wanted, expected = replayed(model, [batch] * 8, pipeline.program, adam, loss)
    assert_close(weights, wanted, 1e-9)
    assert losses == pytest.approx(expected, rel=1e-9) and losses[-1] < losses[0]


def test_every_replica_has_a_row() -> None:
    """The documented ``bundle ... --world-size 2 --DP-ONLY`` gave eight replicas four rows."""
    for words, rows in (("--DP-ONLY", 8), ("", 4)):
        made = options("bundle", "--num-hp", "2", "--world-size", "2", *words.split())
        layout = generate("bundle", made.depth, made.microbatches, ranks=made.ranks).pipeline
        assert layout is not None and default_rows(layout) == rows


def test_command_lines_of_the_three_systems(tmp_path: Path) -> None:
    made = options("--schedule", "wpipe", "--depth", "4", "--num-data-parallel", "2", "--model", "bert_base")
    assert (made.schedule, made.depth, made.replicas, cli.size_of(made)) == ("wpipe", 4, [2] * 4, 8)
    made = options("bundle", "--num-hp", "2", "--world-size", "2", "--rank", "1", "--IP", "10.0.0.1")
    assert made.ranks == [[0, 1, 4, 5], [2, 3, 6, 7]] and made.host_ranks == [[0, 1, 2, 3], [4, 5, 6, 7]]
    made = options("bundle", "--num-hp", "2", "--DP-ONLY")
    assert made.ranks == [[0, 1, 2, 3]] and made.depth == 1 and made.microbatches == 1
    made = options("bundle", "--shape", "4,2")
    assert made.ranks == [[0, 1, 2, 3], [4, 5]]
    conf, graph = tmp_path / "hybrid_conf.json", tmp_path / "gpus=4.txt"
    conf.write_text(CONF)
    partitioned(graph)
    made = options("--config", str(conf), "--graph", str(graph), "--model", "vgg_tiny")
    assert (made.schedule, made.cuts, made.ranks) == ("ashpipe", [0, 4, 6], [[0, 1], [2], [3]])
    assert cli.size_of(made) == 4 and made.microbatches == 1
    made = options("--config", str(conf), "--graph", str(graph), "--model", "vgg_tiny", "--schedule", "2bw")
    assert (made.schedule, made.microbatches) == ("2bw", 4)


def test_stage_modules_are_not_taken_for_layers(tmp_path: Path) -> None:
    """Three stage modules and the loss were read as the first layers of vgg_tiny, one each, and the rest."""
    conf = tmp_path / "hybrid_conf.json"
    conf.write_text(CONF)
    with pytest.raises(ValueError, match="which of the model's .* --graph gpus=N.txt"):
        options("--config", str(conf), "--model", "vgg_tiny")
