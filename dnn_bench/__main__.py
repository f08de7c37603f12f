"""`python -m dnn_bench COMMAND ...`: each command is a module with a `main(arguments) -> exit status`."""

from __future__ import annotations

import importlib
import sys

from dnn_bench.commands import COMMANDS as MORE_COMMANDS

# Only the module of the command that was asked for is imported.
COMMANDS = {
    "synthetic": ("dnn_bench.synthetic", "training throughput in Horovod's format; what dist.sh runs"),
    **MORE_COMMANDS,
}


def usage() -> str:
    lines = [f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: python -m dnn_bench COMMAND [--help | ...]", "", *lines])


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] not in COMMANDS:
        print(f"dnn_bench: there is no command {arguments[0]!r}\n{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[arguments[0]][0])
    status: int = module.main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
