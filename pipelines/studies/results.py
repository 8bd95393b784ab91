"""What a notebook leaves behind: figures, tables and measured claims, each with its provenance."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd

from hetero import paths
from hetero.display import PLAIN, Column
from hetero.errors import require
from pipelines import figure_checks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANIFEST = "manifest.json"
Rows: TypeAlias = list[dict[str, Any]]
"""Arguments of :meth:`ResultFolder.claim`, a claim each."""
DIGITS = 10  # significant digits kept in tables: more differ between machines


@dataclass(slots=True)
class ResultFolder:
    """Results of one notebook, in the one style of figures; without ``output`` they are only shown.

    Parameters
    ----------
    notebook
        Name of the notebook, such as ``"01_workloads"``.
    output
        Folder to write to; the pipeline injects it, Run All in JupyterLab leaves it empty.
    profile
        ``interactive``, ``smoke``, ``default`` or ``paper``: printed under each figure.
    source
        ``twin`` or ``real`` traces: printed under each figure.
    seeds
        Every random seed used: printed under each figure.
    rests_on
        What the figures rest on where that is no trace, such as ``"synthetic workload"``.
    tolerance
        Share of its largest number by which a table may differ on another processor, where a
        search rests on what no setting pins; the manifest says it, `hetero verify` reads it.

    Examples
    --------
    >>> out = ResultFolder("01_workloads", output="", profile="interactive", source="twin")
    >>> out.claim("helix-21-requests", 16657, figure="filtered")
    >>> out.provenance
    'twin traces, interactive profile'
    """

    notebook: str
    output: str
    profile: str
    source: str
    seeds: Sequence[int] = ()
    rests_on: str = ""
    tolerance: float = 0.0
    _figures: list[dict[str, object]] = field(default_factory=list)
    _tables: list[dict[str, object]] = field(default_factory=list)
    _claims: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        from IPython.core.getipython import get_ipython

        from hetero.plots import figures

        shell = get_ipython()
        for name, value in (shell.user_ns if shell else {}).items():
            require(
                not (name[0] != "_" and isinstance(value, str) and re.fullmatch(r"\[.*\]", value)),
                f"Parameter '{name}' is the text {value!r} and no list.",
                resolve=f"write `papermill ... -y '{{{name}: {value}}}'`: its -p gives texts.",
            )
        figures.use_style()
        self._in_lab()

    def _in_lab(self) -> None:
        """In JupyterLab: three digits, sharp pictures, and what is set other than in the report."""
        from IPython.core.getipython import get_ipython
        from IPython.display import HTML, display

        if self.output or not (shell := get_ipython()):
            return
        pd.set_option("display.float_format", Column("", digits=3).show)
        shell.run_line_magic("config", "InlineBackend.figure_formats = ['retina']")
        # By name: what a stage rests on would else be all parameters.
        report = resolve_name("pipelines.schema:load")(profile="default").sections
        pairs = [
            (k, shell.user_ns.get(k, one), one) for k, one in report.get(self.notebook[3:], ())
        ]
        sizes = [(k, *(len(x) if isinstance(x, list) else x for x in both)) for k, *both in pairs]
        if small := [f"{k} {here} (report: {there})" for k, here, there in sizes if here != there]:
            text = "<b>Small run</b>: {}. It may find other than the report."
            display(HTML(text.format(", ".join(small))))  # type: ignore[no-untyped-call]

    @property
    def provenance(self) -> str:
        """One line that says which traces, profile and seeds a result rests on."""
        return self._provenance(list(self.seeds))

    def _provenance(self, seeds: list[int]) -> str:
        parts = [self.rests_on or f"{self.source} traces", f"{self.profile} profile"]
        if seeds:
            run = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
            text = f"{seeds[0]}-{seeds[-1]}" if run else ", ".join(map(str, seeds))
            parts.append(f"seed{'s' if len(seeds) > 1 else ''} {text}")
        return ", ".join(parts)

    @property
    def folder(self) -> Path | None:
        """Folder that results go to, created when first needed; None when nothing is written."""
        if not self.output:
            return None
        folder = paths.root() / self.output  # an absolute path stays what it is
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def figure(
        self,
        figure: Figure,
        name: str,
        *,
        shows: Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        caption: str,
    ) -> None:
        """Save a figure as SVG with its provenance printed below, show it, and close it.

        In the smoke profile it has to be readable, see :mod:`pipelines.figure_checks`. Once saved,
        it is displayed as a link to its file: an executed notebook stays small.

        Parameters
        ----------
        shows
            Rows of ``data/published/figures.csv`` it regenerates, as ``"helix/Fig. 5"``.
        seeds
            Those that it rests on, where they are not all of the notebook.
        caption
            One sentence that says what is to be seen and which reading was taken.
        """
        from IPython.core.getipython import get_ipython
        from IPython.display import HTML, display

        from hetero.plots import figures

        figures.stamp(figure, self._provenance(list(self.seeds if seeds is None else seeds)))
        if self.profile == "smoke":  # other profiles take long, and draw what a user asks for
            figure_checks.hold(figure, f"{self.notebook}/{name}")
        if self.folder is not None:
            # Results are kept in git, where text packs well and pictures do not.
            figures.save(figure, self.folder / name, png=False)
            figure._ipython_display_ = partial(_show_link, f"{name}.svg")  # type: ignore[attr-defined]
        self._figures.append({"file": f"{name}.svg", "shows": list(shows), "caption": caption})
        self._write()
        if get_ipython():
            display(figure)  # type: ignore[no-untyped-call]
            if self.folder is None:
                text = f'<small class="{PLAIN}">{html.escape(caption)}</small>'
                display(HTML(text))  # type: ignore[no-untyped-call]
        figures.close(figure)

    def table(
        self, frame: pd.DataFrame, name: str, *, shows: Sequence[str] = (), caption: str
    ) -> pd.DataFrame:
        """Save a table as CSV (units in the headings, 10 significant digits), and return it."""
        if self.folder is not None:
            frame.to_csv(
                self.folder / f"{name}.csv",
                index=False,
                float_format=f"%.{DIGITS}g",
                lineterminator="\n",
            )
        self._tables.append({"file": f"{name}.csv", "shows": list(shows), "caption": caption})
        self._write()
        return frame

    def claim(
        self,
        claim: str,
        value: float | str,
        *,
        figure: str,
        note: str = "",
        interval: tuple[float, float] | None = None,
    ) -> None:
        """Record what was measured for one row of ``data/published/claims``.

        Parameters
        ----------
        claim
            Id of the row, such as ``"helix-21-requests"``.
        value
            The measured number, or an order such as ``"2>4>1>8"``.
        figure
            Name of the figure or table of this notebook that shows it.
        note
            The reading taken, or the assumption that decides the outcome.
        interval
            Low and high end over seeds, where there are several.
        """
        require(
            all(row["id"] != claim for row in self._claims),
            f"Claim '{claim}' was recorded twice by notebook {self.notebook}.",
            resolve="record each claim once, with the reading it takes in its note.",
        )
        number = float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        row: dict[str, object] = {"id": claim, "value": number, "figure": figure}
        row |= {"note": note} if note else {}
        if interval is not None:
            row["interval"] = [float(f"{end:.{DIGITS}g}") for end in interval]
        self._claims.append(row)
        self._write()

    def _write(self) -> None:
        if self.folder is None:
            return
        manifest: dict[str, object] = {
            "notebook": self.notebook,
            "source": self.source,
            "profile": self.profile,
            "seeds": list(self.seeds),
            "figures": self._figures,
            "tables": self._tables,
            "claims": self._claims,
        }
        manifest |= {"tolerance": self.tolerance} if self.tolerance else {}
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        (self.folder / MANIFEST).write_text(text, encoding="utf-8")


def _show_link(file: str) -> None:
    from IPython.display import display

    name = file.removesuffix(".svg")
    shown = {"text/markdown": f"![{name}]({file})", "text/plain": f"<figure {file}>"}
    display(shown, raw=True, metadata={"hetero": {"figure": file}})  # type: ignore[no-untyped-call]


def claim_rows(paper: str, figure: str, note: str, values: Mapping[str, float | str]) -> Rows:
    """Arguments of :meth:`ResultFolder.claim` for claims that share a figure and a note.

    Examples
    --------
    >>> claim_rows("helix", "filtered", "", {"21-requests": 16657})
    [{'claim': 'helix-21-requests', 'value': 16657, 'figure': 'filtered', 'note': ''}]
    """
    return [
        {"claim": f"{paper}-{number}", "value": value, "figure": figure, "note": note}
        for number, value in values.items()
    ]
