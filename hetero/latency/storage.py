"""Step models as JSON files, written as :mod:`hetero.encoding` writes any value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from hetero import files
from hetero.encoding import Decoder, Encoder, EncodingError
from hetero.errors import DataError
from hetero.latency.step import Bends, Mixed, Piece, StepModel

FORMAT: Final = "hetero step model 2"
_KNOWN = (StepModel, Piece, Mixed, Bends)
_PROVENANCES = ("measured", "derived", "estimated", "assumed")
_RESOLVE = f'give a file with "format": "{FORMAT}", as hetero fit --output writes it.'


def to_json(model: StepModel) -> str:
    """Text of a step model; every digit is kept, so that reading it back gives the same model.

    Examples
    --------
    >>> model = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> float(from_json(to_json(model)).seconds(512)) == float(model.seconds(512))
    True
    """
    return json.dumps({"format": FORMAT, "model": Encoder(_KNOWN).encode(model)}, indent=1) + "\n"


def from_json(text: str, path: Path | str = "step model") -> StepModel:
    """Step model of a JSON text; ``path`` names the file in errors.

    Raises
    ------
    DataError
        If the text is not a step model; the first offending field is named.
    """
    try:
        values = json.loads(text)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise EncodingError("format: this is no step model, or one of another version")
        model = Decoder(_KNOWN).decode(values.get("model"), "model")
        if not isinstance(model, StepModel):
            raise EncodingError("model: no StepModel")
        if model.provenance not in _PROVENANCES:
            raise EncodingError(f"model.provenance: none of {', '.join(_PROVENANCES)}")
    except EncodingError as error:
        raise DataError(f"{error}.", path=path, resolve=_RESOLVE) from None
    except (ValueError, RecursionError):
        raise DataError("the text as a whole: no JSON.", path=path, resolve=_RESOLVE) from None
    return model


def load(path: Path | str) -> StepModel:
    """Step model of a file.

    Raises
    ------
    DataError
        If the file is missing or is not a step model.
    """
    try:
        text = files.text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot be read ({getattr(error, 'strerror', '') or error.__class__.__name__}).",
            path=path,
            resolve="check the path, or write the file with hetero fit --output.",
        ) from None
    return from_json(text, path)


def save(model: StepModel, path: Path | str, *, force: bool = False) -> Path:
    """Write a step model; the file appears whole or not at all."""
    with files.writing(path, force=force) as part:
        part.write_text(to_json(model), encoding="utf-8")
    return Path(path)
