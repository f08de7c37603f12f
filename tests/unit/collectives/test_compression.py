"""The namespace ``Compression`` where torch lacks a type."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import commsched as hvd
from commsched.collectives.compression import block_code
from commsched.optimizer.distributed import check_blocks


def test_fp8_is_there_with_torchs_type_and_says_so_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hvd.Compression.fp8.wire_dtype is torch.float8_e4m3fn
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(
        AttributeError, match=re.escape(f"torch {torch.__version__} does not have; use Compression.int8")
    ):
        _ = hvd.Compression.fp8
    assert hvd.Compression.int8.wire_dtype is torch.int8


def test_two_codes_are_for_blocks() -> None:
    found = {str(wire): block_code(wire) for wire in (None, torch.float16, torch.int8, torch.float8_e4m3fn)}
    assert list(found.values()) == ["", "", "int8", "fp8"]
    for compression in (hvd.Compression.int8, hvd.Compression.fp8):
        with pytest.raises(
            ValueError, match=f"Compression.{block_code(compression.wire_dtype)} is for the buckets"
        ):
            compression.compress(torch.ones(3))


def test_where_gradients_may_be_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs a transport is that of the flags, and any will do; an emulated network moves no blocks."""
    monkeypatch.delenv("COMMSCHED_TRANSPORT", raising=False)
    on = {kind: [SimpleNamespace(device=torch.device(kind))] for kind in ("cpu", "cuda", "meta")}
    accepted: list[tuple[str, Any]] = [("cpu", None), ("cpu", "stream"), ("cpu", "direct"), ("cuda", None)]
    for kind, transport in [*accepted, ("cuda", "ring")]:
        check_blocks("int8", transport, on[kind], False)  # type: ignore[arg-type]
    emulated = SimpleNamespace(name="EMULATED, flags over alone")
    for kind, transport in (("cpu", "ring"), ("cpu", emulated), ("cuda", emulated)):
        with pytest.raises(ValueError, match="not possible over transport"):
            check_blocks("int8", transport, on[kind], False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on meta: gradients are quantised on CPUs and GPUs only"):
        check_blocks("int8", None, on["meta"], False)  # type: ignore[arg-type]
