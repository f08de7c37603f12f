"""How stages follow what a script changes in the model after they were made, once for each step.

Attributes, modes, hooks, buffers, and whether parameters are trained, are taken over. Another module or
parameter in the place of one that the stages have is refused.
"""

from __future__ import annotations

import copy
import weakref
from itertools import chain
from typing import Any

import torch
from torch import nn

_TABLES = ("_modules", "_parameters", "_buffers")


def replaced(name: str) -> ValueError:
    return ValueError(
        f"{name} of the model has been added, removed or replaced since the pipeline was made, and the stages"
        " have what was there before: make a new Pipeline, or change the values in place"
    )


def writes_shared(name: str) -> ValueError:
    return ValueError(
        f"the forward writes to {name}, and several stages have it: each would go on with a value of its own;"
        " choose cuts= that leave all its uses in one stage, or give each stage a tensor of its own"
    )


def follow_model(stage: nn.Module) -> None:
    """Let a stage's module take over what has been changed in the model."""
    if any([followed.follow() for followed in stage._stage_followed]):  # type: ignore[union-attr]
        stage._stage_known.clear()  # type: ignore[operator, union-attr]


class Followed:
    """A module of the model, and the one that a stage runs in its place: a copy, the module itself, or none.
    Nothing that is computed is assigned to the first where there is a copy: forwards run in that.
    """

    def __init__(self, name: str, module: nn.Module, runs: nn.Module | None) -> None:
        self.name, self._module, self.runs = name, weakref.ref(module), runs
        self._copy = None if runs is None or runs is module else vars(runs)
        own = vars(module)
        self._hooks = [key for key in own if "_hooks" in key and isinstance(own[key], dict)]
        if self._copy is not None:
            self._copy.update({key: type(own[key])(own[key]) for key in self._hooks})  # no copies of hooks
            self._check_hooks(own)
        self.remember()

    def __deepcopy__(self, memo: dict[int, Any]) -> Followed:
        module = self._module()
        assert module is not None
        return Followed(self.name, module, copy.deepcopy(self.runs, memo))

    def remember(self) -> None:
        """Take the module's present state for what the stage has. ``_seen`` keeps attributes, whose ids are
        compared, but neither tensors nor modules, which may be another stage's.
        """
        if (module := self._module()) is not None:
            own = vars(module)
            self._state = self._state_of(own)
            self._seen = {key: value for key, value in own.items() if key not in _TABLES}
            self._seen |= {key: dict(own[key]) for key in self._hooks}
            self._children = {key: id(part) for key, part in own["_modules"].items()}
            if self._copy is not None:
                self._parameters, self._buffers = self._parameters_of(own), self._buffers_of(own)

    def follow(self) -> bool:
        """Whether the forward may do other operations from now on."""
        module = self._module()
        if module is None or self._state_of(own := vars(module)) == self._state:
            return False
        self._check(self._children, {key: id(part) for key, part in own["_modules"].items()})
        changed = False
        if self._copy is not None:
            changed = self._take_attributes(module, own, self._copy)
            changed |= self._take_parameters(own["_parameters"], self._copy["_parameters"])
            changed |= self._take_buffers(own["_buffers"], self._copy["_buffers"])
        self.remember()
        return changed

    def _state_of(self, own: dict[str, Any]) -> list[Any]:
        """Equal as long as nothing has changed. The parameters of a module that the stage runs itself are its
        version's, see `Versions.use_newest`.
        """
        if self._copy is None:
            return [*map(id, own["_modules"].values())]
        state: list[Any] = [*map(id, chain(own.values(), own["_modules"].values()))]
        state += chain.from_iterable(
            [own[key] for key in self._hooks]
        )  # the numbers of hooks, never used again
        for p in own["_parameters"].values():
            if p is not None:
                state += id(p), p.requires_grad, p._version, p.data_ptr()
        if own["_buffers"]:
            state += self._buffers_of(own).values()
        return state

    def _parameters_of(self, own: dict[str, Any]) -> dict[str, Any]:
        return {
            key: p if p is None else (id(p), p.requires_grad, p._version, p.data_ptr())
            for key, p in own["_parameters"].items()
        }

    def _buffers_of(self, own: dict[str, Any]) -> dict[str, Any]:
        """Without versions where the copy has the same buffer: its forward writes to it."""
        assert self._copy is not None
        mine = self._copy["_buffers"]
        return {
            key: b if b is None else (id(b), None if mine.get(key) is b else b._version)
            for key, b in own["_buffers"].items()
        }

    def _check(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        for key in {**before, **now}:
            if key not in before or key not in now or before[key] != now[key]:
                raise replaced(f"{self.name}.{key}" if self.name else key)

    def _check_hooks(self, own: dict[str, Any]) -> None:
        if own["_backward_hooks"] or own["_backward_pre_hooks"]:
            raise ValueError(
                f"{self.name or 'the model'} has backward hooks of a module, and a stage runs other stages'"
                " modules without gradients: register a hook of a tensor instead, x.register_hook(...) in the"
                " forward or in a forward hook"
            )

    def _take_attributes(self, module: nn.Module, own: dict[str, Any], mine: dict[str, Any]) -> bool:
        self._check_hooks(own)
        changed = False
        for key, value in own.items():
            before = self._seen.get(key, self)
            if key in self._hooks:
                if value != before:
                    added = {k: hook for k, hook in mine[key].items() if k not in before}  # the stage's own
                    mine[key].clear()
                    mine[key].update(value | added)
                    changed = True
            elif key not in _TABLES and value is not before and key != "_compiled_call_impl":
                is_method = getattr(value, "__self__", None) is module
                mine[key] = value.__func__.__get__(self.runs) if is_method else value
                changed |= key != "training"
        for key in self._seen.keys() - own.keys():
            mine.pop(key, None)
            changed = True
        return changed

    def _take_parameters(self, own: dict[str, Any], mine: dict[str, Any]) -> bool:
        now = self._parameters_of({"_parameters": own})
        self._check(*({k: v and v[0] for k, v in each.items()} for each in (self._parameters, now)))
        changed = False
        for key, value in now.items():
            if value != self._parameters[key]:
                if not mine[key].is_meta and mine[key].data_ptr() != value[3]:  # written to, or ``.data`` set
                    raise replaced(f"{self.name}.{key}" if self.name else key)
                if value[1] != self._parameters[key][1]:
                    mine[key].requires_grad_(value[1])
                    changed = True
        return changed

    def _take_buffers(self, own: dict[str, Any], mine: dict[str, Any]) -> bool:
        now = self._buffers_of({"_buffers": own})
        self._check(*({k: v is None for k, v in each.items()} for each in (self._buffers, now)))
        changed = False
        for key, value in now.items():
            before = self._buffers[key]
            if value is not None and (value[0] != before[0] or (before[1] is not None and value != before)):
                buffer, is_shape = own[key], mine[key].is_meta
                mine[key] = torch.empty_like(buffer, device="meta") if is_shape else buffer
                changed = True
        return changed
