"""Objects that hold a wrapped optimizer and look like one, as Lightning and Fabric make them.

``type("LightningSGD", (LightningOptimizer, type(optimizer)), {})`` inherits the wrapped optimizer's methods,
for ``isinstance`` alone. Called on such an object, they would not find the optimizer's driver. The object's
``__getattr__`` returns the attributes of the optimizer it holds, so these methods are looked up there.
"""

from __future__ import annotations

from typing import Any


class _Forwarded:
    """An attribute that is looked up as if the class did not have it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else instance.__getattr__(self._name)


def forward_to_wrapped(cls: type, methods: type) -> None:
    """Forward the attributes that ``cls`` inherits from ``methods``, if it imitates an optimizer."""
    before = cls.__mro__[: cls.__mro__.index(methods)]
    if not any("__getattr__" in vars(base) for base in before):
        return
    for name in vars(methods):
        if not name.startswith("__") and not any(name in vars(base) for base in before):
            setattr(cls, name, _Forwarded(name))
