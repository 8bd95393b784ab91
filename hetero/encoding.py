"""Frozen values as JSON and back: dataclasses of a known set, arrays, mappings, numbers.

What is written is enough to build the same value again, every digit kept. A value is a JSON number,
string, true, false or null where it is one, a list for a sequence, and else an object of one key:

``{"number": "inf"}``
    What JSON has no number for: ``inf``, ``-inf``, ``nan``.
``{"array": [...], "dtype": "float64"}``
    An array of numbers or truth values, row by row.
``{"mapping": [[key, value], ...]}``
    A mapping, in its order.
``{"Replica": {...}}``
    A dataclass with the fields that it is made from.
``{"shared": 3}``
    The entry of that number in the list of shared values: large ones that many others refer to.

Reading builds nothing but the classes it is given, checks every field against its annotation, and
leaves the rest to the classes' own checks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np

from hetero.errors import HeteroError

Json: TypeAlias = Any
_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DTYPES = ("float64", "int64", "bool")
_DEEPEST = 40


class EncodingError(ValueError):
    """Text that is no value of the known classes; says where and why."""


class Encoder:
    """Writes values; what is shared is kept in ``shared``, in the order of the references.

    Parameters
    ----------
    known
        Dataclasses that values are made of.
    shared
        Those of them that are written once, however many others refer to them.
    """

    def __init__(self, known: Collection[type], shared: Collection[type] = ()) -> None:
        self.known, self._apart = frozenset(known), frozenset(shared)
        self.shared: list[Json] = []
        self._texts: dict[str, int] = {}
        self._seen: dict[int, tuple[object, int]] = {}  # the object is kept, so that its id is

    def encode(self, value: object) -> Json:
        """A value as JSON values.

        Raises
        ------
        TypeError
            If the value, or a part of it, is of no kind that can be written.
        """
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int | np.integer):
            return int(value)
        if isinstance(value, float | np.floating):
            return float(value) if math.isfinite(value) else {"number": str(float(value))}
        if isinstance(value, np.ndarray):
            flat = [self.encode(one) for one in value.ravel().tolist()]
            return {"array": flat, "dtype": str(value.dtype), "shape": list(value.shape)}
        if isinstance(value, Mapping):
            return {"mapping": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        if isinstance(value, Sequence):
            return [self.encode(one) for one in value]
        if type(value) in self._apart:
            return {"shared": self._number(value)}
        if type(value) in self.known:
            return self._fields(value)
        raise TypeError(f"{type(value).__name__} cannot be written as a value")

    def _fields(self, value: Any) -> Json:
        made_from = [one.name for one in fields(value) if one.init and one.compare]
        return {type(value).__name__: {n: self.encode(getattr(value, n)) for n in made_from}}

    def _number(self, value: object) -> int:
        if id(value) not in self._seen:
            text = json.dumps(made := self._fields(value))
            if text not in self._texts:
                self._texts[text] = len(self.shared)
                self.shared.append(made)
            self._seen[id(value)] = (value, self._texts[text])
        return self._seen[id(value)][1]


class Decoder:
    """Reads what an :class:`Encoder` of the same classes wrote."""

    def __init__(self, known: Iterable[type], shared: Sequence[Json] = ()) -> None:
        self._known = {one.__name__: one for one in known}
        self._shared, self._made = shared, dict[int, Any]()

    def decode(self, value: Json, where: str = "the value", depth: int = 0) -> Any:
        """The value of JSON values.

        Raises
        ------
        EncodingError
            If it is none; names the place.
        """
        if depth > _DEEPEST:
            raise EncodingError(f"{where}: nested too deeply")
        if isinstance(value, str) and not value.isprintable():
            raise EncodingError(f"{where}: text of several lines, or with control characters")
        if value is None or isinstance(value, bool | str | int | float):
            return value
        if isinstance(value, list):
            return tuple(
                self.decode(one, f"{where}[{k}]", depth + 1) for k, one in enumerate(value)
            )
        kind, held = next(iter(value.items()), ("", None))
        if kind == "array":
            return self._array(value, where)
        if len(value) == 1 and kind == "number" and held in tuple(_NUMBERS):
            return _NUMBERS[held]
        if len(value) == 1 and kind == "shared":
            return self._of_shared(held, where, depth)
        if len(value) == 1 and kind == "mapping" and isinstance(held, list):
            return self._mapping(held, where, depth)
        if len(value) == 1 and kind in self._known and isinstance(held, dict):
            return self._object(self._known[kind], held, f"{where}.{kind}", depth)
        raise EncodingError(f"{where}: no value of a known kind")

    def _array(self, value: dict[str, Json], where: str) -> np.ndarray[Any, Any]:
        flat, dtype, shape = value["array"], value.get("dtype"), value.get("shape")
        try:
            if dtype not in _DTYPES:
                raise ValueError(f"its type is {dtype!r}")
            numbers = [self.decode(one, where) for one in flat]
            if not all(isinstance(one, bool | int | float) for one in numbers):
                raise ValueError("it holds what is no number")
            return np.array(numbers, dtype=dtype).reshape([int(n) for n in shape or ()])
        except (TypeError, ValueError, OverflowError) as error:
            raise EncodingError(f"{where}: no array ({error})") from None

    def _of_shared(self, number: Json, where: str, depth: int) -> Any:
        if not isinstance(number, int) or not 0 <= number < len(self._shared):
            raise EncodingError(f"{where}: there is no shared value {number!r}")
        if number not in self._made:
            entry, place = self._shared[number], f"shared[{number}]"
            self._made[number] = self.decode(entry, place, depth + 1)
        return self._made[number]

    def _mapping(self, held: list[Json], where: str, depth: int) -> dict[Any, Any]:
        try:
            pairs = [(key, value) for key, value in held]
            return {
                self.decode(key, where, depth + 1): self.decode(value, f"{where}[{key}]", depth + 1)
                for key, value in pairs
            }
        except (TypeError, ValueError) as error:
            if isinstance(error, EncodingError):
                raise
            raise EncodingError(f"{where}: no mapping") from None

    def _object(self, kind: type, held: dict[str, Json], where: str, depth: int) -> Any:
        hints = _hints(kind)
        if unknown := held.keys() - hints.keys():
            raise EncodingError(f"{where}: has no field '{min(unknown)}'")
        values = {}
        for name, one in held.items():
            found = self.decode(one, f"{where}.{name}", depth + 1)
            if not fits(found, hints[name]):
                raise EncodingError(f"{where}.{name}: not of the kind that belongs there")
            values[name] = found
        try:
            return kind(**values)
        except HeteroError as error:
            raise EncodingError(f"{where}: {error.what}") from None
        except (TypeError, ValueError, IndexError, OverflowError, ArithmeticError) as error:
            raise EncodingError(f"{where}: {error}") from None


@lru_cache(maxsize=256)
def _hints(kind: type) -> dict[str, Any]:
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is no dataclass")
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind) if one.init and one.compare}


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of the kind that an annotation names, as far as values can be written.

    Examples
    --------
    >>> fits((1, 2), tuple[int, ...]), fits(1, float), fits("1", float | None)
    (True, True, False)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return True
    if isinstance(value, np.ndarray) and str(getattr(hint, "__module__", "")).startswith("numpy"):
        return True  # one of the protocols of ArrayLike
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if hint is None or hint is NoneType:
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is tuple:
        return isinstance(value, tuple) and _each(value, inner)
    if origin is np.ndarray:
        return isinstance(value, np.ndarray)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, dict) and all(
            fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items()
        )
    if isinstance(origin, type) and issubclass(tuple, origin):  # sequences and what they are
        return isinstance(value, tuple) and _each(value, (*inner, ...))
    return isinstance(hint, type) and not _is_protocol(hint) and isinstance(value, hint)


def _is_protocol(hint: type) -> bool:
    return bool(getattr(hint, "_is_protocol", False))


def _each(values: tuple[object, ...], hints: tuple[Any, ...]) -> bool:
    if len(hints) == 2 and hints[1] is ...:
        return all(fits(one, hints[0]) for one in values)
    return len(values) == len(hints) and all(map(fits, values, hints))


def finite(value: Any) -> Any:
    """A value, or a record, as JSON has it: what is not a number, or infinite, is None.

    Examples
    --------
    >>> finite({"a": (1.0, math.inf)})
    {'a': [1.0, None]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: finite(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
