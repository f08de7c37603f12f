"""What ``gather="parameters"`` refuses, and what to do instead."""

from __future__ import annotations

from commsched.errors import CommError


def own_class(name: str, kind: str) -> ValueError:
    return ValueError(
        f"gather='parameters' moves parameters into flat buffers, and {name} is of a class of its own"
        f" ({kind}); use gather='gradients'"
    )


def early_on_gpu() -> ValueError:
    return ValueError(
        "early_step=True updates from a thread of its own, which has no place in a GPU's streams; use"
        " early_step=False"
    )


def early_accumulation() -> ValueError:
    return ValueError(
        "with early_step=True every backward is a step; call optimizer.step() after each backward"
    )


def before_early_step(what: str) -> ValueError:
    return ValueError(
        f"early_step=True updates inside the backward, before {what} could do anything; use early_step=False"
    )


def no_gradients_left() -> ValueError:
    return ValueError(
        "with gather='parameters' step() leaves no gradients that a further backward could add to; call"
        " optimizer.zero_grad() between step() and the next backward"
    )


def late_gradient(rank: int) -> CommError:
    return CommError(
        f"rank {rank}: a parameter received a second gradient in one backward after its bucket had been sent"
        " (reentrant checkpointing of a module that is used twice?); use gather='gradients' or"
        " use_reentrant=False"
    )


def sparse_gradient(name: str) -> ValueError:
    return ValueError(
        f"the gradient of {name} is sparse, and gather='parameters' reduces dense buckets; use"
        " sparse_as_dense=True or gather='gradients'"
    )


def not_gathered(rank: int) -> CommError:
    return CommError(
        f"rank {rank}: with gather='parameters' no rank holds a whole gradient after backward(); call"
        " optimizer.synchronize() on all ranks before p.grad is read, or optimizer.clip_grad_norm_() to clip"
    )


def gradient_gone(rank: int, name: str) -> CommError:
    return CommError(
        f"rank {rank}: the gradient of {name} is gone: with gather='parameters' step() leaves none; read it"
        " after optimizer.synchronize() and before step(), and call optimizer.zero_grad() (not the model's)"
        " before the next backward"
    )
