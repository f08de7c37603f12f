"""Imports go one way: dnn_bench -> commsched -> scheduler and comm_core, without circles; and what scheduler
may not use.
"""

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
# The folders and files of the scheduler, and which of the others each may import.
FLOORS = {
    "ir": set(),
    "simulate": {"ir"},
    "validate": {"ir", "simulate"},
    "bounds": {"ir"},
    "formats": {"ir"},
    "render": {"ir", "simulate"},
    "policies": {"ir", "simulate", "bounds"},
    "profiles": {"ir", "formats"},
    "pipelines": {"ir", "simulate", "formats"},
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


def modules() -> dict[str, Path]:
    """Every module of the four packages by its dotted name."""
    found = {f"comm_core.{name}": ROOT / f"comm_core/{name}.pyi" for name in ("_C", "_cuda")}
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, source: str, known: set[str]) -> set[str]:
    """The modules that a module imports, in functions too; ``from package import module`` is the module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in known else base)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            found |= {str(node.args[0].value)} if called in ("import_module", "__import__") else set()
    return found & known - {name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or not."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for after in graph[waiting.pop()] - seen:
                seen.add(after)
                waiting.append(after)
        return seen

    behind = {name: reached(name) for name in graph}
    groups = {
        tuple(sorted(other for other in graph if other in behind[name] and name in behind[other]))
        for name in graph
        if name in behind[name]
    }
    return [list(group) for group in sorted(groups)]


def test_no_files_import_each_other() -> None:
    """Down to imports inside functions. A package's ``__init__`` may list what its files define."""
    known = modules()
    graph = {name: imports_of(name, path.read_text(), set(known)) for name, path in known.items()}
    found = circles(graph)
    assert not found, "\n".join(" <-> ".join(group) for group in found)


def loaded_first(name: str, source: str, known: set[str]) -> set[str]:
    """The modules that must be complete before a module is: what its top level imports, with the packages
    that these stand in.
    """
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    direct = imports_of(name, ast.unparse(tree), known)
    parents = {other.rsplit(".", depth)[0] for other in direct for depth in range(1, other.count(".") + 1)}
    return {other for other in direct | parents if not name.startswith(f"{other}.")} & known - {name}


def test_every_module_can_be_imported_first() -> None:
    """A package's ``__init__`` runs before its files: what it imports must not need the file that asked for
    it. Threads that import at the same time once met half a module.
    """
    known = modules()
    graph = {name: loaded_first(name, path.read_text(), set(known)) for name, path in known.items()}
    found = circles(graph)
    assert not found, "\n".join(" <-> ".join(group) for group in found)


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    source = "def f():\n    from . import b\n    from p.c import d"
    assert imports_of("p.a", source, {"p.b", "p.c"}) == {"p.b", "p.c"}


@pytest.mark.parametrize("floor", FLOORS)
def test_floors_of_the_scheduler(floor: str) -> None:
    """``ir`` and ``simulate`` know no policy, schedule, format or picture."""
    known = modules()
    for name, path in known.items():
        if name.split(".")[:2] == ["scheduler", floor]:
            others = {
                other.split(".")[1]
                for other in imports_of(name, path.read_text(), set(known))
                if other.startswith("scheduler.")
            }
            above = sorted(others - FLOORS[floor] - {floor})
            assert not above, f"{name} imports {above}"


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
