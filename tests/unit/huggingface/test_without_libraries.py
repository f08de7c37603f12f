"""The parts of ``commsched.huggingface`` that need none of Hugging Face's libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import distributed

import commsched.huggingface
from commsched.huggingface.job import LateSum


@pytest.mark.parametrize("name", commsched.huggingface.__all__)
def test_a_missing_library_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = "accelerate" if name == "Accelerator" else "transformers"
    for module in [m for m in sys.modules if m.startswith("commsched.huggingface.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{name} needs {library}.*pip install 'commsched\[huggingface\]'"):
        getattr(commsched.huggingface, name)


def test_other_names_do_not_exist() -> None:
    assert not hasattr(commsched.huggingface, "Trainers")


class Work:
    """A reduction that is over when somebody has waited."""

    def __init__(self, total: torch.Tensor) -> None:
        self.total, self.waits = total, 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            self.total.mul_(3)


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Work]]:
    found: list[Work] = []

    def all_reduce(tensor: torch.Tensor, async_op: bool) -> Work:
        found.append(Work(tensor))
        return found[-1]

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    yield found


def test_the_first_use_of_a_late_sum_waits(works: list[Work]) -> None:
    late = LateSum.start(torch.tensor(7.0))
    assert isinstance(late, torch.Tensor) and works[0].waits == 0
    loss = torch.tensor(42.0, requires_grad=True)
    mean = loss / late
    assert type(mean) is torch.Tensor and works[0].waits == 1
    assert (mean.item(), late.item(), int(late), late.dtype) == (2.0, 21.0, 21, torch.float32)
    mean.backward()
    assert loss.grad == 1 / 21
    # These read the tensor's memory, and asked no subclass.
    with pytest.warns(UserWarning, match="copy construct"):
        assert torch.tensor(late, dtype=torch.float64).item() == 21
    assert torch.as_tensor(late, dtype=torch.int64).item() == 21
    late.clamp_(min=30)
    assert late.item() == 30 and works[0].waits == 1
