"""Imports go one way: dnn_bench -> commsched -> scheduler and comm_core; and what scheduler may not use."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ALLOWED = {
    "scheduler": set(),
    "comm_core": set(),
    "commsched": {"scheduler", "comm_core"},
    "dnn_bench": {"commsched", "scheduler", "comm_core"},
}
# The scheduler decides from its arguments alone: no tensors, no processes, no clocks, no network.
IMPURE = {
    "torch",
    "subprocess",
    "multiprocessing",
    "time",
    "threading",
    "socket",
    "horovod",
    "asyncio",
    "concurrent",
}


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py")) + sorted((ROOT / package).rglob("*.pyi"))


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and top-level name of everything that is imported, at any depth, import_module("...") included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, package if node.level else (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value).split(".")[0]


def violations(package: str, source: str) -> list[tuple[int, str]]:
    forbidden = set(ALLOWED) - ALLOWED[package] - {package}
    if package == "scheduler":
        forbidden |= IMPURE
    return [(line, name) for line, name in imported(source, package) if name in forbidden]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package: str) -> None:
    files = python_files(package)
    assert files, f"{package} has no files"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in violations(package, path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("scheduler", "import torch.nn"),
        ("scheduler", "def f():\n    from time import perf_counter"),
        ("scheduler", "from commsched import init"),
        ("comm_core", "import scheduler"),
        ("commsched", "from importlib import import_module\nimport_module('dnn_bench.models')"),
        ("commsched", "import importlib\nimportlib.import_module('dnn_bench')"),
    ],
)
def test_the_check_finds_what_it_must(package: str, source: str) -> None:
    assert len(violations(package, source)) == 1


def test_relative_imports_are_the_package_itself() -> None:
    assert violations("scheduler", "from .program import Program") == []
