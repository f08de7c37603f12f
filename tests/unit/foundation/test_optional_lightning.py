"""``commsched.lightning`` without Lightning says how to install it."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

WITHOUT = ("lightning.pytorch", "pytorch_lightning", "commsched.lightning")


def test_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(WITHOUT)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'commsched\[lightning\]'"):
        importlib.import_module("commsched.lightning")
