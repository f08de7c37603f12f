"""What Trainer's and Accelerate's loops send and when; which of Accelerate's features are refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import commsched as hvd
from tests.support.cases import Me, case, main
from tests.support.huggingface_scripts import SHARDS, arguments, assert_equal, folders, run


def watch(me: Me) -> Any:
    """A callback that notes when forwards run and what is still on its way then. Rank 1 is late."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.pending: list[int] = []
            self.forwards: list[tuple[float, float]] = []

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            model.register_forward_pre_hook(lambda *_: setattr(self, "began", time.monotonic()))
            model.register_forward_hook(
                lambda *_: self.forwards.append((self.began, time.monotonic())) and None
            )
            next(model.parameters()).register_hook(lambda _: self.late())

        def late(self) -> None:
            if me.rank == 1:
                time.sleep(0.02)

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.late()

        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
            self.pending.append(optimizer.optimizer._session.round.pending)

        def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
            session = optimizer.optimizer._session
            self.measures = session._measuring is not None
            self.rounds = session.round.number
            self.plan = hvd.explain(optimizer.optimizer, show=False)
            self.operations = hvd.operations(optimizer.optimizer)

        def hidden(self) -> list[str]:
            """The all-gathers that ran while a forward ran."""
            return [
                op.label
                for op in self.operations
                if op.kind == "AG" and any(op.end > a and op.start < b for a, b in self.forwards)
            ]

    return Watch()


@case(ranks=(2,))
def gathers_run_under_the_next_forward(me: Me) -> None:
    """A plan is installed, and nothing between ``step()`` and the forward waits for the parameters."""
    quiet = ("--logging_steps", "100", "--gradient_accumulation_steps", "2")
    for more, ours in ((("--max_grad_norm", "0"), {}), ((), SHARDS)):
        seen = watch(me)
        with folders(me, 1) as (a,):
            run(
                "causal_language_model",
                *arguments(a, *quiet, *more, steps=20),
                ours={**ours, "bucket_mb": 0.02},
                callback=seen,
            )
        assert seen.plan is not None and not seen.measures, seen.plan
        assert seen.rounds == 20, f"{seen.rounds} reductions in 20 steps"
        hidden = [int(text) for text in me.everybody(str(len(seen.hidden())))]
        assert hidden[0] > 10, f"{ours}: {hidden} all-gathers ran under a forward: {seen.plan}"
        late = seen.pending[12:]  # measured before
        assert me.rank or min(late) > 0, f"{ours}: parameters on their way when a step began: {late}"


# -- Accelerate ----------------------------------------------------------------------------------------------


@case()
def a_loop_of_accelerate(me: Me) -> None:
    stock = run("accelerate_loop")
    for ours in ({}, SHARDS, {"transport": "plain"}):
        mine = run("accelerate_loop", ours=ours)
        assert (mine["optimizer"].optimizer._session is None) == ("transport" in ours)
        for name in ("losses", "state", "rate"):
            assert_equal(mine[name], stock[name], 1e-5 if ours or me.size > 2 else 0.0, name)
        with folders(me, 1) as (folder,):
            mine["accelerator"].save_state(folder)
            mine["accelerator"].wait_for_everyone()  # rank 0 writes
            with torch.no_grad():
                for p in mine["model"].parameters():
                    p.zero_()
            mine["accelerator"].load_state(folder)
            assert_equal(mine["model"].state_dict(), mine["state"], 0.0, "a loaded state")
        mine["accelerator"].free_memory()


@case(ranks=(2,))
def what_takes_the_place_of_ddp_is_refused(me: Me) -> None:
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedDataParallelKwargs

    from commsched.huggingface import Accelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    refused(lambda: Accelerator(cpu=True, commsched={"gathers": 1}), "but got gathers")
    hook = DistributedDataParallelKwargs(comm_hook="fp16")
    refused(lambda: Accelerator(cpu=True, kwargs_handlers=[hook]), "comm_hook fp16: pass commsched=")
    accelerator = Accelerator(cpu=True, commsched=SHARDS)
    model = torch.nn.Linear(3, 3)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    refused(lambda: accelerator.clip_grad_norm_([model.weight], 1.0), "all 2 parameters of one")
    refused(lambda: accelerator.join_uneven_inputs([model]).__enter__(), "leave even_batches=True")
    accelerator.free_memory()


def refused(act: Callable[[], Any], message: str) -> None:
    try:
        act()
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"no error says {message!r}")


main(__name__)
