"""The namespace ``Compression`` where torch lacks a type."""

import re

import pytest
import torch

import commsched as hvd
from commsched.collectives.compression import block_code


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
