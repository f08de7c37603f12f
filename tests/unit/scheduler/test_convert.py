"""Plans as PipeDream's and AshPipe's files and back."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched.cli import main
from scheduler.formats.pipedream import Graph, Node, format_graph, parse_graph
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.link import Cluster, Link
from scheduler.ir.profile import Layer, Profile
from scheduler.pipelines.convert import expecting, read_plan, to_conf, to_plan, write_files

MILLISECONDS = st.integers(0, 10**7).map(lambda n: n / 1e9)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any directed graph without cycles, its nodes in any order."""
    count = draw(st.integers(1, 10))
    places = draw(st.permutations(range(count)))
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    nodes = [
        Node(
            f"node{n}",
            Layer(f"Op({n}, k=({n}, {n}))", draw(MILLISECONDS), draw(MILLISECONDS), 4 * (n % 3), 8 * n),
        )
        for n in range(count)
    ]
    return Graph(tuple(nodes), tuple((places[one], places[other]) for one, other in chosen))


@st.composite
def plans(draw: st.DrawFn, graph: Graph) -> PipelinePlan:
    """Any plan of this graph: cuts, unequal replicas on ranks in any order."""
    sizes = graph.profile("model").sizes
    inner = draw(st.sets(st.integers(1, len(sizes) - 1), max_size=4)) if len(sizes) > 1 else set()
    cuts = (0, *sorted(inner))
    replicas = tuple(draw(st.integers(1, 4)) for _ in cuts)
    ranks = draw(st.permutations(range(sum(replicas))))
    seconds = st.floats(0, 10, allow_nan=False)
    schedule = draw(st.sampled_from(["ashpipe", "pipedream", "2bw", "1f1b", "gpipe"]))
    return PipelinePlan(
        model="model",
        sizes=sizes,
        schedule=schedule,
        microbatches=1 if schedule == "ashpipe" else draw(st.integers(1, 4)),
        cuts=cuts,
        replicas=replicas,
        recompute=tuple(draw(st.booleans()) for _ in cuts),
        placement=draw(st.sampled_from(["eager", "bubble"])),
        devices=tuple(draw(st.permutations(range(2, 2 + len(ranks))))),
        period=draw(seconds),
        bottleneck=draw(seconds),
        memory=tuple(draw(st.integers(0, 1 << 40)) for _ in ranks),
        rank_map=tuple(tuple(ranks[a:b]) for a, b in pairwise(accumulate(replicas, initial=0))),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_plan_survives_its_files(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    plan = data.draw(plans(graph))
    with TemporaryDirectory() as folder:
        files = write_files(plan, graph, folder)
        assert [file.name for file in files] == [f"gpus={plan.ranks}.txt", "hybrid_conf.json"]
        assert read_plan(files[1], files[0]) == plan
        assert PipelinePlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        assert Graph.load(files[0]).profile("model").layers == graph.profile("model").layers


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_nodes_go_where_their_file_puts_them(data: st.DataObject, seed: int) -> None:
    """A file of another system: nodes in an order of its own, nothing but the format's fields."""
    graph = data.draw(graphs())
    plan = data.draw(plans(graph))
    nodes, edges = [], []
    for line in format_graph(graph.with_stages(plan.cuts)).splitlines():
        (edges if line.startswith("\t") else nodes).append(line)
    random.Random(seed).shuffle(nodes)
    shuffled = parse_graph("\n".join([*nodes, *edges]))
    conf = replace(to_conf(plan), ours={}, depths=None)
    found = to_plan(conf, shuffled)
    assert (found.cuts, found.rank_map, found.recompute) == (plan.cuts, plan.rank_map, plan.recompute)
    ends = [*found.cuts[1:], len(nodes)]
    order = shuffled.order()
    for stage, (first, end) in enumerate(zip(found.cuts, ends, strict=True)):
        assert {shuffled.nodes[number].stage for number in order[first:end]} == {stage}


def test_the_other_systems_fields() -> None:
    """As AshPipe writes them: the loss is the last entry, and stages are that many minibatches ahead."""
    fields = {"replicas": (2, 1, 1), "rank_map": (), "devices": range(4), "memory": (0,) * 4}
    plan = replace(NODES, recompute=(True, False, False), **fields)
    written = json.loads(to_conf(plan).text())
    assert written["module_to_stage_map"] == [0, 1, 2, 2]
    assert written["stage_to_rank_map"] == {"0": [0, 1], "1": [2], "2": [3]}
    assert written["stage_to_depth_map"] == {"0": 2, "1": 1, "2": 0}
    assert written["recompute_stage"] == [0]


def test_plans_that_read_files_of_before() -> None:
    """PipelinePlan files without ``rank_map`` number the ranks stage by stage, as they did."""
    data = {name: value for name, value in NODES.to_dict().items() if name not in ("hash", "rank_map")}
    assert PipelinePlan.from_dict(data) == NODES and NODES.rank_map == ((0,), (1,), (2,))
    with pytest.raises(ValueError, match=r"give the stages \[1, 1, 1\] ranks, each of 0 to 2 once, got"):
        replace(NODES, rank_map=((0,), (1,), (1,)))


# A plan of a graph's nodes, for models with other layers

NODES = PipelinePlan("nodes", (0, 8, 0, 4, 4, 0, 0, 6), "ashpipe", 1, (0, 3, 6), (1, 1, 1), (False,) * 3,
                     "bubble", (0, 1, 2), 0.0, 0.0, (0, 0, 0))  # fmt: skip


def test_stages_keep_their_weights_on_coarser_layers() -> None:
    """The third stage starts two nodes before its weights; these compute in the second."""
    assert NODES.on((8, 4, 4, 6)).cuts == (0, 1, 3)
    assert NODES.on((8, 8, 6)).cuts == (0, 1, 2)
    assert NODES.on(NODES.sizes) is NODES


@pytest.mark.parametrize(
    ("cuts", "sizes", "message"),
    [
        ((0, 4, 6), (8, 8, 6), "stage 1 of the plan starts inside layer 1 .* 12 bytes .* the layer 8"),
        ((0, 5, 7), (8, 4, 4, 6), "stage 1 of the plan has no weights"),
        ((0, 1, 3), (8, 4, 4, 6), "stage 0 of the plan has no weights"),
        ((0, 3, 6), (8, 9, 6), "is for 'nodes' of 8 layers, this model has 3"),
        ((0, 3, 6), (8, 4, 5, 5), "is for 'nodes' of 8 layers, this model has 4"),
    ],
)
def test_stages_that_a_model_does_not_have(
    cuts: tuple[int, ...], sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(NODES, cuts=cuts).on(sizes)


def test_weightless_last_stage() -> None:
    with pytest.raises(ValueError, match="stage 1 of the plan has no weights"):
        replace(NODES, sizes=(8, 0, 4, 0, 0, 0, 0, 0), cuts=(0, 5, 7)).on((8, 4))


# Commands


def test_from_a_graph_to_files_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """profile -> partition -> convert, and the files as a plan again."""
    graph = tmp_path / "graph.txt"
    fork = Graph.chain(Profile("fork", tuple(Layer(f"l{n}", 4e-3, 8e-3, 1000, 500) for n in range(6))))
    graph.write_text(format_graph(replace(fork, edges=(*fork.edges, (0, 3), (1, 5)))))
    first, again = str(tmp_path / "plan.json"), str(tmp_path / "again.json")
    words = ["partition", "--profile", str(graph), "--devices", "4", "--link", "10gbit", "--max-stages", "2"]
    assert main([*words, "--schedule", "ashpipe", "-o", first]) == 0
    assert main(["convert", "--plan", first, "--profile", str(graph), "-o", str(tmp_path / "out")]) == 0
    files = tmp_path / "out" / "gpus=4.txt", tmp_path / "out" / "hybrid_conf.json"
    assert all(f"written to {file}" in capsys.readouterr().out for file in files[:1]) and files[1].exists()
    assert len(Graph.load(files[0]).edges) == 7
    words = ["convert", "--graph", str(files[0]), "--conf", str(files[1]), "-o", again]
    assert main(words) == 0
    assert PipelinePlan.load(again) == PipelinePlan.load(first)
    assert main([*words, "--schedule", "2bw"]) == 2  # its depths are others
    assert "choose another schedule" in capsys.readouterr().err


def test_what_files_of_others_may_take(tmp_path: Path) -> None:
    """With a link, the plan says what the simulator expects; without one nothing."""
    profile = Profile("chain", tuple(Layer(f"layer{n}", 1e-3, 2e-3, 8, 8) for n in range(4)))
    conf, graph, out = (tmp_path / name for name in ("hybrid_conf.json", "gpus=3.txt", "plan.json"))
    conf.write_text('{"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [2, 0], "1": [1]}}')
    graph.write_text(format_graph(Graph.chain(profile).with_stages((0, 3))))
    words = ["convert", "--graph", str(graph), "--conf", str(conf), "-o", str(out)]
    assert main(words) == 0
    plan = PipelinePlan.load(out)
    assert (plan.cuts, plan.rank_map, plan.period) == ((0, 3), ((2, 0), (1,)), 0.0)
    assert main([*words, "--link", "alpha=0,beta=0"]) == 0
    free = Cluster.flat(3, Link(0.0, 0.0))
    assert PipelinePlan.load(out) == expecting(plan, Graph.load(graph).profile("gpus=3"), free)
    # Three layers of 3 ms on two replicas.
    assert PipelinePlan.load(out).bottleneck == pytest.approx(4.5e-3)
    assert PipelinePlan.load(out).period == pytest.approx(4.5e-3)
    # 24 bytes of a stage: replicas share their update, and those of a bundle each make all of it.
    updated = replace(Graph.load(graph).profile("gpus=3"), update_per_byte=1e-3)
    for schedule, update in (("ashpipe", 12e-3), ("bundle", 24e-3)):
        found = expecting(replace(plan, schedule=schedule), updated, free)
        assert found.bottleneck == pytest.approx(4.5e-3 + update)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan", "plan.json"], "--plan needs --profile"),
        (["--conf", "hybrid_conf.json"], "--conf needs --graph"),
        (
            ["--plan", "plan.json", "--profile", "vgg16", "--link", "10gbit"],
            "--link does not belong to --plan",
        ),
    ],
)
def test_words_that_are_missing(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", *words, "-o", "nowhere"]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_of_another_model(tmp_path: Path) -> None:
    profile = Profile("chain", tuple(Layer(f"layer{n}", 1e-3, 2e-3, 8, 8) for n in range(4)))
    with pytest.raises(ValueError, match="this model has 4"):
        write_files(NODES, Graph.chain(profile), tmp_path)
