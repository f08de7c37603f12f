"""Every hand-over of the stream backend between streams, under torch's race detector.

Each story is free of races; and for each line of the backend that waits, one story is a race without it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from commsched.backends.interface import Scaling
from commsched.backends.races import MAIN, OTHER, SIDE, Race, Races, WatchedDevice
from tests.support.races import Forgetful
from tests.support.stream_backend import SHAPES, SIZE, OneRank

ALL = range(len(SHAPES))


class Training:
    """One rank trains weights; the loss is the sum of all weights times a number."""

    def __init__(
        self, races: Races, device: WatchedDevice, sharded: bool = False, wire: torch.dtype | None = None
    ) -> None:
        self.races, self.device, self.sharded, self.wire = races, device, sharded, wire
        self.rank = OneRank(device, sharded=sharded, scaling=Scaling(wire_dtype=wire))
        self.weights = [torch.zeros(shape) for shape in SHAPES]
        self.steps = 0

    @property
    def backend(self):  # type: ignore[no-untyped-def]
        return self.rank.backend

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Compute on a stream, ordered after the current one and before it, as autograd does it."""
        device, before = self.device, self.device.current()
        if stream != before:
            self.races.wait(stream, self.races.record(before))
        with device.on(stream):
            yield
        if stream != before:
            self.races.wait(before, self.races.record(stream))

    def backward(
        self,
        streams: Sequence[int] = (MAIN, MAIN, MAIN),
        put: Callable[[int, torch.Tensor], None] | None = None,
        order: tuple[int, int] = (1, 0),
        ordered: bool = True,
    ) -> None:
        """Compute each gradient on its stream, on which the bucket that it completes is marked, too.

        ``ordered``: these streams wait for the forward.
        """
        completes = {1: (2, 1), 0: (0,)} if order[0] else {0: (1, 0), 1: (2,)}
        # Autograd's threads wait once for the forward, then each runs on.
        for stream in {*streams} - {MAIN} if ordered else ():
            self.races.wait(stream, self.races.record(MAIN))
        first = completes[order[0]][0]
        with self.device.on(streams[first]):
            self.backend.begin_step()
        for bucket in order:
            for param in completes[bucket]:
                with self.device.on(streams[param]):
                    grad = torch.full(SHAPES[param], float(self.steps + 1))
                    if put is None:
                        self.backend.put(param, grad, self.rank.slots[param])
                    else:
                        put(param, grad)
                    del grad
                    if param == completes[bucket][-1]:
                        self.backend.mark_ready(bucket)
        for stream in {*streams} - {MAIN}:
            self.races.wait(MAIN, self.races.record(stream))
        self.backend.mark_ready(2)
        self.steps += 1

    def step(self) -> None:
        """Sharded: the update of this rank's part."""
        self.backend.wait_gathered(2)
        if self.sharded:
            for bucket in range(2):
                self.backend.wait_reduced(bucket)
                half = self.rank.buffers.bucket(bucket).numel() // SIZE
                self.rank.gathered.bucket(bucket)[:half].add_(self.rank.buffers.bucket(bucket)[:half])
                self.backend.mark_updated(bucket)
        self.backend.step_ended()

    def complete(self, buckets: Sequence[int] = (0, 1)) -> None:
        """What a parameter does that is needed: wait, and update it."""
        for bucket in buckets:
            self.backend.wait_gathered(bucket)
            for param in {0: (0,), 1: (1, 2)}[bucket]:
                if param == 1:
                    self.backend.wait_gathered(0)
                if self.sharded:
                    self.weights[param].copy_(self.rank.results[param])
                else:
                    self.weights[param].add_(self.rank.slots[param])
        self.backend.updates_issued()

    def forward(self) -> None:
        for weight in self.weights:
            weight.sum()
        for lost in self.rank.residuals:  # as saved and loaded between two steps
            lost.copy_(lost.clone())

    def check(self) -> None:
        expected = SIZE * sum(range(1, self.steps + 1))
        for weight in self.weights:
            assert weight.eq(float(expected)).all()


def one_stream(training: Training) -> None:
    for order in ((1, 0), (0, 1), (1, 0)):
        training.backward(order=order)
        training.step()
        training.complete()
        training.forward()


def gradients_from_two_streams(training: Training) -> None:
    """The bucket is marked once where its other gradient was computed, and once elsewhere."""
    for streams in ((MAIN, SIDE, MAIN), (SIDE, MAIN, SIDE), (MAIN, MAIN, SIDE), (SIDE, SIDE, SIDE)):
        for order in ((1, 0), (0, 1)):
            training.backward(streams, order=order)
            training.step()
            training.complete()
            training.forward()


def gradients_that_are_copied(training: Training) -> None:
    """Into slots on another stream, which the forward before has read on the main one."""
    rank = training.rank

    def put(param: int, grad: torch.Tensor) -> None:
        if param == 1:
            grad = grad.t().contiguous().t()
        training.backend.put(param, grad, rank.slots[param])

    for streams in ((MAIN, SIDE, MAIN), (MAIN, SIDE, SIDE), (SIDE, MAIN, MAIN)):
        training.backward(streams, put, ordered=False)
        training.step()
        training.complete()
        training.forward()


def gradients_added_in_their_slots(training: Training) -> None:
    rank = training.rank

    def put(param: int, grad: torch.Tensor) -> None:
        # What autograd does with p.grad, on a stream that it has let wait for the main one.
        rank.slots[param].zero_().add_(grad)
        training.backend.put(param, rank.slots[param], rank.slots[param])

    for streams in ((MAIN, SIDE, MAIN), (SIDE, MAIN, MAIN), (MAIN, SIDE, SIDE)):
        training.backward(streams, put)
        training.step()
        training.complete()
        training.forward()


def a_second_gradient_on_another_stream(training: Training) -> None:
    """The first was computed on one stream, and the second is added to it on another one."""
    rank, races = training.rank, training.races

    def put(param: int, grad: torch.Tensor) -> None:
        training.backend.put(param, grad / 2, rank.slots[param])
        if param == 1:
            other = MAIN + SIDE - races.stream
            half = torch.full_like(grad, 0.5 * (training.steps + 1))
            races.wait(other, races.record(races.stream))  # autograd hands the gradient over
            with training.device.on(other):
                training.backend.take_back(param, rank.slots[param])
                rank.slots[param].add_(half)
                races.uses(half, other)
        else:
            training.backend.put(param, grad, rank.slots[param])

    for streams in ((MAIN, SIDE, MAIN), (MAIN, MAIN, MAIN), (SIDE, MAIN, SIDE)):
        training.backward(streams, put)
        training.step()
        training.complete()
        training.forward()


def gradients_added_to_earlier_ones(training: Training) -> None:
    """Autograd adds to p.grad in its memory, which a backward on another stream has allocated."""
    rank, races = training.rank, training.races

    def put(param: int, grad: torch.Tensor) -> None:
        other = MAIN + SIDE - races.stream
        with training.device.on(other):
            before = torch.zeros(SHAPES[param])
            base = torch.ones(SHAPES[param])
        races.wait(races.stream, races.record(other))
        before.add_(grad)
        if param == 0:  # only the difference to an earlier sum is sent: see Round._put_difference
            before.add_(1.0)
            training.backend.take_back(param, rank.slots[param])
            torch.sub(before, base, out=rank.slots[param])
            training.backend.reads(before)
            training.backend.reads(base)
        else:
            training.backend.put(param, before, rank.slots[param])

    for streams in ((MAIN, MAIN, MAIN), (MAIN, SIDE, MAIN), (SIDE, MAIN, SIDE), (SIDE, SIDE, SIDE)):
        training.backward(streams, put)
        training.step()
        training.complete()
        training.forward()


def parameters_completed_on_another_stream(training: Training) -> None:
    for _ in range(3):
        training.backward()
        training.step()
        with training.device.on(SIDE):  # an evaluation, say, which nobody has ordered
            training.complete((0,))
        training.complete((1,))
        training.forward()


def two_side_streams_forward_the_same_parameters(training: Training) -> None:
    """Both wait for the step. The update comes with the first forward, and the second one did not wait."""
    races, device = training.races, training.device
    for first in ((0, 1), (), (0,)):  # buckets that the main stream completes
        training.backward()
        training.step()
        training.complete(first)
        for stream in (SIDE, OTHER):
            races.wait(stream, races.record(MAIN))
        for stream in (SIDE, OTHER):
            with device.on(stream):
                training.backend.enter()
                if stream == SIDE:
                    training.complete([bucket for bucket in (0, 1) if bucket not in first])
                for weight in training.weights:
                    weight.sum()
        for stream in (SIDE, OTHER):
            races.wait(MAIN, races.record(stream))


def steps_begun_on_another_stream(training: Training) -> None:
    """The first gradient comes on a stream that has not seen the main one's updates."""
    for _ in range(3):
        training.backward((SIDE, SIDE, SIDE), ordered=False)
        training.step()
        training.complete()
        training.forward()


def values_gathered_outside_of_the_plan(training: Training) -> None:
    for stream in (MAIN, SIDE, MAIN):
        training.backward()
        with training.device.on(stream):
            training.backend.gather_scalars(torch.ones(())).sum()
        with training.on(SIDE):
            norms = torch.ones(SIZE)
        training.backend.gather_now(norms)
        del norms  # the memory goes back to the side stream, which has waited for nothing
        assert training.backend.exchange_seconds(1 << 10) > 0
        training.step()
        training.complete()
        training.forward()


def plans_that_follow_each_other(training: Training) -> None:
    """Buckets are freed by one stream while others have just read and written them."""
    for installed_on in (MAIN, SIDE, SIDE, MAIN):
        for streams in ((MAIN, SIDE, MAIN), (SIDE, MAIN, MAIN)):
            training.backward(streams)
            training.step()
            training.complete()
            training.forward()
        with training.on(installed_on):
            training.rank.install()


STORIES = [
    one_stream,
    gradients_from_two_streams,
    gradients_that_are_copied,
    gradients_added_in_their_slots,
    a_second_gradient_on_another_stream,
    gradients_added_to_earlier_ones,
    parameters_completed_on_another_stream,
    two_side_streams_forward_the_same_parameters,
    steps_begun_on_another_stream,
    values_gathered_outside_of_the_plan,
    plans_that_follow_each_other,
]


def told(
    story: Callable[[Training], None], sharded: bool, wire: torch.dtype | None = None
) -> tuple[list[str], Forgetful]:
    """Return the races of a story, and the device."""
    races = Races()
    device = Forgetful(races)
    with races:
        training = Training(races, device, sharded, wire)
        story(training)
        if not sharded and wire is None:
            training.check()
        assert (wire is None) == (not training.rank.residuals)
        training.backend.close()
        del training
        return races.found(), device


def is_noticed(story: Callable[[Training], None], sharded: bool, left_out: str) -> bool:
    """Return whether a race is reported when one line does nothing."""
    races = Races(stop=True)
    device = Forgetful(races, left_out)
    training = None
    try:
        with races:
            training = Training(races, device, sharded)
            story(training)
            races.stop = False
            training.backend.close()
            training = None
            return bool(races.found())
    except Race:
        return True
    finally:
        if training is not None:
            training.backend.close()


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Let the last reference free memory: when the collector comes depends on the tests before."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("wire", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("story", STORIES)
def test_no_hand_over_is_a_race(
    story: Callable[[Training], None], sharded: bool, wire: torch.dtype | None
) -> None:
    found, _ = told(story, sharded, wire)
    assert not found, "\n".join(found)


WAITS = [
    ("uses in Packing._has_read", "a gradient's memory is given on while it is packed on another stream"),
    ("uses in Packing.put", "memory of an earlier gradient is given on while its bucket is packed"),
    ("uses in StreamBackend.reads", "memory is given on while it is read on another stream"),
    ("uses in StreamSchedule.gather_now", "gathered values are freed while they are gathered"),
    ("wait in Packing._enter", "slots are written that the step before still reads"),
    ("wait in Packing._follow", "gradients are packed before they are computed on another stream"),
    ("wait in StreamBackend._release_after_use", "a plan's memory is given on while it is used"),
    ("wait in StreamBackend.begin_step", "a step begins on a stream that has not seen the last one's end"),
    ("wait in StreamBackend.enter", "a stream forwards parameters that another one still updates"),
    ("wait in StreamBackend.exchange_seconds", "timed messages leave before their memory is set"),
    ("wait in StreamBackend.updates_issued", "the usual stream reads parameters that another one updates"),
    ("wait in StreamSchedule._start", "a bucket leaves before its input is ready"),
    ("wait in StreamSchedule.gather_now", "values are gathered before they are computed"),
    ("wait in StreamSchedule.gather_now", "gathered values are read before they are there"),
    ("wait in StreamSchedule.wait", "results are read before they are there"),
]
"""Every line of the backend that orders streams, and what happens without it."""


def test_a_race_is_found_where_a_line_of_the_backend_does_not_wait() -> None:
    stories: dict[str, list[tuple[Callable[[Training], None], bool]]] = {}
    for story in STORIES:
        for sharded in (False, True):
            for place in told(story, sharded)[1].places:
                stories.setdefault(place, []).append((story, sharded))
    assert sorted(place.rpartition(",")[0] for place in stories) == [place for place, _ in WAITS]
    unnoticed = [
        place
        for place, those in stories.items()
        if not any(is_noticed(story, sharded, place) for story, sharded in reversed(those))
    ]
    assert not unnoticed, "\n".join(unnoticed)
