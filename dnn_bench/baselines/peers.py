"""The trainers of the baselines: PyTorch's, Horovod's and commsched's, as documented, and the limits."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dnn_bench.baselines.trainer import Job, Operation, Stamps, Trainer

LEAST_SHARE = 0.01  # of the model's parameters; smaller parts go with the root


POWERSGD_RANK, POWERSGD_START = 4, 2  # the first iterations travel whole: DDP forms its buckets anew in them


class DDP(Trainer):
    def __init__(self, job: Job, bucket_cap_mb: float | None = None, compression: str = "") -> None:
        self.bucket_cap_mb, self.compression = bucket_cap_mb, compression
        self.recorded: list[Operation] = []
        super().__init__(job)

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        buckets: dict[str, Any] = {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **buckets)
        if self.compression == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
            )
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self.compression == "bf16":
            wrapped.register_comm_hook(None, lambda state, bucket: _in_bf16(bucket))
        return wrapped, self.job.build_optimizer(wrapped.parameters())

    def record_operations(self) -> None:
        # DDP looks at a hook's annotations, which it does not understand as strings; a lambda has none.
        self.model.register_comm_hook(None, lambda state, bucket: self._recorded_all_reduce(bucket))

    def _recorded_all_reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """All-reduce as DDP does by itself, and record its start and end."""
        buffer, begin, number = bucket.buffer(), time.perf_counter(), bucket.index()
        buffer.div_(self.size)

        def note(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
            sent = 2 * (self.size - 1) * buffer.nbytes // self.size
            self.recorded.append((f"AR{number}", begin, time.perf_counter(), sent))
            return reduced.value()[0]

        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        return work.get_future().then(note)

    def operations(self) -> list[Operation]:
        recorded, self.recorded = self.recorded, []
        return recorded


def _in_bf16(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Do what torch's bf16_compress_hook does, which refuses CPUs."""
    sent = bucket.buffer().bfloat16().div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None
    return work.get_future().then(lambda reduced: bucket.buffer().copy_(reduced.value()[0]))


class Zero1(DDP):
    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        wrapped, _ = super().wrap(model)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(),
            optimizer_class=torch.optim.SGD,
            parameters_as_bucket_view=True,
            lr=self.job.learning_rate,
            momentum=self.job.momentum,
        )
        return wrapped, optimizer


class FSDP2(Trainer):
    """Shards over all ranks; `by_host` (HSDP) over those of a host, with all-reduces between hosts."""

    def __init__(self, job: Job, reshard_after_forward: bool = True, by_host: bool = False) -> None:
        self.reshard_after_forward, self.by_host = reshard_after_forward, by_host
        super().__init__(job)

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        per_host = int(os.environ["LOCAL_WORLD_SIZE"]) if self.by_host else self.size
        shape = (self.size // per_host, per_host) if self.by_host else (self.size,)
        names = ("hosts", "ranks")[-len(shape) :]
        mesh = init_device_mesh(self.job.device.partition(":")[0], shape, mesh_dim_names=names)
        for module in [*blocks(model), model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        return model, self.job.build_optimizer(model.parameters())

    def parameters(self) -> dict[str, Tensor]:
        self.finish()
        whole = {}
        for name, value in self.module.named_parameters():
            data = value.detach()
            whole[name] = data.full_tensor() if isinstance(data, DTensor) else data.clone()
        return whole


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated parts of the top-level sequences (or of the model itself) that are worth a message."""
    least = LEAST_SHARE * parameter_count(model)
    trunks = [model] if isinstance(model, nn.Sequential) else list(model.children())
    for trunk in trunks:
        if isinstance(trunk, nn.Sequential):
            yield from (child for child in trunk if parameter_count(child) >= least)


def parameter_count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class Horovod(Trainer):
    """As Horovod's documentation shows it; `options` are the `DistributedOptimizer`'s."""

    library = "horovod.torch"

    def __init__(self, job: Job, compression: str = "none", **options: Any) -> None:
        self.compression, self.options = compression, options
        super().__init__(job)

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        optimizer = self.job.build_optimizer(model.parameters())
        self.ranks.broadcast_parameters(model.state_dict(), root_rank=0)
        self.ranks.broadcast_optimizer_state(optimizer, root_rank=0)
        options = {"compression": getattr(self.ranks.Compression, self.compression), **self.options}
        return model, self.ranks.DistributedOptimizer(optimizer, model.named_parameters(), **options)


class Commsched(Horovod):
    library = "commsched"

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        optimizer = self.job.build_optimizer(model.parameters())
        self.ranks.broadcast_parameters(model.state_dict(), root_rank=0)
        compression = getattr(self.ranks.Compression, self.compression)
        options = {"model": model, "compression": compression, **self.options}
        return model, self.ranks.DistributedOptimizer(optimizer, model.named_parameters(), **options)

    def is_settled(self) -> bool:
        return bool(self.ranks.is_settled(self.optimizer))

    def prediction(self) -> float | None:
        metrics = self.ranks.metrics(self.optimizer)
        return metrics.predicted_step if metrics is not None else None

    def operations(self) -> list[Operation]:
        """The engine's own record; its clock is time.monotonic(), as time.perf_counter() is on Linux."""
        return [(op.label, op.start, op.end, op.bytes) for op in self.ranks.operations(self.optimizer)]


class Kept(Commsched):
    """Survives the loss of any process: every tenth iteration commits, and begins a checkpoint."""

    EVERY = 10

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        wrapped = super().wrap(model)
        self._state = self.ranks.elastic.TorchState(*wrapped)
        self._folder = tempfile.TemporaryDirectory(prefix="kept-")
        self._iterations, self._saving = 0, None
        return wrapped

    def iteration(self, inputs: Tensor, targets: Tensor) -> Stamps:
        stamps = super().iteration(inputs, targets)
        self._iterations += 1
        if self._iterations % self.EVERY == 0:
            self._state.commit()
            state = {"model": self.model, "optimizer": self.optimizer}
            self._saving = self.ranks.save(state, self._folder.name)
        return stamps._replace(end=time.perf_counter())

    def close(self) -> None:
        if self._saving is not None:
            self._saving.wait()
        self._folder.cleanup()
        super().close()


# -- lower limits of a step: the compute alone, the bytes alone, and both at once without dependency ---------


class Local(Trainer):
    """Every rank trains alone; all at the same time, since they share the machine's memory."""


Transfer = tuple[Tensor, int, int]  # bytes, the other rank, tag


class Exchange:
    """Moves as many bytes as an all-reduce of `size` bytes does: a reduce-scatter, then an all-gather.

    Every rank sends a share to each other rank, twice. With several ranks on each of several hosts, what
    leaves a host is what one rank a host would send: its ranks share it out, and each sends to those of its
    place on the other hosts. Memory inside a host counts as free. The ranks of a host end together, as an
    all-reduce does: pairs of ranks that drift apart would each have a changing part of the link, and the
    slowest rank's time would be longer than the link takes for all of them.

    Receives are posted first: gloo announces a receive on the connection that carries the other direction's
    data, so megabytes of data would delay it.
    """

    def __init__(self, size: int) -> None:
        me, ranks = dist.get_rank(), dist.get_world_size()
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        # From one rank to the next with which it exchanges: hosts are in rank order.
        apart = per_host if per_host < ranks else 1
        first = me // apart * apart
        self.neighbours = [other for other in range(first, first + apart) if other != me]
        self.tag, self.nothing = 2 * ranks, torch.zeros(1, dtype=torch.uint8)
        share = -(-size // ranks)
        self.sends, self.receives = [], []
        for half in range(2):
            for distance in range(apart, ranks, apart):
                to, source, tag = (me + distance) % ranks, (me - distance) % ranks, half * ranks + distance
                self.sends.append((torch.zeros(share, dtype=torch.uint8), to, tag))
                self.receives.append((torch.empty(share, dtype=torch.uint8), source, tag))

    def __call__(self) -> None:
        self._run(self.receives, self.sends)
        ends = [(torch.empty_like(self.nothing), other, self.tag) for other in self.neighbours]
        self._run(ends, [(self.nothing, other, self.tag) for other in self.neighbours])

    @staticmethod
    def _run(receives: Sequence[Transfer], sends: Sequence[Transfer]) -> None:
        works = [dist.irecv(buffer, source, tag=tag) for buffer, source, tag in receives]
        works += [dist.isend(buffer, to, tag=tag) for buffer, to, tag in sends]
        for work in works:
            assert work is not None
            work.wait()


class Limit(Trainer):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        trained = (p for p in self.module.parameters() if p.requires_grad)
        self.exchange = Exchange(sum(p.nbytes for p in trained))


class Floor(Limit):
    """The iteration ends when the compute and the exchange have both ended; neither waits for the other."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.pool = ThreadPoolExecutor(1)

    def iteration(self, inputs: Tensor, targets: Tensor) -> Stamps:
        exchanged = self.pool.submit(self.exchange)
        stamps = super().iteration(inputs, targets)
        exchanged.result()
        return stamps._replace(end=time.perf_counter())

    def close(self) -> None:
        self.pool.shutdown()
        super().close()


class Wire(Limit):
    """The exchange alone, without compute."""

    def iteration(self, inputs: Tensor, targets: Tensor) -> Stamps:
        start = time.perf_counter()
        self.exchange()
        return Stamps(start, start, start, time.perf_counter())

    def wrap(self, model: nn.Module) -> tuple[Any, Any]:
        return None, None
