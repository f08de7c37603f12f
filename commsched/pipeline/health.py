"""Whether a pipeline can go on: after a failure its ranks no longer agree on where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from commsched.errors import CommError


class Health:
    """``endings`` are called at the first failure."""

    def __init__(self, *endings: Callable[[], None]) -> None:
        self._endings, self._failure = endings, ""

    @property
    def failed(self) -> bool:
        return bool(self._failure)

    def check(self) -> None:
        """``CommError`` after a failure."""
        if self._failure:
            raise CommError(f"this pipeline has failed before and cannot go on ({self._failure})")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A failure within ``with`` ends the pipeline."""
        self.check()
        try:
            yield
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            for end in self._endings:
                end()
            raise
