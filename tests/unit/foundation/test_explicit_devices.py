"""Tensors of the communication say where they are and what they hold.

``torch.set_default_device``, ``with torch.device(...)`` and ``torch.set_default_dtype`` are the script's. A
counter that they moved to the meta device, or made float64, once broke the optimizer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
PLACES = ("commsched/backends", "commsched/collectives", "comm_core")
# With whether the default type plays a part.
FACTORIES = {
    **dict.fromkeys("empty full ones tensor zeros arange eye linspace logspace rand randn".split(), True),
    **dict.fromkeys("scalar_tensor empty_strided randint randperm".split(), True),
    **dict.fromkeys("as_tensor asarray sparse_coo_tensor sparse_csr_tensor".split(), False),
}


def careless(source: str) -> Iterator[int]:
    """Lines of calls that make a tensor without saying where, or of which type."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            module, name = node.func.value, node.func.attr
            if isinstance(module, ast.Name) and module.id == "torch" and name in FACTORIES:
                said = {keyword.arg for keyword in node.keywords}
                if "device" not in said or (FACTORIES[name] and "dtype" not in said):
                    yield node.lineno


@pytest.mark.parametrize("place", PLACES)
def test_tensors_are_made_with_a_device_and_a_type(place: str) -> None:
    files = sorted((ROOT / place).rglob("*.py"))
    assert files
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in careless(file.read_text())]
    assert not found, "\n".join(found)


def test_the_check_finds_what_it_must() -> None:
    assert list(careless("a = torch.zeros(3, dtype=torch.int32)\nb = torch.tensor([1], device='cpu')")) == [
        1,
        2,
    ]
    assert list(careless("a = torch.zeros(3, dtype=torch.int32, device=d)\nb = torch.zeros_like(a)")) == []


def test_the_list_of_factories_is_torchs() -> None:
    """All functions that the default device changes, and that take one."""
    from torch.utils._device import _device_constructors

    known = {function.__name__ for function in _device_constructors() if hasattr(torch, function.__name__)}
    rare = {name for name in known if name.endswith("_window") or "sparse" in name or name.startswith("_")}
    rare |= {
        "empty_permuted",
        "empty_quantized",
        "range",
        "tril_indices",
        "triu_indices",
        "complex",
        "normal",
    }
    assert known - rare <= set(FACTORIES), known - rare - set(FACTORIES)
