"""Makes commsched and Accelerate see the same ranks, whichever launcher started the script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.utils._pytree import tree_map

from commsched.collectives.carrier import carrier
from commsched.collectives.job import init, rank, size
from commsched.collectives.operations import broadcast_object
from commsched.errors import CommError
from commsched.process.network import HeldPort


@contextmanager
def joined() -> Iterator[None]:
    """Join the job. Within this context Accelerate finds the ranks of any launcher.

    Accelerate reads torchrun's variables. Under another launcher they are set here, and removed again because
    ``init()`` refuses the variables of two launchers.
    """
    init()
    if size() == 1 or distributed.is_initialized() or carrier().launch.launcher == "torchrun":
        yield
        return
    with HeldPort() as port:
        variables = _torchrun_variables(port.number)
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _torchrun_variables(own_port: int) -> dict[str, str]:
    launch = carrier().launch
    address, port = broadcast_object((carrier().meeting.address, own_port), 0)
    return {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def check_ranks(processes: int) -> None:
    """Raise unless Accelerate has found as many processes as commsched."""
    if processes != size():
        raise CommError(
            f"rank {rank()}: Accelerate runs {processes} processes, commsched {size()}; without GPUs pass"
            " use_cpu=True to TrainingArguments or cpu=True to Accelerator; else start the script with"
            " torchrun, accelerate launch or horovodrun"
        )


# -- a sum over all ranks that nobody waits for before it is needed ------------------------------------------


class LateSum(torch.Tensor):
    """The sum over all ranks of a whole number, as a float; the first use waits for it.

    Trainer sums the number of tokens before each forward, which divides by it at its end. Waiting for the sum
    at once would let the forward begin only after the gradients or parameters that share the link with it.
    """

    _total: torch.Tensor
    _work: Any
    _sum: torch.Tensor | None = None

    @staticmethod
    def start(mine: torch.Tensor) -> LateSum:
        """Start to sum. All ranks call this in the same order as other operations of the default group."""
        late = torch.empty(()).as_subclass(LateSum)
        late._total = mine.to(torch.int64)
        late._work = distributed.all_reduce(late._total, async_op=True)
        return late

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(_value, args), **tree_map(_value, kwargs or {}))

    # torch.tensor() and torch.as_tensor() go by the function above.
    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


def _value(item: Any) -> Any:
    if not isinstance(item, LateSum):
        return item
    if item._sum is None:
        item._work.wait()
        item._sum = item._total / 1
    return item._sum
