"""The coordinator's decisions: when an operation runs, in which order, and what is said when it can not."""

import itertools
import random

import pytest

from commsched.collectives.torch_carrier.coordinator import Negotiator, fused


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def request(name, kind="allreduce", **changes):
    return {
        "type": "request",
        "kind": kind,
        "name": name,
        "set": 0,
        "dtypes": ["torch.float32"],
        "shapes": [[4, 2]],
        "device": "cpu",
        "op": 1,
        "prescale": 1.0,
        "postscale": 1.0,
        "root": -1,
        "splits": None,
        "ranks": None,
        "bytes": 32,
    } | changes


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def three(clock):
    return Negotiator(3, 10.0, clock)


def only(replies):
    assert len(replies) == 1, replies
    return replies[0]


def test_an_operation_runs_when_its_last_rank_comes(three):
    assert three.submit(1, request("a")) == []
    assert three.submit(0, request("a")) == []
    ranks, message = only(three.submit(2, request("a")))
    assert ranks == [0, 1, 2]
    assert (message["type"], message["names"], message["joined"]) == ("run", ["a"], [])


def test_what_waits_in_a_removed_process_set_fails(three):
    for rank in range(3):
        replies = three.submit(rank, request("p", "add_process_set", ranks=[0, 1]))
    number = only(replies)[1]["new_set"]
    assert three.submit(0, request("lonely", set=number)) == []
    for rank in range(3):
        replies = three.submit(rank, request("r", "remove_process_set", ranks=[number]))
    (everybody, removed), (waiting, error) = replies
    assert everybody == [0, 1, 2] and removed["removed"]
    assert (waiting, error["type"], error["name"]) == ([0], "error", "lonely")
    assert "removed" in only(three.submit(1, request("lonely", set=number)))[1]["message"]
    assert three.expire() == [] and three.next_deadline() is None


def test_ranks_may_come_in_any_order_and_all_hear_one_order():
    for seed in range(20):
        chance = random.Random(seed)
        negotiator, heard = Negotiator(3, 10.0, lambda: 0.0), {rank: [] for rank in range(3)}
        waiting = {rank: chance.sample("abcdef", 6) for rank in range(3)}
        while any(waiting.values()):
            rank = chance.choice([rank for rank in waiting if waiting[rank]])
            for ranks, message in negotiator.submit(rank, request(waiting[rank].pop())):
                for receiver in ranks:
                    heard[receiver].extend(message["names"])
        assert heard[0] == heard[1] == heard[2] and sorted(heard[0]) == list("abcdef")


def test_only_members_take_part(three):
    for rank in range(2):
        three.submit(rank, request("new", "add_process_set", ranks=[0, 2]))
    ranks, message = only(three.submit(2, request("new", "add_process_set", ranks=[0, 2])))
    assert ranks == [0, 1, 2] and message["new_set"] == 1
    assert three.submit(2, request("a", set=1)) == []
    assert only(three.submit(0, request("a", set=1)))[0] == [0, 2]


def test_a_process_set_that_exists_gets_no_number(three):
    for rank, name in itertools.product(range(3), ("x", "y")):
        replies = three.submit(rank, request(name, "add_process_set", ranks=[1, 2]))
        if rank == 2:
            assert only(replies)[1]["new_set"] == {"x": 1, "y": None}[name]


def test_what_the_ranks_need_of_each_other_travels(three):
    for rank in range(2):
        three.submit(rank, request("g", "allgather", shapes=[[rank, 2], [5, 2]]))
        three.submit(rank, request("t", "alltoall", splits=[rank, 0, 1]))
    _, gather = only(three.submit(2, request("g", "allgather", shapes=[[2, 2], [5, 2]])))
    assert gather["rows"] == [[0, 5], [1, 5], [2, 5]]
    _, exchange = only(three.submit(2, request("t", "alltoall", splits=[2, 0, 1])))
    assert exchange["splits"] == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]


def test_disagreement_is_told_to_all_and_forgotten(three):
    three.submit(0, request("a"))
    three.submit(2, request("a"))
    ranks, message = only(three.submit(1, request("a", shapes=[[5, 2]])))
    assert ranks == [0, 1, 2] and message["type"] == "error"
    assert "rank 0 has [[4, 2]], rank 1 has [[5, 2]]" in message["message"]
    assert three.next_deadline() is None


def test_joined_ranks_stand_in_with_zeros(three):
    assert three.submit(0, request("a")) == []
    assert three.join(1) == []
    ranks, message = only(three.submit(2, request("a")))
    assert ranks == [0, 1, 2] and message["joined"] == [1]
    assert three.submit(2, request("b")) == []
    assert only(three.join(0))[1]["joined"] == [0, 1]
    assert only(three.join(2)) == ([0, 1, 2], {"type": "joined", "last": 2})
    assert three.submit(0, request("c")) == [], "after join() has ended, ranks are waited for again"


def test_progress_of_the_others_keeps_a_join_alive(three, clock):
    three.join(1)
    clock.now = 9.0
    three.hear(0)
    clock.now = 18.0
    assert three.expire() == [] and three.next_deadline() == 19.0
    clock.now = 19.0
    assert only(three.expire())[1]["type"] == "join_failed"


def test_the_others_know_where_the_zeros_of_a_joined_rank_are(three):
    """They took its zeros to be on a GPU of their own: NCCL was never used beside a joined rank."""
    for device in ("cpu", "cuda:b:1"):
        three.join(1, device)
        three.submit(0, request("a", device="cuda:a:0"))
        message = only(three.submit(2, request("a", device="cuda:c:0")))[1]
        assert message["devices"] == ["cuda:a:0", device, "cuda:c:0"]
        three.join(0)
        three.join(2)


@pytest.mark.parametrize(
    ("kind", "op"), [("allreduce", 3), ("allgather", 1), ("broadcast", 1), ("alltoall", 1)]
)
def test_what_zeros_can_not_stand_in_for(three, kind, op):
    three.join(1)
    three.submit(0, request("a", kind, op=op))
    ranks, message = only(three.submit(2, request("a", kind, op=op)))
    assert ranks == [0, 2] and "[1] have joined" in message["message"]


def test_time_out_names_the_missing_and_what_they_do(three, clock):
    three.submit(0, request("a"))
    clock.now = 6.0
    three.submit(1, request("b", "broadcast"))
    assert three.next_deadline() == 10.0 and three.expire() == []
    clock.now = 10.0
    ranks, message = only(three.expire())
    assert ranks == [0]
    assert "a waited 10 s (COMMSCHED_TIMEOUT) for ranks [1, 2]" in message["message"]
    assert "rank 1 waits in b; rank 2 waits in nothing" in message["message"]
    assert three.next_deadline() == 16.0


def test_who_waits_is_told_for_whom_before_the_time_out(clock):
    three = Negotiator(3, 10.0, clock, warning=2.0)
    three.submit(1, request("a"))
    assert three.next_deadline() == 2.0
    clock.now = 2.5
    ranks, message = only(three.expire())
    assert ranks == [1] and message["type"] == "waits"
    assert "a waited 2 of 10 s (COMMSCHED_TIMEOUT) for ranks [0, 2]" in message["message"]
    assert three.next_deadline() == 10.0 and three.expire() == []
    clock.now = 10.0
    assert "a waited 10 s (COMMSCHED_TIMEOUT) for ranks [0, 2]" in only(three.expire())[1]["message"]


@pytest.mark.parametrize("apart", [0.0, 1e-6, 3.0])
def test_operations_that_wait_for_each_other_are_both_named_whichever_expires_first(three, clock, apart):
    """Whose request was read first expired first, was forgotten, and then its rank waited "in nothing"."""
    three.submit(1, request("b", "broadcast"))
    clock.now = apart
    three.submit(0, request("a"))
    told = {}
    for now in (10.0, 10.0 + apart):
        clock.now = now
        told |= {ranks[0]: message["message"] for ranks, message in three.expire()}
    assert "for ranks [0, 2]: rank 0 waits in a" in told[1]
    assert ("rank 1 waits in b" if apart == 0 else "rank 1 waited in vain in b") in told[0]


def test_what_a_rank_does_now_is_told_rather_than_what_it_waited_for_before(three, clock):
    three.submit(1, request("b", "broadcast"))
    clock.now = 10.0
    three.submit(0, request("a"))
    only(three.expire())
    three.submit(1, request("c"))
    clock.now = 20.0
    told = {ranks[0]: message["message"] for ranks, message in three.expire()}
    assert "rank 1 waits in c; rank 2 waits in nothing" in told[0]


def test_a_rank_that_makes_a_plan_is_said_to_do_that(three, clock):
    """It was said to wait "in nothing", for as long as it searched a plan for all ranks."""
    three.hear(0, "makes a plan")
    three.submit(1, request("agreement"))
    clock.now = 10.0
    assert "rank 0 makes a plan; rank 2 waits in nothing" in only(three.expire())[1]["message"]
    three.submit(0, request("agreement"))  # the plan is there
    three.submit(2, request("later"))
    clock.now = 20.0
    told = {ranks[0]: message["message"] for ranks, message in three.expire()}
    assert "rank 0 waits in agreement" in told[2]


def test_what_a_rank_has_done_is_not_told_of_what_it_does_now(three, clock):
    three.hear(0, "makes a plan")
    three.hear(0)
    three.submit(1, request("agreement"))
    clock.now = 10.0
    assert "rank 0 waits in nothing" in only(three.expire())[1]["message"]


def test_join_waits_as_long_as_there_is_news(three, clock):
    three.join(0)
    clock.now = 9.0
    three.submit(1, request("a"))
    three.submit(2, request("a"))
    clock.now = 18.0
    assert three.expire() == []
    clock.now = 19.0
    ranks, message = only(three.expire())
    assert ranks == [0] and message["type"] == "join_failed" and "ranks [1, 2]" in message["message"]


def test_a_dead_rank_ends_what_waits_for_it_and_what_comes_later(three):
    three.submit(0, request("a"))
    three.join(1)
    replies = three.leave(2, "rank 2 died", alarm=True)
    assert [(ranks, message["type"]) for ranks, message in replies] == [
        ([0], "error"),
        ([1], "join_failed"),
        ([0, 1], "lost"),
    ]
    assert all("rank 2 died" in message["message"] for _, message in replies)
    assert only(three.submit(0, request("b")))[1]["message"] == "b can not run: rank 2 died"
    assert only(three.join(0))[1]["type"] == "join_failed"
    assert three.leave(2, "again", alarm=True) == []


def test_a_rank_that_left_in_peace_disturbs_only_those_that_need_it(three):
    for rank in range(3):
        three.submit(rank, request("new", "add_process_set", ranks=[0, 1]))
    assert three.leave(2, "rank 2 has left", alarm=False) == []
    three.submit(0, request("a", set=1))
    assert only(three.submit(1, request("a", set=1)))[1]["type"] == "run"
    assert only(three.submit(1, request("b")))[1]["type"] == "error"


def test_a_collective_that_broke_off_is_explained_by_the_death_that_follows(three, clock):
    """Whether a rank's broken connections or its death are told first is up to the machine."""
    three.fail("a failed on rank 0: Connection closed by peer")
    assert three.next_deadline() == 5.0 and three.expire() == []
    clock.now = 4.9
    assert only(three.leave(2, "rank 2 died", alarm=True)) == (
        [0, 1],
        {"type": "lost", "message": "rank 2 died", "rank": 2},
    )
    three.fail("a failed on rank 1: Connection closed by peer")
    assert three.next_deadline() is None
    assert only(three.submit(0, request("b")))[1]["message"] == "b can not run: rank 2 died"


def test_a_collective_that_broke_off_although_all_ranks_live_is_told_to_all(three, clock):
    three.fail("a failed on rank 0: out of memory")
    three.fail("a failed on rank 1: Connection closed by peer")
    clock.now = 5.0
    assert only(three.expire()) == (
        [0, 1, 2],
        {"type": "lost", "message": "a failed on rank 0: out of memory", "rank": None},
    )
    assert three.next_deadline() is None and three.expire() == []


def test_a_rank_that_leaves_within_a_collective_is_why_it_broke_off(three):
    three.fail("a failed on rank 0: Connection closed by peer")
    assert only(three.leave(1, "rank 1 has left", alarm=False))[1]["message"] == "rank 1 has left"


def runs(negotiator, *requests, threshold=100):
    """What the ranks are told where all of them submit these requests: the names of each run."""
    replies = []
    for one in requests:
        members = negotiator._sets[one["set"]]
        for rank in members:
            if rank not in negotiator._joined:
                replies += negotiator.submit(rank, dict(one))
    messages = [message for _, message in fused(replies, threshold)]
    assert all("requests" in message for message in messages if message["joined"])
    assert not any("requests" in message for message in messages if not message["joined"])
    return [message["names"] for message in messages]


def test_all_reduces_that_are_ready_together_run_as_one_up_to_a_size(three):
    assert runs(three, *map(request, "abcde")) == [["a", "b", "c"], ["d", "e"]]
    assert runs(three, *map(request, "abc"), threshold=64) == [["a", "b"], ["c"]]
    assert runs(three, *map(request, "abc"), threshold=0) == [["a"], ["b"], ["c"]]
    large = request("large", bytes=101)
    assert runs(three, request("a"), large, request("b")) == [["a", "b"], ["large"]]


@pytest.mark.parametrize(
    "other", [{"op": 0}, {"prescale": 0.5}, {"postscale": 2.0}, {"device": "cuda:a:0"}, {"kind": "broadcast"}]
)
def test_only_what_is_computed_alike_runs_as_one(three, other):
    others = [request(name, **other) for name in "cd"]
    found = runs(three, request("a"), others[0], request("b"), others[1])
    apart = other.keys() & {"device", "kind"}
    assert found == ([["a", "b"], ["c"], ["d"]] if apart else [["a", "b"], ["c", "d"]])


def test_all_reduces_of_different_types_and_of_groups_run_as_one(three):
    group = request("g", dtypes=["torch.int32", "torch.int64"], shapes=[[1], [2]])
    assert runs(three, request("a"), group, request("b", dtypes=["torch.float64"])) == [["a", "g", "b"]]


def test_all_reduces_of_different_process_sets_run_apart(three):
    for rank in range(3):
        replies = three.submit(rank, request("p", "add_process_set", ranks=[0, 2]))
    number = only(replies)[1]["new_set"]
    inner = [request(name, set=number) for name in "xy"]
    assert runs(three, request("a"), inner[0], request("b"), inner[1]) == [["a", "b"], ["x", "y"]]


def test_a_joined_rank_hears_what_zeros_it_gives_to_which_run(three):
    replies = three.submit(0, request("before"))
    three.join(1)
    for name in "ab":
        for rank in (0, 2):
            replies += three.submit(rank, request(name, shapes=[[len(replies)]]))
    replies += three.submit(2, request("before"))
    ((ranks, message),) = fused(replies, 1000)
    assert ranks == [0, 1, 2] and message["joined"] == [1] and message["names"] == ["a", "b", "before"]
    assert [one["name"] for one in message["requests"]] == message["names"]
    assert [one["shapes"] for one in message["requests"]] == [[[0]], [[1]], [[4, 2]]]


def test_runs_with_and_without_joined_ranks_stay_apart_and_other_replies_keep_their_order(three):
    replies = [reply for rank in range(3) for reply in three.submit(rank, request("a"))]
    replies += [([0], {"type": "waits", "message": "text"})]
    three.join(1)
    replies += [reply for rank in (0, 2) for reply in three.submit(rank, request("b"))]
    assert [message.get("names") for _, message in fused(replies, 1000)] == [["a"], None, ["b"]]
