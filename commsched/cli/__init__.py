"""The command ``commsched``.

Subcommand ``x`` is in the module that ``COMMANDS`` names, with ``add_x_arguments(parser)`` and
``run_x(arguments)``, which returns an exit status or None for 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

# Name -> module and one line of help. Only the module of the called subcommand is imported, which keeps the
# others fast.
COMMANDS = {
    "plan": ("commsched.cli.plan", "make a plan for a profile and a link"),
    "simulate": ("commsched.cli.simulate", "compare policies on a profile, also over numbers of ranks"),
    "show": ("commsched.cli.plan", "print, check or draw a plan"),
    "profile": ("commsched.cli.profile", "measure a model layer by layer"),
    "partition": ("commsched.cli.partition", "cut a model into the stages of a pipeline"),
    "convert": ("commsched.cli.partition", "write a plan as AshPipe's files, or a plan from them"),
    "advise": ("commsched.cli.advise", "measure a DDP script, and predict its step with commsched"),
    "train": ("commsched.cli.train", "train a model in the stages of a plan"),
    "doctor": ("commsched.doctor", "check this machine: compiler, torch, CUDA, launchers, network, limits"),
}


class HelpFormatter(argparse.HelpFormatter):
    """Appends its default to an option's help, unless it has none or the help says it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        none = action.default is None or action.default is False or action.default in ("", argparse.SUPPRESS)
        return text if none or "default" in text else f"{text} (default: %(default)s)".strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Return its status, or 2 after a wrong argument or file, with one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in COMMANDS:
        return _top_level(words)
    where, line = COMMANDS[words[0]]
    parser = argparse.ArgumentParser(f"commsched {words[0]}", description=line, formatter_class=HelpFormatter)
    module = import_module(where)
    getattr(module, f"add_{words[0]}_arguments")(parser)
    arguments = parser.parse_args(words[1:])
    try:
        status: int | None = getattr(module, f"run_{words[0]}")(arguments)
    except ValueError as error:
        print(f"commsched {words[0]}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader (`head`, a pager) has closed the pipe: print no traceback
        return 0
    return status or 0


def _top_level(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "commsched", description="Schedules communication of data-parallel training."
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (_, line) in COMMANDS.items():
        commands.add_parser(name, help=line)
    parser.parse_args(words or ["--help"])
    return 0
