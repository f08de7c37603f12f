"""How a command ends when its user got something wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps

Main = Callable[[list[str]], int]


def tells(*errors: type[Exception]) -> Callable[[Main], Main]:
    """For a command's ``main``: these errors are told in one line and give status 2; Ctrl-C gives 130."""

    def decorate(main: Main) -> Main:
        @wraps(main)
        def told(arguments: list[str]) -> int:
            try:
                return main(arguments)
            except errors as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                return 130

        return told

    return decorate
