r"""Overheads of vLLM fitted to runs of real servers, and tested on GPUs and models left out.

The form is that of :mod:`hetero.latency.overheads`: constants per step, per decoding request, per
layer's launch, per staged all-reduce and per request, one set for a generation of the engine. No
GPU and no model has a factor of its own. Step times of the kernels are
:func:`pipelines.studies.servers.kernels` and stay as they are.

What is fitted minimises :math:`\rho(\ln(simulated / measured))`, ``rho`` scipy's ``soft_l1``, of
TPOT or, where only the whole batch was timed, of its time; every pair of GPU and model weighs the
same. Runs whose median TTFT is beyond half a second take no part: they queue, or (several RTX 4090)
stand still for seconds at their start, which no constant explains. Nor do runs on GPUs of which
nothing was measured, whose kernels would be fitted as well. Their errors count all the same.
The time per request is then the median of what TTFT lacks on one GPU.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from hetero.arrays import Floats
from hetero.catalog.engines import EngineOverheads
from hetero.display import Column, Table
from hetero.latency.overheads import with_overheads
from hetero.latency.step import StepModel
from pipelines.studies import servers
from pipelines.studies.servers import ServerRun, StepsOfRun

Fold: TypeAlias = Literal["gpu", "llm"]
FOLDS: Final[tuple[Fold, ...]] = ("gpu", "llm")
LABELS: Final = ("TPOT", "E2E", "TTFT", "throughput")

_START = EngineOverheads(
    engine="vllm",
    releases="",
    step_s=1e-3,
    worker_s=1e-3,
    decoding_s=3e-5,
    launch_s=2e-4,
    staged_s=5e-5,
    source="where the search begins",
)
# Launches in parts, and all-reduces through the host, are those of these runs alone.
_ALONE = {"launch_s": "iog", "staged_s": "iog"}
_BATCHES_OF = ("A100-SXM-40GB", "H100-SXM", "GH200-96GB")
_BATCH_TOKENS = (128, 512, 1024)  # of longer ones not all are in memory at once
_QUEUED_S = 0.5
_AWAY = 10.0  # the solver's steps are shares of what it varies


@dataclass(frozen=True, slots=True)
class Generation:
    """Releases that share their overheads, the runs that show them, and which are free."""

    releases: str
    runs: Callable[[], list[ServerRun]]
    free: tuple[str, ...]


def _first() -> list[ServerRun]:
    """Releases 0.4 to 0.6: prompts before anything decodes on."""
    found = [
        _prefill_first(run, 8192)
        for run in servers.runs("argonne")
        if run.gpu in _BATCHES_OF and run.trace.input_tokens[0] in _BATCH_TOKENS
    ]
    return found + [_prefill_first(run, 4096) for run in servers.runs("nm_vllm")]


def _prefill_first(run: ServerRun, tokens: int) -> ServerRun:
    engine = replace(run.engine, batching="prefill first", max_step_tokens=tokens)
    return replace(run, engine=engine)


def _second() -> list[ServerRun]:
    """Releases 0.8 to 0.15: prompts in chunks, from 0.14 on with the next step scheduled ahead."""
    return [*servers.runs("iog"), *servers.runs("blis")]


GENERATIONS: Final = {
    "first": Generation("0.4-0.6", _first, ("step_s", "worker_s", "decoding_s")),
    "second": Generation("0.8-0.15", _second, ("step_s", "decoding_s", "launch_s", "staged_s")),
}


@dataclass(frozen=True, eq=False)
class Fit:
    """Runs of a generation with the step times of their kernels, to fit overheads to."""

    generation: Generation
    runs: tuple[ServerRun, ...]
    kernels: dict[ServerRun, StepModel]
    alone: dict[ServerRun, float] = field(default_factory=dict)

    @classmethod
    def of(cls, generation: Generation) -> Fit:
        """The runs of a generation that our account of the memory holds."""
        runs = tuple(generation.runs())
        return cls(generation, runs, {run: servers.kernels(run) for run in runs})

    def overheads(
        self, values: Floats, request_s: float = 0.0, *, digits: int = 3
    ) -> EngineOverheads:
        """Overheads of fitted values, in the order of ``generation.free``."""
        rounded: dict[str, Any] = {
            name: float(f"{value:.{digits}g}")
            for name, value in zip(self.generation.free, values, strict=True)
        }
        return EngineOverheads(
            engine="vllm",
            releases=self.generation.releases,
            request_s=float(f"{request_s:.{digits}g}"),
            source="fitted on serving_runs",
            **rounded,
        )

    def of_run(self, found: EngineOverheads, run: ServerRun) -> EngineOverheads:
        """What of the overheads a run has."""
        absent: dict[str, Any] = {
            name: 0.0 for name, source in _ALONE.items() if run.source != source
        }
        return replace(found, **absent)

    def steps(self, found: EngineOverheads) -> StepsOfRun:
        """Step times of the runs with overheads."""
        return lambda run: with_overheads(
            self.kernels[run], self.of_run(found, run), run.llm, run.tensor_parallel
        )

    def simulated(self, run: ServerRun, found: EngineOverheads) -> dict[str, float]:
        """Quantities of a run with overheads.

        A batch that is prefilled before it decodes takes all of its steps one after the other, so
        that its time without overheads is simulated once, and theirs are counted.
        """
        own = self.of_run(found, run)
        if run.statistic != "last" or run.engine.batching != "prefill first" or own.launch_s:
            return servers.simulated(run, servers.served(run, self.steps(found)))
        if run not in self.alone:
            result = servers.served(run, self.kernels.__getitem__)
            self.alone[run] = servers.simulated(run, result)["e2e_s"]
        several = run.tensor_parallel > 1
        per_step = own.step_s + several * (own.worker_s + 2.0 * run.llm.layers * own.staged_s)
        prefills = math.ceil(run.trace.input_tokens.sum() / run.engine.max_step_tokens)
        later = int(run.trace.output_tokens[0]) - 1
        more = (prefills + later) * per_step + later * len(run.trace) * own.decoding_s
        return {"e2e_s": self.alone[run] + more + own.request_s}

    def fit(
        self, runs: Sequence[ServerRun], near: EngineOverheads | None = None
    ) -> EngineOverheads:
        """Overheads of some of the runs.

        Parameters
        ----------
        near
            Where to look first; it shortens the search and has no weight in it.
        """
        runs = [
            run
            for run in runs
            if run.measured.get("ttft_s", 0.0) < _QUEUED_S and self.kernels[run].level != "carried"
        ]
        pairs = [(run.gpu, run.llm.name) for run in runs]
        of_pair = Counter(pairs)
        weight = 1.0 / np.sqrt([of_pair[pair] for pair in pairs])
        shown = {run.source for run in runs}
        # What no run shows stays 0.
        start = np.array(
            [
                max(getattr(near or _START, name), 0.1 * getattr(_START, name))
                if _ALONE.get(name) in (None, *shown)
                else 0.0
                for name in self.generation.free
            ]
        )

        def residuals(x: Floats) -> Floats:
            found = self.overheads(start * np.exp(x - _AWAY), digits=9)
            rows = []
            for run in runs:
                of = "tpot_s" if "tpot_s" in run.measured else "e2e_s"
                rows.append(np.log(self.simulated(run, found)[of] / run.measured[of]))
            return np.multiply(weight, rows)

        solved = least_squares(
            residuals,
            np.full(len(start), _AWAY),
            bounds=(_AWAY - 5.0, _AWAY + 3.0),
            loss="soft_l1",
            f_scale=0.05,
            diff_step=np.array(0.05 / _AWAY),
            xtol=3e-3,
            ftol=3e-3,
        )
        values = start * np.exp(solved.x - _AWAY)
        found = self.overheads(values)
        lacking = [
            run.measured["ttft_s"] - self.simulated(run, found)["ttft_s"]
            for run in runs
            if run.tensor_parallel == 1 and "ttft_s" in run.measured
        ]
        return self.overheads(values, max(0.0, float(np.median(lacking))) if lacking else 0.0)

    def errors(self, runs: Sequence[ServerRun], found: EngineOverheads) -> pd.DataFrame:
        """Errors of some runs with overheads."""
        return servers.errors(runs, self.steps(found))


def left_out(name: str) -> tuple[EngineOverheads, pd.DataFrame]:
    """Overheads of a generation, and errors of its runs in and out of the sample.

    Returns
    -------
    The overheads fitted to all runs; and one row per run and way to test (``none``: no overheads,
    ``in sample``, ``gpu`` and ``llm``: with all runs of its GPU or model left out).
    """
    fit = Fit.of(GENERATIONS[name])
    every = fit.fit(fit.runs)
    none = fit.overheads(np.zeros(len(fit.generation.free)))
    parts = [fit.errors(fit.runs, none).assign(test="none")]
    parts.append(fit.errors(fit.runs, every).assign(test="in sample"))
    for fold in FOLDS:
        for value in dict.fromkeys(_key(run, fold) for run in fit.runs):
            rest = [run for run in fit.runs if _key(run, fold) != value]
            out = [run for run in fit.runs if _key(run, fold) == value]
            parts.append(fit.errors(out, fit.fit(rest, every)).assign(test=fold))
    return every, pd.concat(parts, ignore_index=True)


def _key(run: ServerRun, fold: Fold) -> str:
    return run.gpu if fold == "gpu" else run.llm.name


def table(name: str, found: EngineOverheads, frame: pd.DataFrame) -> Table:
    """Medians of the errors of a generation by source and test."""
    rows = servers.medians(frame[frame["left_out"] == ""], ("test", "source", "gpu", "degree"))
    columns = [Column(label) for label in ("test", "source", "GPU", "degree", "runs")]
    for label in LABELS:
        columns += [Column(label, "%", 3), Column("bias", "%", 3)]
    values = {one: getattr(found, one) for one in (*GENERATIONS[name].free, "request_s")}
    said = ", ".join(f"{one.removesuffix('_s')} {1e3 * v:.3g} ms" for one, v in values.items())
    body = tuple(map(tuple, rows.itertuples(index=False)))
    return Table(f"vLLM {found.releases}", tuple(columns), body, (f"Fitted to all: {said}.",))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or list(GENERATIONS):
        print(table(chosen, *left_out(chosen)))
