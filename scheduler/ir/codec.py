"""The codec of every JSON file of ours: dataclasses to JSON and back, guided by their type hints.

    class Profile(JsonFile): ...            # a frozen dataclass
    profile.save("p.json"); Profile.load("p.json")

A file is an object with the dataclass's fields, ``format`` and, where the class is ``HASHED``, ``hash``.
Every error is an ``InputError`` that names the file, the field's path in it, what was expected and the value.
"""

from __future__ import annotations

import hashlib
import json
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from scheduler.ir.inputs import LARGEST, InputError, read_json

Self = TypeVar("Self", bound="JsonFile")

_SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_FORMS: dict[Any, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {}


class JsonFile:
    """A frozen dataclass that is saved as a JSON file."""

    __slots__ = ()
    FORMAT: ClassVar[int] = 1
    HASHED: ClassVar[bool] = False
    UNHASHED: ClassVar[frozenset[str]] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        content = {"format": self.FORMAT, **encode(self, type(self))}
        return {**content, "hash": _digest(content, self.UNHASHED)} if self.HASHED else content

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def from_dict(cls: type[Self], data: Any, where: str = "") -> Self:
        where = where or cls.__name__.lower()
        if not isinstance(data, dict):
            raise InputError(f"{where}: expected a JSON object, got {type(data).__name__}")
        if data.get("format") != cls.FORMAT:
            raise InputError(
                f"{where}: field 'format' is {data.get('format')!r}; this version reads format {cls.FORMAT}"
            )
        content = {name: value for name, value in data.items() if name != "hash" or not cls.HASHED}
        value: Self = decode({name: content[name] for name in content if name != "format"}, cls, where)
        if cls.HASHED and "hash" in data and data["hash"] != _digest(content, cls.UNHASHED):
            raise InputError(
                f"{where}: field 'hash' is {data['hash']!r}, the content's hash is"
                f" {_digest(content, cls.UNHASHED)!r}; the file was changed"
            )
        return value

    @classmethod
    def load(cls: type[Self], path: str | Path) -> Self:
        return cls.from_dict(read_json(path), str(path))


def register(kind: Any, to_json: Callable[[Any], Any], from_json: Callable[[Any], Any]) -> None:
    """Register functions that convert a type to and from JSON, instead of the default conversion."""
    _FORMS[kind] = to_json, from_json


def encode(value: Any, kind: Any) -> Any:
    """Convert ``value`` of type ``kind`` to JSON data."""
    if kind in _FORMS:
        return _FORMS[kind][0](value)
    if _is_record(kind):
        return {name: encode(getattr(value, name), hint) for name, (_, hint) in _fields(kind).items()}
    if value is not None and (inner := _without_none(kind)) is not kind:
        return encode(value, inner)
    if get_origin(kind) is tuple:
        return [encode(item, hint) for item, hint in zip(value, _items(kind, len(value)), strict=True)]
    return dict(value) if isinstance(value, Mapping) else value


def decode(data: Any, kind: Any, where: str) -> Any:
    """Convert JSON data to a value of type ``kind``; errors name the field by ``where``."""
    try:
        if kind in _FORMS:
            return _FORMS[kind][1](data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{where}: cannot be read ({type(error).__name__}: {error})") from None
    if _is_record(kind):
        return _decode_fields(data, kind, where)
    if (inner := _without_none(kind)) is not kind:
        return None if data is None else decode(data, inner, where)
    if get_origin(kind) is tuple:
        if not isinstance(data, (list, tuple)):
            raise InputError(f"{where}: must be a list, got {data!r}")
        hints = _items(kind, len(data))
        if len(hints) != len(data):
            raise InputError(f"{where}: must have {len(hints)} entries, got {len(data)}")
        return tuple(decode(item, hint, f"{where}[{n}]") for n, (item, hint) in enumerate(zip(data, hints)))
    if get_origin(kind) is Mapping and not isinstance(data, Mapping):
        raise InputError(f"{where}: must be an object, got {data!r}")
    if kind in _SCALARS or get_origin(kind) is Annotated:
        return _decode_scalar(data, kind, where)
    return data


def _decode_fields(data: Any, kind: Any, where: str) -> Any:
    known = _fields(kind)
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: must be an object, got {data!r}")
    required = [name for name, (f, _) in known.items() if f.default is f.default_factory is MISSING]
    missing = [name for name in required if name not in data]
    unknown = sorted(set(data) - set(known))
    if missing or unknown:
        raise InputError(f"{where}: missing fields {missing}, unknown fields {unknown}")
    separator = ": " if issubclass(kind, JsonFile) else "."
    values = {name: decode(data[name], known[name][1], f"{where}{separator}{name}") for name in data}
    try:
        return kind(**values)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def _decode_scalar(data: Any, kind: Any, where: str) -> Any:
    kind, most = get_args(kind) if get_origin(kind) is Annotated else (kind, LARGEST)
    whole = isinstance(data, float) and data.is_integer()
    fits = isinstance(data, (int, float) if kind is float else kind) or (kind is int and whole)
    if not fits or (isinstance(data, bool) and kind is not bool):
        raise InputError(f"{where}: must be {_SCALARS[kind]}, got {data!r}")
    if kind in (int, float) and not -most <= data <= most:
        raise InputError(f"{where}: must be at most {most:,}, got {data!r}")
    return int(data) if kind is int else data


def _is_record(kind: Any) -> bool:
    return bool(is_dataclass(kind))


@cache
def _fields(kind: Any) -> dict[str, tuple[Field[Any], Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: (field, hints[field.name]) for field in fields(kind)}


def _without_none(kind: Any) -> Any:
    """``X`` for ``X | None``; other types as they are."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(each for each in get_args(kind) if each is not type(None))
    return kind


def _items(kind: Any, count: int) -> tuple[Any, ...]:
    hints = get_args(kind)
    return (hints[0],) * count if hints[-1:] == (...,) else hints


def _digest(content: Mapping[str, Any], without: frozenset[str]) -> str:
    """Sixteen hex digits that differ whenever the content differs."""
    hashed = {name: value for name, value in content.items() if name not in without}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:16]


def check_numbers(record: Any, where: str, *fields: str) -> None:
    """Raise ``ValueError`` unless these fields are finite and at least 0; ``where`` names the record."""
    for field in fields:
        value = getattr(record, field)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value <= sys.float_info.max:
            raise ValueError(f"{where}: {field} must be a finite number of at least 0, got {value!r}")
