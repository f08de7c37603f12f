"""Reads command lines as the programs themselves would, with their own parsers, and starts nothing."""

from __future__ import annotations

import argparse
import importlib
import io
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from typing import Any
from unittest import mock

from _pytest.mark.expression import Expression

from commsched import cli
from dnn_bench import __main__ as bench
from dnn_bench import launch, settings
from tests.support import cases
from tests.support.documented_commands import ROOT, Call

SCRIPTS = ("script.py", "train.py")
"""Of the user's."""


class _ParsedError(Exception):
    """The arguments are good; the program would start now."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options


def parsed(main: Callable[[], Any], words: Sequence[str]) -> argparse.Namespace | None:
    """What a program's parser makes of its arguments; None if the program ends without one (``--help``)."""
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        raise _ParsedError(parse(parser, args, namespace))

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop), mock.patch("sys.argv", list(words)):
        try:
            status = main()
        except _ParsedError as done:
            return done.options
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        else:
            if status:
                raise ValueError(f"{' '.join(words)} ends with status {status}")
    return None


@contextmanager
def lenient(wanted: bool) -> Iterator[None]:
    """Parsers do not mind what is missing."""
    tell = argparse.ArgumentParser.error

    def error(parser: argparse.ArgumentParser, message: str) -> None:
        if not wanted or "are required" not in message:
            tell(parser, message)

    with mock.patch.object(argparse.ArgumentParser, "error", error):
        yield


class Reader:
    """Checks calls; ``selections`` collects pytest's arguments, which need a collection of the tests."""

    def __init__(self) -> None:
        self.selections: list[tuple[Call, tuple[str, ...]]] = []
        self.call: Call
        self._programs: dict[str, Callable[[list[str]], None]] = {
            "python": self._python,
            "pytest": self._pytest,
            "commsched": self._commsched,
            "horovodrun": self._horovodrun,
            "torchrun": self._torchrun,
            "mpirun": self._mpirun,
            "srun": self._command,
            "docker": self._docker,
            "./dist.sh": self._dist_sh,
            "tests/run": self._tests_run,
            "tests/native/run": self._native,
            "docker/install.sh": self._only("--help"),
            "docker/several_gpus.sh": self._only("--help"),
            "pip": self._starts_with("install", "wheel"),
            "apt-get": self._starts_with("install"),
            "ssh": self._starts_with("host1"),
            "sysctl": self._starts_with("-w", "net.ipv4.tcp_congestion_control"),
        }

    def check(self, call: Call) -> None:
        """Raises ``ValueError`` for what the program would not take. Inline code may leave out what a program
        needs (``torchrun --nproc-per-node 2``); its options must exist all the same.
        """
        self.call = call
        self.whole = call.block.kind == "shell"
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said), lenient(not self.whole):
            try:
                self._command(list(call.words))
            except (ValueError, AttributeError, ImportError, SyntaxError) as error:
                raise ValueError(f"{call}\n  {error}\n{said.getvalue()[-500:]}") from error
            except SystemExit as ended:
                raise ValueError(f"{call}\n  status {ended.code}\n{said.getvalue()[-500:]}") from None

    def _command(self, words: list[str]) -> None:
        if not words:
            if self.whole:
                raise ValueError("the launcher has nothing to start")
            return
        if words[0] not in self._programs:
            raise ValueError(f"nothing here can check {words[0]!r}")
        self._programs[words[0]](words[1:])

    # Launchers

    def _torchrun(self, words: list[str]) -> None:
        from torch.distributed.run import get_args_parser

        known = get_args_parser().parse_args(words)
        rest = [known.training_script, *known.training_script_args] if known.training_script else []
        python = ["python", *(["-m"] if known.module else [])]
        self._command(rest if known.no_python or not rest else [*python, *rest])

    def _horovodrun(self, words: list[str]) -> None:
        if find_spec("horovod") is None:
            return
        from horovod.runner.launch import parse_args

        with mock.patch("sys.argv", ["horovodrun", *words]):
            self._command(list(parse_args().command))

    def _mpirun(self, words: list[str]) -> None:
        parser = argparse.ArgumentParser("mpirun", allow_abbrev=False)
        parser.add_argument("-np", type=int, required=True)
        parser.add_argument("-H", dest="hosts")
        parser.add_argument("-x", action="append")
        parser.add_argument("command", nargs=argparse.REMAINDER)
        self._command(parser.parse_args(words).command)

    def _docker(self, words: list[str]) -> None:
        parser = argparse.ArgumentParser("docker")
        what = parser.add_subparsers(required=True, dest="what")
        build, run = what.add_parser("build"), what.add_parser("run")
        build.add_argument("-f", dest="file", required=True)
        build.add_argument("-t", dest="tag")
        build.add_argument("folder", choices=["."])
        run.add_argument("--rm", action="store_true")
        run.add_argument("--network", choices=["host"])
        run.add_argument("image", choices=["commsched:cpu", "commsched:cuda"])
        run.add_argument("command", nargs=argparse.REMAINDER)
        options = parser.parse_args(words)
        if options.what == "build" and not (ROOT / options.file).is_file():
            raise ValueError(f"there is no {options.file}")
        command = [*getattr(options, "command", [])]
        if command:
            self._command([*command[:-1], "script.py"] if command[-1] == "..." else command)

    # Programs

    def _python(self, words: list[str]) -> None:
        if words[0] == "-c":
            compile(words[1], "-c", "exec")
        elif words[0] == "-m":
            self._module(words[1], words[2:])
        elif words[0] not in SCRIPTS:
            path = ROOT / words[0]
            if not path.is_file():
                raise ValueError(f"there is no {words[0]}")
            with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
                parsed(lambda: runpy.run_path(str(path), run_name="__main__"), [str(path), *words[1:]])

    def _module(self, name: str, words: list[str]) -> None:
        if name == "dnn_bench":
            self._subcommand(bench.COMMANDS, bench.main, words)
        elif name == "tests.support.cases":
            program, ranks, *chosen = words
            at = set(cases.cases_for(program, cases.place_of(ranks)[0]))
            if not at or not set(chosen) <= at:
                raise ValueError(f"{program} on {ranks} ranks has the cases {sorted(at)}, not {chosen}")
        elif name == "pytest":
            self._pytest(words)
        else:
            module = importlib.import_module(name)
            if not hasattr(module, "main"):  # a package
                module = importlib.import_module(f"{name}.__main__")
            main = module.main
            takes = main.__code__.co_argcount
            found = parsed(lambda: main(words) if takes else main(), [name, *words]) if words else None
            if found is not None and getattr(found, "command", None):
                self._command(found.command)

    def _commsched(self, words: list[str]) -> None:
        self._subcommand(cli.COMMANDS, cli.main, words)

    def _subcommand(self, known: Any, main: Callable[[list[str]], Any], words: list[str]) -> None:
        if len(words) == 1 and words[0] in known and not self.whole:
            words = [words[0], "--help"]  # it is only named
        # Options in brackets may be given or left out.
        for variant in ([w for w in words if w[0] != "["], [w.strip("[]") for w in words]):
            found = parsed(lambda variant=variant: main(variant), variant)
            rest = getattr(found, "command", None)
            if isinstance(rest, list):
                self._command(rest[1:] if rest[0] == "--" else rest)

    def _dist_sh(self, words: list[str]) -> None:
        if words:
            raise ValueError("dist.sh takes variables only")
        with mock.patch.object(launch, "find", lambda name: name), mock.patch("sys.executable", "python"):
            line = settings.command_line(settings.read(self.call.variables))
        if "dnn_bench synthetic" not in line:
            raise ValueError(f"dist.sh makes {line!r} of it")

    def _pytest(self, words: list[str]) -> None:
        self.selections.append((self.call, tuple(words)))

    def _tests_run(self, words: list[str]) -> None:
        rest = words[1:] if words[:1] in (["--models"], ["--all"]) else words
        if rest:
            self._pytest(rest)

    def _native(self, words: list[str]) -> None:
        if words[0] not in ("thread", "address", "none") or not all(word.isdigit() for word in words[1:]):
            raise ValueError("tests/native/run takes thread, address or none, rounds and a seed")

    def _only(self, *allowed: str) -> Callable[[list[str]], None]:
        def check(words: list[str]) -> None:
            if not set(words) <= set(allowed):
                raise ValueError(f"takes only {allowed}, not {words}")

        return check

    def _starts_with(self, *allowed: str) -> Callable[[list[str]], None]:
        def check(words: list[str]) -> None:
            if words[0] not in allowed:
                raise ValueError(f"begins with {words[0]!r}; known: {allowed}")

        return check


# -- pytest --------------------------------------------------------------------------------------------------

SELECTOR = argparse.ArgumentParser("pytest", allow_abbrev=False)
SELECTOR.add_argument("paths", nargs="*")
SELECTOR.add_argument("-k", dest="keyword", default="")
SELECTOR.add_argument("-m", dest="marks", default="not slow and not bench and not gpu")
SELECTOR.add_argument("-s", action="store_true")
SELECTOR.add_argument("-n", dest="processes", type=int)
SELECTOR.add_argument("--dist")
SELECTOR.add_argument("--durations", type=int)


class _Marks(dict[str, bool]):
    """The names in an expression of marks."""

    def __missing__(self, name: str) -> bool:
        return False


def matches(expression: str, test: str) -> bool:
    """Whether ``-k expression`` selects the test; without an expression every test is selected."""
    if not expression:
        return True
    return Expression.compile(expression).evaluate(lambda name, **_: name.lower() in test.lower())


def selected(words: Sequence[str], tests: dict[str, list[str]]) -> list[str]:
    """The tests that pytest would run. ``tests``: every test's id and its marks."""
    options = SELECTOR.parse_args(list(words))
    found = {path: [p.relative_to(ROOT).as_posix() for p in ROOT.glob(path)] for path in options.paths}
    missing = [path for path, files in found.items() if not files]
    if missing:
        raise ValueError(f"there is no {', '.join(missing)}")
    files = [file for some in found.values() for file in some]
    return [
        test
        for test, marks in tests.items()
        if (not files or any(test.startswith((f"{path}/", f"{path}::")) for path in files))
        and matches(options.keyword, test)
        and eval(options.marks, {"__builtins__": {}}, _Marks.fromkeys(marks, True))
    ]
