r"""Intervals against servers: what their steps err by, and how often the stated width holds.

``data/measured/servers_held_out.csv`` has a row per run of a server that took no part in what its
simulation used, made by :func:`make_held_out`: errors of four quantities, how much the steps erred,
and how the quantities answer to steps that err. Three tests: ``gpu`` and ``llm``
(the overheads, and efficiencies fitted to runs, without the run's GPU or model,
:func:`pipelines.studies.server_fit.left_out`) and ``unfitted`` (what no fit has seen).
Static batches show E2E and its inverse.

With ``p`` and ``d`` the logarithms by which prefill and decode steps are scaled, the response of a
quantity is known on a grid of both. Steps erred by the ``u`` with

.. math:: q(u, u) = measured

of TPOT, or of the whole batch. :mod:`hetero.latency.calibration.expected` makes errors of step
models of it, and :func:`coverage_frame` looks how often intervals that were made without a run's
GPU (or model) hold it. What belongs to a measured run and not to the steps is added: what repeats
differ by, and the order of requests where it was not published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np
import pandas as pd

from hetero.arrays import Floats
from hetero.catalog import gpu as find_gpu
from hetero.errors import InfeasibleError, ParameterError
from hetero.latency.calibration import expected
from hetero.latency.calibration.expected import Fold, StepError, error_of, level_named
from hetero.latency.scaled import scaled
from hetero.latency.step import StepModel
from hetero.simulator.uncertainty import draw_factors
from hetero.streams import stream
from hetero.workload import Trace, datasets
from pipelines.studies import server_fit, server_gpus, servers
from pipelines.studies.servers import QUEUED_S, ServerRun, StepsOfRun

LABELS: Final = {"tpot_s": "TPOT", "output_tps": "throughput", "ttft_s": "TTFT", "e2e_s": "E2E"}
COLUMNS: Final = (
    *("test", "source", "server", "engine", "gpu", "llm", "degree", "load", "kind", "level"),
    *("step", "request_share", "ttft_per_step", *LABELS.values()),
    *(f"{label} response" for label in LABELS.values()),
    *(f"{label} sample" for label in LABELS.values()),
)
_KEY = ["source", "server", "gpu", "llm", "degree", "load"]
_BY = 0.25  # the logarithm by which steps are scaled
_GRID = tuple((p, d) for p in (-_BY, 0.0, _BY) for d in (-_BY, 0.0, _BY))
_BATCH_TOKENS = (128, 1024)
_ORDERS = 8
_DRAWS = 400


# Made from the published runs ------------------------------------------------------------------


def make_held_out() -> pd.DataFrame:
    """Rows of ``data/measured/servers_held_out.csv``; fits with every GPU and model left out.

    Raises
    ------
    DownloadError
        If the published runs are not here.
    """
    rows: list[dict[str, object]] = []
    fitted: set[str] = set()
    for name, generation in server_fit.GENERATIONS.items():
        overheads, frame = server_fit.left_out(name)
        fit = server_fit.Fit.of(generation)
        fitted |= {run.name for run in fit.runs}
        steps = fit.steps(overheads)
        known = {
            key: (run, _response(run, steps), _sample(run, steps))
            for key, run in _numbered(fit.runs)
        }
        for test in server_fit.FOLDS:
            apart = fit.steps(overheads, test)
            found = frame[(frame["test"] == test) & (frame["left_out"] == "")]
            found = found.assign(number=found.groupby(_KEY).cumcount())
            for error in found.to_dict("records"):
                key = tuple(error[column] for column in (*_KEY, "number"))
                run, response, sample = known[key]
                if run.precision == "int4":  # intervals are of what fits of 16 bits get wrong
                    continue
                if server_gpus.group_of(run):
                    response = _response(run, apart)
                erred = {q: float(np.log1p(error[label] / 100)) for q, label in LABELS.items()}
                rows.append(_row(test, run, apart(run), response, erred, sample))
    for run in _unfitted(fitted):
        tests: tuple[str, ...] = ("unfitted",)
        if server_gpus.group_of(run):
            tests = server_fit.FOLDS
        for name in tests:
            step = server_gpus.left_out(run, name) or servers.known_best(run)
            own = {run: step}.__getitem__
            if response := _response(run, own):
                erred = {q: float(np.log(v[4] / run.measured[q])) for q, v in response.items()}
                rows.append(_row(name, run, step, response, erred, _sample(run, own)))
    return pd.DataFrame([*rows, *_repeats()], columns=COLUMNS)


def _numbered(runs: Iterable[ServerRun]) -> Iterator[tuple[tuple[object, ...], ServerRun]]:
    """Runs by what errors name them by; some settings were run several times."""
    seen: Counter[tuple[object, ...]] = Counter()
    for run in runs:
        key = (run.source, run.server, run.gpu, run.llm.name, run.tensor_parallel, run.load)
        yield (*key, seen[key]), run
        seen[key] += 1


def _unfitted(fitted: set[str]) -> Iterator[ServerRun]:
    """Runs that no fit has seen; static batches of some lengths, and none of token rates alone."""
    for source in servers.SOURCES:
        for run in servers.runs(source):
            if run.name in fitted or "e2e_s" not in run.measured:
                continue
            if not source.startswith("argonne") or run.trace.input_tokens[0] in _BATCH_TOKENS:
                yield run


def _response(run: ServerRun, steps: StepsOfRun) -> dict[str, Floats]:
    """Quantities of a run with its steps scaled by each point of the grid; shape (9,) each.

    Empty where the model does not fit the GPUs by our account of their memory.
    """
    step = steps(run)
    each = []
    for p, d in _GRID:
        own = {run: scaled(step, float(np.exp(p)), float(np.exp(d))) if p or d else step}
        try:
            each.append(servers.simulated(run, servers.served(run, own.__getitem__)))
        except (InfeasibleError, ParameterError):
            return {}
    names = [q for q in servers.QUANTITIES if q in run.measured]
    return {q: np.array([one[q] for one in each]) for q in names}


def _row(
    test: str,
    run: ServerRun,
    step: StepModel,
    response: dict[str, Floats],
    erred: dict[str, float],
    sample: dict[str, float],
) -> dict[str, object]:
    level = level_named(step.level)
    kind = {"carried": "assumed"}.get(level, str(level))
    if level == "measured":
        kind = "layer profile" if "layer profile" in step.source else "operators"
    logs = {q: np.log(v / v[4]) for q, v in response.items()}
    of = "tpot_s" if "tpot_s" in logs else "e2e_s"
    u = float(np.interp(-erred[of], *_diagonal(logs[of])))
    row: dict[str, object] = {
        "test": test,
        "source": run.source,
        "server": run.server,
        "engine": run.server if run.family == "any" else run.family,
        "gpu": run.gpu,
        "llm": run.llm.name,
        "degree": run.tensor_parallel,
        "load": run.load,
        "kind": kind,
        "level": level,
        "step": round(u, 3),
    }
    if "ttft_s" in logs:
        row["request_share"] = round(step.request_s / float(response["ttft_s"][4]), 4)
        if run.measured["ttft_s"] < QUEUED_S and run.tensor_parallel == 1 and step.request_s:
            row["ttft_per_step"] = round(float(logs["ttft_s"][8] - logs["ttft_s"][0]) / 2 / _BY, 3)
    for q, label in LABELS.items():
        if q in logs:
            row[label] = round(erred[q], 4)
            row[f"{label} sample"] = sample.get(q)
            # Of a batch that is timed as a whole it is the inverse of E2E.
            if q != "output_tps" or run.statistic != "last":
                row[f"{label} response"] = " ".join(f"{v:.3f}" for v in logs[q])
    return row


def _sample(run: ServerRun, steps: StepsOfRun) -> dict[str, float]:
    """Deviation of the logarithm of each quantity over orders of gaps, inputs and outputs.

    Lists of requests and arrivals are not published with most runs; empty where all are equal.
    """
    trace, rng = run.trace, stream(0, "orders of requests")
    if trace.prefix_ids is not None or not np.ptp(trace.output_tokens):
        return {}
    gaps = np.diff(trace.arrival_s)
    each = []
    for _ in range(_ORDERS):
        arrival = np.concatenate([[0.0], np.cumsum(rng.permutation(gaps))])
        lengths = (rng.permutation(trace.input_tokens), rng.permutation(trace.output_tokens))
        other = replace(run, trace=Trace(arrival, *lengths, name=trace.name))
        each.append(servers.simulated(run, servers.served(other, lambda _: steps(run))))
    return {q: round(float(np.std(np.log([one[q] for one in each]))), 4) for q in each[0]}


def _diagonal(logs: Floats) -> tuple[Floats, Floats]:
    """A quantity where prefill and decode steps err alike, and the logarithm that they err by.

    Beyond the grid it goes on as at its ends; a quantity that does not move has no steps.
    """
    q, u = logs[[0, 4, 8]], np.array([-_BY, 0.0, _BY])
    slopes = np.maximum(np.diff(q), 1e-6) / _BY
    far = 4.0
    return (
        np.array([q[0] - far * slopes[0], *q, q[2] + far * slopes[1]]),
        np.array([u[0] - far, *u, u[2] + far]),
    )


def _repeats() -> list[dict[str, object]]:
    """What runs that were repeated differ by: deviations of the logarithm, medians over settings.

    Their token rates are of InferenceMAX, the others of the nights of one A10G.
    """
    nights = pd.read_csv(datasets.path(servers.DATASET, "nm_vllm_a10g.csv"))
    ci = pd.read_csv(datasets.path(servers.DATASET, "inferencemax_even.csv"))
    settings = ["hw", "conc", "image", "framework", "precision", "spec_decoding", "disagg"]
    settings += ["model", "isl", "osl", "tp", "ep", "dp_attention", "num_decode_gpu"]
    last = nights[nights["nm_vllm"] == nights["nm_vllm"].max()]
    columns = {"TPOT": "median_tpot_ms", "TTFT": "median_ttft_ms", "E2E": "median_request_latency"}
    return [
        {"test": "repeats", "source": "nm_vllm", **_spread(last, ["model", "rate_rps"], columns)},
        {
            "test": "repeats",
            "source": "inferencemax",
            **_spread(ci, settings, {"throughput": "output_tput_per_gpu"}),
        },
    ]


def _spread(frame: pd.DataFrame, by: list[str], columns: dict[str, str]) -> dict[str, float]:
    found = frame[[*columns.values()]].transform(np.log)
    spread = found.groupby([frame[name] for name in by], dropna=False).std().median()
    return {label: round(float(spread[column]), 4) for label, column in columns.items()}


# From what is committed ------------------------------------------------------------------------


def coverage_frame(share: float = 0.9) -> pd.DataFrame:
    """How often intervals hold runs of servers that took no part in making them.

    Each interval is that of the draws of the error of the run's source of step times, made without
    its GPU (without its model in the test ``llm``), of what repeats differ by, and of what the
    order of requests changes where it is not known.

    Returns
    -------
    One row per test, source, gpu, kind of source and quantity: runs, covered (share of them) and
    width_percent, the median over runs of the interval's width [% of the simulated value].

    Examples
    --------
    >>> found = coverage_frame()
    >>> found.columns.tolist()[:5]
    ['test', 'source', 'gpu', 'kind', 'quantity']
    """
    groups = runs_frame(share).groupby(["test", "source", "gpu", "kind", "quantity"], sort=False)
    return groups.agg(
        runs=("covered", "size"), covered=("covered", "mean"), width_percent=("width", "median")
    ).reset_index()


def runs_frame(share: float = 0.9) -> pd.DataFrame:
    """The intervals themselves: a row per run and quantity with the columns of the statistics.

    Besides: quantity; erred, low and high (logarithms of measured over simulated); covered; width
    [% of the simulated value]; and servers, whose runs made the interval.
    """
    frame = expected.servers_held_out_frame()
    repeats = frame[frame["test"] == "repeats"]
    noise, rows = stream(0, "repeats").standard_normal(_DRAWS), []
    for row in frame[frame["test"] != "repeats"].to_dict("records"):
        fold: Fold = "llm" if row["test"] == "llm" else "gpu"
        vendor = find_gpu(row["gpu"]).vendor
        error = error_of(row["level"], row["engine"], vendor, without=(fold, row[fold]))
        p, d, front = np.log(_draws(error)).T
        for label in LABELS.values():
            if pd.isna(row[label]):
                continue
            inverse = label == "throughput" and pd.isna(row["TPOT"])
            text = row["E2E response" if inverse else f"{label} response"]
            logs = _on_grid(np.array(text.split(), dtype=float), p, d) * (-1 if inverse else 1)
            if label == "TTFT":
                share_s = row["request_share"]  # which steps leave as it is
                logs = np.log(
                    np.maximum(np.exp(logs) - share_s, 0.0) + share_s * np.exp(front) + 1e-9
                )
            logs = (
                logs + np.hypot(repeats[label].max(), np.nan_to_num(row[f"{label} sample"])) * noise
            )
            low, high = np.quantile(logs, [(1 - share) / 2, (1 + share) / 2])
            rows.append(
                {name: row[name] for name in COLUMNS[:10]}
                | {"quantity": label, "erred": -row[label], "low": low, "high": high}
                | {"covered": low <= -row[label] <= high}
                | {"width": 100.0 * (np.exp(high) - np.exp(low)), "servers": error.servers}
            )
    return pd.DataFrame(rows)


@lru_cache(maxsize=256)
def _draws(error: StepError) -> Floats:
    return draw_factors({"": error}, _DRAWS)[""]


def _on_grid(response: Floats, p: Floats, d: Floats) -> Floats:
    """Logarithm of a quantity where steps err by ``p`` and ``d``, linear in both in each cell."""
    grid = response.reshape(3, 3)
    i, j = (p > 0).astype(int), (d > 0).astype(int)
    x, y = p / _BY - (i - 1), d / _BY - (j - 1)
    low = grid[i, j] + x * (grid[i + 1, j] - grid[i, j])
    high = grid[i, j + 1] + x * (grid[i + 1, j + 1] - grid[i, j + 1])
    return np.asarray(low + y * (high - low))
