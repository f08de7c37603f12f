"""Gradients on their way into the buckets of the stream backend: what is sent is what was put."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from commsched.backends.interface import Scaling
from commsched.errors import CommError
from tests.support.host_kernels import HostLauncher
from tests.support.stream_backend import SHAPES, SIZE, OneRank

ALL = range(len(SHAPES))
PATIENCE = 200.0  # seconds that no test waits


def values(rank: OneRank) -> list[torch.Tensor]:
    return [rank.gradient(i, 100.0 * i) for i in ALL]


def step(rank: OneRank, put: Callable[[int], None], order: tuple[int, int] = (1, 0)) -> None:
    """One step without an update; a bucket is marked once the gradients that it completes were put."""
    backend = rank.backend
    backend.begin_step()
    completes = {1: (1, 2), 0: (0,)} if order[0] else {0: (0, 1), 1: (2,)}
    for bucket in order:
        for param in completes[bucket]:
            put(param)
        backend.mark_ready(bucket)
    backend.mark_ready(len(order))
    for bucket in (2, 0, 1):
        backend.wait_gathered(bucket)


def check(rank: OneRank, expected: list[torch.Tensor], factor: float = SIZE) -> None:
    for i, (slot, grad) in enumerate(zip(rank.slots, expected, strict=True)):
        assert torch.equal(slot, factor * grad), f"tensor {i}"


def test_a_gradient_lives_until_every_bucket_that_reads_it_is_packed() -> None:
    """Tensor 1 lies in both buckets. It was dropped with the last one, which may be marked first."""
    rank = OneRank()
    reused: list[torch.Tensor] = []

    def put(param: int) -> None:
        if param == 0:
            reused.append(torch.full(SHAPES[1], -1.0))  # takes memory that nobody holds any more
        rank.backend.put(param, rank.gradient(param, 100.0 * param), rank.slots[param])

    for _ in range(2):
        step(rank, put)
        check(rank, values(rank))
    assert all(tensor.eq(-1.0).all() for tensor in reused)
    assert not rank.backend._packing._offers


TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]


def send_scaled(dtype: torch.dtype, scales: bool, order: tuple[int, int]) -> None:
    rank = OneRank(dtype=dtype, scaling=Scaling(0.5, 0.25), scales=scales)
    grads = [rank.gradient(i, 10.0 * i) for i in ALL]
    assert not dtype.is_complex or all(grad.imag.abs().sum() > 0 for grad in grads)
    for _ in range(2):
        step(rank, lambda i: rank.backend.put(i, grads[i].clone(), rank.slots[i]), order)
        check(rank, grads, SIZE * 0.125)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_is_scaled_before_and_after(
    dtype: torch.dtype, scales: bool, order: tuple[int, int]
) -> None:
    """Complex gradients lost their imaginary parts."""
    send_scaled(dtype, scales, order)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_gpus_kernels_pack_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = HostLauncher()
    monkeypatch.setattr("comm_core.cuda.copies.launcher_for", lambda device: launcher)
    send_scaled(dtype, False, (1, 0))
    assert len(launcher.launches) == 4


@pytest.mark.parametrize("wire", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("order", [[("RS", 0), ("RS", 1), ("AG", 1), ("AG", 0)], [("AR", 1), ("AR", 0)]])
def test_the_gpus_kernels_quantise_the_same(
    wire: torch.dtype, order: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def results(launcher: HostLauncher | None) -> list[torch.Tensor]:
        monkeypatch.setattr("comm_core.cuda.blocks.launcher_for", lambda device: launcher)
        rank = OneRank(scaling=Scaling(1 / 3, 0.5, wire), order=order, scales=False)
        for seed in range(3):
            grads = [rank.gradient(i, 100.0 * i + seed) for i in ALL]
            step(rank, lambda i, grads=grads: rank.backend.put(i, grads[i], rank.slots[i]))
        return [rank.buffers.flat[0], *rank.residuals]

    launcher = HostLauncher()
    found = results(launcher)
    assert found[0].any() and found[1].any()
    assert all(torch.equal(a, b) for a, b in zip(found, results(None), strict=True))
    # A step of each bucket: gradients and sums are quantised, messages added up and restored.
    name = {torch.int8: "qi8"}.get(wire, "qf8")
    assert [kernel for kernel, _ in launcher.launches].count(f"quantise_{name}") == 12
    assert [kernel for kernel, _ in launcher.launches].count(f"sum_{name}") == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_gradients_are_sent_in_fewer_bits(dtype: torch.dtype) -> None:
    """Complex ones are not, as with Horovod's compressors."""
    rank = OneRank(dtype=dtype, scaling=Scaling(1.0, 0.5, torch.float16))
    grads = values(rank)
    step(rank, lambda i: rank.backend.put(i, grads[i].clone(), rank.slots[i]))
    check(rank, grads, SIZE * 0.5)


def test_a_conjugate_is_sent_as_what_it_is_and_not_as_it_lies_in_memory() -> None:
    rank = OneRank(dtype=torch.complex64)
    grads = values(rank)
    step(rank, lambda i: rank.backend.put(i, grads[i].conj(), rank.slots[i]))
    check(rank, [grad.conj() for grad in grads])
    negative = OneRank()
    parts = [torch.complex(grad, grad).conj().imag for grad in values(negative)]
    assert all(part.is_neg() for part in parts)
    step(negative, lambda i: negative.backend.put(i, parts[i], negative.slots[i]))
    check(negative, [-grad for grad in values(negative)])


def test_the_last_gradient_that_was_put_is_sent() -> None:
    rank = OneRank()
    grads, wrong = values(rank), torch.full(SHAPES[1], 7.0)

    def first_elsewhere(i: int) -> None:
        if i == 1:
            rank.backend.put(i, wrong, rank.slots[i])
        rank.backend.put(i, grads[i].clone(), rank.slots[i])

    def last_in_the_slot(i: int) -> None:
        """An offer that came before the slot's own memory was sent in its place."""
        if i == 1:
            rank.backend.put(i, wrong, rank.slots[i])
        rank.slots[i].copy_(grads[i])
        rank.backend.put(i, rank.slots[i], rank.slots[i])

    def last_in_another_order(i: int) -> None:
        if i == 1:
            rank.backend.put(i, wrong, rank.slots[i])
        rank.backend.put(i, grads[i].t().contiguous().t() if i == 1 else grads[i], rank.slots[i])

    for put in (first_elsewhere, last_in_the_slot, last_in_another_order):
        step(rank, put)
        check(rank, grads)


def test_a_second_gradient_is_added_to_the_last_one() -> None:
    rank = OneRank()
    grads, wrong = values(rank), torch.full(SHAPES[1], 7.0)

    def put(i: int) -> None:
        for grad in (wrong, grads[i]) if i == 1 else (grads[i],):
            rank.backend.put(i, grad.clone(), rank.slots[i])
        for _ in range(2):
            rank.backend.take_back(i, rank.slots[i])
            rank.slots[i].add_(1.0)

    step(rank, put)
    check(rank, [grad + 2.0 for grad in grads])
    rank.backend.begin_step()
    rank.backend.put(1, grads[1], rank.slots[1])
    rank.backend.put(2, grads[2], rank.slots[2])
    rank.backend.mark_ready(1)
    with pytest.raises(ValueError, match="until the first of its buckets is marked .* bucket 1, .* 1,"):
        rank.backend.take_back(1, rank.slots[1])
    with pytest.raises(ValueError, match="until the first of its buckets is marked .* bucket 1, .* 1,"):
        rank.backend.put(1, grads[1], rank.slots[1])
    with pytest.raises(ValueError, match=r"rank 0: .* ready once .* bucket 1 was marked twice in step 2"):
        rank.backend.mark_ready(1)


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_gradients_that_were_added_up_in_the_slots(wire: torch.dtype | None, scales: bool) -> None:
    rank = OneRank(scaling=Scaling(0.5, 0.25, wire), scales=scales)
    grads = [torch.full(shape, 8.0 * (i + 1)) for i, shape in enumerate(SHAPES)]

    def accumulate(i: int) -> None:
        rank.slots[i].zero_()
        for _ in range(2):
            rank.slots[i].add_(grads[i])
        rank.backend.put(i, rank.slots[i], rank.slots[i])

    for _ in range(2):
        step(rank, accumulate)
        check(rank, grads, 2 * SIZE * 0.125)


def test_a_gradient_in_the_memory_of_a_slot_but_in_another_order() -> None:
    """``p.grad = p.grad.t()``: the address is the slot's, and nothing was copied."""
    rank = OneRank()

    def put(i: int) -> None:
        rank.slots[i].copy_(values(rank)[i])
        other = rank.slots[1].view(10, 20).t() if i == 1 else rank.slots[i]
        rank.backend.put(i, other, rank.slots[i])

    step(rank, put)
    check(rank, [values(rank)[0], values(rank)[1].view(10, 20).t(), values(rank)[2]])


def test_a_gradient_in_the_memory_of_another_slot() -> None:
    """``p.grad = q.grad``: the other slot's bucket may be summed before this one is packed."""
    rank = OneRank(order=[("RS", 1), ("RS", 0), ("AG", 1), ("AG", 0)])
    grads = values(rank)
    rank.slots[2].copy_(grads[2])

    def put(i: int) -> None:
        if i == 1:
            rank.slots[1].copy_(grads[1])
            rank.backend.put(0, rank.slots[1].view(-1)[100:124], rank.slots[0])  # in bucket 1
            rank.backend.put(1, rank.slots[1], rank.slots[1])
        elif i == 2:
            rank.backend.put(2, rank.slots[2], rank.slots[2])

    step(rank, put)
    check(rank, [grads[1].view(-1)[100:124], grads[1], grads[2]])


def test_buckets_without_elements() -> None:
    rank = OneRank(cuts=[[(0, 0, 8)], [(0, 8, 24)], [(1, 0, 200), (2, 0, 10)]])
    assert rank.buffers.layout.empty(), "no bucket is empty"
    grads = values(rank)
    for _ in range(2):
        rank.backend.begin_step()
        for i in ALL:
            rank.backend.put(i, grads[i].clone(), rank.slots[i])
        for bucket in (0, 2, 1, 3):
            rank.backend.mark_ready(bucket)
        for bucket in range(4):
            rank.backend.wait_gathered(bucket)
        check(rank, grads)


# -- rounds that end early -----------------------------------------------------------------------------------


def test_a_step_that_was_not_sent_is_an_error_and_can_be_ended() -> None:
    """A backward has raised. Neither a new step nor a new plan may forget what the other ranks wait for."""
    rank = OneRank()
    grads = values(rank)
    rank.backend.begin_step()
    rank.backend.put(1, torch.full(SHAPES[1], 7.0), rank.slots[1])
    rank.backend.put(2, torch.full(SHAPES[2], 7.0), rank.slots[2])
    rank.backend.mark_ready(1)
    for begin in (rank.backend.begin_step, rank.install):
        with pytest.raises(CommError, match="step 1 ended before RS of bucket 0 was started"):
            begin()
    rank.slots[0].zero_()
    rank.backend.put(0, rank.slots[0], rank.slots[0])
    rank.backend.mark_ready(0)
    rank.backend.mark_ready(2)
    for bucket in range(3):
        rank.backend.wait_gathered(bucket)
    for order in ((1, 0), (0, 1)):
        step(rank, lambda i: rank.backend.put(i, grads[i].clone(), rank.slots[i]), order)
        check(rank, grads)


def test_plans_made_in_inference_mode_serve_outside_of_it_and_waits_within() -> None:
    with torch.inference_mode():
        rank = OneRank()
    grads = values(rank)
    step(rank, lambda i: rank.backend.put(i, grads[i].clone(), rank.slots[i]))
    check(rank, grads)
    rank.backend.begin_step()
    for i in ALL:
        rank.backend.put(i, grads[i].clone(), rank.slots[i])
    for bucket in range(3):
        rank.backend.mark_ready(bucket)
    with torch.inference_mode():
        for bucket in (2, 0, 1):
            rank.backend.wait_gathered(bucket)
        scalars = rank.backend.gather_scalars(torch.tensor(3.0))
    check(rank, grads)
    scalars.add_(1.0)
    assert scalars[0] == 4.0
    step(rank, lambda i: rank.backend.put(i, rank.slots[i], rank.slots[i]))


# -- the end -------------------------------------------------------------------------------------------------


def marks_and_waits(rank: OneRank) -> list[Callable[[], object]]:
    backend = rank.backend
    return [
        backend.begin_step,
        rank.install,
        lambda: backend.put(0, torch.zeros(SHAPES[0]), rank.slots[0]),
        lambda: backend.take_back(0, rank.slots[0]),
        lambda: backend.mark_ready(0),
        lambda: backend.mark_ready(2),
        lambda: backend.mark_updated(0),
        lambda: backend.wait_reduced(0),
        lambda: backend.wait_gathered(0),
        lambda: backend.wait_gathered(2),
        lambda: backend.is_gathered(0),
        lambda: backend.gather_now(torch.zeros(4)),
        lambda: backend.gather_scalars(torch.zeros(())),
        lambda: backend.exchange_seconds(1000),
    ]


def test_after_its_end_marks_and_waits_say_that_it_is_closed() -> None:
    rank = OneRank()
    step(rank, lambda i: rank.backend.put(i, rank.gradient(i, 0.0), rank.slots[i]))
    for _ in range(2):
        rank.backend.close()
    for call in marks_and_waits(rank):
        with pytest.raises(CommError, match="rank 0: the optimizer is closed"):
            call()
    rank.backend.abort("a rank was lost after the end")
    assert len(rank.backend.events()) == 0
    with pytest.raises(CommError, match="is closed"):
        rank.backend.host.mark_ready(0)
    assert rank.backend.schedule.buckets == []


def test_after_a_failure_marks_and_waits_give_its_reason_also_when_closed() -> None:
    rank = OneRank()
    rank.backend.begin_step()
    rank.backend.put(1, rank.gradient(1, 0.0), rank.slots[1])
    rank.backend.put(2, rank.gradient(2, 0.0), rank.slots[2])
    with pytest.warns(UserWarning, match="the cable was cut. What this rank's GPU"):
        rank.backend.abort("the cable was cut")
    for _ in range(2):
        for call in marks_and_waits(rank):
            with pytest.raises(CommError, match="^the cable was cut$"):
                call()
        rank.backend.close(orderly=False)


@pytest.mark.parametrize("method", ["finished", "wait", "close", "host"])
def test_close_never_raises_and_ends_everything_else(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = OneRank()
    backend = rank.backend
    owner = {"close": backend.exchange, "host": backend.host}.get(method, backend.streams)
    name = method if method in ("finished", "wait") else "close"

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(owner, name, broken)
    backend.close()
    monkeypatch.undo()
    assert backend.schedule.buckets == []
    with pytest.raises(CommError):
        backend.wait_gathered(0)
    backend.host.close()
    with pytest.raises(CommError):
        backend.host.mark_ready(0)


def test_a_rank_that_is_lost_while_close_waits_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = OneRank()
    lost, waiting = threading.Event(), threading.Event()

    def finished(patience: float) -> bool:
        waiting.set()
        return lost.wait(PATIENCE)

    monkeypatch.setattr(rank.backend.streams, "finished", finished)
    monkeypatch.setattr(rank.backend.exchange, "abort", lambda reason: lost.set())
    closing = threading.Thread(target=rank.backend.close)
    closing.start()
    assert waiting.wait(PATIENCE)
    with pytest.warns(UserWarning, match="rank 1 is gone"):
        rank.backend.abort("rank 1 is gone")
    closing.join(PATIENCE)
    assert lost.is_set() and not closing.is_alive()
    with pytest.raises(CommError, match="rank 1 is gone"):
        rank.backend.wait_gathered(0)


def test_an_exchange_that_fails_ends_the_backend_with_its_reason() -> None:
    """The first error was the engine's, and the next ones spoke of buckets that had not been started."""
    rank = OneRank()
    grads = values(rank)

    def lost(bucket: torch.Tensor) -> None:
        raise torch.distributed.DistBackendError("rank 1 went away")

    rank.backend.exchange.all_gather = lost  # type: ignore[method-assign]
    with pytest.raises(CommError, match="rank 1 went away"):
        step(rank, lambda i: rank.backend.put(i, grads[i].clone(), rank.slots[i]))
    for call in marks_and_waits(rank):
        with pytest.raises(CommError, match="rank 1 went away"):
            call()
    with suppress(CommError):
        rank.backend.close()
