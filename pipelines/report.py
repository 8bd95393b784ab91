"""Write results/report.html: one section per paper, then figures and tables of every notebook.

With it go the pages of the executed notebooks (``pipelines.pages``) and the values that DVC's
commands compare (``pipelines.metrics``).

A paper's section has its published values beside ours and, item by item, what regenerates its
figures and tables; a notebook's section has those figures and tables with their provenance. The
page is one file beside the results it shows: no network, links relative to ``results/``, and a few
lines of script that show a section at a time and filter claims; without them all is shown. What is
to be said of a claim in full stands in ``pages/claims.html``. Both are made from the manifests and
the tables beside them; ``python -m pipelines.report`` writes them.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.filters import FILTERS

from hetero import paths
from hetero.display import Column, Table
from hetero.errors import HeteroError
from hetero.files import parse_yaml, writing
from pipelines import dependencies, metrics, pages, schema, source
from pipelines.studies import claims
from pipelines.studies.answers import answer, code_of, places
from pipelines.studies.coverage import DRAWINGS, coverage
from pipelines.studies.published import PAPERS, manifests
from pipelines.studies.results import MANIFEST
from pipelines.sweep import spec

_ROWS = 7  # of a table of the first screen
#: Questions of the opening, and the notebooks that answer them.
_FOUND = {
    "Does a mixed fleet pay?": ("13_arena", "07_island_outer_loop"),
    "How true is the simulator?": ("12_fidelity", "16_calibration"),
}
_PAYS = "13_arena/pays.svg"
_DETAILS = f"{pages.FOLDER}/claims.html"
#: Of the first screen: title, notebook, table, its columns and their headings, whether the largest
#: of the last comes first, a sentence.
_PANELS: tuple[tuple[str, str, str, dict[str, str], bool, str], ...] = (
    (
        "How near the simulator is to real servers",
        "16_calibration",
        "verdicts",
        {"test": "test", "quantity": "of", "runs": "runs", "median error [%]": "median error [%]"},
        False,
        "Published runs of dense models on vLLM, simulated by the default command with all of that "
        "GPU, or of that model, left out of every fit. Notebooks 12 and 16 have them one by one.",
    ),
    (
        "Who plans best",
        "13_arena",
        "league",
        {
            "planner": "planner",
            "cases served": "cases",
            "mean over all cases [% of best]": "goodput [% of best]",
        },
        True,
        "Mean goodput on the same mixed fleets and requests, over that of the best planner of the "
        "papers in each case, 0 without a plan. The portfolio asks them all and improves the best; "
        "notebook 13 has them all.",
    ),
)


def chapters(folder: Path) -> Iterator[dict[str, Any]]:
    """Everything that each notebook left below ``folder``: paper profile, then twin and real."""
    for notebook in source.notebooks():
        every = reversed(places(notebook, folder))
        found: dict[str, dict[str, Any]] = {
            traces: json.loads(path.read_text(encoding="utf-8"))
            for traces in sorted(every, key=lambda name: "/" not in name)
            if (path := folder / traces / notebook / MANIFEST).is_file()
        }
        if found:
            title, question = introduction(notebook)
            yield {
                "notebook": notebook,
                "title": title,
                "question": question,
                "answer": answer(notebook, folder),
                "fingerprint": f"../{dependencies.FOLDER}/{notebook}",
                "runs": tuple(_runs(folder, found)),
                "figures": tuple(_side_by_side(folder, found, "figures")),
                "tables": tuple(_side_by_side(folder, found, "tables")),
            }


def papers(folder: Path, verdicts: claims.Verdicts) -> list[dict[str, Any]]:
    """One entry per paper, in the order of the ledger: its verdicts, and what shows its figures."""
    covered = coverage(folder)
    return [
        {
            "key": paper,
            "title": title,
            "verdicts": verdicts.of(paper),
            "items": [row for row in covered if row.figure.paper == paper],
        }
        for paper, title in PAPERS.items()
    ]


def findings(folder: Path, verdicts: claims.Verdicts) -> Iterator[tuple[str, str]]:
    """What the results come to: questions, and what the notebooks answer."""
    held = []
    for paper, title in PAPERS.items():
        counts = verdicts.of(paper).counts
        tests = sum(counts.values()) - counts["not a test"]
        held.append(f"{title} {counts['reproduced']} of {tests}")
    yield "Whose claims come out again, of those that test something?", "; ".join(held) + "."
    for question, notebooks in _FOUND.items():
        answers = [one.sentence for name in notebooks if (one := answer(name, folder))]
        if answers:
            yield question, " ".join(answers)


def panels(folder: Path) -> Iterator[dict[str, Any]]:
    """What the first screen shows beside the claims: how near the simulator is, who plans best."""
    for title, notebook, file, columns, ranked, says in _PANELS:
        if name := _first_file(folder, f"{notebook}/{file}.csv"):
            frame = pd.read_csv(folder / name)
            shown = frame[[one for one in columns if one in frame]]
            if ranked:
                shown = shown.sort_values(shown.columns[-1], ascending=False, kind="stable")
            few = shown.head(_ROWS).itertuples(index=False)
            rows = [[Column("").show(cell) for cell in row] for row in few]
            head = [columns[str(one)] for one in shown]
            yield {"title": title, "head": head, "rows": rows, "says": says}


def _first_file(folder: Path, name: str) -> str:
    """A file of the fullest run that has it (:func:`places`), else nothing."""
    found = (f"{traces}/{name}" for traces in places(name.partition("/")[0], folder))
    return next((one for one in found if (folder / one).is_file()), "")


def sweeps(folder: Path) -> Iterator[dict[str, Any]]:
    """Sweeps of ``pipelines/sweeps`` whose sentences lie below ``folder``."""
    for file in sorted((paths.root() / "pipelines" / "sweeps").glob("*.yaml")):
        place = folder / "sweeps" / file.stem
        if (place / "sentences.txt").is_file():
            says = (place / "sentences.txt").read_text(encoding="utf-8").splitlines()
            yield {"name": file.stem, "says": says, "stale": spec.stale(file, place)}


def profiles_table(folder: Path, verdicts: claims.Verdicts) -> Table:
    """Claims on which a run in the paper profile says something else than one in the default.

    Twin is compared with twin and real with real; what needs the real trace is judged on it alone.
    Runs of other code than that of the default's are named and not compared.
    """
    fullest = {f"{one.source}/{one.notebook}": one for one in manifests(folder / schema.PAPER)}
    older = {at for at, one in fullest.items() if code_of(one.folder) != code_of(folder / at)}
    compared = [
        (row.claim, default, fuller)
        for row, paper in zip(verdicts, claims.verdicts(folder / schema.PAPER), strict=True)
        for default, fuller in ((row.twin, paper.twin), (row.real, paper.real))
        if default and default.judgement and default.profile == "default"
        if fuller and fuller.judgement and (fuller.source == "real" or not row.claim.requires)
        if fuller.figure.rpartition("/")[0] not in older
    ]
    columns = (
        Column("claim", of=lambda one: one[0].id),
        Column("traces", of=lambda one: one[1].source),
        Column("accepted", of=lambda one: one[0].accepted),
        Column("default", of=lambda one: _value(one[1].value)),
        Column("paper", of=lambda one: _value(one[2].value)),
        Column("verdict, default", of=lambda one: one[1].judgement),
        Column("verdict, paper", of=lambda one: one[2].judgement),
    )
    changed = [one for one in compared if one[1].judgement != one[2].judgement]
    ran = [
        f"{one.notebook} ({one.source}{', of other code' * (at in older)})"
        for at, one in fullest.items()
    ]
    fuller = [name for name, body in schema.load(profile=schema.PAPER).overlaid.items() if body]
    differ = [source.notebook_of(stage) for stage in fuller]
    return Table.of(
        "Default and paper profiles",
        columns,
        changed,
        f"{len(changed)} of {len(compared)} claims that both profiles judge have another verdict.",
        f"Run in the paper profile: {', '.join(ran) or 'none'}. It has values of its own for "
        f"{', '.join(differ) or 'none'}; that of all other notebooks is the default one.",
    )


def introduction(notebook: str) -> tuple[str, str]:
    """Title and first paragraph of a notebook, without its markup.

    Examples
    --------
    >>> plain("Which *range* does `x` cover?")
    'Which range does x cover?'
    """
    for cell in source.cells(source.notebook_path(notebook)):
        if cell.get("cell_type") == "markdown":
            heading, _, rest = source.text(cell).strip().partition("\n")
            paragraph = rest.strip().split("\n\n")[0]
            question = plain(" ".join(paragraph.split())).removeprefix("Question. ")
            return plain(heading.lstrip("# ")), question
    return notebook, ""


def plain(text: str) -> str:
    """Text of one line of Markdown."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"(?<!\w)[*_]{1,2}([^*_]+)[*_]{1,2}(?!\w)|`([^`]*)`", r"\1\2", text)


def _runs(folder: Path, found: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Provenance of the results, and by source the page of the executed notebook, if any."""
    shared: dict[tuple[str, str, str], dict[str, str]] = {}
    for traces, manifest in found.items():
        notebook = manifest["notebook"]
        seeds = ", ".join(map(str, manifest["seeds"])) or "none"
        key = (manifest["profile"], seeds, manifest.get("code_sha256", "")[:12])
        executed = (folder / traces / notebook / f"{notebook}.ipynb").is_file()
        shared.setdefault(key, {})[traces] = pages.page_of(traces, notebook) if executed else ""
    for (profile, seeds, code), shown in shared.items():
        yield {"profile": profile, "seeds": seeds, "code": code, "pages": shown}


def _side_by_side(
    folder: Path, found: dict[str, dict[str, Any]], kind: str
) -> Iterator[list[dict[str, Any]]]:
    """The same figure of each run together, in the order of the first manifest that has it."""
    names = dict.fromkeys(row["file"] for manifest in found.values() for row in manifest[kind])
    for name in names:
        rows = {
            folder / traces / manifest["notebook"] / name: (traces, row)
            for traces, manifest in found.items()
            for row in manifest[kind]
            if row["file"] == name
        }
        of = [traces.rpartition("/") for traces, _ in rows.values()]
        yield [
            {
                "source": traces.rpartition("/")[2],
                "label": traces,
                "paired": "/" not in traces and len({one for *_, one in of}) > 1,
                "file": quote(path.relative_to(folder).as_posix()),
                "caption": row["caption"],
                "shows": list(_unnamed(row)),
                "rows": len(_cells(path)) - 1 if kind == "tables" else 0,
            }
            for path, (traces, row) in rows.items()
        ]


def _unnamed(row: dict[str, Any]) -> Iterator[str]:
    """What of the papers a figure or table shows, unless its caption says so."""
    for name in row["shows"]:
        paper, _, where = name.partition("/")
        named = paper in row["caption"].lower() and re.search(
            rf"{re.escape(where)}(?!\w)", row["caption"]
        )
        if not named:
            yield f"{PAPERS.get(paper, paper)}, {where}"


def _cells(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.reader(stream))


def _value(measured: float | str) -> str:
    """A measured value as a person writes it: whole numbers without a decimal point."""
    if isinstance(measured, float) and measured.is_integer():
        measured = int(measured)
    return Column("", digits=5).show(measured)


def _brief(one: claims.Measurement | None) -> str:
    """A measured value and its interval, to three digits."""
    if one is None or not isinstance(one.value, float):
        return str(one.value) if one else ""
    show = Column("", digits=3).show
    ends = f" ({show(one.interval[0])} to {show(one.interval[1])})" if one.interval else ""
    return f"{show(int(one.value) if one.value.is_integer() else one.value)}{ends}"


def _ranking(text: str) -> Any:
    """A text that may be broken after each > of a ranking, and not within its names."""
    safe = FILTERS["escape"](text)
    return type(safe)(re.sub(r"(&gt;=?)", r"\1<wbr>", str(safe)))


def render(folder: Path) -> tuple[str, str]:
    """Text of the report for the results below ``folder``, and of the page of its claims.

    Raises
    ------
    DataError
        If a manifest does not fit the ledger of claims.
    """
    verdicts = claims.verdicts(folder)
    found = list(chapters(folder))
    cited = parse_yaml(
        (paths.root() / "CITATION.cff").read_text(encoding="utf-8"), Path("CITATION.cff")
    )
    environment = _environment()
    shared = {"verdicts": verdicts, "papers": papers(folder, verdicts), "statuses": claims.STATUSES}
    report = environment.get_template("report.html").render(
        **shared,
        chapters=found,
        rests_on=dict.fromkeys(
            f"{traces.rpartition('/')[2]} traces, {run['profile']} profile"
            for one in found
            for run in one["runs"]
            for traces in run["pages"]
        ),
        coverage=coverage(folder).summary,
        profiles=profiles_table(folder, verdicts),
        panels=panels(folder),
        findings=list(findings(folder, verdicts)),
        pays=_first_file(folder, _PAYS),
        version=cited["version"],
        date=cited["date-released"],
        sweeps=list(sweeps(folder)),
        details=_DETAILS,
        drawings=DRAWINGS,
        brief=_brief,
    )
    return report, environment.get_template("claims.html").render(
        **shared, audited=verdicts.audit()
    )


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["value"] = _value
    environment.filters["ranking"] = _ranking
    return environment


def main() -> None:
    """Write the report of this checkout, its pages and the values that DVC compares."""
    folder = paths.results()
    text, details = render(folder)
    folder.mkdir(exist_ok=True)
    with writing(folder / "report.html", force=True) as part:
        part.write_text(text, encoding="utf-8")
    pages.write(folder, _environment())
    (folder / _DETAILS).write_text(details, encoding="utf-8")
    metrics.write(folder, schema.load().source, claims.verdicts(folder))


if __name__ == "__main__":
    try:
        main()
    except HeteroError as error:
        sys.exit(f"Error: {error}")
