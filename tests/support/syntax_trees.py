"""Lets the threads of a process build syntax trees one after the other; importing this is enough.

CPython 3.11 counts the depth of all syntax trees under construction in one place. When a collection of
garbage lets another thread build one meanwhile, the first ends with "SystemError: AST constructor recursion
depth mismatch". Numpy (headers of files) and torch (scripting) build trees on every rank.
"""

from __future__ import annotations

import ast
import functools
import threading
from typing import Any

_one_tree = threading.Lock()
_parse = ast.parse


@functools.wraps(_parse)
def _parse_alone(*args: Any, **options: Any) -> Any:
    with _one_tree:
        return _parse(*args, **options)


ast.parse = _parse_alone
