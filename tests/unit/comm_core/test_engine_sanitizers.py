"""The engine's C++ under ThreadSanitizer and AddressSanitizer, without Python in between."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "native" / "run"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ and its sanitizers")
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_engines_over_sockets_run_clean(sanitizer: str) -> None:
    result = subprocess.run([str(RUN), sanitizer, "4"], capture_output=True, text=True, timeout=550)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok: 4 rounds" in result.stdout
