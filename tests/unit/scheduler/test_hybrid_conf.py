"""hybrid_conf.json: entries are stage modules of a partitioned graph, not layers of the model.

The files here have the structure of those that PipeDream and AshPipe ship.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.formats.pipedream import Graph, parse_hybrid_conf
from scheduler.ir.profile import Layer, Profile
from scheduler.pipelines.build import program_of
from scheduler.pipelines.convert import read_plan, to_plan
from scheduler.validate import validate


def conf(modules: list[int], ranks: list[list[int]], **fields: Any) -> dict[str, Any]:
    held = {str(stage): row for stage, row in enumerate(ranks)}
    return {"module_to_stage_map": modules, "stage_to_rank_map": held, **fields}


def graph(*nodes: int) -> Graph:
    """A chain with so many nodes in each stage module, every second of them without weights."""
    count = sum(nodes)
    layers = (Layer(f"layer{n}", 1e-3, 2e-3, 0 if n % 2 else 4 * (n + 1), 8) for n in range(count))
    starts = [sum(nodes[:at]) for at in range(len(nodes))]
    return Graph.chain(Profile("chain", tuple(layers))).with_stages(starts)


@pytest.mark.parametrize(
    ("data", "nodes", "cuts", "replicas"),
    [
        # AlexNet, AshPipe's: three stage modules and the loss, the second of one node without weights.
        (
            conf(
                [0, 1, 2, 2],
                [[0, 1, 2, 3], [4, 5, 6], [7]],
                stage_to_depth_map={"2": 0, "1": 1, "0": 2},
                recompute_stage=[],
            ),
            (13, 1, 8),
            (0, 13, 14),
            (4, 3, 1),
        ),
        # VGG16 on 16 devices: 15 replicas and 1.
        (
            conf([0, 1, 1], [list(range(15)), [15]], stage_to_depth_map={"0": 1, "1": 0}),
            (31, 8),
            (0, 31),
            (15, 1),
        ),
        # VGG16 straight: as many stages as devices.
        (
            conf([*range(16), 15], [[rank] for rank in range(16)]),
            (3,) * 16,
            tuple(range(0, 48, 3)),
            (1,) * 16,
        ),
        # dp_conf.json: the modules of a pipeline, all in one stage.
        (conf([0, 0, 0, 0], [[0, 1, 2, 3]]), (5, 2, 4), (0,), (4,)),
        # ResNet50 on two machines: two modules in each stage.
        (conf([0, 0, 1, 1, 1], [[0, 1], [2]]), (4, 3, 2, 6), (0, 7), (2, 1)),
        # ResNet50 on four hosts of four: each host has two replicas of stage 0 and one of the others.
        (
            conf([0, 1, 2, 2], [[0, 1, 4, 5, 8, 9, 12, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
            (9, 4, 2),
            (0, 9, 13),
            (8, 4, 4),
        ),
    ],
)
def test_files_as_they_are_shipped(
    data: dict[str, Any], nodes: tuple[int, ...], cuts: tuple[int, ...], replicas: tuple[int, ...]
) -> None:
    found = to_plan(parse_hybrid_conf(data), graph(*nodes))
    assert (found.cuts, found.replicas) == (cuts, replicas)
    assert [list(row) for row in found.rank_map] == list(data["stage_to_rank_map"].values())
    profile = graph(*nodes).profile("chain")
    program = program_of(found, profile)
    validate(program, profile)
    assert program.pipeline is not None and program.pipeline.ranks == found.rank_map


def test_modules_are_no_layers(tmp_path: Path) -> None:
    """Three stage modules on a model of eight layers were read as its first two layers and the rest."""
    path = tmp_path / "hybrid_conf.json"
    path.write_text('{"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1, 2], "1": [3]}}')
    with pytest.raises(
        ValueError,
        match=r"hybrid_conf.json: .* puts 2 stage modules \(and the loss\) into 2 stages; which of the"
        r" model's 8 layers .* give it with --graph gpus=N.txt",
    ):
        read_plan(path, sizes=(4,) * 8)
    with pytest.raises(ValueError, match="needs the partitioned graph"):
        read_plan(path)


def test_alone_where_only_one_reading_fits(tmp_path: Path) -> None:
    """As many stage modules as layers, or a single stage."""
    path = tmp_path / "hybrid_conf.json"
    path.write_text(
        '{"module_to_stage_map": [0, 0, 1, 2, 2], "stage_to_rank_map": {"0": [0, 1], "1": [2], "2": [3]}}'
    )
    assert read_plan(path, sizes=(4,) * 4).cuts == (0, 2, 3)
    with pytest.raises(ValueError, match="4 stage modules .* the model's 5 layers"):
        read_plan(path, sizes=(4,) * 5)
    path.write_text('{"module_to_stage_map": [0, 0, 0], "stage_to_rank_map": {"0": [0, 1, 2]}}')
    assert read_plan(path, sizes=(4,) * 9).cuts == (0,)


TWO = conf([0, 1, 1], [[0, 1], [2]])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "expected a JSON object, got list"),
        ({}, "'module_to_stage_map' must be a list of whole numbers, got None"),
        (TWO | {"module_to_stage_map": [0, 2, 2]}, "must start with stage 0, rise by at most 1"),
        (TWO | {"module_to_stage_map": [1, 1]}, "must start with stage 0"),
        (TWO | {"module_to_stage_map": [0]}, "end with the loss"),
        (TWO | {"module_to_stage_map": [0, 0, 1]}, "is the loss, and stage 1 would have nothing else"),
        (TWO | {"stage_to_rank_map": None}, "'stage_to_rank_map' must have an entry .* 0 to 1 .* got None"),
        (conf([0, 1, 2, 2], [[0], [1]]), r"an entry for each of the stages 0 to 2 .* got \{'0': \[0\], '1'"),
        (conf([0, 1, 1], [[0], [1], [2]]), "an entry for each of the stages 0 to 1"),
        (conf([0, 1, 1], [[0], []]), "gives stage 1 no rank"),
        (conf([0, 1, 1], [[0, 1], [1]]), r"uses rank 1 twice \(stages \[0, 1\]\)"),
        (conf([0, 1, 1], [[0, 0], [1]]), r"uses rank 0 twice \(stages \[0\]\)"),
        (
            conf([0, 1, 1], [[0, 1], [4]]),
            r"names 3 ranks, so they must be 0 to 2; 2 missing, got \[0, 1, 4\]",
        ),
        (conf([0, 1, 1], [[0], ["a"]]), r"field 'stage_to_rank_map\[1\]' must be a list of whole numbers"),
        (TWO | {"stage_to_depth_map": {"0": 1}}, "'stage_to_depth_map' must have an entry for each"),
        (TWO | {"stage_to_depth_map": {"0": 1, "1": "x"}}, "'stage_to_depth_map' must have whole numbers"),
        (TWO | {"recompute_stage": [2]}, r"'recompute_stage' names stages 0 to 1, got \[2\]"),
        (TWO | {"commsched": 7}, "field 'commsched' must be an object, got 7"),
    ],
)
def test_damaged_files(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_hybrid_conf(data)


def test_a_key_without_quotes_is_told(tmp_path: Path) -> None:
    """One of PipeDream's files is no JSON."""
    path = tmp_path / "mp_conf.json"
    path.write_text('{"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0], 1: [1]}}')
    with pytest.raises(ValueError, match="mp_conf.json: is not valid JSON"):
        read_plan(path, sizes=[4])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            conf([0, 1, 2, 2], [[0], [1], [2]]),
            r"has 4 entries, so it is for 3 stage modules and the loss, but gpus=2.txt has 2 stages",
        ),
        (
            TWO | {"stage_to_depth_map": {"0": 12, "1": 0}},
            r"lets the stages be \[12, 0\] minibatches ahead, schedule 'ashpipe' .* \[1, 0\]; choose another",
        ),
        (TWO | {"commsched": {"schedule": "2bw"}}, r"must have \['bottleneck', .* got \['schedule'\]"),
    ],
)
def test_files_that_do_not_fit_each_other(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_plan(parse_hybrid_conf(data), replace(graph(3, 4), where="gpus=2.txt"))
