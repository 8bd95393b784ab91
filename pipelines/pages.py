"""Executed notebooks as pages that a browser opens: ``results/pages/<source>/<notebook>.html``.

Code hosts show the executed notebook itself; a browser that opens report.html from a disk would
show its JSON. Pages are as light as the notebooks: figures are the files beside them, and there is
no script and no network.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import mistune
from jinja2 import Environment
from mistune.renderers.html import HTMLRenderer

from pipelines import schema, source
from pipelines.studies import answers
from pipelines.studies.results import MANIFEST

#: Folder of the pages, beside the results of each source of traces.
FOLDER = "pages"

_TERMINAL = re.compile(r"\x1b\[[0-9;]*m")  # colours of a terminal, in warnings and errors


class _Prose(HTMLRenderer):
    """Markdown whose relative links start at the folder of the results."""

    def __init__(self, folder: str) -> None:
        super().__init__(escape=False)
        self._folder = folder

    def _here(self, url: str) -> str:
        parts = urlsplit(url)
        return url if parts.scheme or parts.netloc or not parts.path else f"{self._folder}/{url}"

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return super().image(text, self._here(url), title)

    def link(self, text: str, url: str, title: str | None = None) -> str:
        return super().link(text, self._here(url), title)


def write(folder: Path, environment: Environment) -> None:
    """Write the page of every executed notebook below ``folder``; pages of earlier runs go.

    Raises
    ------
    DataError
        If an executed notebook cannot be read.
    """
    template = environment.get_template("notebook.html")
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    for traces in schema.SOURCES:
        for notebook in source.notebooks():
            executed = folder / traces / notebook / f"{notebook}.ipynb"
            if executed.is_file():
                text = template.render(
                    traces=traces,
                    notebook=notebook,
                    answer=answers.answer(notebook, folder),
                    parts=list(_parts(executed, f"../../{traces}/{quote(notebook)}")),
                )
                page = folder / page_of(traces, notebook)
                page.parent.mkdir(parents=True, exist_ok=True)
                page.write_text(text, encoding="utf-8")


def page_of(traces: str, notebook: str) -> str:
    """Page of a notebook's run, relative to the results folder."""
    return f"{FOLDER}/{traces}/{notebook}.html"


def _parts(executed: Path, folder: str) -> Iterator[tuple[str, str]]:
    """Kind and content of each block: ``prose`` and ``html`` are markup, the others are not."""
    prose = mistune.create_markdown(renderer=_Prose(folder), plugins=["table", "strikethrough"])
    manifest = executed.parent / MANIFEST
    left = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    captions = {row["file"]: row["caption"] for row in left.get("figures", ())}
    for cell in source.cells(executed):
        body = source.text(cell).strip()
        if cell.get("cell_type") == "markdown":
            yield "prose", str(prose(body))
        elif cell.get("cell_type") == "code" and body:
            yield "code", body
        outputs = cell.get("outputs")
        for output in outputs if isinstance(outputs, list) else []:
            yield from _shown(output, prose)
            figure = output.get("metadata", {}).get("hetero", {}).get("figure")
            if figure in captions:
                yield "caption", captions[figure]


def _shown(output: dict[str, Any], prose: mistune.Markdown) -> Iterator[tuple[str, str]]:
    data = {kind: _text(value) for kind, value in output.get("data", {}).items()}
    if "text/html" in data:
        yield "html", data["text/html"]
    elif "text/markdown" in data:
        yield "prose", str(prose(data["text/markdown"]))
    elif "image/png" in data:
        yield "png", data["image/png"].strip()
    elif "text/plain" in data:
        yield "text", data["text/plain"]
    elif "text" in output:
        yield "text", _TERMINAL.sub("", _text(output["text"]))


def _text(value: object) -> str:
    return "".join(map(str, value)) if isinstance(value, list) else str(value)
