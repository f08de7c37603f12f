"""Where a pipeline's model comes from: it is there, or a rank makes or reads the parameters of its stages."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from commsched.pipeline.factory import Factory, Make, as_module
from commsched.pipeline.weights import Weights

WeightSource = str | Path | Mapping[str, Tensor]


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of what calls it as a whole."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        text = (
            "a graph of the whole model cannot be cut: its stages run as they are; compile its blocks instead"
        )
        warnings.warn(text, stacklevel=2)
        return inner
    if isinstance(model, nn.DataParallel):
        inner = model.module
        assert isinstance(inner, nn.Module)
        return inner
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "a pipeline sums the gradients of its replicas itself; pass the model without"
            " DistributedDataParallel, and mesh=(stages, replicas)"
        )
    return model


class Origin:
    """``model`` has shapes for parameters where a factory makes it, and where it came on the meta device."""

    def __init__(
        self, model: nn.Module | Sequence[nn.Module] | Make, weights: WeightSource | None = None
    ) -> None:
        self._factory: Factory | None = None
        self._weights = None if weights is None else Weights(weights)
        if isinstance(model, (nn.Module, Sequence)):
            self.model = _unwrapped(as_module(model))
        else:
            self._factory = Factory(model)
            self.model = self._factory.outline()

    @property
    def complete(self) -> bool:
        """Whether nothing is left to fill."""
        return self._weights is None and not any(t.is_meta for t in _named_tensors(self.model).values())

    def fill(self, names: Collection[str], random: Tensor, device: torch.device | str | None = None) -> None:
        """Gives these parameters and buffers their values, on ``device`` (None: where they are made).
        ``random``: the state of torch's generator with which a factory begins.
        """
        tensors = _named_tensors(self.model)
        read = self._names_in_weights({id(tensors[name]) for name in names})
        missing = [name for name in names if tensors[name].is_meta and id(tensors[name]) not in read]
        made: dict[int, Tensor] = {}
        if self._factory and (missing or any(buffer.is_meta for buffer in self.model.buffers())):
            if self._weights and missing:
                text = f"{self._weights} has no {_some(missing)}: they start as the model initialises them"
                warnings.warn(text, stacklevel=2)
            made = self._made(self._factory, missing, random)
        self._put(read, made, device)
        tensors = _named_tensors(self.model)
        kept = set(self.model.state_dict())
        missing = [name for name in tensors if tensors[name].is_meta and (name in names or name not in kept)]
        if missing:
            raise ValueError(
                f"the model is on the meta device and {_some(missing)} have no values"
                + (f", nor has {self._weights}" if self._weights else "")
                + "; pass a function that makes the model instead of the model"
                + ("" if self._weights else ", or weights=")
            )

    def _names_in_weights(self, wanted: Collection[int]) -> dict[int, str]:
        """By id of a tensor its name in the weights, for those that are there."""
        if self._weights is None:
            return {}
        names: dict[int, list[str]] = {}
        for name, tensor in _named_tensors(self.model).items():
            names.setdefault(id(tensor), []).append(name)
        prefix = getattr(self.model, "base_model_prefix", "")
        found = {key: self._weights.name_of(names[key], prefix) for key in wanted}
        return {key: name for key, name in found.items() if name is not None}

    def _made(self, factory: Factory, names: Collection[str], random: Tensor) -> dict[int, Tensor]:
        """By id, these parameters and all buffers as the factory makes them."""
        made, outline = _named_tensors(factory.partial(names, random)), _named_tensors(self.model)
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        return {id(outline[name]): made[name] for name in {*names, *buffers}}

    @torch.no_grad()
    def _put(
        self, read: Mapping[int, str], made: Mapping[int, Tensor], device: torch.device | str | None
    ) -> None:
        new: dict[int, Tensor] = {}
        for owned in [d for m in self.model.modules() for d in (m._parameters, m._buffers)]:
            for key, old in owned.items():
                if old is None or (id(old) not in new and id(old) not in read and id(old) not in made):
                    continue
                if id(old) not in new:
                    value = self._value(old, read[id(old)]) if id(old) in read else made[id(old)]
                    new[id(old)] = _filled(old, value, device)
                owned[key] = new[id(old)]  # type: ignore[assignment]

    def _value(self, old: Tensor, name: str) -> Tensor:
        assert self._weights is not None
        value = self._weights[name]
        if value.shape != old.shape:
            raise ValueError(
                f"{self._weights}: {name} has the shape {tuple(value.shape)}, the model's {tuple(old.shape)}"
            )
        return torch.empty_like(old, device="cpu" if old.is_meta else old.device).copy_(value)


def _filled(old: Tensor, value: Tensor, device: torch.device | str | None) -> Tensor:
    """A tensor that is there gets the value; a shape is replaced by it."""
    if not old.is_meta:
        return old.copy_(value)
    value = value.detach().to(device or value.device)
    if not isinstance(old, nn.Parameter):
        return value
    parameter = nn.Parameter(value, old.requires_grad)
    parameter.__dict__.update(old.__dict__)
    return parameter


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers; those with several names under each of them."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
