"""Checks of command-line options that several commands share."""

from __future__ import annotations

import difflib
import json
from typing import Any, get_args

from hetero.errors import ParameterError


def choice(option: str, value: str, allowed: Any) -> Any:
    """Return ``value`` if it is one of a ``Literal``'s values, or of a collection of names.

    Raises
    ------
    ParameterError
        Naming the option, what was received and the values it may take.
    """
    values = [str(v) for v in get_args(allowed) or allowed]
    if value not in values:
        near = difflib.get_close_matches(value, values, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ParameterError(
            f"{option} does not know '{value}'.", resolve=f"{hint}use one of {', '.join(values)}."
        )
    return value


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers of an option that takes several, by commas.

    Raises
    ------
    ParameterError
        Naming the option and what was received.

    Examples
    --------
    >>> whole_numbers("--batch", "1,2,4")
    (1, 2, 4)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(
            f"{option} cannot read '{text}'.", resolve="write whole numbers, such as 1,2,4."
        ) from None


def to_json(value: object) -> str:
    """JSON text with a line end, as every ``--json`` option prints it."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
