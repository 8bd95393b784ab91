"""Where things lie: in a checkout, or inside the installed wheel."""

from __future__ import annotations

import os
from pathlib import Path

from hetero.errors import HeteroError

_PACKAGE = Path(__file__).resolve().parent


def root() -> Path:
    """Folder of the checkout that this package runs from.

    Raises
    ------
    HeteroError
        If the package runs from a wheel: pipeline and notebooks live in the repository only.
    """
    if not is_checkout():
        raise HeteroError(
            "The pipeline and its notebooks are not part of the installed package.",
            resolve="clone the hetero repository and run this command inside it.",
        )
    return _PACKAGE.parent


def is_checkout() -> bool:
    """Whether this package runs from a checkout of the repository, not from a wheel."""
    return (_PACKAGE.parent / "dvc.yaml").is_file()


def data(*parts: str) -> Path:
    """Path of a file that hetero ships: specs, published claims, twins, derived measurements.

    Examples
    --------
    >>> data("specs", "gpus.csv").is_file()
    True
    """
    checkout = _PACKAGE.parent / "data"
    base = checkout if (checkout / "specs").is_dir() else _PACKAGE / "_data"
    return base.joinpath(*parts)


def results() -> Path:
    """Folder of tables, figures and executed notebooks of this checkout."""
    return root() / "results"


def raw() -> Path:
    """Folder of fetched raw data: ``data/raw`` of the checkout, else the user's cache folder."""
    checkout = _PACKAGE.parent / "data"
    if (checkout / "specs").is_dir():
        return checkout / "raw"
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "hetero"
