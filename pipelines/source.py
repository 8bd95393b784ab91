"""Notebooks as files: their cells, and a fingerprint of their code, which prose leaves as it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hetero import paths
from hetero.errors import DataError, ParameterError


def notebooks() -> list[str]:
    """Names of the notebooks of this checkout, in reading order: ``01_workloads``, ..."""
    return sorted(path.stem for path in paths.root().glob("notebooks/[0-9][0-9]_*.ipynb"))


def section(notebook: str) -> str:
    """Section of params.yaml, and stage of dvc.yaml, of a notebook: its name without number.

    Examples
    --------
    >>> section("01_workloads")
    'workloads'
    """
    return notebook.split("_", 1)[1]


def notebook_of(stage: str) -> str:
    """Name of the notebook that a stage runs."""
    found = [name for name in notebooks() if section(name) == stage]
    if len(found) != 1:
        known = ", ".join(map(section, notebooks())) or "none"
        raise ParameterError(
            f"No single notebook belongs to stage '{stage}'.",
            resolve=f"use one of the stages there are: {known}.",
        )
    return found[0]


def notebook_path(notebook: str) -> Path:
    """File of a notebook in this checkout."""
    return paths.root() / "notebooks" / f"{notebook}.ipynb"


def cells(path: Path) -> list[dict[str, object]]:
    """Cells of a notebook file as it stands on disk.

    Raises
    ------
    DataError
        If the file cannot be read as a notebook.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["cells"]
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise TypeError("its cells are no list of cells")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"The notebook cannot be read ({type(error).__name__}: {error}).",
            path=path,
            resolve="restore the file, or save it again from JupyterLab.",
        ) from error
    return found


def text(cell: dict[str, object]) -> str:
    """Source of a cell as one string; files hold it as a string or as a list of lines."""
    source = cell.get("source", "")
    if isinstance(source, str):
        return source
    return "".join(map(str, source)) if isinstance(source, list) else ""


def tags(cell: dict[str, object]) -> list[str]:
    """Tags of a cell."""
    metadata = cell.get("metadata")
    found = metadata.get("tags") if isinstance(metadata, dict) else None
    return [tag for tag in found if isinstance(tag, str)] if isinstance(found, list) else []


def code(path: Path) -> str:
    """Code of a notebook and nothing else: the text that its results depend on.

    Cells are parted by ``# %%`` lines that carry the tags, because the tag ``parameters`` decides
    where values are injected. Ids, counts, outputs, metadata and prose are left out.
    """
    return "\n".join(
        " ".join(["# %%", *tags(cell)]) + f"\n{body}\n"
        for cell in cells(path)
        if cell.get("cell_type") == "code" and (body := text(cell).strip())
    )


def fingerprint(path: Path) -> str:
    """SHA-256 of the code of a notebook, in hexadecimal digits."""
    return hashlib.sha256(code(path).encode()).hexdigest()


def before_save(model: dict[str, Any], path: str, **_: object) -> None:
    """Hook of JupyterLab (``make lab``): these notebooks are kept as in git, without outputs."""
    if model["type"] == "notebook" and Path(path).match("notebooks/[0-9][0-9]_*.ipynb"):
        for cell in model["content"]["cells"]:
            cell["metadata"] = {k: v for k, v in cell["metadata"].items() if k == "tags"}
            if cell["cell_type"] == "code":
                cell.update(execution_count=None, outputs=[])
        model["content"]["metadata"] = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
