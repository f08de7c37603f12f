"""``python docs/api_page.py [--check]``: write docs/api.md from the docstrings of the public names.

With ``--check`` nothing is written, and the exit status is 1 where the page differs.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
PACKAGES = {
    "commsched": "Horovod's operations and the optimizer",
    "commsched.elastic": "training that goes on when ranks change",
    "commsched.pipeline": "a model in stages",
    "commsched.spatial": "an image in tiles",
}
HEAD = """\
# The public names

Written by `python docs/api_page.py` from the docstrings. Other names are not public and may change;
those of `commsched.huggingface` and `commsched.lightning` are on [their page](integrations.md).
"""


def page() -> str:
    parts = [HEAD]
    for package, about in PACKAGES.items():
        module = import_module(package)
        parts.append(f"## {package}: {about}\n\n{first_paragraph(module)}\n")
        for name in sorted(module.__all__, key=str.lower):
            parts.append("\n".join(entry(f"{package}.{name}", getattr(module, name))))
    return formatted("\n".join(parts))


def entry(name: str, value: Any) -> Iterator[str]:
    """Return the lines of one public name."""
    short = name.rpartition(".")[2]
    if inspect.ismodule(value):
        yield f"### {name}\n\n{first_paragraph(value)}\n"
    elif inspect.isclass(value):
        yield f"### {name}\n\n{block(short, value)}\n\n{first_paragraph(value)}\n"
        members = list(methods(value))
        if members:
            yield "\n".join(members) + "\n"
    elif callable(value):
        yield f"### {name}\n\n{block(short, value)}\n\n{first_paragraph(value)}\n"
    else:
        yield f"### {name}\n\nAn instance of `{type(value).__name__}`.\n"


def methods(cls: type) -> Iterator[str]:
    """Return a line for each public method and property that this project defines in a class."""
    if issubclass(cls, Enum):
        yield f"- values: {', '.join(f'`{member.name}`' for member in cls)}"
        return
    for name in sorted({name for each in cls.__mro__ if ours(each) for name in vars(each)}):
        member = inspect.getattr_static(cls, name)
        if name.startswith("_") or not first_paragraph(member):
            continue
        if isinstance(member, property):
            yield f"- `{name}`: {first_paragraph(member)}"
        elif callable(getattr(cls, name, None)):
            yield f"- `{name}{signature(getattr(cls, name))}`: {first_paragraph(member)}"


def ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("commsched", "comm_core", "scheduler")


def constructor(cls: type) -> str:
    return "" if issubclass(cls, (Enum, BaseException)) else signature(cls)


def signature(value: Any) -> str:
    """Return parameters and result as the source has them; a class has those of its constructor."""
    function = value.__init__ if inspect.isclass(value) else inspect.unwrap(value)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (TypeError, OSError):  # made by dataclass(), or in C++
        return generated_signature(value)
    assert isinstance(tree, ast.FunctionDef)
    every = tree.args
    if every.args and every.args[0].arg in ("self", "cls"):
        del every.args[0]
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns and not inspect.isclass(value) else ""
    return f"({ast.unparse(every)}){returns}"


def block(name: str, value: Any) -> str:
    """Return a class or function with its parameters as a block of Python code."""
    is_class = inspect.isclass(value)
    parameters = constructor(value) if is_class else signature(value)
    return f"```pyi\n{'class' if is_class else 'def'} {name}{parameters}\n```"


def formatted(text: str) -> str:
    """Format all blocks of code like the project's, in one run of the formatter."""
    blocks = re.findall(r"(?<=```pyi\n).*?(?=\n```)", text, flags=re.DOTALL)
    # As stubs of functions: a class with annotated parameters is no Python.
    stubs = [
        re.sub(r"^class (\w+)$", r"class \1()", one).replace("class ", "def class_", 1) for one in blocks
    ]
    ruff = [sys.executable, "-m", "ruff", "format", "--line-length", "110", "--stdin-filename", "api.py", "-"]
    code = "\n\n\n".join(f"{stub.replace('(...)', '(*args)')}: pass" for stub in stubs)
    done = subprocess.run(ruff, input=code, capture_output=True, text=True, check=True)
    results = re.split(r":\s*pass\s*", done.stdout.strip())
    shown = iter(one.replace("def class_", "class ") for one in results)
    return re.sub(r"(?<=```pyi\n).*?(?=\n```)", lambda _: next(shown), text, flags=re.DOTALL)


def generated_signature(value: Any) -> str:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    shown = [str(one).replace("'", "") for one in parameters if one.name != "self"]
    return re.sub(r"<\w+[^>]*>", "...", f"({', '.join(shown)})")


def first_paragraph(value: Any) -> str:
    """Return the docstring's first paragraph on one line, in Markdown."""
    text = inspect.getdoc(value) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    asked = parser.parse_args()
    text = page()
    if asked.check:
        if PAGE.read_text() == text:
            return 0
        print(f"{PAGE} differs from the docstrings; run: python docs/api_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
