"""What a hybrid sends: a line for each pair of ranks, the bytes that are sent, and their time."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from commsched import spatial
from commsched.channels import Parcel, Pending
from scheduler.ir.layout import Placement
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.pipelines import generate
from scheduler.simulate.simulator import simulate
from scheduler.validate import validate
from tests.support.pipeline_runs import on_threads

TILES, ONE, TWO = spatial.Tiles((2, 2)), spatial.Samples(), spatial.Samples(2)
SHAPE = (4, 1, 8, 8)


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)),
        nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)),
    ]


def test_a_line_for_each_border() -> None:
    """A tile of 4x4 pixels sends a row or column of one channel, then of two, and a pixel at the corner."""
    text = str(spatial.explain_stages(stages(), [spatial.Tiles((1, 2)), TWO], SHAPE))
    halo, share = 4 * 4 * 8 * 3, 4 * 4 * 2 * 8 * 4 // 2
    assert text.splitlines() == [
        "a micro-batch (4, 1, 8, 8) in 2 stages, one replica:",
        "stage 0 on ranks 0, 1",
        "stage 1 on ranks 2, 3",
        f"halo of stage 0: rank 0 sends rank 1 {halo} bytes, sends {halo * 2 // 3} in the backward",
        f"halo of stage 0: rank 1 sends rank 0 {halo} bytes, sends {halo * 2 // 3} in the backward",
        *(
            f"activation of stage 0: rank {one} sends rank {other} {share} bytes, gets {share} back"
            for one in (0, 1)
            for other in (2, 3)
        ),
    ]


@pytest.mark.few
@pytest.mark.parametrize("placements", [(TILES, ONE), (TILES, TWO), (TILES, spatial.Tiles((1, 3)))])
def test_bytes_are_those_that_are_sent(
    placements: Sequence[Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    images, target = torch.zeros(SHAPE), torch.zeros(4, dtype=torch.int64)
    start = stages()
    report = spatial.explain_stages(start, placements, SHAPE)
    sent: Counter[tuple[str, int, int]] = Counter()

    def work(fabric: Any) -> None:
        trainer = spatial.Hybrid(copy.deepcopy(start), placements, loss=F.cross_entropy, fabric=fabric)
        trainer.step(images, target)  # descriptions of messages travel in the first step
        lane = trainer.pipeline._interpreter.exchange.outbox.lane
        count(lane.channel, range(fabric.size), "activation")
        for stage in trainer.pipeline.stages.values():
            for tiled in dict.fromkeys(stage.tiled.values()):
                ranks = trainer.program.layout.ranks[stage.number]
                count(tiled.mesh.channel, ranks, "halo")
        trainer.step(images, target)
        trainer.close()

    def count(channel: Any, ranks: Sequence[int], kind: str) -> None:
        exchange = channel.exchange

        def counted(sends: Sequence[Parcel], recvs: Sequence[Parcel], what: str) -> Pending:
            # The notes by which ranks agree are no pixels.
            if "comparing ranks" not in what:
                for peer, buffer in sends:
                    sent[kind, ranks[channel.rank], ranks[peer]] += buffer.nbytes
            return exchange(sends, recvs, what)

        channel.exchange = counted

    on_threads(sum(placement.size for placement in placements), work)
    expected: Counter[tuple[str, int, int]] = Counter()
    for flow in report.flows:
        if flow.kind == "halo":
            expected[flow.kind, flow.source, flow.target] += flow.forward + flow.backward
        else:
            expected[flow.kind, flow.source, flow.target] += flow.forward
            expected[flow.kind, flow.target, flow.source] += flow.backward
    assert sent == expected


def test_borders_are_simulated() -> None:
    """Halos of a program with these borders stand in the timeline, and take time where nothing hides them."""
    report = spatial.explain_stages(stages(), [TILES, ONE], SHAPE)
    border = report.borders[0]
    assert border is not None and report.borders[1] is None
    tiles = [
        sum(f.forward for f in report.flows if f.kind == "halo" and f.source == rank) for rank in range(4)
    ]
    assert border.forward == max(tiles) > border.backward > 0 and border.share == 1.0

    program = replace(generate("1f1b", 2, 1, placements=[TILES, ONE]), borders=report.borders)
    validate(program)
    profile = Profile("stages", (Layer("0", 1.0, 2.0, 4), Layer("1", 1.0, 2.0, 4)))
    result = simulate(program, profile, {"link": Link(0.0, 0.0), "halo": Link(0.0, 1e-3)})
    times = {event.name: event.end - event.start for event in result.timeline if event.rank == 0}
    assert times["0HALO0"] == pytest.approx(border.forward * 1e-3)
    assert times["0HALOB0"] == pytest.approx(border.backward * 1e-3)


def test_interiors_hide_halos() -> None:
    front = nn.Conv2d(64, 64, 3, padding=1)
    shape = (1, 64, 256, 256)
    border = spatial.explain_stages([front], [spatial.Tiles((1, 2))], shape, overlap="on").borders[0]
    assert border is not None and border.share == 1 / 64  # the columns 0 and 127 of 128
    border = spatial.explain_stages([front], [spatial.Tiles((1, 2))], shape, overlap="off").borders[0]
    assert border is not None and border.share == 1.0


def test_what_hybrids_refuse_is_refused() -> None:
    front, shape = nn.Conv2d(1, 1, 3), (1, 1, 8, 8)
    with pytest.raises(ValueError, match="every stage needs a placement, got 1 stages and 2 placements"):
        spatial.explain_stages([front], [TILES, ONE], shape)
    with pytest.raises(ValueError, match="softmax"):
        spatial.explain_stages([nn.Softmax(-1)], [TILES], shape)
    with pytest.raises(ValueError, match="stage 0 runs on tiles and returns"):
        whole = nn.Sequential(front, nn.AdaptiveAvgPool2d(1))
        spatial.explain_stages([whole, nn.ReLU()], [TILES, ONE], shape)
