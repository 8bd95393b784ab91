"""Faults injected into a real engine, and whether ``hetero observe`` names them.

A small Llama behind ``transformers serve`` (:mod:`pipelines.bench.faulted`) is profiled, its steps
paced so that other programs of the machine do not count as faults. Every case then replays one
trace undisturbed, to which the engine is refitted, one with its fault, which is observed against
that refit, and fresh requests with the fault still on, which the engine as observed has to predict.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from hetero.apps import profiling
from hetero.apps.profiling.observed import Observation, ServedLog, observe
from hetero.apps.serving.replay import replay
from hetero.deployment import Deployment, Engine, Replica
from hetero.files import writing
from hetero.routers import Oracle, RoundRobin
from hetero.simulator import simulate
from hetero.streams import stream
from hetero.workload import Trace
from pipelines.bench.engines import Running, engine, write_model
from pipelines.bench.live import PATIENCE_S, STEP_TOKENS, short_conversations
from pipelines.bench.measured import Say, silent

BLOCKS, BLOCK_TOKENS = 96, 16
PACE: Final = {"step_s": 0.08, "decoding_s": 0.008, "token_s": 0.002}
FAULTS: Final[tuple[tuple[str, dict[str, float]], ...]] = (
    *(("decode", {"decode": factor}) for factor in (1.5, 2.0, 2.5)),
    *(("KV cache", {"cache": share}) for share in (0.5, 0.4, 0.3)),
    *(("front end", {"front_s": seconds}) for seconds in (0.3, 0.6, 1.2)),
    ("prefill", {"prefill_s_per_token": 0.002}),
)
"""The part that is to be named, and what :mod:`pipelines.bench.faulted` does to it."""


def bench(
    *,
    repeats: int = 1,
    sound: int = 4,
    requests: int = 80,
    rate: float = 0.8,
    seed: int = 0,
    progress: Say = silent,
) -> pd.DataFrame:
    """Inject every fault so often, and nothing into ``sound`` cases.

    Parameters
    ----------
    requests, rate
        Of each of the three replays of a case; arrivals come in bursts.

    Returns
    -------
    One row per case: fault and size, parts named, the interval of the part that was disturbed, and
    errors of means over fresh requests after the refit [%].
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", hidden=64, layers=2)
        fault = folder / "fault.json"
        fault.write_text(json.dumps(PACE), encoding="utf-8")
        with engine(
            folder / "model",
            blocks=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            step_tokens=STEP_TOKENS,
            fault=fault,
        ) as running:
            work = _Injection(running, fault, folder, requests, rate, seed, progress)
            work.profile()
            cases = [*FAULTS * repeats, *[("", dict[str, float]())] * sound]
            order = stream(seed, "order").permutation(len(cases))
            rows = [work.case(k, *cases[i]) for k, i in enumerate(order)]
    return pd.DataFrame(rows)


class _Injection:
    """An engine, its profile, and cases one after the other."""

    def __init__(
        self,
        running: Running,
        fault: Path,
        folder: Path,
        requests: int,
        rate: float,
        seed: int,
        say: Say,
    ) -> None:
        self.endpoint = profiling.Endpoint(running.url, running.model, timeout_s=PATIENCE_S)
        self.fault, self.folder, self.say = fault, folder, say
        self.requests, self.rate, self.seed = requests, rate, seed

    def profile(self) -> None:
        """Fit the step times that the first observation begins with."""
        file = self.folder / "rounds.csv"
        profiling.profile(
            self.endpoint, profiling.grid((1, 3, 8), (16, 48, 112), (12,)), file, progress=self.say
        )
        rules = Engine(
            batching="chunked",
            admission="paged",
            max_step_tokens=STEP_TOKENS,
            block_tokens=BLOCK_TOKENS,
        )
        step = profiling.fitted(file).step
        self.told = Replica("engine", step, BLOCKS * BLOCK_TOKENS, engine=rules)

    def case(self, k: int, part: str, disturbed: dict[str, float]) -> dict[str, object]:
        """Undisturbed, disturbed, and disturbed again with fresh requests."""
        began = time.monotonic()
        sound = observe(self.log(f"{k}/sound", {}), self.told)
        seen = observe(self.log(f"{k}/seen", disturbed), sound.replica)
        fresh = self.log(f"{k}/fresh", disturbed)
        row: dict[str, object] = {"fault": part, "size": next(iter(disturbed.values()), 0.0)}
        row["named"] = ", ".join(seen.named)
        of = {one.part: one for one in seen.parts}.get(part)
        for end in ("told", "found", "low", "high"):
            row[end] = getattr(of, end) if of else np.nan
        row |= errors(fresh, seen)
        spent = time.monotonic() - began
        self.say(f"case {k + 1}, {spent:.0f} s: {row}")
        return row

    def log(self, what: str, disturbed: dict[str, float]) -> ServedLog:
        """What requests of their own saw with a fault."""
        with writing(self.fault, force=True) as part:  # the engine may read it at any moment
            part.write_text(json.dumps(PACE | disturbed), encoding="utf-8")
        drawn = short_conversations(self.requests, stream(self.seed, f"requests/{what}"))
        gaps = stream(self.seed, f"gaps/{what}").gamma(0.5, 2.0 / self.rate, self.requests)
        trace = Trace(np.cumsum(gaps), drawn.input_tokens, drawn.output_tokens, name=what)
        journal = self.folder / f"{what.replace('/', '-')}.journal"
        run = replay(
            self.endpoint, trace, journal, seed=int(stream(self.seed, what).integers(2**31))
        )
        return ServedLog.of(run.frame(), what)


def errors(fresh: ServedLog, seen: Observation) -> dict[str, float]:
    """Errors of means over fresh requests, as the refitted engine is simulated [%]."""
    trace, tpot_s = fresh.trace, fresh.tpot_s
    run = simulate(Deployment("refitted", (seen.replica,)), trace, RoundRobin(), predictor=Oracle())
    later = np.maximum(trace.output_tokens - 1, 0)
    pairs: Sequence[tuple[str, np.ndarray, np.ndarray]] = (
        ("TTFT", run.ttft_s, fresh.ttft_s),
        ("TPOT", run.tpot_s, tpot_s),
        ("E2E", run.e2e_s, fresh.ttft_s + np.nan_to_num(tpot_s) * later),
    )
    return {
        f"{name} %": 100.0 * float(np.nanmean(simulated) / np.nanmean(real) - 1.0)
        for name, simulated, real in pairs
    }


if __name__ == "__main__":
    found = bench(progress=print)
    named = found["named"] == found["fault"]
    for bad, what in ((True, "name the fault alone"), (False, "name nothing")):
        of = named[(found["fault"] != "") == bad]
        print(f"{of.sum()} of {len(of)} cases {what}.")
    print(found.to_string(index=False, float_format="%.3g"))
