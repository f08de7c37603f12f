"""Exit statuses of commands: 2 after a wrong argument, 130 after Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps

Main = Callable[[list[str]], int]


def one_line_errors(*errors: type[Exception]) -> Callable[[Main], Main]:
    """Decorate a command's ``main``: print these errors in one line and return 2; return 130 on Ctrl-C."""

    def decorate(main: Main) -> Main:
        @wraps(main)
        def wrapped(arguments: list[str]) -> int:
            try:
                return main(arguments)
            except errors as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                return 130

        return wrapped

    return decorate
