"""No page shows a command that does not work: every one is read by the program's own parser.

``tests/dist/test_documented_commands.py`` runs them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_lines import Reader, selected
from tests.support.documented_commands import ROOT, Block, Call, blocks, calls, of_help, of_page
from tests.support.documented_runs import NOT_RUN

COLLECT = """
import json, sys
import pytest

class Tests:
    def pytest_collection_finish(self, session):
        found = {item.nodeid: [mark.name for mark in item.iter_markers()] for item in session.items}
        json.dump(found, open(sys.argv[1], "w"))

sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", "", "tests"], [Tests()]))
"""


def problems(commands: list[Call], reader: Reader) -> list[str]:
    found = []
    for call in commands:
        try:
            reader.check(call)
        except ValueError as error:
            found.append(str(error))
    return found


def collected(config: pytest.Config, file: Path) -> dict[str, list[str]]:
    """The marks of all tests there are: from this run, or from a process that collects them."""
    if noted := config.stash.get(sys.modules["tests.conftest"].COLLECTED, None):
        return noted
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[str]] = json.loads(file.read_text())
    return found


def test_every_command_is_one(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "calls").mkdir()
    shown = [block for block in blocks() if block.kind in ("shell", "inline")]
    reader = Reader()
    found = calls(shown, tmp_path / "calls")
    wrong = problems(found, reader)
    assert not wrong, "\n".join(wrong)
    lines = [" ".join(call.words) for call in found]
    stale = [pattern for pattern in NOT_RUN if not any(re.match(pattern, line) for line in lines)]
    assert not stale, f"no page shows these any more: {stale}"

    tests = collected(request.config, tmp_path / "tests.json")
    empty = [f"{call}: selects no test" for call, words in reader.selections if not selected(words, tests)]
    assert len(reader.selections) > 30 and not empty, "\n".join(empty)


@pytest.mark.parametrize(
    "command",
    [
        "python -m dnn_bench pipeline --scheduler wpipe",
        "python -m dnn_bench piepline --depth 2",
        "python -m dnn_bench.nothing",
        "python no_such_file.py",
        "python -c 'a b'",
        "commsched partition --profile bert_base",
        "horovodrun -nq 2 python script.py",
        "torchrun --nproc-per-host 2 script.py",
        "mpirun -nq 2 python script.py",
        "docker build -f docker/Dockerfile.gpu .",
        "dnn=resnet51 ./dist.sh",
        "git clone everything",
        "python -m tests.support.cases optimizer_training 17",
        "torchrun --nproc-per-node 2 --no-python commsched train --job a:b --steps many",
        "for s in 1f1b; do python -m dnn_bench pipeline --skedule $s; done",
    ],
)
def test_a_wrong_command_is_found(command: str, tmp_path: Path) -> None:
    block = Block("page.md", 1, "shell", command)
    assert len(problems(calls([block], tmp_path), Reader())) == 1


def test_selections_of_tests() -> None:
    tests = {"tests/unit/test_a.py::test_one[x]": [], "tests/unit/test_a.py::test_two": ["slow", "dist"]}
    one, two = tests
    assert selected(["tests/unit"], tests) == selected([], tests) == [one]
    assert selected(["-m", "slow or not slow", "-k", "TEST"], tests) == [one, two]
    assert selected(["-k", "three"], tests) == []
    for path in ("tests/unit/test_nothing.py", "tests/unit/nothing_*.py"):
        with pytest.raises(ValueError, match=f"there is no {path[:19]}"):
            selected([path], tests)


PAGE = """
Run `tests/run -m slow`, or `horovodrun`, or `python -m
dnn_bench --help`.

    FOO=1 pytest tests    # comment
    for i in 1 2; do commsched show plan.json; done

then
    indented prose and

    import torch
    torch.ones(1)

with

    0 | F0 F1
    1 |    F0

```
mpirun -np 2 python a.py \\
    --more
```
```python
import commsched
```
"""


def test_pages_are_read_as_their_readers_do(tmp_path: Path) -> None:
    found = list(of_page("page.md", PAGE))
    assert sorted((b.line, b.kind) for b in found) == [
        (2, "inline"),
        (2, "inline"),
        (5, "shell"),
        (11, "python"),
        (16, "drawing"),
        (20, "shell"),
        (24, "python"),
    ]
    called = [call.words for call in calls([b for b in found if b.kind in ("shell", "inline")], tmp_path)]
    assert called.count(("commsched", "show", "plan.json")) == 2
    assert ("mpirun", "-np", "2", "python", "a.py", "--more") in called
    assert ("python", "-m", "dnn_bench", "--help") in called and ("tests/run", "-m", "slow") in called
    help_text = "python -m dnn_bench pipeline --depth 2\npython -m scheduler.table [FILE]\npython is great"
    assert [b.text for b in of_help("a.py", help_text)][0] == "python -m dnn_bench pipeline --depth 2"


def python_blocks() -> list[Block]:
    return [block for block in blocks(docstrings=False) if block.kind == "python"]


def skip_without_libraries(imports: list[ast.Import | ast.ImportFrom]) -> None:
    """Libraries that some pages are about are there in the environment of tests/run --models only."""
    for node in imports:
        name = (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        if name.partition(".")[0] in ("transformers", "accelerate", "lightning", "ray"):
            pytest.importorskip(name, reason="tests/run --models installs it")


def wrong_names(block: Block) -> list[str]:
    """Attributes of what the page imports, and keywords of calls to it, that do not exist."""
    tree, known, wrong = ast.parse(block.text), {}, []
    page = [other.text for other in python_blocks() if other.page == block.page]
    lines = [node for text in (*page, block.text) for node in ast.parse(text).body]
    imports = [node for node in lines if isinstance(node, (ast.Import, ast.ImportFrom))]
    skip_without_libraries(imports)
    exec(compile(ast.Module(imports, []), block.place, "exec"), known)

    def value_of(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if not isinstance(node, ast.Attribute) or (owner := value_of(node.value)) is None:
            return None
        if not hasattr(owner, node.attr):
            wrong.append(f"{block.place}: {ast.unparse(node)} does not exist")
        return getattr(owner, node.attr, None)

    for node in ast.walk(tree):
        value = value_of(node) if isinstance(node, ast.Attribute) else None
        function = value_of(node.func) if isinstance(node, ast.Call) else value
        if isinstance(node, ast.Call) and function is not None:
            try:
                signature = inspect.signature(function)
            except (TypeError, ValueError):
                continue  # of an extension
            words = {word.arg: None for word in node.keywords if word.arg}
            try:
                signature.bind_partial(*node.args, **words)
            except TypeError as error:
                wrong.append(f"{block.place}: {ast.unparse(node)}: {error}")
    return wrong


@pytest.mark.parametrize("block", python_blocks(), ids=lambda block: block.place)
def test_python_on_pages_uses_what_there_is(block: Block) -> None:
    assert not wrong_names(block)


@pytest.mark.parametrize(
    "text",
    [
        "import commsched as hvd\nhvd.DistributedOptimiser(1)",
        "import commsched as hvd\nhvd.DistributedOptimizer(o, schedul='dear')",
        "from commsched import spatial\nspatial.shard(model, grid=(2, 2), halo=1)",
        "from scheduler.ir.link import Link\nlink = Link(alpha=1e-4, gamma=2e-9)",
    ],
)
def test_python_that_is_wrong_is_found(text: str) -> None:
    assert wrong_names(Block("page.md", 1, "python", text))


LONG = pytest.param("docs/policies.md", marks=pytest.mark.slow)


@pytest.mark.parametrize("page", ["docs/scheduler.md", LONG])
def test_python_that_needs_nothing_runs(page: str) -> None:
    first = next(block for block in python_blocks() if block.page == page)
    exec(compile(first.text, first.place, "exec"), {})
