"""Stock scripts of transformers, TRL and Accelerate, run as they stand or with their two lines changed.

Accelerate's wheel has scripts that test it; they run with another ``Accelerator``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.support.cases import Me

EXAMPLES = Path(__file__).resolve().parents[1] / "models" / "examples"
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
def accelerates_script(name: str) -> Iterator[Any]:
    """A script of ``accelerate.test_utils.scripts``, in which our ``Accelerator`` stands for Accelerate's."""
    from accelerate.state import AcceleratorState, PartialState

    from commsched.huggingface import Accelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    script = import_module(f"accelerate.test_utils.scripts.{name}")
    with (
        patch.dict(os.environ, {"ACCELERATE_USE_CPU": "true"}),
        patch.object(script, "Accelerator", Accelerator, create=True),
        # The scripts destroy the process group at their end, and other cases use it.
        patch.object(PartialState, "destroy_process_group"),
    ):
        yield script


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
