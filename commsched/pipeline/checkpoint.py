"""Checkpoints in the middle of a run, and the state of the whole model, which is spread over ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from commsched.pipeline.chain import Chain
from commsched.pipeline.exchange import Inputs, Values
from commsched.pipeline.factory import named_tensors, save_index, save_shard
from commsched.pipeline.interpreter import Interpreter
from commsched.pipeline.messages import (
    Description,
    Fabric,
    Lane,
    Leaf,
    everyones,
    from_first,
    receive_object,
    receive_tree,
    send_object,
    send_tree,
)
from commsched.pipeline.random_state import random_state, set_random_state
from commsched.pipeline.rows import Share
from commsched.pipeline.shares import Sampling
from commsched.pipeline.stage import Head, Saved, Stage, Version, load_state, slot_of
from commsched.pipeline.update import Stepped, Update
from scheduler.ir.actions import SENT_AS, Action, Kind, peer_of, stage_of
from scheduler.ir.layout import Layout, far_stage
from scheduler.ir.program import LINK_LANE, RECV_LANE, Program

# -- checkpoints, with micro-batches in flight ---------------------------------------------------------------

# Between two steps every rank stands at the same iteration. Messages that have been sent and not received are
# received first. Of micro-batches between forward and backward, the checkpoint keeps the inputs, the
# version's number and the state of the random numbers; resuming repeats their forward.

_PROGRESS = ("link", "complete", "stepped", "forwards")  # of the interpreter
CLASSES = (Action, Kind, Description, Leaf, Share)
"""Besides tensors and Python's own types, all that a checkpoint consists of: what loading it must allow."""


class Running(Protocol):
    """The parts of a pipeline that a checkpoint reads and writes."""

    program: Program
    rank: int
    stages: dict[int, Stage]
    layout: Layout
    _interpreter: Interpreter
    _updates: dict[int, Update]
    _inputs: Inputs
    _sampling: Sampling
    _weights: FullState
    _names: dict[str, str]
    fabric: Fabric
    _periods: int
    _done: int

    def _newest(self) -> None: ...


def taken(pipeline: Running) -> dict[str, Any]:
    """This rank's state between two steps."""
    interpreter, exchange = pipeline._interpreter, pipeline._interpreter.exchange
    exchange.shares.settle()
    terms = pipeline._inputs.terms
    if terms is not None:
        terms.settle()
    exchange.inbox.expect(_under_way(pipeline))
    interpreter.settle()
    return {
        "program": pipeline.program.hash,
        "rank": pipeline.rank,
        "random": random_state(_device(pipeline)),
        "counters": (pipeline._periods, pipeline._done),
        "sampler": pipeline._sampling.state(),
        "interpreter": {
            name: list(value) if isinstance(value := getattr(interpreter, name), deque) else copy(value)
            for name in _PROGRESS
        },
        "batches": dict(pipeline._inputs.given),
        "shares": dict(exchange.shares),
        "terms": dict(terms or {}),
        "arrived": dict(exchange.inbox.arrived),
        "to_come": dict(exchange.to_come),
        "came": {key: list(value) for key, value in exchange.came.items()},
        "outputs": {
            key: (_plain(leaves), tree_unflatten(range(len(leaves)), spec), grads, cuts)
            for key, (leaves, spec, grads, cuts) in exchange.outputs.items()
        },
        "input_grads": dict(exchange.input_grads),
        "inputs": {key: _plain(leaves) for key, leaves in exchange.inputs.items()},
        "stages": {n: _stage(stage, pipeline._updates[n]) for n, stage in pipeline.stages.items()},
    }


def _device(pipeline: Running) -> torch.device:
    return next(iter(pipeline.stages.values())).device


def _under_way(pipeline: Running) -> list[Action]:
    """The messages to this rank that were sent in an iteration that is over, and whose receive is not."""
    exchange, done = pipeline._interpreter.exchange, pipeline._done
    found = []
    for action in pipeline.program.kernel[pipeline.rank].get(RECV_LANE, ()):
        sent = _sent(pipeline, action)
        for period in range(pipeline._periods):
            # An action of shift k belongs to iteration period - k.
            if period - sent.shift < done <= period - action.shift:
                found.append((period - action.shift, replace(action, shift=period)))
    coming = [action for _, action in sorted(found, key=lambda item: item[0])]
    return [a for a in coming if exchange.moves(a) and a not in exchange.inbox.arrived]


def _sent(pipeline: Running, action: Action) -> Action:
    """The send in the peer's lane that a receive takes up."""
    wanted = (SENT_AS[action.kind], action.index, far_stage(action), pipeline.rank)
    for sent in pipeline.program.kernel[peer_of(action)][LINK_LANE]:
        if (sent.kind, sent.index, sent.stage, sent.peer) == wanted:
            return sent
    raise ValueError(f"rank {action.peer} has no send for {action}")


def _plain(leaves: list[Any]) -> list[Any]:
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _stage(stage: Stage, update: Update) -> dict[str, Any]:
    update.finish()
    stage.versions.use(stage.versions.newest)
    return {
        "newest": stage.versions.newest.number,
        "versions": {n: _plain(list(v.data)) for n, v in stage.versions.live.items()},
        "modules": [dict(deepcopy(module.state_dict())) for module in stage.modules],
        "unsaved": [_unsaved(module) for module in stage.modules],
        "saved": {micro: _kept(stage, saved) for micro, saved in stage.saved.items()},
        "grads": {period: _plain(list(grads)) for period, grads in stage.grads.items()},
        "losses": {period: float(loss) for period, loss in stage.losses.items()},
        "forwards": stage.forwards,
        "update": update.state(),
    }


def _unsaved(module: nn.Module) -> dict[str, Tensor | None]:
    """Buffers that the state dict leaves out: training may change these, too."""
    every = [(f"{prefix}.{key}".lstrip("."), value) for prefix, part in module.named_modules()
             for key, value in part._buffers.items()]  # fmt: skip
    kept = module.state_dict().keys()
    return {name: None if value is None else value.clone() for name, value in every if name not in kept}


def _kept(stage: Stage, saved: Saved) -> dict[str, Any]:
    if saved.weights is not None:
        raise ValueError("a checkpoint between the two halves of a backward is not possible")
    flags = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in saved.leaves]
    is_live = saved.version is stage.versions.live[saved.version.number]
    return {
        "version": saved.version.number,
        "weights": None if is_live else _plain(list(saved.version.data)),
        "leaves": _plain(saved.leaves),
        "flags": flags,
        "structure": tree_unflatten(range(len(saved.leaves)), saved.spec),
        "head": None if saved.head is None else (saved.head.targets, saved.head.weight, saved.head.counts),
        "random": saved.random,
        "buffers": stage.changed_buffers(saved),
        "written": sorted(saved.written),
        "attributes": [{k: v for k, v in then.items() if _is_plain(v)} for _, then, _ in saved.attributes],
        "cuts": saved.cuts,
    }


def _is_plain(value: Any) -> bool:
    """Whether a file may hold an attribute, without knowing the classes of the model."""
    if isinstance(value, tuple):
        return type(value) is tuple and all(map(_is_plain, value))
    return type(value) in (bool, int, float, str, type(None), Tensor)


def resumed(pipeline: Running, state: dict[str, Any]) -> None:
    if (state["program"], state["rank"]) != (pipeline.program.hash, pipeline.rank):
        raise ValueError(
            f"the checkpoint is of rank {state['rank']} and program {state['program']}, this is rank"
            f" {pipeline.rank} and program {pipeline.program.hash}; give every rank its own checkpoint, and"
            " make the pipeline as it was made then"
        )
    interpreter, exchange = pipeline._interpreter, pipeline._interpreter.exchange
    pipeline._periods, pipeline._done = state["counters"]
    pipeline._sampling.resume(state["sampler"], state["random"])
    for name in _PROGRESS:
        setattr(interpreter, name, type(getattr(interpreter, name))(state["interpreter"][name]))
    interpreter._told = pipeline._done - 1
    pipeline._inputs.given = dict(state["batches"])
    exchange.shares.update(state["shares"])
    if pipeline._inputs.terms is not None:
        pipeline._inputs.terms.update(state["terms"])
    exchange.inbox.arrived.update(state["arrived"])
    exchange.to_come.update(state["to_come"])
    exchange.came.update({key: list(value) for key, value in state["came"].items()})
    for key, (leaves, structure, *others) in state["outputs"].items():
        exchange.outputs[key] = Values(leaves, tree_flatten(structure)[1], *others)
    exchange.input_grads.update(state["input_grads"])
    exchange.inputs.update(state["inputs"])
    for number, stage in pipeline.stages.items():
        _restore(stage, pipeline._updates[number], state["stages"][number])
    _reduce_again(pipeline)
    set_random_state(state["random"], _device(pipeline))


@torch.no_grad()
def _restore(stage: Stage, update: Update, state: dict[str, Any]) -> None:
    for module, kept in zip(stage.modules, state["modules"], strict=True):
        load_state(module, kept)
    for module, unsaved in zip(stage.modules, state.get("unsaved", ())):  # older checkpoints have none
        _put_unsaved(module, unsaved, stage.device)
    versions = stage.versions
    newest = versions.newest
    versions.live = {
        number: newest
        if number == state["newest"]
        else Version(number, [nn.Parameter(tensor.clone()) for tensor in tensors])
        for number, tensors in state["versions"].items()
    }
    newest.number = state["newest"]
    update.load(state["update"])
    for period, grads in state["grads"].items():
        stage.grads[period] = [None if grad is None else grad.clone() for grad in grads]
    stage.losses.update(state["losses"])
    stage.forwards = state.get("forwards", 0)  # nor these
    for micro, kept in state["saved"].items():
        leaves = [
            leaf.clone().requires_grad_(flag) if isinstance(leaf, Tensor) else leaf
            for leaf, flag in zip(kept["leaves"], kept["flags"], strict=True)
        ]
        head = None if kept["head"] is None else Head(*kept["head"])
        spec = tree_flatten(kept["structure"])[1]
        version = versions.live[kept["version"]]
        if (weights := kept.get("weights")) is not None:
            version = Version(version.number, [nn.Parameter(tensor.clone()) for tensor in weights])
        saved = Saved(version, leaves, spec, head, kept["random"], micro, kept["cuts"])
        saved.buffers = kept.get("buffers", {})
        saved.written = set(kept.get("written", ()))
        saved.attributes = []
        for (own, now, keys), then in zip(stage.present(), kept.get("attributes", ())):
            then |= {key: value for key, value in now.items() if not _is_plain(value) and key not in then}
            saved.attributes.append((own, then, keys - now.keys() | then.keys()))
        stage.restore(micro, saved)


def _put_unsaved(module: nn.Module, unsaved: dict[str, Tensor | None], device: torch.device) -> None:
    for name, value in unsaved.items():
        buffers, key = slot_of(module, name)
        own = buffers.get(key)
        if own is None or value is None or (own.shape, own.dtype) != (value.shape, value.dtype):
            buffers[key] = None if value is None else value.to(device, copy=True)
        else:
            own.copy_(value)


def _reduce_again(pipeline: Running) -> None:
    """Reductions that were under way start over: the gradients are still there."""
    interpreter = pipeline._interpreter
    for action in pipeline.program.kernel[pipeline.rank].get(LINK_LANE, ()):
        if action.kind in (Kind.RS, Kind.AR):
            number = stage_of(action)
            for period in range(interpreter.stepped[number] + 1, interpreter.complete[number] + 1):
                pipeline._updates[number].reduce(period, action.index)


# -- the state of the whole model, which is spread over ranks ------------------------------------------------


class FullState:
    """Reads each stage from its first rank. ``newest`` lets modules hold the newest weights."""

    def __init__(
        self,
        layout: Layout,
        fabric: Fabric,
        lane: Lane,
        chain: Chain,
        stages: dict[int, Stage],
        newest: Callable[[], None],
    ) -> None:
        self.layout, self.fabric, self.lane, self.stages, self.newest = layout, fabric, lane, stages, newest
        self.owners = [ranks[0] for ranks in layout.ranks]
        state = chain.model.state_dict()
        self.keys = tuple(state)
        held = chain.stage(0, len(chain)).state_dict().keys()
        spare = {key: value for key, value in state.items() if key not in held}
        if extra := [key for key, value in spare.items() if not isinstance(value, Tensor)]:
            text = "is the state of a module that is cut: define get_extra_state in modules that stay whole"
            raise ValueError(f"{', '.join(extra)} {text}, such as blocks")
        known = named_tensors(chain.model)
        if renamed := [key for key in spare if key not in known]:
            text = "which its state_dict() renames: rename the keys of pipeline.state_dict() instead"
            raise ValueError(f"the model has no {', '.join(renamed[:4])}, {text}")
        # Tensors that no stage uses never change.
        self.spare = {key: value.clone() for key, value in spare.items()}
        mine = [value for stage in stages.values() for value in stage.module.state_dict().values()]
        here = {value.data_ptr() for value in mine if _has_memory(value)}
        tensors = {key: value for key, value in state.items() if key in held and _has_memory(value)}
        others = [key for key, value in tensors.items() if value.numel() and value.data_ptr() not in here]
        self.callers_model = CallersModel(chain.model, others, fabric.rank)

    def state_dict(self) -> dict[str, Tensor]:
        self.newest()
        found = {key: value.clone() for key, value in self.spare.items()}
        for number, owner in enumerate(self.owners):
            mine = deepcopy(self.stages[number].module.state_dict()) if owner == self.fabric.rank else {}
            others = [rank for rank in range(self.fabric.size) if rank != owner]
            found.update(from_first(self.lane, self.fabric.rank, [owner, *others], mine))
        return {key: found[key] for key in self.keys}

    def save(self, folder: str | Path) -> None:
        """Writes a file of safetensors for each stage, by its first rank, and their index."""
        self.newest()
        if extra := [key for key in self.keys if key.endswith("_extra_state")]:
            raise ValueError(f"save() writes tensors, not {', '.join(extra)}: torch.save the state_dict()")
        folder, count = Path(folder), len(self.owners)
        mine = {}
        for number, owner in enumerate(self.owners):
            if owner == self.fabric.rank:
                state = self.stages[number].module.state_dict()
                mine[number] = save_shard(folder, state | (self.spare if number == 0 else {}), number, count)
        if self.fabric.rank:
            for sent in send_object(self.lane, 0, mine):
                sent.wait()
        else:
            for peer in range(1, self.fabric.size):
                mine |= receive_object(self.lane, peer)
            save_index(folder, [mine[number] for number in range(count)])

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        missing = [key for key in self.keys if key not in state]
        if missing:
            raise ValueError(f"the state has no {', '.join(missing[:4])}; it must be the whole model's")
        if unknown := [key for key in state if key not in self.keys]:
            raise ValueError(f"the state has {', '.join(unknown[:4])}, which the model has not")
        self.newest()
        held = {
            key: value for stage in self.stages.values() for key, value in stage.module.state_dict().items()
        }
        for key, value in {**held, **self.spare}.items():
            if isinstance(value, Tensor) and value.shape != state[key].shape:
                raise ValueError(
                    f"the state's {key} has the shape {tuple(state[key].shape)}, and the model's has"
                    f" {tuple(value.shape)}"
                )
        self.callers_model.old = True
        for stage in self.stages.values():
            stage.load(state)
        for key, value in self.spare.items():
            value.copy_(state[key])


# -- the state of the whole training, for a pipeline of other stages -----------------------------------------


def whole_training(pipeline: Running) -> dict[str, Any]:
    """Copies in host memory, the same on every rank: each stage's first rank sends its part to all others."""
    pipeline._newest()
    weights, fabric, mine = pipeline._weights, pipeline.fabric, {}
    for number, stage in sorted(pipeline.stages.items()):
        update = pipeline._updates[number]
        assert isinstance(update, Stepped)
        by_name = update.state_by_name(pipeline._names)
        if weights.owners[number] == fabric.rank:
            mine[number] = tree_map(_copied, {
                "model": dict(stage.module.state_dict()),
                "unsaved": _unsaved(stage.module),
                "optimizer": by_name,
                "steps": update.taken,
            })  # fmt: skip
    ranks = range(fabric.size)
    told = everyones(weights.lane, fabric.rank, ranks, mine, send_tree, receive_tree)
    parts = [part for _, part in sorted(item for each in told for item in each.items())]
    model = {key: value.clone() for key, value in weights.spare.items()}
    unsaved: dict[str, Tensor | None] = {}
    optimizer: dict[str, Any] = {"groups": [], "state": {}}
    for part in parts:
        model |= part["model"]
        unsaved |= part["unsaved"]
        optimizer["groups"] += part["optimizer"]["groups"]
        optimizer["state"] |= part["optimizer"]["state"]
    steps = [part["steps"] for part in parts]
    if len(set(steps)) > 1:
        raise ValueError(f"all ranks must have taken the same steps, but the stages have taken {steps}")
    return {
        "model": {key: model[key] for key in weights.keys},
        "unsaved": unsaved,
        "optimizer": optimizer,
        "steps": steps[0],
        "sampler": pipeline._sampling.state(),
    }


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True).contiguous() if isinstance(value, Tensor) else deepcopy(value)


@torch.no_grad()
def put_training(pipeline: Running, state: dict[str, Any]) -> None:
    extra = {key: deepcopy(value) for key, value in state["model"].items() if not isinstance(value, Tensor)}
    pipeline._weights.load_state_dict(state["model"] | extra)
    for number, stage in sorted(pipeline.stages.items()):
        for module in stage.modules:
            held = dict(module.named_modules())
            unsaved = {k: value for k, value in state["unsaved"].items() if k.rpartition(".")[0] in held}
            _put_unsaved(module, unsaved, stage.device)
        update = pipeline._updates[number]
        assert isinstance(update, Stepped)
        update.load_by_name(state["optimizer"], pipeline._names)
        update.taken = state["steps"]
    pipeline._sampling.resume(state["sampler"], None)


# -- the model that the caller passed: other ranks' weights do not come back to it ---------------------------


def allow_state_dict(model: nn.Module) -> None:
    """Ends the refusals for an earlier pipeline, also in a copy of its model: a new one begins with the
    weights that the model has.
    """
    for hooks in (model._state_dict_pre_hooks, model._load_state_dict_post_hooks):
        for key in [k for k, hook in hooks.items() if isinstance(_owner(hook), CallersModel)]:
            del hooks[key]


def _owner(hook: Any) -> Any:
    return getattr(hook, "__self__", None)


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


class CallersModel:
    """Refuses ``state_dict()`` of a model while its tensors ``others``, which other ranks train, are ``old``.
    ``load_state_dict()`` of the model renews them. Does not keep the model alive.
    """

    def __init__(self, model: nn.Module, others: list[str], rank: int) -> None:
        self.others, self.rank, self.old = others, rank, False
        if others:
            model.register_load_state_dict_post_hook(self._loaded)
            model.register_state_dict_pre_hook(self._check)

    def _check(self, *_: Any) -> None:
        if self.old:
            names = ", ".join(self.others[:4])
            raise ValueError(
                f"state_dict() of the model on rank {self.rank} has old values of {names}, which other ranks"
                " train: call pipeline.state_dict() on every rank, or state_dict() of single layers of this"
                " rank; or, after pipeline.drain(), model.load_state_dict(pipeline.state_dict()) before"
            )

    def _loaded(self, model: nn.Module, keys: Any) -> None:
        self.old = self.old and bool(keys.missing_keys)
