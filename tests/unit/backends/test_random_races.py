"""Random programs on devices on paper: no access lacks an order, and a wait that is left out is reported."""

from __future__ import annotations

from time import process_time

import pytest
import torch

from commsched.backends.races import COMM, MAIN, Races
from tests.checker.__main__ import warm_up
from tests.checker.races import KINDS
from tests.support.watched_ranks import new_devices


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    torch.set_num_threads(1)
    warm_up()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_have_no_race(kind: str) -> None:
    """``python -m tests.checker.races`` runs thousands."""
    for seed in (1, 2, 4, 5):
        reason = KINDS[kind](seed)
        assert not reason, (
            f"python -m tests.checker.races --kinds {kind} --programs 1 --seed {seed}\n{reason}"
        )


LEFT_OUT = [
    ("optimizers", "wait in StreamSchedule._start"),
    ("optimizers", "wait in StreamSchedule.wait"),
    ("pipelines", "wait in Staging.bring"),
    ("direct", "wait in _OnStream.wait"),
    ("tiles", "wait in Staging.take_in"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "place"), LEFT_OUT)
def test_a_wait_that_is_left_out_is_reported(kind: str, place: str) -> None:
    reported = (KINDS[kind](seed, place) for seed in (1, 2, 4, 5, 6))
    assert any(" on stream " in reason for reason in reported)


def test_the_detector_takes_time_in_proportion_to_the_operations() -> None:
    """Each freed tensor left a stream behind, for which every later wait of the host waited: after some
    thousands, programs took minutes."""

    def seconds(count: int) -> float:
        races = Races()
        with races:
            start = process_time()
            for _ in range(count):
                torch.ones(1).item()
            return process_time() - start

    seconds(100)
    assert seconds(2000) < 3 * 10 * seconds(200)


def test_memory_of_a_stream_is_given_on_with_its_next_allocation() -> None:
    """Where scripts let a stream wait before they use it, what it gives on then is in order."""

    def races_of(waits: bool) -> list[str]:
        races = Races(at_once=False)
        with races:
            races.stream = COMM
            made = torch.ones(4)
            races.stream = MAIN
            races.wait(MAIN, races.record(COMM))
            made.sum()
            del made
            if waits:
                races.wait(COMM, races.record(MAIN))
            races.stream = COMM
            torch.ones(4)
            races.stream = MAIN
            return races.found()

    assert not races_of(waits=True)
    [race] = races_of(waits=False)
    assert "the next owner of the memory" in race


def test_memory_that_was_freed_within_an_operation_gets_a_larger_tensor() -> None:
    """The end of the small one, which was noticed later, took lines of the large one away."""
    memory, races = torch.zeros(256).numpy().data, Races()
    small = torch.frombuffer(memory, dtype=torch.float32, offset=512, count=32)
    races._allocated(small)
    del small
    large = torch.frombuffer(memory, dtype=torch.float32)
    races._allocated(large)
    with races:
        large.add_(1.0)
        del large
        assert not races.found()


def test_memory_of_python_is_no_part_of_the_memory_beside_it() -> None:
    """Bytes in the last line of a tensor were read on another stream, and with them the tensor, it seemed."""
    memory, races = torch.zeros(256).numpy().data, Races()
    ours, bytes_ = (
        torch.frombuffer(memory, dtype=torch.float32, count=10),
        torch.frombuffer(memory, dtype=torch.float32, offset=48, count=30),
    )
    races._allocated(ours)
    with races:
        races.stream = COMM
        bytes_.sum()
        races.stream = MAIN
        ours.add_(1.0)
        assert not races.found()
        races.stream = COMM
        ours.sum()
        [race, *_] = races.found()
    assert "aten.sum" in race


def test_threads_find_every_operation_made() -> None:
    """Two threads made one each, and torch kept the address of the one that was replaced: a crash."""
    new_devices(2)
    every = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    names = [name.partition(".") for space, _, name in every if space == "aten"]
    for name in ("add", "mm", "copy_", "native_layer_norm_backward"):
        wanted = {overload or "default" for each, _, overload in names if each == name}
        assert wanted and wanted <= vars(getattr(torch.ops.aten, name)).keys()
