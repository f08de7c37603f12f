"""What users do to a model and its optimizers. Each action is one function for both sides.

An action returns what the user sees: tensors, numbers, texts. ``salt`` is the action's own number, of which
its random values are made, so that they stay the same when other actions are removed from the program.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters

from tests.checker import models
from tests.checker.models import LAYERS, WIDTH
from tests.checker.world import PlainWorld, World

Args = dict[str, Any]


@dataclass(frozen=True)
class Action:
    """``draw``: chooses the arguments. ``events``: what it begins with, for the table of listed errors.

    ``legal``: whether plain PyTorch defines its result in this state. ``settles``: whether it makes ranks
    even of which not all had a backward. ``local``: whether a closed optimizer offers what it needs.
    """

    name: str
    act: Callable[..., Any]
    weight: float
    draw: Callable[[random.Random, Args], Args]
    events: tuple[str, ...] | Callable[[Args], tuple[str, ...]]
    legal: Callable[[PlainWorld], bool]
    settles: bool
    local: bool
    needs: str


ACTIONS: dict[str, Action] = {}


def action(
    weight: float = 1.0,
    draw: Callable[[random.Random, Args], Args] = lambda dice, options: {},
    events: tuple[str, ...] | Callable[[Args], tuple[str, ...]] = (),
    legal: Callable[[PlainWorld], bool] = lambda w: True,
    settles: bool = False,
    local: bool = True,
    needs: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(act: Callable[..., Any]) -> Callable[..., Any]:
        name = act.__name__.rstrip("_")
        ACTIONS[name] = Action(name, act, weight, draw, events, legal, settles, local, needs)
        return act

    return register


# -- what is drawn -------------------------------------------------------------------------------------------


def loss_spec(dice: random.Random, options: Args) -> Args:
    spec: Args = {}
    if dice.random() < 0.35:
        spec["branch"] = dice.choice(["right", "both", "by rank", "by rank"])
    if dice.random() < 0.15:
        spec["twice"] = True
    if dice.random() < 0.15:
        spec["checkpointed"] = dice.choice(["reentrant", "not reentrant"])
        if options["compression"] != "none":  # a second gradient would be rounded apart
            spec["checkpointed"] = "not reentrant"
    if dice.random() < 0.15:
        spec["extra"] = dice.choice(["functional", "sum of weights"])
    return spec


CLEARS = (
    *("optimizer", "optimizer zero", "model", "model zero"),
    *("none", "zero_", "del", "none where set", "none where trained"),
)


def events_of_clear(args: Args) -> tuple[str, ...]:
    return ("read", "clear") if args["how"] in ("model zero", "zero_", "none where set") else ("clear",)


def clear(w: World, how: str) -> None:
    """Clear all gradients in one of the usual ways."""
    params = w.trained()
    w.events(("clear",))
    if how == "optimizer":
        w.zero_grad()
    elif how == "optimizer zero":
        w.zero_grad(set_to_none=False)
    elif how == "model":
        w.model.zero_grad()
    elif how == "model zero":
        w.reading()
        w.changing_grads()
        w.model.zero_grad(set_to_none=False)
    elif how == "none":
        for p in params:
            p.grad = None
    elif how == "none where trained":
        for p in params:
            if p.requires_grad:
                p.grad = None
    elif how == "del":
        for p in params:
            del p.grad
    elif how == "zero_":
        w.reading()
        w.changing_grads()
        for p in params:
            if p.grad is not None:
                p.grad.zero_()
    elif how == "none where set":
        w.reading()
        for p in params:
            if p.grad is not None:
                p.grad = None


def draw_loss(dice: random.Random, options: Args) -> Args:
    return {"loss": loss_spec(dice, options)}


def copies(tensors: Any) -> list[Any]:
    return [None if t is None else t.detach().clone() for t in tensors]


def cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: cloned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [cloned(item) for item in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def part(w: World, place: int) -> nn.Module:
    """Return one of the model's modules."""
    modules: list[nn.Module] = [w.model.front, *w.model.body, w.model.left, w.model.right, w.model.tail]
    return modules[place % len(modules)]


def one(w: World, place: int) -> nn.Parameter:
    params = w.trained()
    return params[place % len(params)]


def dense(w: PlainWorld) -> bool:
    return w.model.kind != "sparse"


def on_a_stream(w: PlainWorld) -> bool:
    return w.options["stream"] or w.options["transport"] == "stream"


def calm(w: PlainWorld) -> bool:
    """Whether gradients are the same on all ranks, so that changes have one meaning with op=Sum."""
    return not any(book.local and book.sums for book in w.books)


def fresh(w: PlainWorld) -> bool:
    """Whether gradients were averaged since the last step; else changes have two meanings with op=Sum."""
    return not any(book.sums and not book.fresh for book in w.books)


# -- backwards and steps -------------------------------------------------------------------------------------


@action(
    5,
    lambda dice, o: {
        **draw_loss(dice, o),
        "steps": dice.choice([1, 1, 2, 3]),
        "clear": dice.choice(["optimizer", "optimizer", "optimizer zero", "model", "none"]),
        "first": dice.random() < 0.6,
    },
    ("backward",),
)
def train(w: World, salt: int, loss: Args, steps: int, clear: str, first: bool) -> Any:
    """The usual loop; ``first``: clears before the backward, else after the step."""
    seen = []
    for _ in range(steps):
        if first:
            _clear_in_loop(w, clear)
        value = w.loss(loss, salt)
        w.backward(value)
        w.step()
        if not first:
            _clear_in_loop(w, clear)
        seen.append(value.item())
    return seen


def _clear_in_loop(w: World, how: str) -> None:
    clear(w, how)
    if isinstance(w, PlainWorld):
        w.look()


@action(5, draw_loss, ("backward",))
def backward(w: World, salt: int, loss: Args) -> Any:
    value = w.loss(loss, salt)
    w.backward(value)
    return value.item()


@action(
    1,
    lambda dice, o: {
        **draw_loss(dice, o),
        "way": dice.choice(["one by one", "retained", "together", "graph"]),
    },
    ("backward",),
)
def two_losses(w: World, salt: int, loss: Args, way: str) -> Any:
    if way == "retained":
        value = w.loss(loss, salt)
        w.backward(value, retain_graph=True)
        w.backward(value)
        return value.item()
    if way == "graph":
        out = w.forward(w.batch(salt), loss)
        first, second = w.loss_of(out, loss, salt), out.tanh().sum() * 0.1
        w.backward(first, retain_graph=True)
        w.backward(second)
        return first.item()
    first, second = w.loss(loss, salt), w.loss(loss, salt)
    if way == "together":
        w.backward([first, second])
    else:
        w.backward(first)
        w.backward(second)
    return first.item(), second.item()


@action(4, events=("step",), settles=True)
def step(w: World, salt: int) -> Any:
    w.step()


@action(1.5, events=("synchronize",), settles=True, local=False)
def synchronize(w: World, salt: int) -> Any:
    w.synchronize()


@action(1.5, draw_loss, ("backward",), local=False)
def closure_step(w: World, salt: int, loss: Args) -> Any:
    """``optimizer.step(closure)``; with two optimizers the closure belongs to the first."""

    def closure() -> torch.Tensor:
        w.zero_grad()
        value = w.loss(loss, salt)
        w.backward(value)
        return value

    value = w.optimizers[0].step(closure)
    for other in w.optimizers[1:]:
        other.step()
    return float(value)


@action(3, lambda dice, o: {"how": dice.choice(CLEARS)}, events_of_clear)
def clear_grads(w: World, salt: int, how: str) -> Any:
    clear(w, how)


@action(0.7, lambda dice, o: {"place": dice.randrange(9), "way": dice.choice(["module", "none"])})
def clear_some(w: World, salt: int, place: int, way: str) -> Any:
    module = part(w, place)
    if way == "module":
        module.zero_grad()
    else:
        for p in module.parameters():
            p.grad = None


@action(
    2.5,
    lambda dice, o: {
        **draw_loss(dice, o),
        "local": dice.randint(1, 2),
        "then": dice.choice(["nothing", "backward", "backward"]),
    },
    ("backward",),
    local=False,
)
def no_sync(w: World, salt: int, loss: Args, local: int, then: str) -> Any:
    """Backwards under no_sync(), and then maybe one that reduces the sum."""
    with w.no_sync():
        for _ in range(local):
            w.backward(w.loss(loss, salt))
    if then == "backward":
        w.backward(w.loss(loss, salt))


@action(
    0.6,
    lambda dice, o: {"passes": dice.randint(1, 3)},
    legal=lambda w: not any(b.local or b.done for b in w.books),
    local=False,
)
def set_passes(w: World, salt: int, passes: int) -> Any:
    for optimizer in w.optimizers:
        optimizer.set_backward_passes_per_step(passes)


@action(
    1,
    lambda dice, o: {
        **draw_loss(dice, o),
        "rank": dice.randrange(o["ranks"]),
        "then": dice.choice(["step", "sync"]),
    },
    ("backward", "step"),
    legal=lambda w: all(b.passes == 1 and not (b.local or b.backwards or b.fresh) for b in w.books),
    local=False,
)
def idle_rank(w: World, salt: int, loss: Args, rank: int, then: str) -> Any:
    """One rank has no data: it calls step() or synchronize() without a backward."""
    if w.rank != rank:
        w.backward(w.loss(loss, salt))
    elif isinstance(w, PlainWorld):
        w.note(loss)
        for optimizer in w.wrapped:  # the others ask whether this rank had a backward
            optimizer.after_backward(optimizer.before_backward())
    if then == "sync":
        w.synchronize()
    else:
        w.step()


@action(
    1.5,
    lambda dice, o: {
        **draw_loss(dice, o),
        "bomb": dice.randint(0, LAYERS + 1),
        "clear": dice.choice([None, *CLEARS]),
    },
    ("backward",),
)
def failing_backward(w: World, salt: int, loss: Args, bomb: int, clear: str | None) -> Any:
    """A backward raises on all ranks in the same layer; the script catches it and clears, or does not."""
    if not all(p.requires_grad for p in w.params()):
        # A rank's own branch may have no gradient before the bomb: nothing tells the others of that backward.
        loss = {name: value for name, value in loss.items() if name != "branch"}
    try:
        w.backward(w.loss(loss, salt, bomb))
    except RuntimeError as error:
        if "bomb" not in str(error):
            raise
        seen = str(error)
    else:
        seen = "nothing was raised"
    if clear is not None:
        _clear_in_loop(w, clear)
    return seen


@action(
    1,
    lambda dice, o: {
        **draw_loss(dice, o),
        "bomb": dice.randint(0, LAYERS),
        "rank": dice.randrange(o["ranks"]),
        "clear": dice.choice(["optimizer", "model", "none", "del"]),
    },
    ("backward",),
    # At least one gradient comes before the bomb: else nothing tells the others of this backward.
    legal=lambda w: all(b.passes == 1 for b in w.books) and all(p.requires_grad for p in w.params()),
    local=False,
)
def failing_rank(w: World, salt: int, loss: Args, bomb: int, rank: int, clear: str) -> Any:
    """A backward raises on one rank; all ranks leave this batch out and clear."""
    value = w.loss(loss, salt, bomb if w.rank == rank else None)
    try:
        if isinstance(w, PlainWorld):  # what the other ranks have averaged is cleared
            w.inside_a_backward()
            for optimizer in w.wrapped:
                optimizer.before_backward()
            torch.autograd.backward(value)
        else:
            w.backward(value)
    except RuntimeError as error:
        if "bomb" not in str(error):
            raise
    _clear_in_loop(w, clear)


@action(
    1.5,
    lambda dice, o: {
        **draw_loss(dice, o),
        "way": dice.choice(["input", "params", "create_graph", "grad only"]),
    },
    ("backward",),
)
def penalty(w: World, salt: int, loss: Args, way: str) -> Any:
    """Gradients of gradients."""
    loss = {**loss, "checkpointed": "no"}
    x = w.batch(salt)
    if way == "input" and x.is_floating_point():
        x.requires_grad_()
        value = w.loss_of(w.forward(x, loss), loss, salt)
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        w.backward(value + grad.square().sum())
        return value.item(), x.grad
    value = w.loss_of(w.forward(x, loss), loss, salt)
    params = [p for p in w.model.body.parameters() if p.requires_grad]
    if way == "create_graph" or not params:
        w.backward(value, create_graph=True)
        return value.item()
    grads = torch.autograd.grad(value, params, create_graph=way != "grad only")
    if way == "grad only":
        return copies(grads)
    w.backward(value + sum(g.square().sum() for g in grads))
    return value.item()


@action(
    0.8,
    lambda dice, o: {**draw_loss(dice, o), "places": sorted(dice.sample(range(12), 3))},
    ("backward",),
    legal=lambda w: not w.options["two"],
)
def backward_inputs(w: World, salt: int, loss: Args, places: list[int]) -> Any:
    """``backward(inputs=...)``: only these parameters get a gradient."""
    value = w.loss({**loss, "branch": "both", "checkpointed": "no"}, salt)
    inputs = [one(w, place) for place in places]
    inputs = [p for p in dict.fromkeys(inputs) if p.requires_grad]
    if inputs:
        w.backward(value, inputs=inputs)


@action(0.6, draw_loss, ("backward",), legal=lambda w: "graph" not in w.kept)
def keep_graph(w: World, salt: int, loss: Args) -> Any:
    """A forward whose backward comes in a later action."""
    w.kept["graph"], w.kept["loss of graph"] = w.loss(loss, salt), loss


@action(1.5, events=("backward",), legal=lambda w: "graph" in w.kept, needs="keep_graph")
def use_graph(w: World, salt: int) -> Any:
    if isinstance(w, PlainWorld):
        w.note(w.kept["loss of graph"])
    w.backward(w.kept.pop("graph"))


@action(
    1.2,
    lambda dice, o: {
        **draw_loss(dice, o),
        "samples": dice.randint(1, 4),
        "passes": dice.choice([1, 1, 2, 3]),
        "odd": dice.choice([None, None, None, 0, 1, 2]),
        "idle": dice.choice([None] * 4 + [dice.randrange(o["ranks"])]),
        "local": dice.random() < 0.2,
        "then": dice.choice(["step", "step", "read and step", "clip and step", "nothing"]),
        "clear": dice.choice([None, *CLEARS]),
    },
    ("backward", "synchronize"),
    legal=lambda w: (
        dense(w)
        and w.options["op"] != "sum"
        and w.options["optimizer"] != "lbfgs"
        and not any(b.local or b.ungathered or b.gathered or b.consumed or b.done or b.fresh for b in w.books)
        and all(b.passes == 1 for b in w.books)
        and len(w.books) == 1
        and not w.hooks  # they see gradients of sums over samples
        and all(p.requires_grad for p in w.trained())
    ),
    local=False,
)
def weighted(
    w: World,
    salt: int,
    loss: Args,
    samples: int,
    passes: int,
    odd: int | None,
    idle: int | None,
    local: bool,
    then: str,
    clear: str | None,
) -> Any:
    """A step whose ranks have different numbers of samples, one maybe none; ``local``: all passes are.

    ``odd``: the pass whose loss is not weighted. It is refused if it would add to samples that were counted,
    and so is the next one, which would count samples for it.
    """
    loss = {**loss, "branch": "both", "checkpointed": "no"}
    optimizer, refused = w.optimizers[0], False
    if passes > 1 or odd == 0 or local or then != "step":
        idle = None
    if idle is not None:
        _clear_in_loop(w, "optimizer")  # else the others would be refused, and this rank not know it
    for number in range(passes):
        with w.no_sync() if local or number + 1 < passes else nullcontext():
            refused = refused or _add_weighted(w, salt + number, loss, samples + w.rank, number == odd, idle)
    seen = [refused]
    if refused or then == "nothing":
        _clear_in_loop(w, "optimizer")
        return seen
    if then == "read and step":
        w.synchronize()
        w.reading()
        seen += copies(p.grad for p in w.trained())
    elif then == "clip and step":
        seen.append(optimizer.clip_grad_norm_(0.05).item())
        w.changing_grads()
    with nullcontext() if then == "step" else optimizer.skip_synchronize():
        optimizer.step()
    if clear is not None:
        w.events(events_of_clear({"how": clear}))
        _clear_in_loop(w, clear)
    return seen


def _add_weighted(w: World, salt: int, loss: Args, samples: int, odd: bool, idle: int | None) -> bool:
    """Run one backward of a weighted loss, or of an odd one; return whether it was refused."""
    value, optimizer = w.loss(loss, salt), w.optimizers[0]
    if isinstance(w, PlainWorld):
        w.events(("backward",))
        if w.rank == idle:
            optimizer.after_backward(optimizer.before_backward())
        elif optimizer.counts(0 if odd else samples):
            w.backward(value if odd else value * samples)
        else:
            return True
    elif w.rank != idle:
        try:
            w.backward(value if odd else optimizer.weighted(value, samples))
        except ValueError as error:
            if "weighted" not in str(error):
                raise
            return True
    return False


@action(
    1,
    lambda dice, o: {**draw_loss(dice, o), "samples": dice.randint(1, 4), "local": dice.random() < 0.6},
    ("backward",),
    legal=lambda w: (
        dense(w)
        and w.options["op"] != "sum"
        and w.options["optimizer"] != "lbfgs"
        and all(b.passes == 1 and (b.samples or not (b.local or b.fresh or b.consumed)) for b in w.books)
        and len(w.books) == 1
        and not w.hooks
    ),
    local=False,
)
def weighted_backward(w: World, salt: int, loss: Args, samples: int, local: bool) -> Any:
    """One backward of a weighted loss. Until its gradients are reduced, few other actions have a meaning."""
    with w.no_sync() if local else nullcontext():
        spec = {**loss, "branch": "both", "checkpointed": "no"}
        return _add_weighted(w, salt, spec, samples + w.rank, odd=False, idle=None)


AMONG_WEIGHTED = frozenset(
    (
        "weighted_backward step synchronize clear_grads freeze unfreeze add_group read_params close_at_end"
    ).split()
)


@action(
    1,
    lambda dice, o: {**draw_loss(dice, o), "how": dice.choice(["rate", "rate", "hook"])},
    ("backward", "step", "state"),
    legal=lambda w: (
        w.options["optimizer"] != "lbfgs"
        and "graph" not in w.kept
        and not any(b.local or b.ungathered or b.consumed for b in w.books)
        and all(b.passes == 1 for b in w.books)
    ),
    local=False,
)
def failing_update(w: World, salt: int, loss: Args, how: str) -> Any:
    """An update raises; the script goes back to the model and the optimizers that it had before."""
    model = copy.deepcopy(w.model.state_dict())
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in w.optimizers]
    _clear_in_loop(w, "optimizer")
    last = w.optimizers[-1]
    rates = [group["lr"] for group in last.param_groups]
    hook = last.register_step_pre_hook(_fail) if how == "hook" else None
    if how == "rate":
        for group in last.param_groups:  # before the backward, in which early_step=True updates
            group["lr"] = None
    w.backward(w.loss(loss, salt))
    seen = "nothing was raised"
    try:
        w.step()
        copies(w.params())  # an update that was put off raises here
    except TypeError:
        seen = "raised"
    if hook is not None:
        hook.remove()
    for group, rate in zip(last.param_groups, rates, strict=True):
        group["lr"] = rate
    _clear_in_loop(w, "optimizer")
    w.model.load_state_dict(model)
    for optimizer, state in zip(w.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    return seen, copies(w.params())


def _fail(*_: Any) -> None:
    raise TypeError("a hook fails")


# -- reading -------------------------------------------------------------------------------------------------


READS = "clone state_dict vector numpy data sum one item tolist copy_ cat norm forward made subclass".split()


@action(4, lambda dice, o: {"how": dice.choice(READS), "place": dice.randrange(12)})
def read_params(w: World, salt: int, how: str, place: int = 0) -> Any:
    params = w.params()
    if how == "state_dict":
        return {name: value.clone() for name, value in w.model.state_dict().items()}
    if how == "vector":
        return parameters_to_vector(p.contiguous() for p in params).detach()
    if how == "numpy":
        return [torch.from_numpy(p.detach().numpy().copy()) for p in params]
    if how == "data":
        return [p.data.clone() for p in params]
    if how == "sum":
        return [p.sum().item() for p in params]
    if how == "one":
        return params[place % len(params)].detach().clone()
    if how == "item":
        return [p.detach().flatten()[0].item() for p in params]
    if how == "tolist":
        return [torch.tensor(p.tolist(), dtype=torch.float64) for p in params]
    if how == "copy_":
        return [torch.empty_like(p).detach().copy_(p.detach()) for p in params]
    if how == "made":
        return copies([nn.Parameter(p) for p in params])
    if how == "subclass":
        return copies([p.as_subclass(torch.Tensor) for p in params])
    if how == "cat":
        with torch.no_grad():
            return torch.cat([p.flatten() for p in params])
    if how == "norm":
        with torch.no_grad():
            return list(torch._foreach_norm(params))
    if how == "forward":
        with torch.no_grad():
            return w.forward(w.batch(salt), {"branch": "both"})
    return copies(params)


@action(
    3,
    lambda dice, o: {
        "how": dice.choice(["clone", "norm", "one", "has"]),
        "place": dice.randrange(12),
        "gathered": dice.random() < 0.4,
    },
    lambda args: ("synchronize",) if args["gathered"] else ("read",),
    legal=lambda w: not any(b.vague for b in w.books),
)
def read_grads(w: World, salt: int, how: str, gathered: bool, place: int = 0) -> Any:
    """Read gradients; ``gathered``: after synchronize()."""
    if gathered:
        w.gather()
    w.reading()
    params = w.trained()
    if how == "has":
        return [p.grad is not None for p in params]
    if how == "norm":
        return [None if p.grad is None else p.grad.norm().item() for p in params]
    if how == "one":
        return copies([one(w, place).grad])
    return [None if p.grad is None else p.grad.detach().to_dense().clone() for p in params]


@action(2, lambda dice, o: {"load": dice.random() < 0.3}, local=False)
def optimizer_state(w: World, salt: int, load: bool) -> Any:
    """``optimizer.state_dict()``, and maybe load it again."""
    seen = []
    for optimizer in w.optimizers:
        state = optimizer.state_dict()
        seen.append(
            {"state": cloned(state["state"]), "groups": [group["params"] for group in state["param_groups"]]}
        )
        if load:
            optimizer.load_state_dict(copy.deepcopy(state))
    return seen


EVALUATIONS = (
    "no_grad",
    "inference_mode",
    "eval",
    "part",
    "functional",
    "functional_call",
    "own weights",
    "vmap",
)


@action(2.5, lambda dice, o: {"how": dice.choice(EVALUATIONS), "place": dice.randrange(LAYERS)})
def evaluate(w: World, salt: int, how: str, place: int) -> Any:
    model, x = w.model, w.batch(salt)
    if how == "no_grad":
        with torch.no_grad():
            return w.forward(x, {"branch": "both"})
    if how == "inference_mode":
        with torch.inference_mode():
            return w.forward(x, {"branch": "both"}).clone()
    if how == "eval":
        model.eval()
        out = w.forward(x, {"branch": "right"}).detach()
        model.train()
        return out
    h = w.noise((2, WIDTH), salt)
    if how == "part":
        return model.body[place](h).detach()
    if how == "functional":
        return F.linear(h, model.body[place].linear.weight, model.left.bias).detach()
    if how == "functional_call":
        moved = {name: p * 1.01 for name, p in model.named_parameters()}
        return torch.func.functional_call(model, moved, (x,), {"branch": "both"}).detach()
    if how == "own weights":
        return torch.func.functional_call(model, dict(model.named_parameters()), (x,)).detach()
    with torch.no_grad():
        return torch.vmap(model.body[place])(h)


# -- gradients in the user's hands ---------------------------------------------------------------------------


@action(
    2,
    lambda dice, o: {"how": dice.choice(["norm", "value", "optimizer"]), "sync": dice.random() < 0.8},
    lambda args: ("synchronize",) if args["sync"] or args["how"] == "optimizer" else ("read",),
    legal=lambda w: dense(w) and calm(w) and fresh(w) and not any(b.vague for b in w.books),
    local=False,
)
def clip(w: World, salt: int, how: str, sync: bool) -> Any:
    """Clip by norm or value; ``sync``: after synchronize(), and step within skip_synchronize()."""
    if how == "optimizer":
        seen = [optimizer.clip_grad_norm_(0.05).item() for optimizer in w.optimizers]
        w.changing_grads()
        return seen
    if sync:
        w.synchronize()
    w.reading()
    seen = None
    if how == "norm":
        seen = clip_grad_norm_(w.trained(), 0.05).item()
    elif any(p.grad is not None for p in w.trained()):
        clip_grad_value_(w.trained(), 0.01)
    w.changing_grads()
    if sync:
        for optimizer in w.optimizers:
            with optimizer.skip_synchronize():
                optimizer.step()
    return seen


CHANGES = ("assign", "data", "set_", "mul_", "copy_", "swap", "none", "clone", "add_")


def draw_change(dice: random.Random, o: Args) -> Args:
    how = dice.choice(CHANGES)
    return {
        # With op=Sum nobody could say of other changes whether they are to be summed.
        "how": "mul_" if o["op"] == "sum" and how != "none" else how,
        "places": sorted(dice.sample(range(14), dice.choice([1, 3]))),
        "gathered": dice.random() < 0.5,
    }


@action(
    3,
    draw_change,
    lambda args: (
        ("synchronize",) if args["gathered"] else () if args["how"] in ("assign", "none") else ("read",)
    ),
    legal=lambda w: dense(w) and calm(w) and fresh(w) and not any(b.vague for b in w.books),
)
def change_grads(w: World, salt: int, how: str, places: list[int], gathered: bool) -> Any:
    """Change or replace some gradients, in the same way on all ranks; ``gathered``: after synchronize()."""
    w.events(("clear",))
    if gathered:
        w.gather()
    if how not in ("assign", "none"):
        w.reading()
    w.changing_grads()
    for place in places:
        p = one(w, place)
        x = w.noise(p.shape, salt, place) * 0.1
        if how == "assign":
            p.grad = x
        elif how == "none":
            p.grad = None
        elif p.grad is None:
            continue
        elif how == "data":
            p.grad.data = x
        elif how == "set_":
            p.grad.set_(x)
        elif how == "mul_":
            p.grad.mul_(0.5)
        elif how == "add_":
            p.grad.add_(x)
        elif how == "copy_":
            p.grad.copy_(x)
        elif how == "clone":
            p.grad = p.grad.clone()
        elif how == "swap":
            for q in w.trained():
                if q is not p and q.shape == p.shape and q.grad is not None:
                    p.grad, q.grad = q.grad, p.grad
                    break


@action(
    1.2,
    lambda dice, o: {**draw_loss(dice, o), "clear": dice.choice(["optimizer", "model", "none", "del"])},
    ("backward",),
    legal=lambda w: (
        dense(w) and calm(w) and not any(b.vague for b in w.books) and all(b.passes == 1 for b in w.books)
    ),
)
def keep_old_grads(w: World, salt: int, loss: Args, clear: str) -> Any:
    """Keep the gradients of one loss, clear, compute those of another, and project (PCGrad)."""
    _clear_in_loop(w, "optimizer")
    w.backward(w.loss(loss, salt))
    w.gather_shards()
    w.reading()
    old = [p.grad for p in w.trained()]
    _clear_in_loop(w, clear)
    w.backward(w.loss(loss, salt))
    w.gather_shards()
    w.reading()
    products = [
        None if p.grad is None or g is None else (p.grad * g).sum().item()
        for p, g in zip(w.trained(), old, strict=True)
    ]
    return products, copies(old)


@action(
    1,
    draw_loss,
    ("synchronize", "backward"),
    # What user code puts into p.grad after a backward counts as it is: a rank's own would stay its own.
    legal=lambda w: (
        dense(w)
        and calm(w)
        and w.options["op"] != "sum"
        and all(b.passes == 1 and not b.local for b in w.books)
    ),
)
def add_by_hand(w: World, salt: int, loss: Args) -> Any:
    """Take the gradients away, run a backward, and add them again."""
    w.gather_shards()
    w.reading()
    old = [p.grad for p in w.trained()]
    for p in w.trained():
        p.grad = None
    if isinstance(w, PlainWorld):
        w.look()
    w.backward(w.loss(loss, salt))
    w.gather_shards()
    w.reading()
    for p, g in zip(w.trained(), old, strict=True):
        # After a backward that raised, zero_grad(set_to_none=False) leaves zeros where this rank had some.
        if g is not None and (p.grad is not None or g.any()):
            p.grad = g if p.grad is None else p.grad + g


# -- parameters in the user's hands --------------------------------------------------------------------------


WRITES = ("data", "mul_", "clamp_", "copy_", "vector", "state_dict", "set_", "init", "swap")


@action(
    3,
    lambda dice, o: {
        "how": dice.choice(WRITES),
        "places": sorted(dice.sample(range(14), dice.choice([1, 3]))),
    },
    legal=lambda w: "graph" not in w.kept,
)
def change_params(w: World, salt: int, how: str, places: list[int]) -> Any:
    """Change parameters, or the memory that they stand in."""
    if how == "vector":
        vector = parameters_to_vector(p.contiguous() for p in w.params())
        vector_to_parameters(vector.detach() * 0.95, w.params())
        return
    if how == "state_dict":
        for value in w.model.state_dict().values():
            value.mul_(0.97)
        return
    for place in places:
        p = one(w, place)
        x = w.noise(p.shape, salt, place) * 0.3
        if how == "data":
            p.data = x
        elif how == "clamp_":
            p.data.clamp_(-0.2, 0.2)
        elif how == "set_":
            with torch.no_grad():
                p.set_(x)
        elif how == "init":
            nn.init.constant_(p, 0.1)
        elif how == "mul_":
            with torch.no_grad():
                p.mul_(0.9)
        elif how == "copy_":
            with torch.no_grad():
                p.copy_(x)
        elif how == "swap":
            for q in w.trained():
                if q is not p and q.shape == p.shape:
                    p.data, q.data = q.data, p.data
                    break


@action(
    1.5,
    lambda dice, o: {
        "how": dice.choice(["data", "detach", "view"]),
        "places": sorted(dice.sample(range(14), 3)),
    },
)
def keep_alias(w: World, salt: int, how: str, places: list[int]) -> Any:
    """Keep tensors that share the parameters' memory."""
    params = [one(w, place) for place in places]
    if how == "data":
        w.kept["alias"] = [p.data for p in params]
    elif how == "detach":
        w.kept["alias"] = [p.detach() for p in params]
    else:
        with torch.no_grad():
            w.kept["alias"] = [p.view(-1) if p.is_contiguous() else p.data for p in params]


@action(
    3,
    lambda dice, o: {"how": dice.choice(["read", "clamp_", "mul_", "read"])},
    legal=lambda w: "alias" in w.kept and "graph" not in w.kept,
    needs="keep_alias",
)
def use_alias(w: World, salt: int, how: str) -> Any:
    with torch.no_grad():
        for tensor in w.kept["alias"]:
            if how == "clamp_":
                tensor.clamp_(-0.25, 0.25)
            elif how == "mul_":
                tensor.mul_(0.95)
    return copies(w.kept["alias"])


@action(
    0.5,
    lambda dice, o: {"places": sorted(dice.sample(range(LAYERS), 2))},
    legal=lambda w: "graph" not in w.kept,
)
def tie_data(w: World, salt: int, places: list[int]) -> Any:
    """Two parameters share their memory from now on."""
    first, second = (w.model.body[place].linear.weight for place in places)
    second.data = first.data


@action(2, lambda dice, o: {"how": dice.choice(["keep", "load", "load", "load own", "pickle", "size"])})
def model_state(w: World, salt: int, how: str) -> Any:
    """``state_dict()`` kept, loaded, saved."""
    if how == "keep":
        w.kept["state"] = copy.deepcopy(w.model.state_dict())
    elif how == "load" and "state" in w.kept:
        w.kept.pop("graph", None)
        w.model.load_state_dict(w.kept["state"])
    elif how == "load own":
        w.kept.pop("graph", None)
        w.model.load_state_dict(w.model.state_dict())
    elif how == "pickle":
        file = io.BytesIO()
        torch.save(w.model.state_dict(), file)
        file.seek(0)
        return torch.load(file)
    elif how == "size":
        file = io.BytesIO()
        state = w.model.right.state_dict()
        torch.save(state, file)
        needed = sum(t.numel() * t.element_size() for t in state.values())
        return (
            "as large as it must be" if file.tell() < needed + 2000 else f"{file.tell()} bytes for {needed}"
        )
    return None


@action(
    0.4, lambda dice, o: {"again": dice.random() < 0.7}, local=False, legal=lambda w: not w.options["tied"]
)
def load_assign(w: World, salt: int, again: bool) -> Any:
    """``load_state_dict(assign=True)`` makes new parameters; ``again``: the script makes new optimizers."""
    w.kept.pop("graph", None)
    state = {name: value.detach().clone() * 0.98 for name, value in w.model.state_dict().items()}
    names = {id(p): name for name, p in w.model.named_parameters()}
    before = [[names.get(id(p)) for p in group_params(base)] for base in w.bases]
    w.model.load_state_dict(state, assign=True)
    if again and all(None not in each for each in before):
        now = dict(w.model.named_parameters())
        close(w)
        from tests.checker.world import OPTIMIZERS

        w.bases = [OPTIMIZERS[w.options["optimizer"]]([now[n] for n in each if n]) for each in before]
        w.kept.pop("scheduler", None)
        w.wrap()


def group_params(optimizer: Any) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# -- the optimizer's parameters ------------------------------------------------------------------------------


@action(
    2.5,
    lambda dice, o: {
        "place": dice.randrange(9),
        "what": dice.choice(["module", "module", "one"]),
        "on": dice.random() < 0.5,
    },
    legal=lambda w: "graph" not in w.kept,
)
def freeze(w: World, salt: int, place: int, what: str, on: bool) -> Any:
    """Freeze (``on``) or unfreeze something."""
    w.kept["frozen"] = True
    for p in part(w, place).parameters() if what == "module" else [one(w, place)]:
        p.requires_grad_(not on)


@action(2, legal=lambda w: "frozen" in w.kept and "graph" not in w.kept, needs="freeze")
def unfreeze(w: World, salt: int) -> Any:
    w.kept.pop("frozen", None)
    for p in w.params():
        p.requires_grad_(True)


@action(
    0.6,
    events=("state",),
    legal=lambda w: not w.model.uses_late and w.options["optimizer"] != "lbfgs" and "graph" not in w.kept,
)
def add_group(w: World, salt: int) -> Any:
    w.events(("state",))
    w.optimizers[0].add_param_group({"params": list(w.model.late.parameters()), "lr": 0.01})
    w.model.uses_late = True


@action(1.5, lambda dice, o: {"factor": dice.choice([0.5, 0.0, 1.5])}, ("settings",))
def set_rate(w: World, salt: int, factor: float) -> Any:
    for optimizer in w.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.03 * factor
            if "betas" in group:
                group["betas"] = (0.8, 0.95)
            if "momentum" in group and group["momentum"]:
                group["momentum"] = 0.5


@action(1, lambda dice, o: {"base": dice.random() < 0.3})
def schedule_rate(w: World, salt: int, base: bool) -> Any:
    """Make learning-rate schedulers, or step those that there are."""
    if "scheduler" not in w.kept:
        # A plain optimizer shares all attributes with its base, whose scheduler would hide its step().
        made = w.bases if base and not isinstance(w, PlainWorld) else w.optimizers
        w.kept["scheduler"] = [torch.optim.lr_scheduler.StepLR(o, 1, 0.7) for o in made]
    else:
        for scheduler in w.kept["scheduler"]:
            scheduler.step()
    return [group["lr"] for o in w.optimizers for group in o.param_groups]


@action(
    0.7,
    lambda dice, o: {"last": dice.random() < 0.7},
    ("read",),
    legal=lambda w: w.model.kind == "image" and "graph" not in w.kept,
)
def to_format(w: World, salt: int, last: bool) -> Any:
    w.reading()
    w.model.to(memory_format=torch.channels_last if last else torch.contiguous_format)


@action(
    0.3,
    lambda dice, o: {"to": dice.choice(["float32", "float64"])},
    ("read",),
    legal=lambda w: "graph" not in w.kept and not any(o.state for o in w.bases) and dense(w),
)
def to_dtype(w: World, salt: int, to: str) -> Any:
    w.kept.pop("alias", None)
    w.reading()
    dtype = getattr(torch, to)
    if dtype != w.dtype:
        w.converting()
    w.model.to(dtype)


# -- copies --------------------------------------------------------------------------------------------------


@action(1.5, lambda dice, o: {"how": dice.choice(["deepcopy", "pickle", "module", "optimizer"])})
def copies_of(w: World, salt: int, how: str) -> Any:
    """A copy of the model, of a part or of the optimizers, used at once and kept."""
    if how == "optimizer":
        made = [pickle.loads(pickle.dumps(optimizer)) for optimizer in w.optimizers]
        made += [copy.deepcopy(optimizer) for optimizer in w.optimizers]
        return [copies(group_params(each)) for each in made], [type(each).__name__ for each in made]
    w.captured.clear()  # a hook holds them, and what is computed cannot be copied
    if how == "module":
        module = copy.deepcopy(w.model.body[1])
        return module(w.noise((2, WIDTH), salt)).detach()
    log, hooks = w.log, w.hooks
    made = copy.deepcopy(w.model) if how == "deepcopy" else pickle.loads(pickle.dumps(w.model))
    assert (log, hooks) == (w.log, w.hooks)
    w.kept["copy"] = made
    with torch.no_grad():
        return made(w.batch(salt), "both"), copies(made.parameters())


@action(1, legal=lambda w: "copy" in w.kept, needs="copies_of")
def use_copy(w: World, salt: int) -> Any:
    """Train the copy by itself."""
    made = w.kept["copy"]
    made.zero_grad()
    x = models.batch(made.kind, w.seed, salt, w.rank)
    made(x.to(w.dtype) if x.is_floating_point() else x, "both").square().mean().backward()
    return copies(made.parameters()), [
        None if p.grad is None else p.grad.to_dense().clone() for p in made.parameters()
    ]


@action(1.5)
def average_weights(w: World, salt: int) -> Any:
    """An exponential moving average of the weights."""
    if "ema" not in w.kept:
        w.kept["ema"] = copies(w.params())
    with torch.no_grad():
        for mean, p in zip(w.kept["ema"], w.params(), strict=False):
            mean.lerp_(p.to(mean.dtype), 0.3)
    return copies(w.kept["ema"])


@action(0.25, legal=lambda w: not w.hooks)
def trace(w: World, salt: int) -> Any:
    """Trace a part of the model: the whole one would take as long as a whole program."""
    x = w.noise((2, WIDTH), salt)
    with torch.no_grad():
        w.model.body[salt % LAYERS](x)  # nothing may wait for other ranks while this one has the lock
        with models.JIT:
            w.kept["traced"] = torch.jit.trace(w.model.body[salt % LAYERS], (x,), check_trace=False)


@action(2, legal=lambda w: "traced" in w.kept, needs="trace")
def use_traced(w: World, salt: int) -> Any:
    with torch.no_grad():
        return w.kept["traced"](w.noise((2, WIDTH), salt))


@action(0.5, legal=lambda w: "second" not in w.kept and "graph" not in w.kept)
def second_model(w: World, salt: int) -> Any:
    """Another model that shares a parameter of the first."""
    other = nn.Linear(WIDTH, WIDTH, bias=False).double()
    other.weight = w.model.body[1].linear.weight
    w.kept["second"] = other


@action(0.2, legal=lambda w: not w.hooks)
def script_part(w: World, salt: int) -> Any:
    """Script a part of the model and use it."""
    x = w.noise((2, WIDTH), salt)
    w.model.body[1](x)  # nothing may wait for other ranks while this one has the lock
    with models.JIT:
        scripted = torch.jit.script(w.model.body[1])
    return scripted(x).detach()


@action(
    0.5,
    lambda dice, o: {
        "kind": dice.choice(["script", "parametrized", "bare", "complex", "complex", "lazy"]),
        "steps": dice.randint(1, 3),
    },
    # A CPU's stream blocks: a rank would wait in it while another one waits to make this optimizer.
    legal=lambda w: w.options["compression"] == "none" and not on_a_stream(w),
    local=False,
)
def other_model(w: World, salt: int, kind: str, steps: int) -> Any:
    """Train another model of an unusual kind with an optimizer of its own."""
    module = unusual(w, kind, salt)
    optimizer = w.distributed(torch.optim.SGD(list(module.parameters()), lr=0.1, momentum=0.9), module)
    if isinstance(w, PlainWorld):
        optimizer.book.sharded = False
    for step in range(steps):
        value = module(models.noise((3, WIDTH), salt, step, w.rank)).square().mean()
        if isinstance(w, PlainWorld):
            marks = optimizer.before_backward()
            value.backward()
            optimizer.after_backward(marks)
        else:
            value.backward()
        if step == 0 and steps > 1:
            continue
        optimizer.step()
        optimizer.zero_grad()
    seen = copies(module.parameters())
    optimizer.close()
    return seen


def unusual(w: World, kind: str, salt: int) -> Any:
    """Return a small model: a ScriptModule, one with parametrizations, with complex weights, ..."""
    first, second = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH, bias=False).double()
    for p in (*first.parameters(), *second.parameters()):
        p.data.copy_(models.noise(p.shape, w.seed, salt, p.shape) * 0.3)
    module: Any = nn.Sequential(first, nn.Tanh(), second)
    if kind == "parametrized":
        torch.nn.utils.parametrizations.weight_norm(first)
    elif kind == "script":
        with models.JIT:
            module = torch.jit.script(module)
    elif kind == "lazy":
        module.append(nn.LazyLinear(2, bias=False).double())
        module(torch.zeros(1, WIDTH, dtype=torch.float64))
        module[3].weight.data.copy_(models.noise((2, WIDTH), w.seed, salt, "lazy"))
    elif kind == "bare":
        module = Bare(first.weight, None)
    elif kind == "complex":
        phase = torch.complex(models.noise((WIDTH, 3), salt, "re"), models.noise((WIDTH, 3), salt, "im"))
        module = Bare(first.weight, nn.Parameter(phase * 0.3))
    return module


class Bare:
    """Parameters that belong to no module."""

    def __init__(self, weight: nn.Parameter, phase: nn.Parameter | None) -> None:
        self.weight, self.phase = weight, phase

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in (self.weight, self.phase) if p is not None]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(f"bare{i}", p) for i, p in enumerate(self.parameters())]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight
        if self.phase is not None:
            x = (x.to(self.phase.dtype) @ self.phase).abs()
        return x


@action(
    0.8,
    lambda dice, o: {
        **draw_loss(dice, o),
        "unscale": dice.random() < 0.5,
        "clear": dice.choice(["optimizer", "none"]),
    },
    ("backward",),
    legal=lambda w: (
        dense(w)
        and w.options["optimizer"] != "lbfgs"
        and w.options["op"] != "sum"
        and all(b.passes == 1 for b in w.books)
    ),
)
def scaled_step(w: World, salt: int, loss: Args, unscale: bool, clear: str) -> Any:
    """A step with a GradScaler."""
    scaler = w.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
    _clear_in_loop(w, clear)
    value = w.loss(loss, salt)
    w.backward(scaler.scale(value))
    w.gather_shards()
    w.reading()
    for optimizer in w.optimizers:
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    _clear_in_loop(w, clear)
    return value.item(), scaler.get_scale()


# -- hooks ---------------------------------------------------------------------------------------------------


class Scale:
    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0.5


class Log:
    """Notes what a hook on a parameter's gradient sees; ``clip``: and clamps it."""

    def __init__(self, w: World, clip: bool = False) -> None:
        self.log, self.clip = w.log, clip

    def __call__(self, p: torch.Tensor) -> None:
        assert p.grad is not None, "a hook after accumulation sees no gradient"
        self.log.append(p.grad.detach().to_dense().norm().item())
        if self.clip:
            p.grad.clamp_(-0.01, 0.01)


class Peek:
    """Notes what a hook on one parameter's gradient sees of another's."""

    def __init__(self, w: World, other: nn.Parameter) -> None:
        self.log, self.other = w.log, other

    def __call__(self, p: torch.Tensor) -> None:
        grad = self.other.grad
        self.log.append(None if grad is None else grad.detach().to_dense().norm().item())


class Capture:
    """Keeps the input or output of a module for the loss."""

    def __init__(self, w: World) -> None:
        self.captured = w.captured

    def __call__(self, module: nn.Module, args: Any, *out: Any) -> None:
        tensor = out[0] if out else args[0]
        if torch.is_grad_enabled() and tensor.is_floating_point():
            self.captured.append(tensor)


class Output:
    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * 1.1


class Input:
    def __call__(self, module: nn.Module, args: Any) -> Any:
        return tuple(x * 0.9 for x in args)


class Backward:
    def __init__(self, w: World) -> None:
        self.log = w.log

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        self.log.append([None if g is None else g.norm().item() for g in outputs])
        return tuple(None if g is None else g * 0.8 for g in inputs)


HOOKS = ("scale", "log", "clip", "peek", "input captured", "output captured", "output", "input", "backward")


@action(
    3,
    lambda dice, o: {"kind": dice.choice(HOOKS), "place": dice.randrange(14)},
    legal=lambda w: "graph" not in w.kept,
)
def add_hook(w: World, salt: int, kind: str, place: int) -> Any:
    p, module = one(w, place), w.model.body[place % LAYERS]
    if kind == "clip" and w.options["op"] == "sum":
        kind = "log"  # whether it changes what has been summed already, depends on when it was cleared
    if kind in ("scale", "log", "clip", "peek"):
        if not p.requires_grad or (kind == "clip" and w.model.kind == "sparse"):
            return
        if kind == "scale":
            w.hooks.append(p.register_hook(Scale()))
        elif kind == "peek":
            w.hooks.append(p.register_post_accumulate_grad_hook(Peek(w, one(w, place + 5))))
        else:
            w.hooks.append(p.register_post_accumulate_grad_hook(Log(w, kind == "clip")))
    elif kind == "input captured":
        w.hooks.append(module.register_forward_pre_hook(Capture(w)))
    elif kind == "output captured":
        w.hooks.append(module.register_forward_hook(Capture(w)))
    elif kind == "output":
        w.hooks.append(module.register_forward_hook(Output()))
    elif kind == "input":
        w.hooks.append(module.register_forward_pre_hook(Input()))
    else:
        w.hooks.append(module.register_full_backward_hook(Backward(w)))


@action(2, legal=lambda w: bool(w.hooks), needs="add_hook")
def read_log(w: World, salt: int) -> Any:
    seen = list(w.log)
    w.log.clear()
    return seen


@action(0.8, legal=lambda w: bool(w.hooks) and "graph" not in w.kept, needs="add_hook")
def remove_hooks(w: World, salt: int) -> Any:
    while w.hooks:
        w.hooks.pop().remove()


# -- the life of the optimizer -------------------------------------------------------------------------------


def close(w: World) -> None:
    if w.is_wrapped:
        for optimizer in w.optimizers:
            optimizer.close()
        w.kept["closed"] = w.optimizers
        w.optimizers = list(w.bases)
        w.after_closing()


@action(
    0.4,
    local=False,
    legal=lambda w: not any(b.local or b.ungathered or b.consumed or b.vague for b in w.books),
)
def close_and_go_on(w: World, salt: int) -> Any:
    """Train on without communication, with the optimizer that was wrapped."""
    close(w)
    return copies(w.params())


@action(1, needs="close_and_go_on", legal=lambda w: "closed" in w.kept and not w.is_wrapped)
def use_closed(w: World, salt: int) -> Any:
    """Step with an optimizer that has been closed."""
    for optimizer in w.kept["closed"]:
        optimizer.step(*([lambda: torch.zeros(())] if w.options["optimizer"] == "lbfgs" else []))


@action(
    0.8,
    lambda dice, o: {
        "gather": dice.choice(["gradients", "gradients", "parameters"]),
        "device": dice.choice([None, None, "cpu", "meta"]),
        "another": dice.random() < 0.3,
    },
    legal=lambda w: (
        not w.diverged
        and {id(p) for p in w.trained()} <= {id(p) for p in w.params()}
        and not any(b.local or b.consumed or b.ungathered or b.vague for b in w.books)
        and (w.options["op"] != "sum" or all(p.grad is None for p in w.trained()))
    ),
)
def wrap_again(w: World, salt: int, gather: str, device: str | None, another: bool) -> Any:
    """Close and wrap again; ``device``: while this one is the default for new tensors; ``another``: make and
    wrap new optimizers for the same parameters, and keep the others.
    """
    if another and not isinstance(w, PlainWorld):
        w.kept["earlier"] = w.optimizers  # which the new ones close
        w.after_closing()
    else:
        close(w)
    if another:
        from tests.checker.world import OPTIMIZERS

        w.bases = [OPTIMIZERS[w.options["optimizer"]](group_params(base)) for base in w.bases]
        w.kept.pop("scheduler", None)
    if w.model.kind != "sparse" and w.options["optimizer"] != "lbfgs" and w.options["compression"] == "none":
        w.options["gather"] = gather
    with torch.device(device) if device else nullcontext():
        w.wrap()


@action(
    1,
    lambda dice, o: {
        **draw_loss(dice, o),
        "steps": dice.randint(1, 2),
        "more": dice.sample(range(max(3, o["ranks"])), o["ranks"]),
    },
    ("backward", "step"),
    legal=lambda w: (
        not any(b.local or b.ungathered or b.gathered or b.fresh for b in w.books)
        and all(b.passes == 1 for b in w.books)
        and all(p.grad is None for p in w.trained())
        and w.options["optimizer"] != "lbfgs"
    ),
    local=False,
)
def join(w: World, salt: int, loss: Args, steps: int, more: list[int]) -> Any:
    """Ranks have different numbers of batches and then join."""
    mine, most = steps + more[w.rank], steps + max(more)
    for number in range(most if isinstance(w, PlainWorld) else mine):
        if isinstance(w, PlainWorld):
            w.step_with_zeros(loss, salt, number < mine)
        else:
            w.backward(w.loss(loss, salt))
            w.step()
            w.zero_grad()
    w.join()
    return copies(w.params())


@action(0)
def close_at_end(w: World, salt: int) -> Any:
    close(w)
    return copies(w.params())
