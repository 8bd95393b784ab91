r"""Mixtures of experts on real servers: what their kernels reach, fitted and tested left out.

InferenceMAX (dataset ``serving_runs``) has closed loops of clients on gpt-oss-120b and DeepSeek-R1
under vLLM and SGLang, Argonne static batches of Mixtral under vLLM of 2024, BLIS stages of Mixtral
under vLLM 0.15. Each run is simulated as ``hetero simulate`` would; with the shares of
:class:`~hetero.latency.models.roofline.ExpertEfficiency` fitted to TPOT and TTFT, or the time of a
whole batch, of all runs, of all but a GPU's, and of all but a model's. Experts stored in a narrower
type than what is computed in (gpt-oss, mxfp4) have shares of their own. TTFT under SGLang is many
times its kernels and takes no part in a fit.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from hetero.arrays import Floats
from hetero.catalog import EngineName, gpu, llm
from hetero.deployment import engine_on
from hetero.latency.models.roofline import ExpertEfficiency
from hetero.latency.resolve import resolve
from hetero.latency.step import StepModel
from hetero.streams import stream
from hetero.workload import Trace
from pipelines.studies import servers
from pipelines.studies.calibration import summary
from pipelines.studies.server_fit import FOLDS, LABELS, Fold
from pipelines.studies.servers import ServerRun, StepsOfRun, read, served, simulated

# Smallest and largest share of compute, share of bandwidth, and time per layer [us]; and the weak
# prior of each: its centre, and the deviation of its logarithm. Two of them can explain one run.
_BOUNDS: Final = ((0.02, 2.0), (0.1, 2.0), (0.1, 500.0))
_PRIOR: Final = ((0.5, 1.0), (1.0, 0.1), (5.0, 1.5))
_SCALE: Final = 0.1
_AWAY: Final = 10.0  # the solver's steps are shares of what it varies
_GPUS: Final = {
    "h100": "H100-SXM",
    "h200": "H200-SXM",
    "b200": "B200-SXM",
    "mi300x": "MI300X",
    "mi325x": "MI325X",
    "mi355x": "MI355X",
}
_MODELS: Final = {"gptoss": "gpt-oss-120b", "dsr1": "DeepSeek-R1"}
_SHORTEST = 0.8  # of the lengths asked for; shorter ones are not drawn


def inferencemax() -> Iterator[ServerRun]:
    """The last run of every setting of one replica, under vLLM and SGLang."""
    frame = read("inferencemax_even.csv")
    kept = (frame["latest"] == 1) & ~frame["disagg"] & (frame["spec_decoding"] == "none")
    kept &= frame["framework"].isin(["vllm", "sglang"]) & (frame["ep"] == 1)
    for row in frame[kept].to_dict("records"):
        model = llm(_MODELS[row["infmax_model_prefix"]])
        if row["precision"] == "fp4" and not model.expert_bits:
            continue
        clients, name = int(row["conc"]), _GPUS[row["hw"].split("-")[0]]
        release = row["image"].rpartition(":")[2].lstrip("v").split("-")[0].split(".post")[0]
        yield ServerRun(
            "inferencemax",
            f"{row['framework']} {release}",
            name,
            model,
            int(row["tp"]),
            f"{clients} clients, {row['isl']} + {row['osl']}",
            lengths(10 * clients, row["isl"], row["osl"]).closed_loop(clients),
            {
                "ttft_s": row["median_ttft"],
                "tpot_s": row["median_tpot"],
                "e2e_s": row["median_e2el"],
                "output_tps": row["output_tput_per_gpu"] * row["tp"],
            },
            precision="fp16" if model.expert_bits else row["precision"],
            engine=replace(engine_on(gpu(name), row["framework"], release), prefix_cache=False),
            family=row["framework"],
        )


def lengths(count: int, inputs: int, outputs: int) -> Trace:
    """Requests of 0.8 to 1 times the lengths asked for, as the benchmark draws them."""
    rng = stream(0, "inferencemax")
    prompts, answers = (
        rng.integers(round(_SHORTEST * n), n + 1, count).astype(np.int32) for n in (inputs, outputs)
    )
    return Trace(np.zeros(count), prompts, answers, name=f"{inputs} + {outputs}")


@dataclass(frozen=True, eq=False)
class Family:
    """Runs under one engine on GPUs of one vendor, whose experts are stored alike."""

    engine: EngineName
    vendor: str
    narrow: bool
    runs: tuple[ServerRun, ...]

    def steps(self, shares: ExpertEfficiency) -> StepsOfRun:
        """Step times with these shares, under the engine's overheads."""

        def of(run: ServerRun) -> StepModel:
            return resolve(
                gpu(run.gpu),
                run.llm,
                run.tensor_parallel,
                engine=run.family,
                release=run.release,
                precision=run.precision,
                experts=shares,
            ).step

        return of

    def errors(self, shares: ExpertEfficiency, runs: Sequence[ServerRun] = ()) -> Floats:
        """Logarithms of simulated over measured: TPOT and TTFT or E2E; of a batch its time."""
        steps, rows = self.steps(shares), []
        for run in runs or self.runs:
            own = simulated(run, served(run, steps))
            keys = ("tpot_s", "ttft_s" if self.engine == "vllm" else "e2e_s")
            keys = ("e2e_s", "e2e_s") if run.statistic == "last" else keys
            rows.append([math.log(own[key] / run.measured[key]) for key in keys])
        return np.array(rows)

    def fit(self, runs: Sequence[ServerRun] = ()) -> ExpertEfficiency:
        """Shares that explain the runs best; every pair of GPU and model weighs the same.

        Runs that wait for room in the KV cache say nothing of kernels and take no part.
        """
        chosen = tuple(filter(_held, runs or self.runs))
        many = Counter((run.gpu, run.llm.name) for run in chosen)
        weight = np.array([many[run.gpu, run.llm.name] ** -0.5 for run in chosen])[:, None]
        low, high = np.log(_BOUNDS).T + _AWAY
        centre, deviation = np.log([one for one, _ in _PRIOR]), [one for _, one in _PRIOR]

        def residuals(logs: Floats) -> Floats:
            found = _shares(logs - _AWAY)
            far = _SCALE * (logs - _AWAY - centre) / deviation
            return np.append((weight * self.errors(found, chosen)).ravel(), far)

        found = least_squares(
            residuals,
            centre + _AWAY,
            bounds=(low, high),
            loss="soft_l1",
            f_scale=_SCALE,
            diff_step=[0.005],
            xtol=1e-3,
            ftol=1e-3,
        )
        return _shares(found.x - _AWAY)

    def left_out(self, fold: Fold) -> Iterator[tuple[ServerRun, ExpertEfficiency]]:
        """Every run with the shares of a fit that does not know its GPU, or its model."""

        def name(run: ServerRun) -> str:
            return run.gpu if fold == "gpu" else run.llm.name

        for held in dict.fromkeys(map(name, self.runs)):
            rest = [run for run in self.runs if name(run) != held]
            shares = self.fit(rest) if rest else ExpertEfficiency()
            yield from ((run, shares) for run in self.runs if name(run) == held)


def _held(run: ServerRun) -> bool:
    """Whether the KV cache has room for all clients, or for the batch, at once."""
    (replica,) = served(run).deployment.replicas
    trace = run.trace
    each = float((trace.input_tokens + trace.output_tokens).mean())
    return (trace.clients or len(trace)) * each < replica.kv_tokens


def _shares(logs: Floats) -> ExpertEfficiency:
    compute, bandwidth, layer_us = (float(f"{value:.3g}") for value in np.exp(logs))
    return ExpertEfficiency(
        compute_share=compute, bandwidth_share=bandwidth, layer_s=1e-6 * layer_us
    )


def families() -> tuple[Family, ...]:
    """The runs by engine, vendor, and whether experts are narrower than what is computed in."""
    runs = [*inferencemax(), *servers.runs("argonne", experts=True)]
    groups: dict[tuple[EngineName, str, bool], list[ServerRun]] = {}
    for run in runs:
        key = (run.family, gpu(run.gpu).vendor, run.llm.expert_bits > 0)
        groups.setdefault(key, []).append(run)
    return tuple(Family(*key, tuple(found)) for key, found in sorted(groups.items()))


def shares() -> pd.DataFrame:
    """Rows of ``data/measured/experts.csv``: a fit per family, to all its runs."""
    rows = []
    for family in families():
        found = family.fit()
        rows.append(
            {
                "engine": family.engine,
                "vendor": family.vendor,
                "narrow": int(family.narrow),
                "compute_share": found.compute_share,
                "bandwidth_share": found.bandwidth_share,
                "layer_us": round(1e6 * found.layer_s, 3),
                "runs": len(family.runs),
                "gpus": " ".join(sorted({run.gpu for run in family.runs})),
                "models": " ".join(sorted({run.llm.name for run in family.runs})),
            }
        )
    return pd.DataFrame(rows)


def errors() -> pd.DataFrame:
    """Rows of ``data/measured/expert_servers.csv``: the error of every run, left out and fitted.

    Columns as of :func:`pipelines.studies.servers.errors`, and ``test``: ``gpu`` and ``llm`` where
    the shares come from a fit without that GPU or that model (with no run left, shares are 1),
    ``default`` with what every command takes.
    """
    parts = []
    for family in families():
        frame = servers.errors(family.runs)
        parts.append(frame.assign(test="default"))
        for fold in FOLDS:
            rows = [
                servers.errors([run], family.steps(found)) for run, found in family.left_out(fold)
            ]
            parts.append(pd.concat(rows).assign(test=fold))
    columns = ["test", "source", "server", "gpu", "llm", "degree", "load", *LABELS]
    found = pd.concat(parts, ignore_index=True)[columns]
    return found.assign(**{label: found[label].round(1) for label in LABELS})


if __name__ == "__main__":
    pd.set_option("display.width", 200)
    found = summary(errors(), ("test", "server", "gpu", "llm"))
    sys.stdout.write(f"{found.round(1).to_string()}\n")
