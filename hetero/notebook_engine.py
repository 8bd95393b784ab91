"""Papermill engine whose executed notebooks come out byte for byte the same in every run."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell
from papermill.engines import NBClientEngine, NotebookExecutionManager

log = logging.getLogger("hetero.notebook")

# What differs between two runs inside printed text: addresses of objects, and the temporary
# file that a warning names as its origin.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,16}\b")
_CELL_FILE = re.compile(r"\S*ipykernel_\d+/\d+\.py")


class HeteroEngine(NBClientEngine):  # type: ignore[misc]
    """Engine ``hetero``: runs a notebook with nbclient, then drops what is not its content.

    Start and end times, durations, random cell ids, absolute paths, widget state and the version
    of the interpreter go; code, parameters, outputs and tags stay. Figures that were saved stand as
    links below their cells. Headings are logged to ``hetero.notebook`` as they are reached.

    Examples
    --------
    >>> from papermill.engines import papermill_engines
    >>> papermill_engines.get_engine("hetero").__name__
    'HeteroEngine'
    """

    @classmethod
    def execute_notebook(cls, nb: NotebookNode, kernel_name: str, **options: Any) -> NotebookNode:
        """Run ``nb`` and return it without anything that differs between two runs."""
        executed: NotebookNode = super().execute_notebook(nb, kernel_name, **options)
        strip(executed)
        return executed

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: NotebookExecutionManager, kernel_name: str, **options: Any
    ) -> None:
        """Run every cell; streams are merged, since their chunks depend on timing."""
        cell_start = nb_man.cell_start

        def announce(cell: NotebookNode, cell_index: int | None = None, **more: Any) -> None:
            first = cell.source.lstrip().split("\n", 1)[0]
            if cell.cell_type == "markdown" and first.startswith("#"):
                log.info("%s", first.lstrip("# "))
            cell_start(cell, cell_index, **more)

        nb_man.cell_start = announce
        options = {"coalesce_streams": True, "record_timing": False, **options}
        # Else the kernel warns of plain local TCP as it starts, and of the interrupt as it ends.
        options.setdefault("extra_arguments", ["--log-level=CRITICAL"])
        super().execute_managed_notebook(nb_man, kernel_name, **options)


def strip(nb: NotebookNode) -> None:
    """Drop in place everything from an executed notebook that two equal runs do not share."""
    papermill = nb.metadata.pop("papermill", {})
    if papermill.get("parameters"):
        nb.metadata["papermill"] = {"parameters": papermill["parameters"]}
    nb.metadata.pop("widgets", None)
    nb.metadata.get("language_info", {}).pop("version", None)
    nb.cells = [shown for cell in nb.cells for shown in (cell, *_figures(cell))]
    for position, cell in enumerate(nb.cells):
        # Papermill gives the cell it injects a random id, and nbformat each cell without one.
        digest = hashlib.sha256(cell.source.encode()).hexdigest()
        cell["id"] = f"{position:02d}-{digest[:8]}"
        for key in ("papermill", "execution", "ExecuteTime"):
            cell.metadata.pop(key, None)
        for output in cell.get("outputs", []):
            _strip_output(output)


def _figures(cell: NotebookNode) -> Iterator[NotebookNode]:
    """Take the links to saved figures out of a cell, into a cell of prose that follows it.

    Code hosts show a relative link to a picture in prose, but not in an output.
    """
    outputs = cell.get("outputs", [])
    links = [one for one in outputs if "figure" in one.get("metadata", {}).get("hetero", {})]
    if links:
        cell["outputs"] = [one for one in outputs if one not in links]
        text = "\n\n".join(one["data"]["text/markdown"] for one in links)
        yield new_markdown_cell(text)  # type: ignore[no-untyped-call]


def _strip_output(output: NotebookNode) -> None:
    if "text" in output:
        output["text"] = _same_text(output["text"])
    if "traceback" in output:
        output["traceback"] = [_same_text(line) for line in output["traceback"]]
    data = output.get("data", {})
    data.pop("application/vnd.jupyter.widget-view+json", None)
    if "text/html" in data:
        data.pop("text/plain", None)  # the same table once more
    for kind in ("text/plain", "text/html", "text/markdown"):
        if kind in data:
            data[kind] = _same_text(data[kind])


def _same_text(text: str) -> str:
    return _ADDRESS.sub("", _CELL_FILE.sub("<cell>", text))
