"""Elastic jobs of horovodrun: a host comes, a rank is killed or stopped. The result is plain training's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.launch import elastic_hosts, run_ranks, start_ranks
from tests.support.needs import needs_horovod

PROGRAM = Path(__file__).with_name("programs") / "elastic_training.py"
COMMITS = PROGRAM.with_name("elastic_commits.py")
MEMBERSHIP = PROGRAM.with_name("elastic_membership.py")
SIZES = [1, 1, 1, 2, 2, 2, 1, 1, 1]


def plain() -> list[float]:
    """The parameters after the same steps in one process, with the ranks' mean gradients."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, size in enumerate(SIZES):
        optimizer.zero_grad()
        for rank in range(size):
            seeded = torch.Generator().manual_seed(10 * step + rank)
            data = torch.randn(4, 3, dtype=torch.float64, generator=seeded)
            (model(data).square().mean() / size).backward()
        optimizer.step()
    return [value for p in model.parameters() for value in p.flatten().tolist()]


@pytest.mark.dist
@needs_horovod
@pytest.mark.parametrize(
    ("gather", "victim", "loss"), [("gradients", 0, "SIGKILL"), ("parameters", 1, "SIGSTOP")]
)
def test_a_host_comes_and_a_rank_is_lost(tmp_path: Path, gather: str, victim: int, loss: str) -> None:
    hosts, launcher = elastic_hosts(tmp_path, "localhost:1")
    env = {"COMMSCHED_TIMEOUT": "300"}
    with start_ranks(PROGRAM, 2, [hosts, gather, str(victim), loss], env, launcher) as ranks:
        results = ranks.wait()
        shown = ranks.report()
    lines = results[1 - victim].stdout.splitlines()
    assert lines, shown
    sizes, at_reset, listening, values = json.loads(lines[-1])
    assert sizes == SIZES and at_reset == ([2] * victim + [1]), shown
    assert listening <= 1, "the stores of ended epochs still listen"
    torch.testing.assert_close(torch.tensor(values), torch.tensor(plain()))


def replayed(sizes: list[int]) -> list[object]:
    """The steps, the weights and their momenta after steps of so many ranks: elastic_commits.py."""
    processed, weight, momentum = 0, 0.0, 0.0
    for size in sizes:
        step = range(processed, min(processed + 2 * size, 36))
        momentum = 0.5 * momentum + sum(index + 1 for index in step)
        weight, processed = weight - momentum, step.stop
    return [len(sizes), [weight], [momentum]]


@pytest.mark.dist
@needs_horovod
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_killed_before_the_others_have_all_of_a_commit(tmp_path: Path, victim: int) -> None:
    """Each goes back to that commit or the one before, and all go on from one of them: each sample once."""
    hosts, launcher = elastic_hosts(tmp_path, "localhost:1", "127.0.0.1:1", "127.1:1")
    with start_ranks(COMMITS, 3, [hosts, str(victim)], {}, launcher) as ranks:
        results = ranks.wait()
        shown = ranks.report()
    printed = [json.loads(line) for rank in results for line in rank.stdout.splitlines() if line[:2] == "[["]
    assert len(printed) == 2 and printed[0][::2] == printed[1][::2], shown
    sizes, _, end = printed[0]
    assert set(sizes[:2]) == {3} and set(sizes[3:]) == {2} and end == replayed(sizes), shown
    assert sum(2 * size for size in sizes[:-1]) < 36 <= sum(2 * size for size in sizes), shown
    for _, restored, _ in printed:
        assert restored[-1] in (replayed([3] * 2), replayed([3] * 3)), shown


def loses_a_rank_that_has_not_met() -> None:
    import os

    if os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
        os._exit(1)  # after the driver's answer to the others, and before the meeting
    import sys
    import time
    from pathlib import Path

    import torch

    import commsched as hvd

    hvd.init()

    @hvd.elastic.run
    def train(state):
        while state.step < 4:
            hvd.allreduce(torch.ones(1))
            state.step += 1
            if state.step == 2:
                Path(sys.argv[1]).write_text("localhost:1\n127.0.0.1:1\n")
                deadline = time.monotonic() + 300
                while state._host_messages.empty() and time.monotonic() < deadline:
                    time.sleep(0.05)
                begin.append(time.monotonic())
            state.commit()

    begin, waited = [], []
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
    state.register_reset_callbacks([lambda: waited.append(time.monotonic() - begin[0])])
    train(state)
    print(hvd.size(), *waited, flush=True)


@pytest.mark.dist
@needs_horovod
def test_a_rank_that_dies_before_the_others_have_met_it(tmp_path: Path) -> None:
    """They waited for the whole COMMSCHED_START_TIMEOUT."""
    hosts, launcher = elastic_hosts(tmp_path, "localhost:1")
    env = {"COMMSCHED_START_TIMEOUT": "96"}
    with start_ranks(loses_a_rank_that_has_not_met, 2, [hosts], env, launcher) as ranks:
        results = ranks.wait()
        shown = ranks.report()
    size, *waited = results[0].stdout.split() or [""]
    assert size == "1" and len(waited) == 1, shown
    assert 12 <= float(waited[0]) < 90, shown


@pytest.mark.dist
@needs_horovod
def test_every_way_in_which_members_change(tmp_path: Path) -> None:
    """Joins, removals of the last, the middle and the first rank, an abort, subsets: one job through all."""
    hosts, launcher = elastic_hosts(tmp_path, "localhost:1")
    with start_ranks(MEMBERSHIP, 3, [hosts], {}, launcher) as ranks:
        results = ranks.wait()
        shown = ranks.report()
    lines = [line for rank in results for line in rank.stdout.splitlines() if line.startswith("[[")]
    assert len(lines) == 1, shown
    walked, has_aborted = json.loads(lines[0])
    assert has_aborted and [size for _, _, size in walked] == [1, 2, 3, 2, 3, 2, 3, 2, 2, 2, 1], shown


def leaves_out_a_step() -> None:
    import torch

    import commsched as hvd

    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < 5:
            if hvd.rank() != 0 or state.step != 3:
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                hvd.allreduce(torch.ones(1), name="loss")
            state.step += 1
            state.commit()

    try:
        train(state)
    except hvd.CommError:
        print(state.step, flush=True)


@pytest.mark.dist
def test_a_rank_0_that_leaves_out_a_step_does_not_keep_its_state() -> None:
    """It had committed, and gave the state without that step's update to the others."""
    ranks = run_ranks(leaves_out_a_step, 2, env={"COMMSCHED_TIMEOUT": "20"})
    assert [rank.stdout.split() for rank in ranks] == [["3"], ["3"]], [rank.stderr for rank in ranks]
