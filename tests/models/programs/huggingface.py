"""Stock scripts of transformers, TRL and Accelerate with two changed lines: as with DDP, bit for bit."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import commsched as hvd
from tests.support.cases import Me, case, main

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TIMES = ("_runtime", "_per_second", "total_flos")  # these differ from run to run
SHARDS = {"gather": "parameters"}
CHANGED = {  # the two lines, for each script
    "text_classification": ("from transformers import Trainer", "trainer = Trainer("),
    "causal_language_model": ("from transformers import Trainer", "trainer = Trainer("),
    "supervised_fine_tuning": ("from trl import SFTTrainer", "trainer = SFTTrainer("),
    "accelerate_loop": ("from accelerate import Accelerator", "accelerator = Accelerator("),
}
NEW = {
    "from transformers import Trainer": "from commsched.huggingface import Trainer",
    "from accelerate import Accelerator": "from commsched.huggingface import Accelerator",
    "from trl import SFTTrainer": (
        "from trl import SFTTrainer as TRL; import commsched.huggingface as hf\n"
        "class SFTTrainer(hf.TrainerMixin, TRL): pass"
    ),
}


Options = dict[str, Any] | None


def run(script: str, *arguments: str, ours: Options = None, callback: Any = None) -> dict[str, Any]:
    """Run a script as it stands, or with its two lines changed; returns its names."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    text = (EXAMPLES / f"{script}.py").read_text()
    if ours is not None:
        first, second = CHANGED[script]
        text = _changed(text, first, NEW[first])
        text = _changed(text, second, f"{second}commsched={ours!r}, ")
    if callback is not None:
        text = _changed(text, "\ntrainer.train(", "\ntrainer.add_callback(callback)\ntrainer.train(")
    names: dict[str, Any] = {"__name__": "__main__", "callback": callback}
    before = sys.argv
    sys.argv = [script, *arguments]
    try:
        exec(compile(text, script, "exec"), names)
    finally:
        sys.argv = before
    return names


def _changed(text: str, line: str, new: str) -> str:
    assert text.count(line) == 1, f"{line!r} stands {text.count(line)} times in the script"
    return text.replace(line, new)


@contextmanager
def folders(me: Me, count: int) -> Iterator[list[Path]]:
    """Empty folders that all ranks share."""
    mine = tempfile.mkdtemp() if me.rank == 0 else ""
    shared = Path(me.everybody(mine)[0])
    yield [shared / str(i) for i in range(count)]
    me.everybody()
    if me.rank == 0:
        shutil.rmtree(shared)


def arguments(folder: Path, *more: str, steps: int = 6) -> list[str]:
    # With Adam's usual epsilon, gradients that are zero but for rounding move parameters by whole steps.
    own = f"""
        --output_dir {folder} --use_cpu True --max_steps {steps} --logging_steps 1 --report_to none
        --disable_tqdm True --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --save_strategy no
        --learning_rate 0.01 --adam_epsilon 1e-3
    """
    return own.split() + list(more)


def said(trainer: Any) -> list[dict[str, Any]]:
    """What the trainer logged, without times."""
    rows = trainer.state.log_history
    return [{k: v for k, v in row.items() if not any(time in k for time in TIMES)} for row in rows]


def assert_equal(mine: Any, stock: Any, tolerance: float, what: str) -> None:
    """Equal numbers and tensors; or, where sums have another order, equal within ``tolerance``."""
    if isinstance(stock, dict):
        assert set(mine) == set(stock), f"{what}: {sorted(set(mine) ^ set(stock))} on one side only"
        for key in stock:
            assert_equal(mine[key], stock[key], tolerance, f"{what} {key}")
    elif isinstance(stock, (list, tuple)):
        assert len(mine) == len(stock), f"{what}: {len(mine)} and {len(stock)} entries\n{mine}\n{stock}"
        for i, (a, b) in enumerate(zip(mine, stock)):
            assert_equal(a, b, tolerance, f"{what} {i}")
    elif isinstance(stock, torch.Tensor):
        torch.testing.assert_close(
            mine, stock, rtol=tolerance, atol=tolerance / 10, msg=lambda text: f"{what}: {text}"
        )
    elif isinstance(stock, float) and tolerance:
        assert abs(mine - stock) <= tolerance * max(1.0, abs(stock)), f"{what}: {mine} and {stock}"
    else:
        assert mine == stock, f"{what}: {mine!r} and {stock!r}"


def compare(mine: Any, stock: Any, tolerance: float, resumed: bool = False) -> None:
    assert type(stock.accelerator).__module__.startswith("accelerate."), type(stock.accelerator)
    assert type(mine.accelerator).__module__.startswith("commsched."), type(mine.accelerator)
    logs = [said(trainer) for trainer in (mine, stock)]
    if resumed:  # the last line is the mean since then
        logs = [log[:-1] for log in logs]
    assert_equal(*logs, tolerance, "the log")
    assert_equal(mine.model.state_dict(), stock.model.state_dict(), tolerance, "parameters")


def alike(me: Me, script: str, *more: str, ours: Options = None, tolerance: float = 1e-5) -> None:
    """Train with DDP and with commsched and compare. Two numbers have one sum: two ranks give equal bits."""
    ours = ours or {}
    tolerance = 0.0 if me.size == 2 and not ours else tolerance
    with folders(me, 2) as (a, b):
        stock = run(script, *arguments(a, *more))
        mine = run(script, *arguments(b, *more), ours=ours)
        compare(mine["trainer"], stock["trainer"], tolerance)
        if "predictions" in stock:
            pairs = zip(mine["predictions"][:2], stock["predictions"][:2])
            both = ([torch.tensor(x) for x in side] for side in zip(*pairs))
            assert_equal(*both, tolerance, "predictions")


# -- Trainer -------------------------------------------------------------------------------------------------

EVALUATED = (
    "--eval_strategy steps --eval_steps 2 --save_strategy steps --save_steps 2 --load_best_model_at_end True"
    " --metric_for_best_model accuracy --gradient_accumulation_steps 2 --warmup_steps 2"
).split()


@case()
def classification_with_the_best_checkpoint(me: Me) -> None:
    for ours in ({}, SHARDS):
        alike(me, "text_classification", *EVALUATED, ours=ours)


@case()
def tokens_are_counted_over_all_ranks(me: Me) -> None:
    for more in ((), ("--average_tokens_across_devices", "False")):
        alike(me, "causal_language_model", "--gradient_accumulation_steps", "3", *more)
    alike(me, "causal_language_model", "--gradient_accumulation_steps", "3", ours=SHARDS)


@case()
def epochs_that_do_not_divide(me: Me) -> None:
    """The last accumulation of an epoch has fewer batches. Without clipping, the norm is logged anyway."""
    more = "--max_steps -1 --num_train_epochs 2 --gradient_accumulation_steps 4 --max_grad_norm 0"
    alike(me, "causal_language_model", *more.split(), "--logging_steps", "2")
    alike(me, "causal_language_model", *more.split(), ours=SHARDS)


@case()
def half_precision(me: Me) -> None:
    more = ("--bf16", "True", "--gradient_accumulation_steps", "2")
    for ours in ({}, SHARDS):
        alike(me, "text_classification", *more, ours=ours, tolerance=1e-2)


@case()
def supervised_fine_tuning(me: Me) -> None:
    more = ("--gradient_accumulation_steps", "2", "--bf16", "False")
    alike(me, "supervised_fine_tuning", *more[:2], tolerance=1e-2)  # TRL's default is bf16
    alike(me, "supervised_fine_tuning", *more, ours=SHARDS)


@case()
def batches_from_rank_0(me: Me) -> None:
    config = json.dumps({"dispatch_batches": True, "split_batches": True})
    alike(me, "text_classification", "--accelerator_config", config, "--per_device_train_batch_size", "6")


@case()
def checkpoints_resume_in_both_directions(me: Me) -> None:
    """Each side goes on from the other's checkpoint, and ends where DDP ends without a break."""
    saving = ("--save_strategy", "steps", "--save_steps", "3", "--gradient_accumulation_steps", "2")
    for ours in ({}, SHARDS):
        tolerance = 0.0 if me.size == 2 and not ours else 1e-5
        with folders(me, 4) as (a, b, c, d):
            whole = run("text_classification", *arguments(a, *saving))["trainer"]
            run("text_classification", *arguments(b, *saving), ours=ours)
            names = [sorted(p.name for p in (f / "checkpoint-3").iterdir()) for f in (a, b)]
            assert names[0] == names[1], names
            from_stock, from_ours = (("--resume_from_checkpoint", str(f / "checkpoint-3")) for f in (a, b))
            mine = run("text_classification", *arguments(c, *from_stock, *saving), ours=ours)["trainer"]
            compare(mine, whole, tolerance, resumed=True)
            stock = run("text_classification", *arguments(d, *from_ours, *saving))["trainer"]
            compare(mine, stock, tolerance)


@case(ranks=(2,))
def a_model_is_trained_again(me: Me) -> None:
    """By the same trainer and by another one, after an evaluation; then nothing of the former is left."""
    from commsched.huggingface import Trainer

    with folders(me, 1) as (a,):
        for ours in ({}, SHARDS):
            trainer = run("text_classification", *arguments(a), ours=ours)["trainer"]
            trainer.evaluate()
            trainer.train()
            assert trainer.optimizer.optimizer._driver is None
            other = Trainer(trainer.model, trainer.args, train_dataset=trainer.train_dataset, commsched=ours)
            other.train()
            total = torch.stack([p.detach().double().sum() for p in trainer.model.parameters()])
            assert len(set(me.everybody(str(total.tolist())))) == 1, "the ranks differ"
            assert not any(m._forward_pre_hooks for m in trainer.model.modules())


# -- when what is sent ---------------------------------------------------------------------------------------


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
            self.pending.append(optimizer.optimizer._driver.reducer.state.pending)

        def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
            driver = optimizer.optimizer._driver
            self.measures = driver._measuring is not None
            self.rounds = driver.reducer.state.rounds
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
    for ours in ({}, SHARDS):
        mine = run("accelerate_loop", ours=ours)
        assert mine["optimizer"].optimizer._driver is not None
        for name in ("losses", "state", "rate"):
            assert_equal(mine[name], stock[name], 1e-5 if ours or me.size > 2 else 0.0, name)
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
