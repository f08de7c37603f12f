"""Tensors that another stage computes: shape and type only. Lists of torch's functions by what they need."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _functions(*listed: tuple[Any, str]) -> set[Any]:
    return {getattr(home, name) for home, names in listed for name in names.split()}


_ABOUT_NUMBERS = "is_floating_point is_complex numel"
ASKS_FOR_SHAPE = _functions(
    (torch, _ABOUT_NUMBERS),
    (Tensor, _ABOUT_NUMBERS),
    (Tensor, "size dim ndimension nelement stride storage_offset is_contiguous element_size get_device"),
    (Tensor, "__len__ __hash__"),
)
ASKS_FOR_VALUES = _functions(
    (torch, "equal allclose is_nonzero"),
    (Tensor, "equal allclose is_nonzero item tolist numpy __bool__ __int__ __float__ __index__"),
)
DRAWS = _functions(
    (torch, "rand randn randint randperm rand_like randn_like randint_like normal poisson bernoulli"),
    (torch, "multinomial dropout"),
    (Tensor, "bernoulli bernoulli_ uniform_ normal_ random_ exponential_ geometric_ multinomial"),
    (F, "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"),
)
"""Functions that draw random numbers."""


def _same(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


def _grouped_mm(
    a: Tensor, b: Tensor, *, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    size = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        size.insert(0, a.shape[0] if offs is None else len(offs))
    return a.new_empty(size, dtype=out_dtype)


ON_META: dict[Any, Any] = {Tensor.cpu: _same, Tensor.cuda: _same}
if hasattr(torch, "_grouped_mm"):  # mixtures of experts; torch's own takes bfloat16 alone on the meta device
    ON_META[torch._grouped_mm] = _grouped_mm
"""Functions that take the place of torch's on the meta device."""


class Absent(Tensor):
    """A tensor that another stage computes: shape and type only."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    real_device: torch.device
    has_grad: bool

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({tuple(self.as_subclass(Tensor).shape)})"


def absent(shape_of: Tensor, device: torch.device, grad: bool) -> Absent:
    found: Absent = torch.Tensor._make_subclass(Absent, shape_of.detach())
    found.real_device, found.has_grad = device, grad
    return found


def plain(leaf: Any) -> Any:
    return leaf.as_subclass(Tensor) if isinstance(leaf, Absent) else leaf


def on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Absent):
        return leaf.as_subclass(Tensor)
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.device) or (
        isinstance(leaf, str) and leaf.partition(":")[0] in ("cpu", "cuda")
    ):
        return torch.device("meta")
    return leaf


def has_grad(tensor: Tensor) -> bool:
    return tensor.has_grad if isinstance(tensor, Absent) else tensor.requires_grad


def versions(leaves: list[Any]) -> list[tuple[Tensor, int]]:
    return [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def code_place() -> str:
    """The line of the model's own code that runs now."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and Path(frame.filename).parent != Path(__file__).parent:
            return f"{frame.name} ({frame.filename}:{frame.lineno}: {frame.line})"
    return "the forward"
