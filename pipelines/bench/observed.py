"""Faults injected into a real engine, and whether ``hetero observe`` names them.

A small Llama behind ``transformers serve`` (:mod:`pipelines.bench.faulted`) is profiled, its steps
paced so that other programs of the machine do not count as faults, and refitted to requests of its
own, undisturbed. Every case then replays requests with its fault, which are observed against that
refit, and fresh ones with the fault still on, which the engine as observed has to predict.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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

BLOCKS, BLOCK_TOKENS = 48, 16  # which bursts fill now and then
FREE_SHARE = 0.15  # below which its first-come scheduler takes no prompt beside decoding requests
PACE: Final = {"step_s": 0.08, "decoding_s": 0.008, "token_s": 0.002}
FAULTS: Final[dict[str, tuple[str, float, float]]] = {
    "decode": ("decode", 1.4, 2.0),
    "KV cache": ("cache", 0.5, 0.65),
    "front end": ("front_s", 0.3, 1.2),
    "prefill": ("prefill_s_per_token", 0.002, 0.006),
}
"""The part that is to be named, what :mod:`pipelines.bench.faulted` does to it, and how much."""


def cases(repeats: int, sound: int, rng: np.random.Generator) -> list[tuple[str, dict[str, float]]]:
    """Faults of drawn sizes, each part so often, and cases without any, in random order."""
    found = [
        (part, {name: round(float(rng.uniform(low, high)), 4)})
        for part, (name, low, high) in FAULTS.items()
        for _ in range(repeats)
    ]
    found += [("", {}) for _ in range(sound)]
    return [found[k] for k in rng.permutation(len(found))]


def bench(
    *,
    repeats: int = 3,
    sound: int = 2,
    requests: int = 80,
    rate: float = 1.1,
    engines: int = 4,
    seed: int = 0,
    progress: Say = silent,
) -> pd.DataFrame:
    """Inject a fault into every part so often, and nothing into ``sound`` cases.

    Replays come first, of several engines side by side: what observing them takes disturbs none.

    Parameters
    ----------
    requests, rate
        Of each of the two replays of a case, in bursts; an engine is first refitted to twice as
        many.

    Returns
    -------
    One row per case: fault and size, parts named, the interval of the part that was disturbed, and
    errors of means over fresh requests after the refit [%].
    """
    every = cases(repeats, sound, stream(seed, "cases"))
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ends:
        folder = Path(name)
        write_model(folder / "model", hidden=64, layers=2)
        work = []
        for k in range(engines):
            fault = folder / f"fault-{k}.json"
            fault.write_text(json.dumps(PACE), encoding="utf-8")
            size = {"blocks": BLOCKS, "block_tokens": BLOCK_TOKENS, "step_tokens": STEP_TOKENS}
            running = ends.enter_context(engine(folder / "model", fault=fault, **size))
            drawn = (2 * requests, requests, rate)
            work.append(_Injection(running, fault, folder, drawn, f"{seed}/{k}", progress))
        told = work[0].profiled()
        with ThreadPoolExecutor(engines) as side_by_side:
            shares = (dict(list(enumerate(every))[k::engines]) for k in range(engines))
            logs = list(side_by_side.map(lambda one, share: one.logs(share), work, shares))
    rows = {}
    for sound_log, seen in logs:
        known = observe(sound_log, told).replica
        for k, (log, fresh) in seen.items():
            part, disturbed = every[k]
            rows[k] = row(part, disturbed, observe(log, known), fresh)
            progress(f"case {k + 1}: {rows[k]}")
    return pd.DataFrame([rows[k] for k in sorted(rows)])


class _Injection:
    """An engine, its profile, and what requests see of it in one case after the other."""

    def __init__(
        self,
        running: Running,
        fault: Path,
        folder: Path,
        drawn: tuple[int, int, float],
        name: str,
        say: Say,
    ) -> None:
        self.endpoint = profiling.Endpoint(running.url, running.model, timeout_s=PATIENCE_S)
        self.fault, self.folder, self.say, self.name = fault, folder, say, name
        self.first, self.requests, self.rate = drawn

    def profiled(self) -> Replica:
        """The engine with the step times that the first observation begins with."""
        file = self.folder / "rounds.csv"
        profiling.profile(
            self.endpoint, profiling.grid((1, 8), (16, 80), (12,)), file, progress=self.say
        )
        rules = Engine(
            batching="chunked",
            admission="paged",
            max_step_tokens=STEP_TOKENS,
            block_tokens=BLOCK_TOKENS,
            free_share=FREE_SHARE,
        )
        step = profiling.fitted(file).step
        return Replica("engine", step, BLOCKS * BLOCK_TOKENS, engine=rules)

    def logs(
        self, share: dict[int, tuple[str, dict[str, float]]]
    ) -> tuple[ServedLog, dict[int, tuple[ServedLog, ServedLog]]]:
        """What the first requests saw, undisturbed, and two lots of each case, disturbed."""
        first = self.log("sound", {}, self.first)
        seen = {}
        for k, (part, disturbed) in share.items():
            began = time.monotonic()
            pair = [self.log(f"{k}/{lot}", disturbed, self.requests) for lot in ("seen", "fresh")]
            seen[k] = (pair[0], pair[1])
            self.say(f"replayed case {k + 1}, {part}, {time.monotonic() - began:.0f} s")
        return first, seen

    def log(self, what: str, disturbed: dict[str, float], count: int) -> ServedLog:
        """What requests of their own saw with a fault."""
        with writing(self.fault, force=True) as part:  # the engine may read it at any moment
            part.write_text(json.dumps(PACE | disturbed), encoding="utf-8")
        name = f"{self.name}/{what}"
        drawn = short_conversations(count, stream(0, f"requests/{name}"))
        gaps = stream(0, f"gaps/{name}").gamma(0.5, 2.0 / self.rate, count)
        trace = Trace(np.cumsum(gaps), drawn.input_tokens, drawn.output_tokens, name=name)
        journal = self.folder / f"{name.replace('/', '-')}.journal"
        run = replay(self.endpoint, trace, journal, seed=int(stream(0, name).integers(2**31)))
        frame = run.frame()
        answered = frame["ttft_s"] > 0
        if not answered.all():
            self.say(f"{name}: {(~answered).sum()} of {count} requests were not answered")
        return ServedLog.of(frame[answered], name)


def row(
    part: str, disturbed: dict[str, float], seen: Observation, fresh: ServedLog
) -> dict[str, object]:
    """One case, as :func:`bench` gives it."""
    found: dict[str, object] = {"fault": part, "size": next(iter(disturbed.values()), 0.0)}
    found["named"] = ", ".join(seen.named)
    of = {one.part: one for one in seen.parts}.get(part)
    for end in ("told", "found", "low", "high"):
        found[end] = getattr(of, end) if of else np.nan
    return found | errors(fresh, seen)


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
