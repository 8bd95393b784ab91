"""Step models as JSON files."""

from __future__ import annotations

import textwrap
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json as to_json_bytes

from hetero.errors import DataError
from hetero.files import writing
from hetero.latency.step import Bends, Mixed, Piece, StepModel

FORMAT: Literal["hetero step model 1"] = "hetero step model 1"


class _Text(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _MixedText(_Text):
    per_cached_token_s: list[float]
    level_s: list[float]
    per_token_s: list[float]


class _BendsText(_Text):
    context_tokens: list[float]
    extra_s: list[list[float]]


class _PieceText(_Text):
    knots_tokens: list[float]
    knots_s: list[float]
    per_cached_token_s: list[float]
    per_pair_s: float = 0.0
    mixed: _MixedText | None = None
    decode_level_s: list[float] | None = None
    bends: _BendsText | None = None


class _StepModelText(_Text):
    format: Literal["hetero step model 1"]
    source: str
    provenance: Literal["measured", "derived", "estimated", "assumed"]
    pieces: list[_PieceText]
    # JSON knows no infinity: null means that the model claims no limit.
    max_tokens: float | None = None
    max_decoding: float | None = None


def to_json(model: StepModel) -> str:
    """Text of a step model; every digit is kept, so that reading it back gives the same model.

    Examples
    --------
    >>> model = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> float(from_json(to_json(model)).seconds(512)) == float(model.seconds(512))
    True
    """
    head = {"format": FORMAT, "source": model.source, "provenance": model.provenance}
    return to_json_bytes(head | _plain(model), indent=1).decode() + "\n"


def _plain(value: Any) -> Any:
    """A value as JSON has it: arrays as lists, dataclasses as objects, infinity as null."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return None if isinstance(value, float) and np.isinf(value) else value


def from_json(text: str, path: Path | str = "step model") -> StepModel:
    """Step model of a JSON text; ``path`` names the file in errors.

    Raises
    ------
    DataError
        If the text is not a step model; the first offending field is named.
    """
    try:
        read = _StepModelText.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = textwrap.shorten(".".join(map(str, first["loc"])), 100) or "the text as a whole"
        raise DataError(
            f"{where}: {first['msg']}.",
            path=path,
            resolve=f'give a file with "format": "{FORMAT}", as hetero fit --output writes it.',
        ) from None
    return StepModel(
        tuple(_piece(piece) for piece in read.pieces),
        source=read.source,
        provenance=read.provenance,
        max_tokens=np.inf if read.max_tokens is None else read.max_tokens,
        max_decoding=np.inf if read.max_decoding is None else read.max_decoding,
    )


def _piece(text: _PieceText) -> Piece:
    mixed = None if text.mixed is None else Mixed(**_arrays(text.mixed))
    bends = None if text.bends is None else Bends(**_arrays(text.bends))
    return Piece(**_arrays(text) | {"mixed": mixed, "bends": bends})


def _arrays(text: _Text) -> dict[str, Any]:
    """Fields with lists as arrays; rows of unequal length as an empty one, which nothing takes."""

    def array(value: object) -> object:
        if not isinstance(value, list):
            return value
        ragged = len({len(row) for row in value if isinstance(row, list)}) > 1
        return np.zeros((0, 0)) if ragged else np.array(value)

    return {name: array(value) for name, value in text}


def load(path: Path | str) -> StepModel:
    """Step model of a file.

    Raises
    ------
    DataError
        If the file is missing or is not a step model.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot be read ({error.__class__.__name__}).",
            path=path,
            resolve="check the path, or write the file with hetero fit --output.",
        ) from None
    return from_json(text, path)


def save(model: StepModel, path: Path | str, *, force: bool = False) -> Path:
    """Write a step model; the file appears whole or not at all.

    Raises
    ------
    ParameterError
        If the file exists and ``force`` is not set, or its folder does not exist.
    """
    with writing(path, force=force) as part:
        part.write_text(to_json(model), encoding="utf-8")
    return Path(path)
