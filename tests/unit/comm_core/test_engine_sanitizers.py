"""The engine's C++ under ThreadSanitizer and AddressSanitizer, without Python in between."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RUN = ROOT / "tests" / "native" / "run"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ and its sanitizers")


@needs_compiler
def test_the_stress_program_fits_the_engine() -> None:
    """It once stopped compiling unnoticed, since the sanitizers run in the slow tests only."""
    program = str(ROOT / "tests" / "native" / "engine_stress.cpp")
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/comm_core/csrc"]
    result = subprocess.run(["g++", *flags, program], capture_output=True, text=True, timeout=550)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_engines_over_sockets_run_clean(sanitizer: str) -> None:
    result = subprocess.run([str(RUN), sanitizer, "4"], capture_output=True, text=True, timeout=550)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok: 4 rounds" in result.stdout
