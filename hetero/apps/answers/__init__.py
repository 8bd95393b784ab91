"""What commands do, as functions that take the same words in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Answer:
    """A plan of one method, with what is said of it.

    Attributes
    ----------
    plan
        As the method has it.
    record
        As JSON values.
    texts
        All there is to read, in order.
    """

    plan: Any
    record: dict[str, Any]
    texts: tuple[object, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.texts))
