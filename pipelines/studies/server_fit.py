r"""Overheads of vLLM fitted to runs of real servers, and tested on GPUs and models left out.

The form is that of :mod:`hetero.latency.overheads`: constants per step, per decoding request, per
layer's launch and per request, one set for a generation of the engine. No GPU and no model has a
factor of its own. Step times of the kernels are :func:`pipelines.studies.servers.kernels` and stay
as they are.

What is fitted minimises :math:`\rho(\ln(simulated / measured))`, ``rho`` scipy's ``soft_l1``, of
TPOT or, where only the whole batch was timed, of its time; every pair of GPU and model weighs the
same. Runs whose median TTFT is beyond half a second take no part, they queue; nor do runs on GPUs
and replicas whose kernels are themselves fitted to runs
(:mod:`pipelines.studies.server_gpus`). Their errors count all the same, as do those of sources that
are tested alone. The time per request is then the median of what TTFT lacks on one GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from hetero.arrays import Floats
from hetero.catalog.engines import EngineOverheads
from hetero.latency.overheads import with_overheads
from hetero.latency.step import StepModel
from pipelines.studies import server_gpus, servers
from pipelines.studies.servers import AWAY, QUEUED_S, ServerRun, StepsOfRun

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
    source="where the search begins",
)


@dataclass(frozen=True, slots=True)
class Generation:
    """Releases that share their overheads, the runs that show them, and which are free.

    Attributes
    ----------
    whole_from
        First release that launches all layers at once.
    tested
        Sources that take no part in the fit.
    """

    releases: str
    runs: Callable[[], list[ServerRun]]
    free: tuple[str, ...]
    whole_from: str = ""
    tested: tuple[str, ...] = ()


def _first() -> list[ServerRun]:
    """Releases 0.4 to 0.6: prompts before anything decodes on."""
    found = servers.runs("argonne")
    batches = [run for run in found if run.trace.input_tokens[0] in servers.BATCH_TOKENS]
    others = [run for name in ("nm_vllm", "dstack", "dstack batches") for run in servers.runs(name)]
    return batches + others


def _second() -> list[ServerRun]:
    """Releases 0.8 to 0.15: prompts in chunks, from 0.14 on with the next step scheduled ahead."""
    return [*servers.runs("iog"), *servers.runs("blis")]


def _around(found: EngineOverheads, run: ServerRun) -> EngineOverheads:
    """What a run has of overheads."""
    return found.of(run.release, run.engine.schedule_ahead)


GENERATIONS: Final = {
    "first": Generation(
        "0.4-0.6",
        _first,
        ("step_s", "worker_s", "decoding_s"),
        tested=(
            *("dstack amd", "dstack meta", "dstack batches amd", "dstack batches meta"),
            "nm_vllm 4-bit",
        ),
    ),
    "second": Generation("0.8-0.15", _second, ("step_s", "decoding_s", "launch_s"), "0.11"),
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
            whole_from=self.generation.whole_from,
            request_s=float(f"{request_s:.{digits}g}"),
            source="fitted on serving_runs",
            **rounded,
        )

    def steps(self, found: EngineOverheads, fold: Fold | None = None) -> StepsOfRun:
        """Step times of the runs with overheads; kernels without their GPU or model in a fold."""

        def made(run: ServerRun) -> StepModel:
            left = fold and server_gpus.left_out(run, fold)
            kernels = left or self.kernels[run]
            return with_overheads(kernels, _around(found, run), run.llm, run.tensor_parallel)

        return made

    def simulated(self, run: ServerRun, found: EngineOverheads) -> dict[str, float]:
        """Quantities of a run with overheads.

        A batch that is prefilled before it decodes takes all of its steps one after the other, so
        that its time without overheads is simulated once, and theirs are counted.
        """
        own = _around(found, run)
        if run.statistic != "last" or run.engine.batching != "prefill first" or own.launch_s:
            return servers.simulated(run, servers.served(run, self.steps(found)))
        if run not in self.alone:
            result = servers.served(run, self.kernels.__getitem__)
            self.alone[run] = servers.simulated(run, result)["e2e_s"]
        per_step = own.step_s + (run.tensor_parallel > 1) * own.worker_s
        prefills = math.ceil(run.trace.input_tokens.sum() / run.engine.max_step_tokens)
        later = int(run.trace.output_tokens[0]) - 1
        more = (prefills + later) * per_step + later * len(run.trace) * own.decoding_s
        return {"e2e_s": self.alone[run] + more + own.request_s}

    def takes_part(self, run: ServerRun) -> bool:
        """Whether a run shows the overheads."""
        return (
            run.source not in self.generation.tested
            and run.measured.get("ttft_s", 0.0) < QUEUED_S
            and server_gpus.group_of(run) is None
        )

    def fit(
        self, runs: Sequence[ServerRun], near: EngineOverheads | None = None
    ) -> EngineOverheads:
        """Overheads of some of the runs.

        Parameters
        ----------
        near
            Where to look first; it shortens the search and has no weight in it.
        """
        runs = [run for run in runs if self.takes_part(run)]
        pairs = [(run.gpu, run.llm.name) for run in runs]
        of_pair = Counter(pairs)
        weight = 1.0 / np.sqrt([of_pair[pair] for pair in pairs])
        start = np.array(
            [
                max(getattr(near or _START, name), 0.1 * getattr(_START, name))
                for name in self.generation.free
            ]
        )
        shown = [_around(self.overheads(start), run) for run in runs]
        # What no run shows stays 0.
        start *= [any(getattr(own, name) for own in shown) for name in self.generation.free]

        def residuals(x: Floats) -> Floats:
            found = self.overheads(start * np.exp(x - AWAY), digits=9)
            rows = []
            for run in runs:
                of = "tpot_s" if "tpot_s" in run.measured else "e2e_s"
                rows.append(np.log(self.simulated(run, found)[of] / run.measured[of]))
            return np.multiply(weight, rows)

        solved = least_squares(
            residuals,
            np.full(len(start), AWAY),
            bounds=(AWAY - 5.0, AWAY + 3.0),
            loss="soft_l1",
            f_scale=0.05,
            diff_step=np.array(0.05 / AWAY),
            xtol=3e-3,
            ftol=3e-3,
        )
        values = start * np.exp(solved.x - AWAY)
        found = self.overheads(values)
        lacking = [
            run.measured["ttft_s"] - self.simulated(run, found)["ttft_s"]
            for run in runs
            if run.tensor_parallel == 1 and "ttft_s" in run.measured
        ]
        return self.overheads(values, max(0.0, float(np.median(lacking))) if lacking else 0.0)

    def errors(
        self, runs: Sequence[ServerRun], found: EngineOverheads, fold: Fold | None = None
    ) -> pd.DataFrame:
        """Errors of some runs with overheads, kernels fitted without their GPU or model."""
        frame = servers.errors_frame(runs, self.steps(found, fold))
        return frame.assign(fitted=[self.takes_part(run) for run in runs])


@lru_cache(maxsize=2)
def left_out(name: str) -> tuple[EngineOverheads, pd.DataFrame]:
    """Overheads of a generation, and errors of its runs in and out of the sample.

    Returns
    -------
    The overheads fitted to all runs; and one row per run and way to test (``none``: no overheads,
    ``in sample``, ``gpu`` and ``llm``: with all runs of its GPU or model left out, also where
    kernels take something from them), with the columns of
    :func:`pipelines.studies.servers.errors_frame` and ``fitted``, whether it takes part in a fit.
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
            parts.append(fit.errors(out, fit.fit(rest, every), fold).assign(test=fold))
    return every, pd.concat(parts, ignore_index=True)


def _key(run: ServerRun, fold: Fold) -> str:
    return run.gpu if fold == "gpu" else run.llm.name
