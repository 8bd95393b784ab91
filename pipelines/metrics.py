"""What DVC's own commands compare: ``results/metrics.json`` and ``results/claims.csv``.

``dvc metrics show``, ``dvc metrics diff`` and ``dvc exp show`` read the first, a plot of dvc.yaml
the second. Both are drawn from the tables that the notebooks left for the traces of params.yaml:
few values, each with a name that stands alone as a heading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from pipelines.studies.claims import Verdicts
from pipelines.studies.published import PAPERS

#: Both files, below the results folder.
METRICS, CLAIMS = "metrics.json", "claims.csv"

_THROUGHPUT = "throughput [tokens/s]"


def write(folder: Path, traces: str, verdicts: Verdicts) -> None:
    """Write both files below ``folder`` for the results of one source of traces."""
    found = {name: values for name, values in _metrics(folder / traces, verdicts) if values}
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    (folder / METRICS).write_text(text, encoding="utf-8")
    rows = [
        {"paper": paper, "verdict": status, "claims": count}
        for paper in PAPERS
        for status, count in verdicts.of(paper).counts.items()
    ]
    pd.DataFrame(rows).to_csv(folder / CLAIMS, index=False, lineterminator="\n")


def _metrics(folder: Path, verdicts: Verdicts) -> Iterator[tuple[str, dict[str, float]]]:
    yield "claims", {str(status): count for status, count in verdicts.counts.items()}
    yield ("reproduced", {paper: verdicts.of(paper).counts["reproduced"] for paper in PAPERS})
    for name, (notebook, table, read) in _TABLES.items():
        path = folder / notebook / f"{table}.csv"
        if path.is_file() and len(found := pd.read_csv(path)):
            yield name, read(found)


def _theta(table: pd.DataFrame) -> dict[str, float]:
    """Best weight of Xiong et al.'s Algorithm 2 with their link and predictor, all at once."""
    first = table.iloc[0]
    paper = table[(table["link"] == first["link"]) & (table["predictor"] == first["predictor"])]
    return _best(paper[paper["rate [req/s]"] == paper["rate [req/s]"].max()], "theta", _THROUGHPUT)


def _bins(table: pd.DataFrame) -> dict[str, float]:
    """Best number of length bins at the first load and decode time of the sweep.

    Taken where long prompts have a place of their own: elsewhere K moves nothing.
    """
    first = table.iloc[0]
    rows = table[(table["load"] == first["load"]) & (table["decode"] == first["decode"])]
    return _best(
        rows[rows["swept"].str.startswith("K, ")],
        "value",
        f"{_THROUGHPUT}, mean",
        shown=_THROUGHPUT,
    )


def _skew(table: pd.DataFrame) -> dict[str, float]:
    """Best range of the divider's skew after the last iteration, mean over seeds."""
    last = table[table["iteration"] == table["iteration"].max()]
    name = "best throughput [requests/s]"
    return _best(last.groupby("skew up to", as_index=False)[[name]].mean(), "skew up to", name)


def _best(
    table: pd.DataFrame, setting: str, value: str, *more: str, shown: str = ""
) -> dict[str, float]:
    best: Any = table.iloc[int(table[value].to_numpy().argmax())]
    found = {"best": best[setting], shown or value: best[value]} | {one: best[one] for one in more}
    return {name: _digits(number) for name, number in found.items()}


def _errors(table: pd.DataFrame) -> dict[str, float]:
    """Mean absolute error of simulated mean latencies against measured engines."""
    means = table[table["statistic"] == "mean"]
    by_quantity = means["error_percent"].abs().groupby(means["quantity"], sort=False).mean()
    return {str(name): _digits(error) for name, error in by_quantity.items()}


def _goodput(table: pd.DataFrame) -> dict[str, float]:
    """Every planner's goodput over the best single one's, mean over all cases of the arena."""
    shares = table.set_index("planner")["mean over all cases [% of best]"].sort_index()
    return {str(name): _digits(share) for name, share in shares.items()}


def _digits(number: Any) -> float:
    return float(f"{number:.6g}")


_TABLES = {
    "theta": ("04_request_scheduling", "theta", _theta),
    "bins": ("05_heteroserve", "sweeps", _bins),
    "skew": ("07_island_outer_loop", "skew", _skew),
    "error [%]": ("12_fidelity", "engine_errors", _errors),
    "goodput [% of best]": ("13_arena", "league", _goodput),
}
