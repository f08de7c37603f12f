"""The commands that stand in the documentation: README.md, docs/, docstrings of modules, headers of scripts.

A page is read as its reader does: code blocks, and inline code that begins with a program and goes on. Bash
expands each command (loops, quotes, variables, several commands on a line), with every program replaced by
one that notes how it was called.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    "python",
    "pytest",
    "commsched",
    "horovodrun",
    "torchrun",
    "mpirun",
    "srun",
    "docker",
    "pip",
    "sysctl",
    "./dist.sh",
    "tests/run",
    "tests/native/run",
    "docker/install.sh",
    "docker/horovod.sh",
    "docker/several_gpus.sh",
)
# A page that shows one of these needs a check of its own first.
OTHERS = (
    "apt apt-get bash cmake conda curl git ip make mpiexec mpicc nsys nvcc nvidia-smi pip3 python3 sh"
    " source ssh sudo tc uv wget"
).split()
SHELL = ("for", "time")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=(\"[^\"]*\"|'[^']*'|\S*)\s+")
PACKAGES = ("comm_core", "commsched", "dnn_bench", "scheduler", "tests/support", "tests/native")


@dataclass(frozen=True)
class Block:
    """Code of one place. ``kind``: shell, python, inline (a part of a sentence) or drawing."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Call:
    """A program as bash would start it. ``variables``: those that the command sets."""

    block: Block
    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.block.place}: {' '.join(self.words)}"


# -- reading -------------------------------------------------------------------------------------------------


def blocks(docstrings: bool = True) -> list[Block]:
    """All code of the pages; with ``docstrings`` also the commands of modules and scripts."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = []
    for page in pages:
        found += of_page(page.relative_to(ROOT).as_posix(), page.read_text())
    if not docstrings:
        return found
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            found += of_help(path.relative_to(ROOT).as_posix(), text)
    scripts = [ROOT / "dist.sh", ROOT / "tests" / "run", ROOT / "tests" / "native" / "run"]
    for path in (*scripts, *sorted((ROOT / "docker").iterdir())):
        lines = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
        found += of_help(path.relative_to(ROOT).as_posix(), "\n".join(lines))
    return found


def of_page(page: str, text: str) -> Iterator[Block]:
    """The code of a Markdown page: fenced, indented behind an empty line, and inline."""
    lines = text.splitlines()
    number, paragraphs = 0, [(1, "")]
    while number < len(lines):
        line, first = lines[number], number + 1
        if line.startswith("```"):
            end = next(n for n in range(number + 1, len(lines)) if lines[n].startswith("```"))
            body = "\n".join(lines[number + 1 : end])
            yield Block(page, first + 1, "python" if line[3:] == "python" else kind_of(body), body)
            number = end
        elif line.startswith("    ") and (number == 0 or not lines[number - 1].strip()):
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            body = textwrap.dedent("\n".join(lines[number:end])).strip("\n")
            yield Block(page, first, kind_of(body), body)
            number = end - 1
        elif not line.strip() or line.startswith("#"):
            paragraphs.append((first + 1, ""))
        else:
            start, before = paragraphs[-1]
            paragraphs[-1] = (start if before else first, f"{before}{line}\n")
        number += 1
    for first, paragraph in paragraphs:
        for found in re.finditer(r"`([^`]+)`", paragraph):
            code = " ".join(found[1].split())
            if program_of(code) in (*PROGRAMS, *OTHERS) and " " in code:
                yield Block(page, first + paragraph[: found.start()].count("\n"), "inline", code)


def of_help(page: str, text: str) -> Iterator[Block]:
    """The commands of a docstring or a script's header: whole lines, or in backticks; not their synopses."""
    for number, line in enumerate(text.splitlines(), 1):
        quoted = re.findall(r"``?([^`]+)``?", line)
        for code in quoted or [line.strip()]:
            words = code.split()
            known = program_of(code) in PROGRAMS and len(words) > 1
            if known and not any(map(is_placeholder, words[1:])):
                yield Block(page, number, "inline", code)


def is_placeholder(word: str) -> bool:
    """FILE, [PART ...] and the like."""
    return bool(re.match(r"\[|\.\.\.|[A-Z]{2,}", word)) and not word.startswith("[--")


def is_command(line: str) -> bool:
    return program_of(line) in (*PROGRAMS, *OTHERS, *SHELL)


def program_of(line: str) -> str:
    while found := ASSIGNMENT.match(line):
        line = line[found.end() :]
    return (line.split() or [""])[0]


def kind_of(body: str) -> str:
    """A block without a language's name: commands, Python, or a drawing."""
    lines = [line for line in body.splitlines() if line.strip()]
    if is_command(next((line for line in lines if line[0] != "#"), "")):
        return "shell"
    strange = [line for line in lines if is_command(line) and not line.startswith("sh ")]
    try:
        ast.parse(body)
    except SyntaxError:
        if strange:
            raise ValueError(f"is this a command or a drawing? {strange[0]!r} stands in\n{body}") from None
        return "drawing"
    return "python"


# -- expanding -----------------------------------------------------------------------------------------------

NOTE = r"""#!/bin/bash
{ printf '%s\0' "$#" "$0" "$@"; env -0; printf '\0'; } >> "$CALLS"
"""


def calls(commands: list[Block], folder: Path) -> list[Call]:
    """Every call of a program that the commands make. ``folder``: an empty one."""
    programs = folder / "programs"
    for name in (*PROGRAMS, *OTHERS):
        path = (folder if "/" in name else programs) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(NOTE)
        path.chmod(0o755)
    for name in ("env", "seq"):
        (programs / name).symlink_to(shutil.which(name) or name)
    found = []
    # Nothing else is on PATH: a page may name programs that change the machine.
    base = {"PATH": str(programs), "CALLS": str(folder / "calls"), "HOME": str(folder)}
    for block in commands:
        (folder / "calls").write_bytes(b"")
        done = subprocess.run(
            ["/bin/bash", "-c", block.text], cwd=folder, env=base, capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise ValueError(f"{block.place}: bash cannot run {block.text!r}: {done.stderr}")
        found += [Call(block, *noted) for noted in _noted((folder / "calls").read_bytes(), base, folder)]
    return found


Noted = tuple[tuple[str, ...], dict[str, str]]


def _noted(data: bytes, base: dict[str, str], folder: Path) -> Iterator[Noted]:
    """Per call: how many arguments, the program, its arguments, the environment, an empty word."""
    words = iter(data.decode().split("\0"))
    for count in words:
        if not count:
            continue
        program = next(words).removeprefix(f"{folder}/programs/")
        arguments = [next(words) for _ in range(int(count))]
        pairs = dict(pair.split("=", 1) for pair in iter(lambda: next(words), ""))
        set_here = {k: v for k, v in pairs.items() if k not in (*base, "_", "SHLVL", "PWD", "OLDPWD")}
        yield (program, *arguments), set_here
