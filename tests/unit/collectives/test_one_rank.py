"""The torch carrier on one rank; staging GPU tensors through the CPU; names, and the recorded timeline."""

import json
from types import SimpleNamespace

import pytest
import torch

import commsched as hvd
from commsched import spatial
from commsched.channels import SilentChannel
from commsched.collectives.carrier import OperationNames, ReduceOp, Reduction
from commsched.collectives.job import registered_id
from commsched.collectives.torch_carrier import operation_queue
from commsched.collectives.torch_carrier.operation_queue import (
    KnownRequests,
    Operation,
    OperationRunner,
    Timeline,
)
from commsched.errors import CommError
from commsched.process.groups import device_name, nccl_usable
from commsched.process.launch import ALONE
from commsched.process.rendezvous import meet
from commsched.spatial.tile import Tile


@pytest.fixture
def alone(monkeypatch):
    """The torch carrier on one rank."""
    monkeypatch.setenv("COMMSCHED_RUNTIME", "torch")
    hvd.init()
    yield hvd
    hvd.shutdown()


@pytest.mark.parametrize("unsupported", ["error", "gather"])
def test_tiles_that_are_whole_on_every_rank_are_plain_tensors_and_parts_are_refused(alone, unsupported):
    """The engine was given the memory of the local part with the size of the whole."""
    mesh = spatial.Mesh(SilentChannel(0, 2), (1, 2), (-2, -1), unsupported)
    loss = Tile.make(torch.tensor([2.5]), mesh, (None, None))
    for found in (
        alone.allreduce(loss),
        alone.broadcast(loss, 0),
        alone.allgather(loss),
        alone.allreduce_(loss),
    ):
        assert type(found) is torch.Tensor and found.tolist() == [2.5]
    part = spatial.from_local(torch.ones(1, 2, 4, 2), (1, 2, 4, 4), mesh)
    for operation in (alone.allreduce, alone.allreduce_async_, alone.allgather_async):
        with pytest.raises(ValueError, match="memory of its own, but got a Tile on cpu; .*, pass tile.local"):
            operation(part)
    norm = alone.SyncBatchNorm(2, process_set=SimpleNamespace(size=lambda: 2))
    with pytest.raises(ValueError, match="SyncBatchNorm needs .* got a Tile on cpu; for tiles use"):
        norm(part)


def staged(kind, tensors, outputs=(), **more):
    """The result of an operation that runs through the CPU, as for a GPU that several ranks share."""
    operation = Operation(kind, f"{kind}.x", 0, tuple(tensors), tuple(outputs), **more)
    runner = OperationRunner(meet(ALONE), {0: [0]})
    message = {"joined": [], "splits": [operation.splits]}
    message["rows"] = [[t.shape[0] for t in tensors]]
    return runner._run_through_cpu(operation, message)


def test_staging_fills_the_callers_outputs():
    source, target = torch.arange(3.0), torch.zeros(3)
    assert staged("allreduce", [source], [target], reduction=Reduction(ReduceOp.SUM, 2.0)) is target
    assert target.tolist() == [0.0, 2.0, 4.0] and source.tolist() == [0.0, 1.0, 2.0]
    results = staged(
        "allreduce", [source, source], [source, target], grouped=True, reduction=Reduction(ReduceOp.SUM)
    )
    assert results[0] is source and results[1] is target
    assert staged("broadcast", [source], [target], root=0) is target and torch.equal(target, source)


def test_staging_makes_new_results():
    rows = torch.arange(4.0).view(2, 2)
    assert torch.equal(staged("allgather", [rows]), rows)
    assert all(torch.equal(part, rows) for part in staged("allgather", [rows, rows], grouped=True))
    assert torch.equal(staged("reducescatter", [rows], reduction=Reduction(ReduceOp.AVERAGE)), rows)
    found, received = staged(
        "alltoall", [rows], splits=[2], received_splits=torch.empty(0, dtype=torch.int64)
    )
    assert torch.equal(found, rows) and received.tolist() == [2] and received.dtype is torch.int64


def joined_in(device):
    """The coordinator's message to a joined rank about the others' all-reduce of GPU tensors."""
    request = {"kind": "allreduce", "name": "x", "set": 0, "device": "cuda:a:0", "op": 1}
    request |= {"shapes": [[2]], "dtypes": ["torch.float32"], "prescale": 1.0, "postscale": 1.0}
    return {"requests": [request], "devices": ["cuda:a:0", device]}


def test_the_zeros_of_a_joined_rank_are_on_the_cpu():
    """They were on cuda:0, whatever GPU the rank had, or none."""
    (result,) = OperationRunner(meet(ALONE), {0: [0]}).run([], joined_in("cpu"))
    assert result.tolist() == [0.0, 0.0] and result.device.type == "cpu"


def test_the_zeros_of_a_joined_rank_are_where_it_said():
    runner = OperationRunner(meet(ALONE), {0: [0]})
    runner.joined_on = torch.device("meta")
    assert runner._zeros(joined_in("cuda:b:1")["requests"][0]).tensors[0].device == runner.joined_on


def test_all_reduces_that_run_as_one_have_the_results_that_they_have_alone():
    def operations():
        torch.manual_seed(0)
        types = (torch.float32, torch.int16, torch.float64)
        for i, dtype in enumerate(types * 2):
            tensors = tuple((3 * torch.randn(shape)).to(dtype) for shape in [(2, 3), (), (0,)][: i % 3 + 1])
            outputs = tensors if i < 3 else tuple(map(torch.empty_like, tensors))
            reduction = Reduction(ReduceOp.AVERAGE, 3.0, 0.5)
            yield Operation("allreduce", f"{i}", 0, tensors, outputs, i % 3 > 0, reduction)

    runner = OperationRunner(meet(ALONE), {0: [0]})
    together, alone = list(operations()), list(operations())
    results = runner.run(together, {})
    for result, operation, single in zip(results, together, alone, strict=True):
        (expected,) = runner.run([single], {})
        assert type(result) is type(expected) is (tuple if operation.grouped else torch.Tensor)
        for mine, output, other in zip(
            result if operation.grouped else [result],
            operation.outputs,
            expected if operation.grouped else [expected],
            strict=True,
        ):
            assert mine is output and torch.equal(mine, other) and mine.dtype is other.dtype


def asked(name, *tensors, kind="allreduce", **more):
    return Operation(kind, name, 0, tensors, reduction=more.pop("reduction", Reduction(ReduceOp.SUM)), **more)


def test_a_request_that_is_repeated_travels_as_a_number():
    known = KnownRequests("here")
    first = json.loads(known.text(asked("a", torch.ones(2, 3))))
    assert (first["number"], first["name"], first["shapes"], first["bytes"]) == (0, "a", [[2, 3]], 24)
    assert known.text(asked("a", torch.zeros(2, 3))) == "0"
    changes = [
        asked("b", torch.ones(2, 3)),
        asked("a", torch.ones(3, 2)),
        asked("a", torch.ones(2, 3).int()),
        asked("a", torch.ones(2, 3), torch.ones(1)),
        asked("a", torch.ones(2, 3), kind="reducescatter"),
        asked("a", torch.ones(2, 3), reduction=Reduction(ReduceOp.SUM, 2.0)),
        asked("a", torch.ones(2, 3), reduction=None, kind="broadcast", root=1),
        asked("a", torch.ones(2, 3), reduction=None, kind="broadcast", root=0),
    ]
    for number, change in enumerate(changes, start=1):
        text = known.text(change)
        assert json.loads(text) == {**change.request("here"), "number": number}
        assert known.text(change) == str(number)
    assert known.text(asked("a", torch.ones(2, 3))) == "0"
    for _ in range(2):  # splits may differ each time
        exchange = asked("t", torch.ones(2), kind="alltoall", reduction=None, splits=[1, 1])
        assert json.loads(known.text(exchange)) == exchange.request("here")


def test_numbers_of_requests_are_few_and_the_oldest_is_given_again(monkeypatch):
    monkeypatch.setattr(operation_queue, "_KNOWN_REQUESTS", 2)
    known, x = KnownRequests("here"), torch.ones(1)
    for name, number in (("a", 0), ("b", 1), ("c", 0), ("a", 1), ("b", 0)):
        sent = json.loads(known.text(asked(name, x)))
        assert (sent["name"], sent["number"]) == (name, number)
    assert known.text(asked("a", x)) == "1" and known.text(asked("b", x)) == "0"


def test_nccl_needs_a_gpu_for_each_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert nccl_usable(["cuda:a:0", "cuda:a:1"])
    assert not nccl_usable(["cuda:a:0", "cuda:a:0"]) and not nccl_usable(["cuda:a:0", "cpu"])


def test_where_tensors_live_is_told():
    assert device_name([], "host") == "cpu" and device_name([torch.ones(1)], "host") == "cpu"


def test_alone_needs_no_other_process(alone):
    assert (alone.rank(), alone.size(), alone.local_rank(), alone.cross_size()) == (0, 1, 0, 1)
    handle = alone.allreduce_async(torch.ones(2), op=alone.Sum)
    assert alone.poll(handle) and alone.synchronize(handle).tolist() == [1.0, 1.0]
    assert alone.join() == 0 and alone.allgather_object("x") == ["x"]
    with pytest.raises(CommError, match="dimension"):
        alone.allgather(torch.tensor(1.0))
    with pytest.raises(ValueError, match="op must be"):
        alone.allreduce(torch.ones(1), op=9)
    with pytest.raises(ValueError, match="MPI"):
        alone.mpi_threads_supported()
    assert alone.engine_name() == "torch" and not alone.mpi_enabled() and alone.gloo_enabled()


def test_process_sets_alone(alone):
    with pytest.raises(ValueError, match="exists already"):
        alone.add_process_set([0])
    with pytest.raises(ValueError, match="from 0 to 0"):
        alone.add_process_set([1])
    assert alone.global_process_set.size() == 1 and registered_id(alone.global_process_set) == 0


def test_init_arguments(monkeypatch):
    monkeypatch.setenv("COMMSCHED_RUNTIME", "torch")
    for wrong, text in (({"comm": [1]}, "must name all 1 ranks"), ({"process_sets": "static"}, "'dynamic'")):
        with pytest.raises(ValueError, match=text):
            hvd.init(**wrong)
        assert not hvd.is_initialized()
    hvd.init(comm=[0], process_sets="dynamic")
    assert hvd.is_initialized()
    hvd.shutdown()


def test_names_count_per_kind_and_process_set():
    operation_names = OperationNames()
    names = [
        operation_names.choose(kind, number, given)
        for kind, number, given in (
            ("allreduce", 0, None),
            ("allreduce", 0, None),
            ("allgather", 0, None),
            ("allreduce", 1, None),
            ("allreduce", 0, "mine"),
        )
    ]
    assert names == ["noname.0.0", "noname.0.1", "noname.0.0", "noname.0.0", "mine"]
    operation_names.restart()
    assert operation_names.choose("allreduce", 0, None) == "noname.1.0"


def test_timeline_of_operations(tmp_path):
    path = tmp_path / "t.json"
    timeline = Timeline(str(path), 0, mark_cycles=True)
    start = timeline._start
    timeline.operation("allreduce.a", "allreduce", start + 1.0, start + 1.5, start + 1.75)
    timeline.operation("allreduce.a", "allreduce", start - 5.0, start + 2.0, start + 2.25)  # began before
    timeline.close()
    events = json.loads(path.read_text())
    spans = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("NEGOTIATE_ALLREDUCE", pytest.approx(1.0e6), pytest.approx(0.5e6)),
        ("ALLREDUCE", pytest.approx(1.5e6), pytest.approx(0.25e6)),
        ("NEGOTIATE_ALLREDUCE", 0.0, pytest.approx(2.0e6)),
        ("ALLREDUCE", pytest.approx(2.0e6), pytest.approx(0.25e6)),
    ]
    assert sum(e["name"] == "CYCLE_START" for e in events) == 2
    assert any("start_time_since_epoch_in_micros" in e.get("args", {}) for e in events)


def test_timeline_asked_for_as_in_horovod(monkeypatch, tmp_path):
    monkeypatch.setenv("COMMSCHED_RUNTIME", "torch")
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "new" / "t.json"))
    hvd.init()
    hvd.allreduce(torch.ones(1), name="seen")
    hvd.shutdown()
    assert "allreduce.seen" in (tmp_path / "new" / "t.json").read_text()


def test_a_timeline_that_cannot_be_written_is_an_error_at_its_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Timeline(str(tmp_path / "file" / "t.json"), 0, mark_cycles=False)
