"""``elastic.run``: which errors begin an epoch, and which end the function. The test is the driver."""

from __future__ import annotations

import copy
import os
import time
import weakref
from contextlib import nullcontext

import pytest
import torch

import commsched as hvd
from commsched import checkpoint
from commsched.collectives import job
from commsched.elastic import recovery
from commsched.pipeline import Pipeline
from tests.support.pipeline_runs import adam, batches, chain_model, loss_of, train


@pytest.fixture(autouse=True)
def left():
    yield
    hvd.shutdown()


ADDED, REMOVED = hvd.elastic.HostsUpdatedInterrupt(False), hvd.elastic.HostsUpdatedInterrupt(True)
LOST = hvd.CommError("rank 1 died")


class Recorded(hvd.elastic.State):
    def __init__(self):
        super().__init__(lambda value: value, lambda: 0)
        self.calls = []

    def __getattribute__(self, name):
        if name in ("save", "restore", "sync", "on_reset", "forget_host_updates"):
            return lambda: self.calls.append(name)
        return super().__getattribute__(name)


def failing(*errors):
    """A function that raises these, one in each call, and then returns its argument."""
    left = list(errors)

    @hvd.elastic.run
    def function(state, value):
        state.calls.append("call")
        if left:
            raise left.pop(0)
        return value

    return function


@pytest.fixture
def driver(monkeypatch):
    """What horovodrun's driver would do for one rank: each epoch has this rank alone."""
    asked = []
    launch = job._launch().__class__("horovodrun", 0, 1, 0, 1, "localhost", elastic=True)
    monkeypatch.setattr(recovery, "detect_launch", lambda *_: launch)
    monkeypatch.setattr(recovery, "init", lambda: (asked.append(hvd.is_initialized()), hvd.init()))
    monkeypatch.setattr(recovery, "_notified_of_hosts", lambda *_: nullcontext())
    return asked


def test_a_lost_rank(driver):
    hvd.init()
    state = Recorded()
    assert failing(hvd.CommError("rank 1 died"))(state, 5) == 5
    assert driver == [False]  # this rank has left the epoch when it asks
    assert state.calls == ["sync", "call", "restore", "forget_host_updates", "on_reset", "sync", "call"]


def test_what_the_function_held_when_a_rank_was_lost_is_free(driver):
    """The error kept its frames, and these a whole pipeline, until the next rank was lost."""
    hvd.init()
    held = []

    @hvd.elastic.run
    def function(state):
        if not held:
            batch = torch.zeros(1)
            held.append(weakref.ref(batch))
            try:
                forward()
            except ValueError as error:
                raise hvd.CommError("rank 1 died") from error
        return [one() for one in held]

    def forward():
        activations = torch.zeros(1)
        held.append(weakref.ref(activations))
        raise ValueError("rank 1 sent no more")

    assert function(Recorded()) == [None, None]


def test_a_pipeline_is_made_anew_and_goes_back_to_the_commit(driver):
    hvd.init()
    model, data, made = chain_model(2), batches(5), []

    def make(ranks):
        made.append(Pipeline(copy.deepcopy(model), num_microbatches=2, loss=loss_of, optimizer=adam))
        return made[-1]

    @hvd.elastic.run
    def function(state):
        state.calls += 1
        while state.step < 5:
            state.losses.append(state.pipeline.step(data[state.step]))
            state.step += 1
            if state.step == 2:
                state.commit()
            if state.step == 4 and len(made) == 1:
                raise hvd.CommError("rank 1 died")

    state = hvd.elastic.PipelineState(make, step=0, calls=0, losses=[])
    function(state)
    weights, losses, _ = train(model, data, 1, adam, num_microbatches=2)
    assert len(made) == 2 and state.calls == 2 and state.losses == losses
    assert all(torch.equal(value, weights[name]) for name, value in state.pipeline.state_dict().items())
    made[0].close()  # closing twice does no harm
    made[1].close()


def test_the_commit_of_a_pipeline_can_be_read_after_a_loss():
    """Under other launchers the function ends with the error."""
    hvd.init()

    def make(ranks):
        return Pipeline(chain_model(2), num_microbatches=2, loss=loss_of, optimizer=adam)

    @hvd.elastic.run
    def function(state):
        for number, batch in enumerate(batches(3)):
            state.pipeline.step(batch)
            if number == 1:
                state.commit()
        raise LOST

    state = hvd.elastic.PipelineState(make)
    with pytest.raises(hvd.CommError, match="rank 1 died"):
        function(state)
    weights, *_ = train(chain_model(2), batches(3)[:2], 1, adam, num_microbatches=2)
    found = state.model_state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in found.items())


@pytest.fixture
def output(monkeypatch):
    """This process's output, a pipe: its reader and its writer."""
    reader, writer = os.pipe()
    monkeypatch.setattr(recovery, "OUTPUTS", (writer,), raising=False)
    yield reader, writer
    os.close(writer)


@pytest.mark.parametrize("prints", ["before the others go on without it", "later"])
def test_output_that_nobody_reads(driver, output, prints):
    """A process that was cut off from horovodrun ended at its next print, with the newest state."""
    hvd.init()
    (reader, writer), state, calls = output, Recorded(), []

    @hvd.elastic.run
    def function(state):
        calls.append("call")
        os.write(writer, b"a line")
        if len(calls) == 1:
            os.close(reader)
            if prints == "later":
                raise hvd.CommError("rank 1 died")
            os.write(writer, b"a line")

    function(state)
    assert len(calls) == 2 and len(driver) == 1
    assert state.calls == ["sync", "restore", "forget_host_updates", "on_reset", "sync"]


def test_an_error_of_the_system_with_output_that_is_read_ends_the_function(driver, output):
    hvd.init()
    with pytest.raises(BrokenPipeError):
        failing(BrokenPipeError())(Recorded(), 5)
    assert driver == []
    os.close(output[0])


def test_output_that_nobody_reads_under_another_launcher(output):
    """Nobody begins an epoch there: Python's rule holds."""
    hvd.init()
    os.close(output[0])
    with pytest.raises(BrokenPipeError):
        failing(BrokenPipeError())(Recorded(), 5)


def test_hosts_were_added(driver):
    hvd.init()
    state = Recorded()
    assert failing(hvd.elastic.HostsUpdatedInterrupt(False))(state, 5) == 5
    assert state.calls == ["sync", "call", "forget_host_updates", "on_reset", "sync", "call"]


def test_hosts_were_only_removed(driver):
    hvd.init()
    state = Recorded()
    assert failing(hvd.elastic.HostsUpdatedInterrupt(True))(state, 5) == 5
    assert state.calls == ["sync", "call", "forget_host_updates", "on_reset", "call"]


def test_each_epoch_collects_garbage_once(driver, monkeypatch):
    """It took 0.4 of the 0.8 seconds between a death and the next step."""
    hvd.init()
    collections = []
    monkeypatch.setattr("commsched.optimizer.distributed.gc.collect", lambda: collections.append(1))
    failing(LOST)(Recorded(), 5)
    assert len(collections) == 2 and len(driver) == 1


@pytest.mark.parametrize(
    ("errors", "left", "waits"),
    [
        ((REMOVED, ADDED), {("a", 0)}, True),
        ((REMOVED, LOST), {("a", 0)}, True),
        ((LOST, ADDED), {("a", 0)}, False),
        ((ADDED, ADDED), {("a", 0), ("b", 0), ("c", 0)}, False),
    ],
)
def test_the_driver_notices_the_ends_of_removed_processes_first(driver, monkeypatch, errors, left, waits):
    """It took the late end of a process for that of the next one in its place, and ended the job."""
    hvd.init()
    places = [{("a", 0), ("b", 0)}, left]
    monkeypatch.setattr(recovery, "_places", lambda: places[bool(driver)], raising=False)
    seconds = 2.0  # an epoch alone takes half a second on a busy machine
    monkeypatch.setattr(recovery, "_ENDING_SECONDS", seconds, raising=False)
    asks, init = [], recovery.init
    monkeypatch.setattr(recovery, "init", lambda: (asks.append(time.monotonic()), init()))
    assert failing(*errors)(Recorded(), 5) == 5
    assert (asks[1] - asks[0] > seconds) == waits


def test_optimizers_with_other_settings(driver):
    """With rank 0's learning rate at fault, its last commit gave that to all, and they trained on with it."""
    hvd.init()
    state = Recorded()
    with pytest.raises(hvd.SettingsError, match="lr of group 0"):
        failing(hvd.SettingsError("lr of group 0"))(state, 5)
    assert driver == [] and state.calls == ["sync", "call"]


@pytest.mark.parametrize("change", ["none", "a commit", "a new process", "fewer processes"])
def test_the_same_processes_fail_again(driver, monkeypatch, change):
    """Ranks that disagree in every step lose no rank: they restored the commit and failed again, for ever."""
    hvd.init()
    state, errors = Recorded(), [hvd.CommError(f"the ranks disagree ({number})") for number in range(4)]
    left = list(errors)
    if change == "a new process":
        gathered = recovery.allgather_object
        monkeypatch.setattr(
            recovery, "allgather_object", lambda mine, name: gathered(mine, name) + [0] * ("failures" in name)
        )
    if change == "fewer processes":
        monkeypatch.setattr(recovery, "size", lambda: 9 - len(driver))

    @hvd.elastic.run
    def function(state):
        if change == "a commit":
            state.commit()
        if left:
            raise left.pop(0)

    if change != "none":
        function(state)
        assert len(driver) == len(errors)
        return
    with pytest.raises(hvd.CommError, match=r"same 1 processes .* 2 times .*disagree \(1\)") as raised:
        function(state)
    assert raised.value.__cause__ is errors[1] and state.calls.count("restore") == 2


def test_a_host_that_is_announced_while_places_are_assigned(driver, monkeypatch):
    """The driver may have counted its hosts before; the host stayed idle until another one came."""
    hvd.init()
    state, ends = hvd.elastic.ObjectState(lambda value: value, lambda: 0), []
    monkeypatch.setattr(
        recovery, "init", lambda: (len(ends) == 1 and state.on_hosts_updated(1, 2), hvd.init())
    )

    @hvd.elastic.run
    def function(state):
        if not ends:
            ends.append("a lost rank")
            raise hvd.CommError("rank 1 died")
        try:
            state.commit()
        except hvd.elastic.HostsUpdatedInterrupt:
            ends.append("a new host")
            raise

    function(state)
    assert ends == ["a lost rank", "a new host"]


def test_a_rank_that_does_not_meet_the_others_again(driver, monkeypatch):
    """init() has tried for long: the function tried for ever."""
    hvd.init()
    outcomes = [hvd.CommError("rank 0 of 2 has not met the others")]
    monkeypatch.setattr(recovery, "renew", lambda: None, raising=False)

    def init():
        raise outcomes.pop()

    monkeypatch.setattr(recovery, "init", init)
    with pytest.raises(hvd.CommError, match="has not met the others"):
        failing(hvd.CommError("rank 1 died"))(Recorded(), 5)


def test_without_a_driver_the_commit_is_restored_and_the_error_raised():
    hvd.init()
    state = Recorded()
    with pytest.raises(hvd.CommError, match="rank 1 died"):
        failing(hvd.CommError("rank 1 died"))(state, 5)
    assert state.calls == ["sync", "call", "restore"]


@pytest.mark.parametrize("error", [None, ValueError("other"), hvd.SettingsError("lr of group 0"), LOST])
def test_what_a_later_process_in_this_place_is_told(driver, monkeypatch, error):
    """After an error on all ranks it began the training anew, alone. After a failed meeting it may begin."""
    hvd.init()
    told = []

    def unmet():
        raise hvd.CommError("rank 0 of 2 has not met the others")

    monkeypatch.setattr(recovery, "tell_end", lambda place, error=None: told.append(error))
    if error is LOST:
        monkeypatch.setattr(recovery, "init", unmet)
    with nullcontext() if error is None else pytest.raises(type(error)):
        failing(*[error] * (error is not None))(Recorded(), 5)
    assert told == ([] if error is LOST else [error])


def test_other_errors_end_the_function(driver):
    hvd.init()
    state = Recorded()
    with pytest.raises(ZeroDivisionError):
        failing(ZeroDivisionError())(state, 5)
    assert state.calls == ["sync", "call"]


@pytest.mark.filterwarnings("ignore:a checkpoint is not saved")
@pytest.mark.parametrize("act", ["load", "save"])
def test_a_checkpoint_that_cannot_be_read_or_written_ends_the_function(driver, monkeypatch, tmp_path, act):
    """Such errors counted as lost ranks: the job restored its commit and failed again, for ever."""
    hvd.init()
    hvd.save({"epoch": 1}, tmp_path).wait()
    state = Recorded()

    @hvd.elastic.run
    def function(state):
        state.calls.append("call")
        if state.calls.count("call") == 1:
            hvd.load({}, tmp_path) if act == "load" else hvd.save({"epoch": 2}, tmp_path).wait()

    if act == "load":
        next(tmp_path.glob("*/__0_0.distcp")).unlink()
    else:
        monkeypatch.setattr(checkpoint, "_write_file", lambda *_: os.stat(tmp_path / "no disk"))
    with pytest.raises(hvd.CommError, match="no generation in .* is whole|cannot write .*no disk"):
        function(state)
    assert state.calls == ["sync", "call"] and not driver


def test_horovods_own_errors_are_caught(driver):
    exceptions = pytest.importorskip("horovod.common.exceptions")
    hvd.init()
    assert issubclass(hvd.CommError, exceptions.HorovodInternalError)
    assert hvd.elastic.HostsUpdatedInterrupt is exceptions.HostsUpdatedInterrupt
    state = Recorded()
    assert failing(exceptions.HorovodInternalError("lost"))(state, 5) == 5
    assert "restore" in state.calls


def test_an_optimizer_of_an_ended_job_is_not_stepped_alone(monkeypatch):
    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    hvd.shutdown()
    hvd.init()
    optimizer.step()  # a job of one rank again
    hvd.shutdown()
    hvd.init()
    launch = job._launch().__class__("torchrun", 0, 2, 0, 2, "localhost")
    monkeypatch.setattr(job.carrier(), "launch", launch)
    with pytest.raises(hvd.CommError, match="not connected to the ranks"):
        optimizer.step()


def test_the_module_has_horovods_names():
    theirs = pytest.importorskip("horovod.torch.elastic")
    assert set(theirs.__all__) <= set(hvd.elastic.__all__)
