"""Messages from device to device between processes: all code for NCCL, over groups that need no GPU."""

import pytest

from tests.support.launch import run_ranks, start_ranks

pytestmark = pytest.mark.dist

# Gloo's groups in the place of NCCL's; what NCCL's watchdog finds out is ``error``.
GROUPS = """
import copy, os, sys, threading, time
from types import SimpleNamespace
import torch, torch.nn as nn
from torch.distributed import PrefixStore
import commsched as hvd
from commsched.backends.nccl import NcclDirection
from commsched.collectives.carrier import carrier
from commsched.errors import CommError
from commsched.pipeline import Pipeline, messages
from commsched.process.groups import gloo_group

class Group:
    made = []

    def __init__(self, name, ranks, device, blocks):
        meeting, place = carrier().meeting, list(ranks).index(hvd.rank())
        self.inner = gloo_group(PrefixStore("data", meeting.store), name, place, ranks, meeting.address)
        self.ended, self.error, self.moved, self.freed = "", "SUCCESS", 0, threading.Event()
        Group.made.append(self)

    def broadcast(self, tensors, options):
        self.moved += 1
        return self.inner.broadcast(tensors, options)

    def get_error(self):
        return SimpleNamespace(name=self.error)

    def abort(self):
        self.ended = "aborted"
        self.freed.set()

    def shutdown(self):
        self.ended = "shut down"

def over_groups():
    messages.nccl_between = Group
    messages.device_name = lambda tensors, node: f"gpu {hvd.rank()}" if tensors else "cpu"
    messages.nccl_usable = lambda names: "cpu" not in names
    NcclDirection.can_tell = staticmethod(lambda: True)

def model():
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]).double()

def loss(outputs, targets):
    return (outputs - targets).square().sum(1).mean()

def pipeline_of(mesh, **options):
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    options = {"num_microbatches": 4, "loss": loss, "optimizer": optimizer, **options}
    return Pipeline(model(), mesh=mesh, **options)

dice = torch.Generator().manual_seed(2)
batches = [tuple(torch.randn(16, 8, generator=dice, dtype=torch.float64) for _ in range(2)) for _ in range(3)]
hvd.init()
"""

TRAINED = """
def trained(**options):
    pipeline = pipeline_of((hvd.size() // 2, 2), **options)
    losses = [pipeline.step(batch) for batch in batches] + [pipeline.evaluate(batches[0])]
    weights = pipeline.state_dict()
    pipeline.close()
    return losses, weights

schedules = "gpipe", "1f1b", "interleaved", "zero_bubble"
through_hosts = [trained(schedule=schedule) for schedule in schedules]
assert not Group.made
over_groups()
for schedule, wanted in zip(schedules, through_hosts):
    found = trained(schedule=schedule)
    assert found[0] == wanted[0], (found[0], wanted[0])
    assert all(torch.equal(value, wanted[1][name]) for name, value in found[1].items())
    assert Group.made and all(group.ended == "shut down" and group.moved > 12 for group in Group.made)
    Group.made.clear()

pipeline = pipeline_of((hvd.size() // 2, 2))
pipeline.step(batches[0])
if hvd.rank():  # rank 0 ends first, in order and without close(): nobody aborts
    time.sleep(2)
assert not any(group.ended for group in Group.made)
"""


@pytest.mark.parametrize("ranks", [4, 6])
def test_training_has_the_bits_of_messages_through_the_host(ranks: int) -> None:
    run_ranks(GROUPS + TRAINED, ranks, check=True)


def test_a_chosen_transport_keeps_messages_on_the_host() -> None:
    program = "over_groups()\npipeline_of((2, 1)).step(batches[0])\nassert not Group.made\n"
    run_ranks(GROUPS + program, 2, env={"COMMSCHED_TRANSPORT": "direct"}, check=True)


DIES = """
over_groups()
pipeline = pipeline_of((2, 1))
pipeline.step(batches[0])
print("stepped", flush=True)
if hvd.rank() == 1:
    time.sleep(900)
# As in a step, where the host waits for its GPU until the groups are aborted.
assert all(group.freed.wait(300) for group in Group.made), "nobody aborted"
try:
    pipeline.step(batches[1])
except CommError as error:
    assert any(text in str(error) for text in ("rank 1 is gone", "rank 1 died")), error
    print("told")
"""


def test_groups_are_aborted_when_a_rank_dies() -> None:
    with start_ranks(GROUPS + DIES, 2) as ranks:
        for rank in range(2):
            ranks.wait_for_output(rank, "stepped")
        ranks.kill(1)
        result = ranks.wait()[0]
    assert "told" in result.stdout and result.returncode == 0, result.stderr[-3000:]


FAILS = """
over_groups()
pipeline = pipeline_of((2, 1))
pipeline.step(batches[0])
try:
    if hvd.rank() == 0:
        pipeline.step((torch.zeros(16, 5, dtype=torch.float64), batches[1][1]))
    # As in a step, where the host waits for its GPU until the groups are aborted.
    assert all(group.freed.wait(300) for group in Group.made), "nobody aborted"
    pipeline.step(batches[1])
except (CommError, ValueError) as error:
    print("SAID", error)
assert all(group.ended == "aborted" for group in Group.made)
hvd.barrier()
"""


def test_groups_are_aborted_when_a_rank_gives_up() -> None:
    first, second = run_ranks(GROUPS + FAILS, 2, check=True)
    assert "stage 0 on rank 0 failed in the forward" in first.stdout.partition("SAID")[2]
    assert "rank 0" in second.stdout.partition("SAID")[2]
