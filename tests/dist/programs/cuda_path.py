"""The GPU's way, taken by CPU tensors (transport="stream"): the same numbers as every other way."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import commsched as hvd
from commsched.backends.cuda import StreamBackend, StreamSchedule
from commsched.backends.nccl import exchange_for
from commsched.backends.races import Races, WatchedDevice, WatchedExchange
from commsched.collectives.private_groups import private_group
from commsched.devices import Device
from commsched.optimizer.gradient import RESIDUAL
from scheduler.ir.buckets import fuse_by_bytes
from scheduler.ir.link import Link
from scheduler.ir.profile import Layer, Profile
from scheduler.policies import plan
from tests.support.cases import Me, case, main
from tests.support.device_waits import NoQuestions
from tests.support.oracle import assert_close, batch, release, seeded
from tests.support.quantised_training import COMPRESSIONS, case_of_each_code
from tests.support.reference_run import MakeOptimizer, Twin, momentum, some_profile
from tests.support.small_models import loss_of
from tests.support.stream_device import GroupOnPaper


class Mixed(nn.Module):
    """Convolutions in channels_last, a parameter that is used twice, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 48)
        self.image = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.twice = nn.Linear(80, 80)
        self.never = nn.Linear(4, 4)
        self.last = nn.Linear(80, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.first(x).view(-1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        x = self.image(image).flatten(1)
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


def mixed64() -> nn.Module:
    return Mixed().double()


loss = loss_of


@case(ranks=(2, 3))
def every_policy_has_the_oracles_bits(me: Me) -> None:
    for policy in ("wfbp", "bytescheduler", "dear", "pipedap", "optimal"):
        twin = Twin(me, Mixed, schedule=policy, transport="stream", lag=0.0)
        session = twin.optimizer._session
        assert type(session.backend) is StreamBackend
        assert session.backend.name.startswith("staged, flags over "), session.backend.name
        for step in range(4):
            twin.step(loss(step))
        twin.end()


@case(ranks=(2,))
def accumulation_and_gradients_to_read(me: Me) -> None:
    twin = Twin(me, mixed64, transport="stream", lag=0.0)
    for step in range(3):
        twin.backward(loss(2 * step))
        twin.compare_grads(exact=step == 0)
        twin.backward(loss(2 * step + 1))  # adds to what has been reduced, which rounds in another order
        twin.update()
        twin.compare(exact=False)
        twin.zero_grad(set_to_none=bool(step % 2))
    release(twin.optimizer)


@case(ranks=(2,))
def shards_learn_what_the_oracle_learns(me: Me) -> None:
    twin = Twin(me, mixed64, transport="stream", gather="parameters", lag=0.0)
    assert type(twin.optimizer._session.backend) is StreamBackend
    for step in range(4):
        twin.step(loss(step))
    twin.compare(exact=False)
    release(twin.optimizer)


def fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, fused=True)


def clipped(me: Me, build: Any, make: MakeOptimizer, norm: float = 2.0) -> Twin:
    """Four steps, clipped to a norm that all exceed; the host asks the device nothing."""
    twin = Twin(me, build, make, transport="stream", gather="parameters", lag=0.0)
    elements = sum(p.numel() for p in twin.plain.parameters())
    for step in range(4):
        twin.backward(loss(step))
        theirs = nn.utils.get_total_norm(
            [p.grad for p in twin.plain.parameters() if p.grad is not None], norm
        )
        with NoQuestions():
            total = twin.optimizer.clip_grad_norm_(0.01, norm)
            twin.optimizer.step()
        assert theirs > 0.01
        assert_close([total], [theirs], elements, "norm")
        nn.utils.clip_grads_with_norm_(twin.plain.parameters(), 0.01, total)
        twin.oracle.optimizer.step()
        twin.zero_grad()
        twin.compare_update(f"clipped in step {step}")
    return twin


@case(ranks=(2, 3))
def clipping_asks_the_device_nothing(me: Me) -> None:
    try:
        with NoQuestions():
            float(torch.ones(1))
    except AssertionError:
        pass
    else:
        raise AssertionError("a question was not noticed")
    for norm in (2.0, 1.0, float("inf")):
        release(clipped(me, mixed64, momentum, norm).optimizer)


@case(ranks=(2,))
def a_fused_update_takes_the_clip_factor(me: Me) -> None:
    release(clipped(me, Mixed, fused_adam).optimizer)


@case(ranks=(2,))
def an_overflow_does_not_count_as_a_step(me: Me) -> None:
    """Through torch's own GradScaler, which leaves it to fused optimizers to skip the step."""
    twin = Twin(me, Mixed, fused_adam, transport="stream", gather="parameters", lag=0.0)
    mine, theirs = (torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2))
    for step in range(6):
        factor = float("inf") if step in (0, 3) else 1.0
        twin.backward(lambda m, rank, step=step, f=factor: loss(step)(m, rank) * f * mine.get_scale())
        for scaler in (mine, theirs):
            scaler.scale(torch.zeros(()))  # as a script's loss
        twin.optimizer.synchronize()  # the scaler looks at whole gradients
        mine.step(twin.optimizer)
        mine.update()
        theirs.step(twin.oracle.optimizer)
        theirs.update()
        twin.zero_grad()
        twin.compare_update(f"step {step}", twin.terms)
    for optimizer in (twin.optimizer, twin.oracle.optimizer):
        counts = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
        assert counts == {4}, counts
    release(twin.optimizer)


@case(ranks=(2,))
def clipped_twice_and_read_before_the_step(me: Me) -> None:
    twin = Twin(me, mixed64, transport="stream", gather="parameters", lag=0.0)
    for step in range(3):
        twin.backward(loss(step))
        for bound in (0.1, 0.01):
            theirs = nn.utils.clip_grad_norm_(twin.plain.parameters(), bound)
            assert_close(
                [twin.optimizer.clip_grad_norm_(bound)], [theirs], twin.terms, f"norm before {bound}"
            )
        if step:
            twin.optimizer.synchronize()
            grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (twin.model, twin.plain)]
            assert_close(*grads, twin.terms, "clipped gradients")
        twin.update()
        twin.zero_grad()
        twin.compare(f"step {step}", exact=False)
    release(twin.optimizer)


@case(ranks=(2,))
def an_infinite_norm_is_an_error_where_asked_for(me: Me) -> None:
    twin = Twin(me, Mixed, transport="stream", gather="parameters", lag=0.0)
    twin.backward(lambda model, rank: loss(0)(model, rank) * (float("inf") if rank == 1 else 1.0))
    try:
        twin.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        assert "total norm" in str(error)
    else:
        raise AssertionError("no error")
    twin.optimizer.close()


@case(ranks=(2,))
def half_precision_on_the_wire_is_that_of_the_engine(me: Me) -> None:
    found = []
    for transport in ("direct", "stream"):
        model = seeded(Mixed)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            compression=hvd.Compression.fp16,
            gradient_predivide_factor=2.0,
            schedule="dear",
            profile=some_profile(model),
            transport=transport,
        )
        for step in range(3):
            loss(step)(model, me.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        release(optimizer)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@case_of_each_code(ranks=(2, 3))
def quantised_gradients_are_those_of_the_engine(me: Me, code: str) -> None:
    """And so are their residuals, through a checkpoint, also over a group that stands for NCCL's."""

    def build() -> nn.Module:
        widths = [nn.Linear(*width, bias=False) for width in ((12, 200), (200, 70), (70, 40))]
        return nn.Sequential(widths[0], nn.Tanh(), widths[1], nn.Tanh(), widths[2])

    def trained(transport: str, gather: str, name: str) -> list[torch.Tensor]:
        model, saved = seeded(build), None
        for schedule in ("dear", "bytescheduler" if gather == "gradients" else "sequential"):
            with default_type(torch.float64):  # the script's, not ours
                optimizer: Any = hvd.DistributedOptimizer(
                    momentum(model),
                    model.named_parameters(),
                    compression=COMPRESSIONS[code],
                    gradient_predivide_factor=3.0,
                    schedule=schedule,
                    profile=some_profile(model),
                    bucket_mb=0.03,
                    gather=gather,
                    transport=transport,
                )
            assert optimizer._session.backend.name.startswith(name), optimizer._session.backend.name
            if saved is not None:
                optimizer.load_state_dict(saved)
            for step in range(3):
                model(batch(me.rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            saved = optimizer.state_dict()
            release(optimizer)
        assert saved is not None
        lost = [entries[RESIDUAL] for entries in saved["state"].values()]
        assert len(lost) == 3 and all(each.any() for each in lost)
        return [*(p.detach() for p in model.parameters()), *lost]

    for gather in ("gradients", "parameters"):
        wanted = trained("direct", gather, "direct")
        found = [trained("stream", gather, "staged, flags over")]
        with over_nccl_on_paper():
            found.append(trained("stream", gather, "nccl, flags over"))
        for over, tensors in zip(("staged", "nccl"), found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True)), (over, gather)


@case(ranks=(2,))
def measuring_on_the_way(me: Me) -> None:
    model = seeded(Mixed)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), model=model, transport="stream")
    for step in range(8):
        loss(step)(model, me.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    profile = optimizer.profile()
    assert sum(layer.backward for layer in profile.layers) > 0
    events = optimizer._session.backend.events()
    assert (
        len(events)
        and (events["end"] >= events["start"]).all()
        and (events["start"] >= events["ready"]).all()
    )
    release(optimizer)


class Ending(Device):
    """Whether the communication has ended by the time of close() is up to the test."""

    ends = True
    asked: list[int] = []

    def finished(self, patience: float) -> bool:
        self.asked.append(len(GroupOnPaper.living))
        return self.ends


def over_nccl_on_paper() -> ExitStack:
    """Buckets travel over groups that count themselves, through the code that is for NCCL."""
    stack = ExitStack()
    stack.enter_context(patch("commsched.backends.nccl.nccl_usable", lambda names: True))
    stack.enter_context(patch("commsched.backends.cuda.device_of", Ending))
    stack.enter_context(
        patch(
            "commsched.backends.nccl.private_group",
            lambda process_set, channel, device: GroupOnPaper(private_group(process_set, channel)),
        )
    )
    return stack


@case(ranks=(2,))
def communicators_end_with_their_optimizer(me: Me) -> None:
    """Groups were cached until shutdown(): each time that parameters were frozen, one more was kept."""
    with over_nccl_on_paper():
        twin = Twin(me, Mixed, transport="stream", lag=0.0)
        groups = []
        for step in range(3):
            twin.step(loss(step))
            assert twin.optimizer._session.backend.name.startswith("nccl")
            assert len(GroupOnPaper.living) == 1, f"{len(GroupOnPaper.living)} communicators in step {step}"
            groups += GroupOnPaper.living
            twin.both(lambda m, step=step: m.image.weight.requires_grad_(bool(step % 2)))
        Ending.asked.clear()
        release(twin.optimizer)
        assert Ending.asked == [1], "close() waits for the communication stream, and only then ends the group"
        assert [group.ended for group in groups] == ["shut down"] * 3 and not GroupOnPaper.living


@case(ranks=(2,))
def communication_that_does_not_end_is_aborted_by_close(me: Me) -> None:
    with over_nccl_on_paper():
        twin = Twin(me, Mixed, transport="stream", lag=0.0)
        twin.step(loss(0))
        (group,) = GroupOnPaper.living
        me.everybody()  # the first rank that aborts ends the others' steps
        with patch.object(Ending, "ends", False):
            twin.optimizer.close()
        assert group.ended == "aborted"


@case(ranks=(2,))
def connections_are_given_back_at_once(me: Me) -> None:
    """Those of the exchange were kept until their last reference went, and a second close() waited again."""
    model = seeded(Mixed)
    loss(0)(model, me.rank).backward()
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), transport="stream")
        optimizer.step()
        made = len(os.listdir("/proc/self/fd")) - before
        for _ in range(2):
            optimizer.close()
        left = len(os.listdir("/proc/self/fd")) - before
        assert made - left >= 5, f"{left} of {made} descriptors are left"  # exchange 3, peers 2; flags 3
    finally:
        gc.enable()


@case(ranks=(2,))
def what_streams_cannot_do_is_refused(me: Me) -> None:
    model = seeded(Mixed)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        hvd.DistributedOptimizer(
            inner,
            model.named_parameters(),
            gather="parameters",
            early_step=True,
            schedule="dear",
            profile=some_profile(model),
            transport="stream",
        )
    except ValueError as error:
        assert "use early_step=False" in str(error)
    else:
        raise AssertionError("early_step was accepted")


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@case(ranks=(2,))
def the_scripts_default_device_and_type_are_not_ours(me: Me) -> None:
    """``with torch.device("meta")`` around everything, as scripts have it that build large models."""
    batches = [torch.randn(4, 12) * (me.rank + 1) for _ in range(6)]
    for transport in ("stream", "direct"):
        results = []
        for around in (nullcontext, lambda: torch.device("meta"), lambda: default_type(torch.float64)):
            model = seeded(Mixed)
            inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with around():
                optimizer = hvd.DistributedOptimizer(
                    inner, model.named_parameters(), model=model, transport=transport, bucket_mb=0.002
                )
                backend = optimizer._session.backend
                for batch in batches:
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                assert all(p.isfinite().all() for p in model.parameters())  # now nothing is on its way
                assert backend.exchange_seconds(1 << 12) > 0
                numbers = backend.gather_scalars(torch.ones((), device="cpu"))
                objects = hvd.allgather_object(me.rank)
                rows = hvd.alltoall(batches[0], splits=[1, 3])[0]
                ones = torch.sparse_coo_tensor([[me.rank]], [1.0], (3,), dtype=torch.float32, device="cpu")
                total = hvd.synchronize(hvd.sparse_allreduce_async(ones, "ones", hvd.Sum)).to_dense()
                optimizer.close()
            assert numbers.tolist() == [1.0, 1.0] and objects == [0, 1] and rows.device.type == "cpu"
            assert total.tolist() == [1.0, 1.0, 0.0]
            results.append([p.detach().clone() for p in model.parameters()])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), transport


def races_of_training(me: Me, stack: ExitStack, steps: int = 12, **options: Any) -> list[str]:
    """Train in all sorts of ways, with all communication on a stream of its own; return the races."""
    races = Races()
    inner = exchange_for
    stack.enter_context(patch("commsched.backends.cuda.device_of", lambda device: WatchedDevice(races)))
    stack.enter_context(
        patch("commsched.backends.cuda.exchange_for", lambda *args: WatchedExchange(inner(*args), races))
    )
    sharded = options.get("gather") == "parameters"
    with stack, races:
        model = seeded(Mixed)
        inner_optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(
            inner_optimizer, model.named_parameters(), model=model, transport="stream", **options
        )
        for step in range(steps):
            loss(step)(model, me.rank).backward()
            if step % 3 == 1 and not sharded:
                loss(step + 50)(model, me.rank).backward()  # adds to what was reduced
                assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
            if step % 4 == 2:
                optimizer.clip_grad_norm_(1.0) if sharded else optimizer.synchronize()
            optimizer.step()
            if step % 3 == 0:
                with torch.inference_mode():
                    loss(step)(model, me.rank)
            optimizer.zero_grad(set_to_none=bool(step % 2))
            if step == 9:
                model.twice.bias.requires_grad_(False)  # a new driver, and the memory of the old one is freed
        optimizer.close()
        return races.found()


def check_no_race(me: Me, **options: Any) -> None:
    found = races_of_training(me, ExitStack(), **options)
    assert not found, "\n".join([str(options), *found])


@case(ranks=(2,))
def no_hand_over_of_the_optimizer_is_a_race(me: Me) -> None:
    check_no_race(me, schedule="auto")


@case(ranks=(), slow=(2,))
def no_hand_over_is_a_race_whatever_the_options(me: Me) -> None:
    check_no_race(me, schedule="bytescheduler", bucket_mb=0.002)
    check_no_race(me, gather="parameters")
    check_no_race(me, compression=hvd.Compression.fp16, gradient_predivide_factor=2.0)
    check_no_race(me, compression=hvd.Compression.int8)
    check_no_race(me, compression=hvd.Compression.fp8, gather="parameters")


@case(ranks=(2,))
def a_race_of_the_optimizer_is_noticed(me: Me) -> None:
    def forgetful(self: StreamSchedule, *args: Any, plain: Any = StreamSchedule._start) -> None:
        with patch.object(self.device, "wait", lambda stream, event: None):
            plain(self, *args)

    stack = ExitStack()
    stack.enter_context(patch.object(StreamSchedule, "_start", forgetful))
    assert races_of_training(me, stack, gather="parameters", steps=3)


class LateNeighbour(nn.Module):
    """The last layer, used in every second step only, shares its bucket with a part of a large tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(40, 40)
        self.seldom = nn.Linear(40, 4)
        self.used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.large(torch.cat([x] * 4, 1)[:, :40])
        return self.seldom(x) if self.used else x


@case(ranks=(2,))
def a_gradient_whose_later_bucket_is_sent_first(me: Me) -> None:
    """Its memory was given back with its last bucket, and the first one was filled from old memory."""
    layers = [Layer("(outside)", 1e-3, 0.0, 0)]
    layers += [Layer(name, 1e-3, 2e-3, 4 * p.numel()) for name, p in LateNeighbour().named_parameters()]
    buckets = fuse_by_bytes([layer.bytes for layer in layers], 2000, part=2000)
    profile, link = Profile("given", tuple(layers)), Link(1e-4, 1e-7)
    for gather in ("gradients", "parameters"):
        program = plan(profile, link, "dear", ranks=2, buckets=buckets, gather=gather)
        options = {"gather": gather, "transport": "stream", "lag": 0.0}
        twin = Twin(me, LateNeighbour, schedule=program, bucket_mb=None, planned=False, **options)
        slots = twin.optimizer._session.round.buffers.layout.slots
        first, *later = slots[0].buckets
        assert later and first in slots[3].buckets, "no tensor begins in its neighbour's bucket"
        for step in range(6):
            twin.both(lambda m, step=step: setattr(m, "used", step % 2 == 0))
            twin.step(loss(step))
            twin.compare(f"step {step}", exact=gather == "gradients")
        release(twin.optimizer)


class Rotation(nn.Module):
    """Complex weights, whose gradients autograd may leave as conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.rotation = nn.Module()  # named_parameters() begins with a module's own
        self.rotation.turn = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
        self.rotation.shift = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.first(x).view(-1, 6, 2))
        return torch.view_as_real(z @ self.rotation.turn.conj() + self.rotation.shift).flatten(1)


@case(ranks=(2,))
def complex_parameters(me: Me) -> None:
    for transport in ("stream", "direct"):
        twin = Twin(me, Rotation, transport=transport, lag=0.0)
        for step in range(4):
            twin.step(loss(step))
            twin.compare(f"step {step} over {transport}")
        release(twin.optimizer)


@case(ranks=(2,))
def plain_reduces_at_step_time(me: Me) -> None:
    model = seeded(Mixed)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), transport="plain")
    assert optimizer._session is None
    loss(0)(model, me.rank).backward()
    optimizer.step()


main(__name__)
