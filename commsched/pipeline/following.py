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

    def __init__(self, name: str, module: nn.Module, runs: nn.Module | None, reads: bool = True) -> None:
        """``reads``: whether only scripts write to the module's buffers that the copy does not share."""
        self.name, self._module, self.runs, self._reads = name, weakref.ref(module), runs, reads
        self._copy = None if runs is None or runs is module else vars(runs)
        own = vars(module)
        self._hooks = [key for key in own if "_hooks" in key and isinstance(own[key], dict)]
        if self._copy is not None:
            self._copy.update({key: type(own[key])(own[key]) for key in self._hooks})  # no copies of hooks
        self.remember()

    def __deepcopy__(self, memo: dict[int, Any]) -> Followed:
        module = self._module()
        assert module is not None
        return Followed(self.name, module, copy.deepcopy(self.runs, memo), reads=False)

    def remember(self) -> None:
        """Take the module's present state for what the stage has. ``_seen`` keeps attributes, whose ids are
        compared, but neither tensors nor modules, which may be another stage's.
        """
        if (module := self._module()) is None:
            return
        own = vars(module)
        self._state, self._fixed = self._state_of(own), self._fixed_of(own)
        if self._copy is not None:
            if own["_backward_hooks"] or own["_backward_pre_hooks"]:
                raise ValueError(
                    f"{self.name or 'the model'} has backward hooks of a module, and a stage runs other"
                    " stages' modules without gradients: register a hook of a tensor instead,"
                    " x.register_hook(...) in the forward or in a forward hook"
                )
            self._seen = {key: value for key, value in own.items() if key not in _TABLES}
            self._seen |= {key: dict(own[key]) for key in self._hooks}
            self._tensors = self._tensors_of(own, self._copy["_buffers"])

    def follow(self) -> bool:
        """Whether the forward may do other operations from now on."""
        module = self._module()
        if module is None or self._state_of(own := vars(module)) == self._state:
            return False
        fixed = self._fixed_of(own)
        for key in {**self._fixed, **fixed}:
            if self._fixed.get(key) != fixed.get(key):
                raise replaced(f"{self.name}.{key}" if self.name else key)
        changed = self._copy is not None and self._take(module, own, self._copy)
        self.remember()
        return changed

    def _state_of(self, own: dict[str, Any]) -> list[Any]:
        """Equal as long as nothing has changed. The parameters of a module that the stage runs itself are its
        version's, see `Versions.use_newest`.
        """
        if self._copy is None:
            return [*map(id, own["_modules"].values())]
        state: list[Any] = [*map(id, chain(own.values(), own["_modules"].values()))]
        state += chain.from_iterable([own[key] for key in self._hooks])  # numbers that are never used again
        if own["_parameters"] or own["_buffers"]:
            state += self._tensors_of(own, self._copy["_buffers"]).values()
        return state

    def _fixed_of(self, own: dict[str, Any]) -> dict[str, Any]:
        tables = _TABLES[:1] if self._copy is None else _TABLES[:2]
        fixed = {key: id(value) for table in tables for key, value in own[table].items()}
        buffers = {} if self._copy is None else own["_buffers"]
        return fixed | {key: value is None for key, value in buffers.items()}

    def _tensors_of(self, own: dict[str, Any], held: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        """Without versions of buffers that the copy has, too: its forward writes to them."""
        found: dict[str, tuple[Any, ...]] = {}
        for key, p in own["_parameters"].items():
            if p is not None:
                found[key] = id(p), p._version, p.data_ptr(), p.requires_grad
        for key, b in own["_buffers"].items():
            if b is not None:
                found[key] = id(b), None if held.get(key) is b or not self._reads else b._version
        return found

    def _take(self, module: nn.Module, own: dict[str, Any], mine: dict[str, Any]) -> bool:
        changed = bool(self._seen.keys() - own.keys())
        for key in self._seen.keys() - own.keys():
            mine.pop(key, None)
        for key, value in own.items():
            before = self._seen.get(key, self)
            if key in self._hooks:
                if value != before:
                    added = {k: hook for k, hook in mine[key].items() if k not in before}  # the stage's own
                    mine[key].clear()
                    mine[key].update(added | value)
                    changed = True
            elif key not in _TABLES and value is not before and key != "_compiled_call_impl":
                is_method = getattr(value, "__self__", None) is module
                mine[key] = value.__func__.__get__(self.runs) if is_method else value
                changed |= key != "training"
        for key, (number, version, *others) in self._tensors_of(own, mine["_buffers"]).items():
            was_number, was_version, *was = self._tensors[key]
            if others and (version, *others) != (was_version, *was):
                held = mine["_parameters"][key]
                if not held.is_meta and held.data_ptr() != others[0]:
                    name = f"{self.name}.{key}" if self.name else key
                    if (version, others[0]) != (was_version, was[0]):  # written to, or ``.data`` set
                        raise replaced(name)
                    raise ValueError(
                        f"{name} has been frozen, or is trained again, but the stages have versions of"
                        " their own: make a new Pipeline"
                    )
                if others != was:
                    held.requires_grad_(others[1])
                    changed = True
            elif not others and (number != was_number or was_version not in (None, version)):
                held, buffer = mine["_buffers"], own["_buffers"][key]
                held[key] = torch.empty_like(buffer, device="meta") if held[key].is_meta else buffer
                changed = True
        return changed
