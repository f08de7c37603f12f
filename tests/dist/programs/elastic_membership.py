"""One elastic job through every way in which its members may change. Argument: the file with the hosts.

Each step of the walk has the hosts that rank 0 asks for, and the hosts in the order of the ranks that must
come of it: a host that stays keeps its place before those that came later.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import commsched as hvd

A, B, C = "localhost", "127.0.0.1", "127.1"
WALK = [
    ("alone", [A], [A]),
    ("a late join", [A, B], [A, B]),  # of two at once, horovodrun takes any for the first
    ("another one", [A, B, C], [A, B, C]),
    ("without the last", [A, B], [A, B]),
    ("from two to three", [A, B, C], [A, B, C]),
    ("without the one in the middle", [A, C], [A, C]),
    ("it is the last one now", [A, B, C], [A, C, B]),
    ("without the first", [B, C], [C, B]),
    ("after an abort", [B, C], [C, B]),
    ("a split and a merge", [B, C], [C, B]),
    ("down to one", [B], [B]),
]
hosts, here = Path(sys.argv[1]), os.environ["HOROVOD_HOSTNAME"]
has_aborted = False
hvd.init()


def ask_for(names):
    beside = hosts.with_suffix(".new")
    beside.write_text("".join(f"{name}:1\n" for name in names))
    beside.replace(hosts)


def check_sums(ranks, process_set=hvd.global_process_set):
    """The sum over these ranks, and a broadcast from the first one."""
    mine = torch.full((4,), hvd.rank() + 1.0)
    total = hvd.allreduce(mine, op=hvd.Sum, process_set=process_set)
    assert torch.equal(total, torch.full((4,), sum(rank + 1.0 for rank in ranks))), (ranks, total)
    sent = torch.full((4,), 42.0) if hvd.rank() == ranks[0] else torch.zeros(4)
    assert torch.equal(hvd.broadcast(sent, ranks[0], process_set=process_set), torch.full((4,), 42.0))


@hvd.elastic.run
def walk(state):
    global has_aborted
    while True:
        name, _, expected = WALK[state.at]
        if hvd.size() != len(expected) or set(hvd.allgather_object(here)) != set(expected):
            time.sleep(0.05)
            state.commit()  # raises where the hosts have changed
            continue
        assert hvd.allgather_object(here) == expected, name
        if name == "after an abort" and not has_aborted:
            has_aborted = True
            hvd.allreduce(torch.ones(hvd.rank() + 1))  # an error on all ranks; the same ones meet again
        everybody = list(range(hvd.size()))
        check_sums(everybody)
        if name == "a split and a merge":
            alone = [hvd.add_process_set([rank]) for rank in everybody]
            check_sums([hvd.rank()], alone[hvd.rank()])
            for one in alone:
                hvd.remove_process_set(one)
            check_sums(everybody)
        state.walked.append([name, hvd.rank(), hvd.size()])
        state.at += 1
        if state.at == len(WALK):
            return
        if hvd.rank() == 0:
            ask_for(WALK[state.at][1])
        state.commit()


state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, at=0, walked=[])
walk(state)
print(json.dumps([state.walked, has_aborted]), flush=True)
