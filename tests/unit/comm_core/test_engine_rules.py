"""Order, ownership and errors of the engine, between threads of one process."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from comm_core import (
    OPS,
    DirectTransport,
    Engine,
    EngineError,
    PythonTransport,
    RingTransport,
    TcpChannel,
    local_channels,
)
from tests.support.engines import local_engines, on_ranks, run_step

LONG = 3600.0  # seconds that no test waits


@pytest.fixture
def alone() -> Engine:
    """The engine of a single rank, with two buckets and no plan."""
    engine = Engine(direct(1)[0], 0, 1, timeout_seconds=LONG)
    for name in ("first", "second"):
        engine.add_bucket(torch.ones(4), postscale=0.5, name=name)
    return engine


def failure(call: Callable[[], object]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        call()
    return caught.value


def direct(size: int) -> list[DirectTransport]:
    return [DirectTransport(channel, rank, size) for rank, channel in enumerate(local_channels(size))]


def pair(plans: list[list[tuple[str, int]]], timeout: float = LONG) -> list[EngineError | None]:
    """What each rank's wait_all() raised when rank r ran plans[r] on two buckets."""

    def one(engine: Engine, plan: list[tuple[str, int]]) -> EngineError | None:
        try:
            for name in ("first", "second"):
                engine.add_bucket(torch.ones(len(plans) * 40), name=name)
            engine.install(plan)
            run_step(engine, sorted({bucket for _, bucket in plan}))
        except EngineError as error:
            return error
        return None

    with local_engines(len(plans), timeout) as engines:
        return on_ranks(len(plans), lambda rank: one(engines[rank], plans[rank]))


SPLIT = [("RS", 0), ("AG", 0)]
BOTH = [("RS", 0), ("RS", 1), ("AG", 0), ("AG", 1)]


def test_a_single_rank_only_scales(alone: Engine) -> None:
    gradients = torch.arange(5.0)
    bucket = alone.add_bucket(gradients, prescale=3.0, postscale=0.5)
    alone.install([("RS", bucket), ("AG", bucket)])
    run_step(alone, [bucket])
    assert gradients.tolist() == [0, 1.5, 3, 4.5, 6]


def test_operations_run_in_the_order_of_the_plan_whatever_the_order_of_the_marks(alone: Engine) -> None:
    alone.install([("RS", 1), ("RS", 0), ("AG", 0), ("AG", 1)])
    begin = time.monotonic()
    alone.begin_step()
    alone.mark_ready(0)
    time.sleep(0.02)
    assert not alone.ag_done(0) and not len(alone.events(clear=False)), "RS0 overtook RS1"
    alone.mark_ready(1)
    alone.wait_all()
    events = alone.events()
    assert [(OPS[op], int(b)) for op, b in zip(events["op"], events["bucket"], strict=True)] == [
        ("RS", 1), ("RS", 0), ("AG", 0), ("AG", 1)
    ]  # fmt: skip
    assert np.all(events["ready"] <= events["start"]) and np.all(events["start"] <= events["end"])
    assert np.all(events["end"][:-1] <= events["start"][1:])
    assert begin < events["end"][-1] < time.monotonic(), "not the clock of time.monotonic()"
    assert len(alone.events()) == 0, "reading clears"


def test_the_event_log_counts_bytes_and_keeps_the_latest() -> None:
    transports = direct(2)

    def one(rank: int) -> np.ndarray:
        engine = Engine(transports[rank], rank, 2, LONG, max_events=3)
        bucket = engine.add_bucket(torch.ones(200), wire_dtype=torch.float16)
        engine.install([("RS", bucket), ("AG", bucket)])
        for _ in range(2):
            run_step(engine, [bucket])
        events = engine.events()
        engine.close()
        return events

    for events in on_ranks(2, one):
        assert events["step"].tolist() == [1, 2, 2]
        assert events["bytes"].tolist() == [200, 200, 200]


def test_two_steps_may_be_under_way_but_not_three(alone: Engine) -> None:
    alone.install([("RS", 0), ("RS", 1), ("AG", 1), ("AG", 0)])
    assert alone.begin_step() == 1
    alone.mark_ready(1)
    assert alone.begin_step() == 2
    assert failure(alone.begin_step).kind == "usage"
    again = failure(lambda: alone.mark_ready(1))
    assert "nothing has waited for it in step 1" in str(again)
    assert alone.step == 2


def test_waits_look_at_the_step_begun_last(alone: Engine) -> None:
    alone.install([("AR", 0)])
    run_step(alone, [0])
    assert alone.ag_done(0)
    alone.begin_step()
    assert not alone.ag_done(0)
    alone.mark_ready(0)
    alone.wait_ag(0)


def test_without_marks_a_wait_ends_by_the_engines_time_out_and_the_failure_is_kept() -> None:
    engine = Engine(direct(1)[0], 0, 1, timeout_seconds=0.1)
    engine.add_bucket(torch.ones(2), name="forgotten")
    engine.install([("AR", 0)])
    engine.begin_step()
    error = failure(lambda: engine.wait_ag(0))
    assert (error.kind, error.bucket, error.name, error.step, error.op) == (
        "timeout",
        0,
        "forgotten",
        1,
        "AR",
    )
    assert "not marked ready" in str(error)
    assert str(failure(lambda: engine.mark_ready(0))) == str(error) == engine.error()


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda e: e.mark_ready(1), "not in the installed plan"),
        (lambda e: e.mark_ready(7), "there is no bucket 7: the engine has 2 buckets"),
        (lambda e: [run_step(e, [0]), e.mark_ready(0)], "marked ready twice in step 1"),
        (lambda e: e.mark_ready(0), "marked ready twice in step 0"),
        (lambda e: e.mark_updated(0), "not declared with needs_update"),
        (lambda e: e.wait_ag(1), "never gathers bucket 1 (second)"),
        (lambda e: [e.begin_step(), e.install([])], "between steps, but step 1 is not finished"),
        (lambda e: [e.begin_step(), e.add_bucket(torch.ones(1))], "between steps"),
        (lambda e: [e.begin_step(), e.clear_buckets()], "between steps"),
        (lambda e: e.install([("AG", 0)]), "must come before AG0"),
        (lambda e: e.install([("RS", 0), ("AR", 0)]), "reduces a bucket once"),
        (lambda e: e.install([("AR", 0), ("AG", 0)]), "gathers a bucket once"),
        (lambda e: e.install([("XX", 0)]), "made of RS, AG and AR"),
        (lambda e: e.install([("RS", 2)]), "no bucket 2"),
        (lambda e: e.add_bucket(torch.ones(2, 2)), "one-dimensional contiguous"),
        (lambda e: e.add_bucket(torch.ones(4), ends=[3]), "ascend to its length"),
        (lambda e: e.add_bucket(torch.ones(4), ends=[2, 4]), "one for each of 1 ranks"),
        (lambda e: e.add_bucket(torch.ones(4)[::2]), "one-dimensional contiguous"),
        (lambda e: e.add_bucket(torch.ones(2), gather=torch.ones(3)), "same number of elements"),
        (lambda e: e.add_bucket(torch.ones(2, dtype=torch.bool)), "has type Bool"),
        (lambda e: e.add_bucket(torch.ones(2), wire_dtype=torch.float64), "cannot travel as float64"),
        (lambda e: e.add_bucket(torch.ones(2).int(), wire_dtype=torch.float16), "cannot travel as float16"),
    ],
)  # fmt: skip
def test_wrong_use_says_which_rule_and_does_not_spoil_the_engine(
    alone: Engine, act: Callable[[Engine], object], text: str
) -> None:
    alone.install([("RS", 0), ("AG", 0)])
    error = failure(lambda: act(alone))
    assert error.kind == "usage" and text in str(error)
    assert alone.error() is None


def test_a_bucket_updated_in_shards_needs_both_halves() -> None:
    engine = Engine(direct(1)[0], 0, 1)
    bucket = engine.add_bucket(torch.ones(2), gather=torch.ones(2), needs_update=True)
    assert "updated between RS and AG" in str(failure(lambda: engine.install([("AR", bucket)])))
    assert "must gather it" in str(failure(lambda: engine.install([("RS", bucket)])))
    engine.install([("RS", bucket), ("AG", bucket)])
    engine.begin_step()
    assert "its RS is not done" in str(failure(lambda: engine.mark_updated(bucket)))
    engine.mark_ready(bucket)
    engine.wait_rs(bucket)
    engine.mark_updated(bucket)
    engine.wait_ag(bucket)


def test_a_plan_and_buckets_can_be_replaced_between_steps(alone: Engine) -> None:
    alone.install([("AR", 0), ("AR", 1)])
    run_step(alone, [0, 1])
    alone.install([("RS", 1), ("AG", 1)])
    run_step(alone, [1])
    alone.clear_buckets()
    assert alone.add_bucket(torch.ones(3), name="new") == 0
    alone.install([("AR", 0)])
    run_step(alone, [0])
    assert alone.step == 3


def test_the_engine_keeps_a_buckets_memory_alive_until_it_is_cleared() -> None:
    freed: list[bool] = []

    def own_memory() -> torch.Tensor:
        memory = np.ones(1000, dtype=np.float32)
        weakref.finalize(memory, freed.append, True)
        return torch.from_numpy(memory)

    engine = Engine(direct(1)[0], 0, 1)
    bucket = engine.add_bucket(own_memory())
    engine.install([("AR", bucket)])
    run_step(engine, [bucket])
    gc.collect()
    assert not freed
    engine.clear_buckets()
    gc.collect()
    assert freed


@pytest.mark.parametrize("ring", [False, True])
def test_a_message_that_does_not_come_is_a_time_out_that_names_the_peer_and_the_bucket(ring: bool) -> None:
    gave_up = threading.Event()

    def one(engine: Engine, rank: int) -> EngineError:
        engine.add_bucket(torch.ones(400), name="weights")
        engine.install(SPLIT)
        if rank == 1:
            gave_up.wait()  # it sends nothing meanwhile
        error = failure(lambda: run_step(engine, [0]))
        gave_up.set()
        return error

    with local_engines(2, timeout=[0.3, LONG], ring=ring) as engines:
        first, second = on_ranks(2, lambda rank: one(engines[rank], rank))
    assert second.kind == "peer_lost" and "rank 0 gave up: rank 0: RS of bucket 0 (weights)" in str(second)
    assert (first.kind, first.peer, first.name, first.step) == ("timeout", 1, "weights", 1)
    assert "is rank 1 alive" in str(first) and "RS of bucket 0 (weights) in step 1" in str(first)


def test_a_rank_that_vanishes_is_noticed_at_once() -> None:
    """Its sockets close without a farewell, while the others wait for it."""
    rows = [[(-1, -1, "")] * 3 for _ in range(3)]
    theirs = []
    for one, other in ((0, 1), (0, 2), (1, 2)):
        ends = socket.socketpair()
        rows[one][other] = (ends[0].detach(), -1, "")
        if other == 2:
            theirs.append(ends[1])
        else:
            rows[other][one] = (ends[1].detach(), -1, "")
    engines = [Engine(DirectTransport(TcpChannel(r, rows[r]), r, 3), r, 3, LONG) for r in range(2)]
    timer = threading.Timer(0.1, lambda: [end.close() for end in theirs])
    timer.start()

    def one_step(engine: Engine) -> EngineError:
        engine.add_bucket(torch.ones(120))
        engine.install(SPLIT)
        return failure(lambda: run_step(engine, [0]))

    errors = on_ranks(2, lambda rank: one_step(engines[rank]))
    timer.join()
    assert all(error.kind == "peer_lost" and error.peer == 2 for error in errors)
    assert any("the connection to rank 2 is lost" in str(error) for error in errors)


@pytest.mark.parametrize("other", [[("RS", 1), ("RS", 0), ("AG", 0), ("AG", 1)], SPLIT])
def test_ranks_with_different_plans_are_told_so(other: list[tuple[str, int]]) -> None:
    # A plan that only ends earlier is not noticed before the time-out.
    first, second = pair([BOTH, other], timeout=1 if other == SPLIT else LONG)
    told = [error for error in (first, second) if error is not None]
    assert told and all(error.kind in ("mismatch", "peer_lost", "timeout") for error in told)
    if other != SPLIT:
        assert any("do all ranks run the same plan?" in str(error) for error in told)


def test_a_rank_that_takes_one_step_less_stops_the_others_in_time() -> None:
    both_stepped = threading.Barrier(2)

    def one(engine: Engine, transport: DirectTransport, steps: int) -> str:
        engine.add_bucket(torch.ones(80), name="w")
        engine.install(SPLIT)
        try:
            for step in range(steps):
                run_step(engine, [0])
                if step == 1:
                    both_stepped.wait()
                    transport.set_timeout(0.5)
        except EngineError as error:
            return f"{error.kind} {error.peer} {error.step}"
        return "fine"

    transports = direct(2)
    engines = [Engine(transports[rank], rank, 2, LONG) for rank in range(2)]
    found = on_ranks(2, lambda rank: one(engines[rank], transports[rank], 3 - rank))
    assert found == ["timeout 1 3", "fine"]
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("end", ["abort", "close"])
def test_abort_and_close_end_the_waits_of_other_threads(end: str) -> None:
    transports = direct(2)
    engine = Engine(transports[0], 0, 2, LONG)
    engine.add_bucket(torch.ones(4))
    engine.install([("AR", 0)])
    engine.begin_step()
    engine.mark_ready(0)
    timer = threading.Timer(0.1, engine.close if end == "close" else lambda: engine.abort("enough"))
    timer.start()
    error = failure(lambda: engine.wait_ag(0))
    assert error.kind == "aborted" and ("enough" if end == "abort" else "closed") in str(error)
    timer.join()
    engine.close()
    engine.close()


class Collectives:
    """What PythonTransport asks of an object, for a single rank."""

    rank, size = 0, 1

    def __init__(self, fault: Callable[[], object] = lambda: None) -> None:
        self.fault = fault
        self.calls: list[str] = []

    def scatter_sum(self, full: torch.Tensor, shard: torch.Tensor, name: str) -> None:
        self.calls.append(name)
        self.fault()
        shard.copy_(full)

    def gather(self, shard: torch.Tensor, full: torch.Tensor, name: str) -> None:
        self.calls.append(name)
        full.copy_(shard)

    def sum(self, full: torch.Tensor, name: str) -> None:
        self.calls.append(name)


def python_engine(collectives: Collectives, timeout: float = LONG) -> tuple[Engine, torch.Tensor]:
    engine = Engine(PythonTransport(collectives), 0, 1, timeout)
    buffer = torch.tensor([1.0, 2.0])
    engine.add_bucket(buffer, wire_dtype=torch.bfloat16, prescale=2.0, postscale=0.25, name="w")
    return engine, buffer


def test_a_python_object_can_carry_out_the_operations() -> None:
    collectives = Collectives()
    engine, buffer = python_engine(collectives)
    engine.install(SPLIT)
    run_step(engine, [0])
    engine.install([("AR", 0)])
    run_step(engine, [0])
    assert collectives.calls == ["rs.0.w", "ag.0.w", "ar.0.w"]
    assert buffer.tolist() == [0.25, 0.5]
    engine.close()


def test_an_exception_of_a_python_object_is_the_engines_failure() -> None:
    def fault() -> None:
        raise ZeroDivisionError("the network is down")

    collectives = Collectives(fault)
    engine, _ = python_engine(collectives)
    engine.install(SPLIT)
    error = failure(lambda: run_step(engine, [0]))
    assert error.bucket == 0 and "ZeroDivisionError: the network is down" in str(error)
    engine.close()


def test_a_python_object_that_never_returns_hangs_neither_waits_nor_close() -> None:
    release = threading.Event()
    engine, _ = python_engine(Collectives(release.wait), timeout=0.2)
    engine.install(SPLIT)
    error = failure(lambda: run_step(engine, [0]))
    assert error.kind == "timeout" and "under way" in str(error)
    engine.close()
    release.set()


def test_an_engine_that_nobody_closes_ends_with_its_last_reference() -> None:
    mine, other = direct(2)
    engine = Engine(mine, 0, 2, LONG)
    del mine
    engine.add_bucket(torch.ones(2))
    engine.install(SPLIT)
    engine.begin_step()
    engine.mark_ready(0)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    values = torch.ones(2)
    error = failure(lambda: [other.reduce_scatter(values, step=1), other.all_gather(values, step=1)])
    assert (error.kind, error.peer) == ("peer_lost", 0), "its connection is open still"


def test_transports_and_engines_check_what_they_are_given() -> None:
    channel = local_channels(2)[0]
    transport = DirectTransport(channel, 0, 2)
    assert "must be the transport's, 0 of 2" in str(failure(lambda: Engine(transport, 0, 3)))
    assert "timeout_seconds must be positive" in str(failure(lambda: Engine(transport, 0, 2, 0.0)))
    assert "divide by the number of ranks" in str(
        failure(lambda: Engine(transport, 0, 2).add_bucket(torch.ones(3), name="odd"))
    )
    assert "a channel is needed, not" in str(failure(lambda: RingTransport("gloo", 0, 2)))
    assert "rank must be in [0, size)" in str(failure(lambda: RingTransport(channel, 2, 2)))
    assert "segment_bytes" in str(failure(lambda: RingTransport(channel, 0, 2, segment_bytes=9)))
