"""Step models as JSON files."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from hetero.errors import DataError
from hetero.files import writing
from hetero.latency.step import Bends, Mixed, Piece, StepModel

FORMAT: Literal["hetero step model 1"] = "hetero step model 1"


class _MixedText(BaseModel):
    model_config = ConfigDict(extra="forbid")

    per_cached_token_s: list[float]
    level_s: list[float]
    per_token_s: list[float]


class _BendsText(BaseModel):
    model_config = ConfigDict(extra="forbid")

    context_tokens: list[float]
    extra_s: list[list[float]]


class _PieceText(BaseModel):
    model_config = ConfigDict(extra="forbid")

    knots_tokens: list[float]
    knots_s: list[float]
    per_cached_token_s: list[float]
    per_pair_s: float = 0.0
    mixed: _MixedText | None = None
    decode_level_s: list[float] | None = None
    bends: _BendsText | None = None


class _StepModelText(BaseModel):
    model_config = ConfigDict(extra="forbid")

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
    text = _StepModelText(
        format=FORMAT,
        source=model.source,
        provenance=model.provenance,  # type: ignore[arg-type]  # pydantic checks it
        pieces=[
            _PieceText(
                knots_tokens=piece.knots_tokens.tolist(),
                knots_s=piece.knots_s.tolist(),
                per_cached_token_s=piece.per_cached_token_s.tolist(),
                per_pair_s=piece.per_pair_s,
                mixed=None
                if piece.mixed is None
                else _MixedText(
                    per_cached_token_s=piece.mixed.per_cached_token_s.tolist(),
                    level_s=piece.mixed.level_s.tolist(),
                    per_token_s=piece.mixed.per_token_s.tolist(),
                ),
                decode_level_s=None
                if piece.decode_level_s is None
                else piece.decode_level_s.tolist(),
                bends=None
                if piece.bends is None
                else _BendsText(
                    context_tokens=piece.bends.context_tokens.tolist(),
                    extra_s=piece.bends.extra_s.tolist(),
                ),
            )
            for piece in model.pieces
        ],
        max_tokens=None if np.isinf(model.max_tokens) else model.max_tokens,
        max_decoding=None if np.isinf(model.max_decoding) else model.max_decoding,
    )
    return text.model_dump_json(indent=1) + "\n"


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
        tuple(
            Piece(
                np.array(piece.knots_tokens),
                np.array(piece.knots_s),
                np.array(piece.per_cached_token_s),
                piece.per_pair_s,
                None
                if piece.mixed is None
                else Mixed(
                    np.array(piece.mixed.per_cached_token_s),
                    np.array(piece.mixed.level_s),
                    np.array(piece.mixed.per_token_s),
                ),
                None if piece.decode_level_s is None else np.array(piece.decode_level_s),
                None
                if piece.bends is None
                else Bends(np.array(piece.bends.context_tokens), _rows(piece.bends.extra_s)),
            )
            for piece in read.pieces
        ),
        source=read.source,
        provenance=read.provenance,
        max_tokens=np.inf if read.max_tokens is None else read.max_tokens,
        max_decoding=np.inf if read.max_decoding is None else read.max_decoding,
    )


def _rows(lists: list[list[float]]) -> NDArray[np.float64]:
    """A matrix of lists; empty where they differ in length, which no piece takes."""
    same = len({len(row) for row in lists}) == 1
    return np.array(lists, dtype=np.float64) if same else np.zeros((0, 0))


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
