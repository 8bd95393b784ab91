"""Two real engines of different size behind every router, and the simulator on the same requests.

The experiment of Xiong et al. (Fig. 5) on engines that anyone can start: two Llamas with random
weights behind ``transformers serve``, each pinned to a core of its own. Each is profiled by
requests, its step times are fitted, shares are planned from them, and ``hetero serve`` dispatches
more requests than both carry, with one router after the other in random order. The simulator then
gets the same requests at the same times, with the fitted step times and the same router objects.
Dispatcher and client share the two cores with the engines: there is nowhere else to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import psutil
from numpy.typing import NDArray

from hetero import timings, workload
from hetero.apps import profiling
from hetero.apps.serving.deployment_file import write
from hetero.apps.serving.settings import DeploymentFile
from hetero.catalog import Gpu
from hetero.deployment import Deployment, Engine, Replica
from hetero.display import Column, Table
from hetero.errors import EndpointError, ParameterError
from hetero.planners.baselines.capacity import Bucket, capacity_rps
from hetero.routers import (
    Builtin,
    HeteroServe,
    Oracle,
    Predictive,
    RoundRobin,
    WeightedRoundRobin,
    Workload,
)
from hetero.simulator import simulate
from hetero.streams import stream
from hetero.workload import Trace
from pipelines.bench.engines import Running, engine, free_port, started, write_model
from pipelines.bench.measured import Measured, Say, cpu_s, silent
from pipelines.studies import live_data

_MODEL = "llama"


SIZES: Final = {"small": (768, 8), "large": (1024, 12)}  # hidden size, layers
BLOCKS, BLOCK_TOKENS, STEP_TOKENS = 24, 64, 2048
_BATCHES, _INPUTS, _OUTPUTS = (1, 3, 8), (16, 48, 112), (12,)
PATIENCE_S: Final = 300.0  # a loaded machine is slow, not broken
_LIMITS = {"token_s": PATIENCE_S, "queue_s": PATIENCE_S, "health_timeout_s": 60.0}


def profiles(
    running: dict[str, Running], sizes: dict[str, int], folder: Path, say: Say
) -> tuple[pd.DataFrame, dict[str, profiling.Fitted]]:
    """Rounds of every engine, one engine after the other, and what is fitted to them."""
    frames, fits = [], {}
    for called, one in running.items():
        file = folder / f"{called}.csv"
        endpoint = profiling.Endpoint(one.url, one.model, timeout_s=PATIENCE_S)
        settings = profiling.grid(_BATCHES, _INPUTS, _OUTPUTS)
        say(f"profiling '{called}'")
        profiling.profile(endpoint, settings, file, repeats=3, progress=say)
        fits[called] = profiling.fitted(file)
        frame = pd.read_csv(file).drop(columns=["model"])  # a folder of this machine
        frames.append(frame.assign(engine=called, parameters=sizes[called]))
    return pd.concat(frames, ignore_index=True), fits


def replica(called: str, fit: profiling.Fitted, sizes: dict[str, int]) -> Replica:
    """The engine as planners, routers and the simulator know it.

    Routers that read capabilities get those of the core per parameter of the model: the cores are
    equal, and it is the models that make one engine slower. Only ratios count.
    """
    hidden, layers = SIZES[called]
    slower = sizes[called] / sizes["small"]
    per_token = 4.0 * hidden * layers  # keys and values of half the heads, 4 bytes each
    core = Gpu(
        name=f"core with '{called}'",
        mem_gib=BLOCKS * BLOCK_TOKENS * per_token / 2**30,
        mem_bw_gbs=10.0 / slower,
        fp16_tflops=0.05 / slower,
        link_type="none",
        link_gbs=1.0,
        pcie_gbs=1.0,
        source="assumed",
    )
    rules = Engine(
        batching="chunked",
        admission="paged",
        max_step_tokens=STEP_TOKENS,
        block_tokens=BLOCK_TOKENS,
    )
    return Replica(called, fit.step, BLOCKS * BLOCK_TOKENS, per_token, engine=rules, gpu=core)


def short_conversations(count: int, rng: np.random.Generator) -> Trace:
    """Conversations of the Azure trace's twin, inputs a 24th and outputs an eighth as long."""
    whole = workload.load("azure2023_conv").sample(count, rng)
    inputs = np.clip(whole.input_tokens // 24, 8, 128)
    outputs = np.clip(whole.output_tokens // 8, 4, 64)
    return Trace(whole.arrival_s, inputs, outputs, name="short conversations")


def compared(capacities_rps: tuple[float, ...], sample: Trace) -> tuple[Builtin, ...]:
    """The routers that are compared; weights are planned, bins and lengths those of the sample."""
    tail = int(np.quantile(sample.output_tokens, 0.9))
    return (
        RoundRobin(),
        WeightedRoundRobin([round(x / sum(capacities_rps), 4) for x in capacities_rps]),
        Workload(),
        HeteroServe(
            bins_tokens=[int(np.quantile(sample.input_tokens, q)) for q in (1 / 3, 2 / 3)],
            footprint_tokens=tail,
            longest_tokens=int(sample.input_tokens.max()),
        ),
        Predictive(),
    )


@dataclass(frozen=True, repr=False)
class LiveBench(Measured):
    """What was measured, and what the simulator says of it.

    Attributes
    ----------
    runs, rounds
        See :mod:`pipelines.studies.live_data`.
    notes
        Under which conditions.
    """

    runs: pd.DataFrame
    rounds: pd.DataFrame
    notes: tuple[str, ...]

    def table(self) -> Table:
        """Throughput per router, measured and simulated."""
        gain = live_data.gains_frame(self.runs, RoundRobin().name)
        ratios = {
            one["case"]: (one["ratio"], one["low"])
            for one in gain[gain["origin"] == "real"].to_dict("records")
        }
        rows = []
        for kind in ("alone", "router"):
            for one in live_data.cases_frame(self.runs, kind).to_dict("records"):
                half = 0.5 * (one["real_high"] - one["real_low"])
                means = one["real"], half, one["simulated"], one["error_percent"]
                rows.append((one["case"], *means, *ratios.get(one["case"], (float("nan"),) * 2)))
        columns = (
            Column("case"),
            Column("real", "tokens/s", 3),
            Column("half interval", "tokens/s", 2),
            Column("simulated", "tokens/s", 3),
            Column("error", "%", 2),
            Column("over round robin", "", 3),
            Column("at least", "", 3),
        )
        return Table("Real engines", columns, tuple(rows), self.notes)

    def keep(self) -> None:
        """Write ``live.csv`` and ``live_profile.csv`` of ``data/measured``."""
        live_data.record(self.runs, self.rounds)

    def record(self) -> list[dict[str, object]]:
        """One row per run, for JSON."""
        return self.runs.to_dict("records")  # type: ignore[return-value]


def bench(
    *,
    repeats: int = 5,
    requests: int = 80,
    load: float = 1.5,
    alone: int = 3,
    max_minutes: float = 7.5,
    seed: int = 0,
    progress: Say = silent,
) -> LiveBench:
    """Run the experiment on this machine.

    Parameters
    ----------
    repeats
        Runs per router; each has requests of its own, the same for every router.
    requests
        Requests per run.
    load
        Arrival rate over what both engines are planned to carry.
    alone
        Runs of each engine alone, which show the error of its step times apart from routing.
    max_minutes
        No further repeat begins that would probably end later.
    seed
        Of requests, arrivals and the order of the runs.

    Raises
    ------
    EndpointError
        If a process does not start, or a request is not answered.
    """
    say = progress
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise ParameterError(
            f"Two engines need a core each; this process may use {len(cores)}.",
            resolve="run it on a machine with two cores or more.",
        )
    if min(repeats, requests, alone) < 2 or not load > 0:
        raise ParameterError(
            f"{repeats} repeats of {requests} requests and {alone} runs alone at a load of {load}.",
            resolve="give at least 2 of each, and a load above 0.",
        )
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ends:
        folder = Path(name)
        sizes = {}
        for k, (called, (hidden, layers)) in enumerate(SIZES.items()):
            say(f"starting '{called}': {layers} layers of {hidden}, core {cores[-k]}")
            sizes[called] = write_model(folder / called, hidden=hidden, layers=layers)
        running = {
            called: ends.enter_context(
                engine(
                    folder / called,
                    core=cores[-k],
                    blocks=BLOCKS,
                    block_tokens=BLOCK_TOKENS,
                    step_tokens=STEP_TOKENS,
                )
            )
            for k, called in enumerate(SIZES)
        }
        rounds, fits = profiles(running, sizes, folder, say)
        fleet = Deployment("live", tuple(replica(called, fits[called], sizes) for called in SIZES))
        sample = short_conversations(2000, stream(seed, "plan"))
        means = float(sample.input_tokens.mean()), float(sample.output_tokens.mean())
        mean = Bucket(*means, 1.0, (0.0, float("inf")))
        planned = tuple(capacity_rps(one, mean) for one in fleet.replicas)
        say(f"planned: {', '.join(f'{x:.3g}' for x in planned)} requests/s")
        work = _Work(fleet, running, folder, (cores[0], cores[-1]), seed, say)
        ends.enter_context(work.serving())
        rows = work.alone(alone, requests // 3, load, planned)
        rows += work.routers(
            compared(planned, sample), repeats, requests, load * sum(planned),
            begin + 60.0 * max_minutes,
        )  # fmt: skip
    found = pd.DataFrame(rows, columns=list(live_data.COLUMNS))
    notes = (
        f"{requests} requests per run at {load:g} times the planned "
        f"{sum(planned):.2f} requests/s, {means[0]:.0f} + {means[1]:.0f} tokens on average; "
        "throughput in output tokens from the first arrival to the last finish.",
        f"Engine 'small' on core {cores[0]}, 'large' on core {cores[-1]}; dispatcher and client "
        "share both.",
        f"Other programs took {100 * found['other_cpu_share'].mean():.0f} % of these cores; "
        f"{(time.monotonic() - begin) / 60:.1f} minutes.",
    )
    return LiveBench(found, rounds, notes)


class _Work:
    """Serves and replays, case by case."""

    def __init__(
        self,
        fleet: Deployment,
        running: dict[str, Running],
        folder: Path,
        cores: tuple[int, int],
        seed: int,
        say: Say,
    ) -> None:
        self.cores = cores
        self.fleet, self.running, self.folder = fleet, running, folder
        self.seed, self.say = seed, say
        self.file = folder / "deployment.yaml"
        self.count = 0

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """``hetero serve`` in a process of its own."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._write(self.fleet, RoundRobin())
        command = [sys.executable, "-c", "from hetero.apps.cli import main; main()", "serve"]
        command += [str(self.file), "--port", str(port)]
        log = self.folder / "serve.log"
        # The first start compiles the routers.
        with started(command, self.url, log, limit_s=240.0) as process:
            self.dispatcher = psutil.Process(process.pid)
            yield

    def _write(self, fleet: Deployment, router: Builtin) -> DeploymentFile:
        return write(
            fleet,
            self.file,
            model=_MODEL,
            router=router,
            urls={called: one.url for called, one in self.running.items()},
            models={called: one.model for called, one in self.running.items()},
            force=True,
            limits=_LIMITS,
            # Every request says how many tokens it wants, and gets them.
            outputs="allowed",
            learn=False,  # what is compared are the step times of its files
        )

    def _go_over(self, fleet: Deployment, router: Builtin) -> None:
        """Have the running dispatcher read another deployment."""
        self._write(fleet, router)
        self.dispatcher.send_signal(signal.SIGHUP)
        names = {one.name for one in fleet.replicas}
        end = time.monotonic() + 60.0
        while True:
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    found = json.loads(answer.read())
                if found["router"] == router.name and set(found["engines"]) == names:
                    return
            if time.monotonic() > end:
                raise EndpointError(
                    "The dispatcher did not take over another deployment within a minute.",
                    resolve="run again on an idle machine.",
                )
            time.sleep(0.05)

    def alone(
        self, repeats: int, requests: int, load: float, planned: tuple[float, ...]
    ) -> list[tuple[object, ...]]:
        """Every engine alone, at the same load."""
        rows = []
        for k in range(repeats):
            for one, rate in zip(self.fleet.replicas, planned, strict=True):
                lone = Deployment(one.name, (one,))
                trace = self._trace(f"{one.name}/{k}", requests, load * rate)
                rows += self._run(f"{one.name} alone", "alone", k, lone, RoundRobin(), trace)
        return rows

    def routers(
        self, routers: tuple[Builtin, ...], repeats: int, requests: int, rate: float, end: float
    ) -> list[tuple[object, ...]]:
        """Both engines behind every router, in random order within a repeat."""
        rows: list[tuple[object, ...]] = []
        begin = time.monotonic()
        for k in range(repeats):
            spent = (time.monotonic() - begin) / max(k, 1)
            if k >= 2 and time.monotonic() + spent > end:
                self.say(f"the time is up: {k} repeats")
                break
            trace = self._trace(str(k), requests, rate)
            for i in stream(self.seed, f"order/{k}").permutation(len(routers)):
                rows += self._run(routers[i].name, "router", k, self.fleet, routers[i], trace)
        order = {router.name: i for i, router in enumerate(routers)}
        # Rows come in pairs, and in the order that the routers are listed in.
        return sorted(rows, key=lambda row: (order[str(row[0])], row[2], row[3]))

    def _trace(self, what: str, requests: int, rate: float) -> Trace:
        drawn = short_conversations(requests, stream(self.seed, f"requests/{what}"))
        return drawn.poisson(rate, stream(self.seed, f"arrivals/{what}"))

    def _run(
        self, case: str, kind: str, k: int, fleet: Deployment, router: Builtin, trace: Trace
    ) -> list[tuple[object, ...]]:
        """One case: measured, then the same requests simulated."""
        self._go_over(fleet, router)
        self.count += 1
        endpoint = profiling.Endpoint(self.url, _MODEL, timeout_s=PATIENCE_S)
        engines = [psutil.Process(one.process.pid) for one in self.running.values()]
        hosts = [self.dispatcher, psutil.Process()]
        before = np.array([cpu_s(*engines), cpu_s(*hosts), _busy_s(self.cores)])
        # Words of their own in every run, or the engine finds prompts in its prefix cache.
        found = asyncio.run(_simulated(endpoint, trace, self.count))
        spent = np.array([cpu_s(*engines), cpu_s(*hosts), _busy_s(self.cores)]) - before
        spent[2] = max(spent[2] - spent[0] - spent[1], 0.0)
        span_s = _span_s(found)
        inputs, outputs = found[["input_tokens", "output_tokens"]].to_numpy(np.int32).T
        counted = Trace(found["arrival_s"].to_numpy(), inputs.copy(), outputs.copy())
        simulated = simulate(fleet, counted, router, predictor=Oracle(), seed=k).frame()
        first = fleet.replicas[0].name
        rows = [
            _row(case, kind, k, "real", seen=found, first=first, cpu=spent / (2 * span_s)),
            _row(case, kind, k, "simulated", seen=simulated, first=first, cpu=np.full(3, np.nan)),
        ]
        real, sim = (float(row[live_data.COLUMNS.index("output_tps")]) for row in rows)  # type: ignore[arg-type]
        self.say(
            f"{case}, repeat {k + 1}: {span_s:.1f} s, {real:.1f} tokens/s real, "
            f"{sim:.1f} simulated ({100 * (sim / real - 1):+.0f} %)"
        )
        return rows


async def _simulated(endpoint: profiling.Endpoint, trace: Trace, seed: int) -> pd.DataFrame:
    """What requests saw that were sent when the trace says, with lengths as the server counts."""
    prompts = profiling.Prompts()
    probes = {count: prompts.words(count, stream(seed, "probe")) for count in (8, 64)}
    async with endpoint.client() as client:
        # The engines know no end of an answer.
        ask = partial(endpoint.complete, client, ignore_eos=False)
        prompts.learn([(n, (await ask(text, 2)).input_tokens) for n, text in probes.items()])
        lengths = trace.input_tokens.tolist()
        texts = [prompts.of_tokens(n, stream(seed, f"prompt/{k}")) for k, n in enumerate(lengths)]
        zero_s = time.perf_counter() + 0.2 - float(trace.arrival_s[0])

        async def one(k: int) -> tuple[object, ...]:
            due_s = zero_s + float(trace.arrival_s[k])
            await asyncio.sleep(due_s - time.perf_counter())
            reply = await ask(texts[k], int(trace.output_tokens[k]))
            ttft_s, e2e_s = reply.chunk_s[0] - due_s, reply.chunk_s[-1] - due_s
            tpot_s = (e2e_s - ttft_s) / max(reply.output_tokens - 1, 1)
            tokens = reply.input_tokens, reply.output_tokens
            return due_s - zero_s, *tokens, reply.engine, ttft_s, tpot_s, e2e_s

        rows = await asyncio.gather(*map(one, range(len(trace))))
    columns = ("arrival_s", "input_tokens", "output_tokens", "replica", "ttft_s", "tpot_s", "e2e_s")
    return pd.DataFrame(rows, columns=columns)


def _span_s(seen: pd.DataFrame) -> float:
    """First arrival to last finish [s]."""
    return float((seen["arrival_s"] + seen["e2e_s"]).max() - seen["arrival_s"].min())


def _row(
    *what: object, seen: pd.DataFrame, first: str, cpu: NDArray[np.float64]
) -> tuple[object, ...]:
    """What was seen of requests, and the share of the engine ``first``."""
    span_s, tpot_s = _span_s(seen), seen["tpot_s"]
    return (
        *(*what, len(seen), span_s),
        *(seen["output_tokens"].sum() / span_s, len(seen) / span_s),
        *np.percentile(seen["ttft_s"], live_data.PERCENTILES),
        *np.percentile(tpot_s[np.isfinite(tpot_s)], live_data.PERCENTILES),
        *(float((seen["replica"] == first).mean()), *cpu),
        *(timings.processor(), datetime.datetime.now(datetime.UTC).date().isoformat()),
    )


def _busy_s(cores: tuple[int, int]) -> float:
    """Time that cores have been busy, with whatever [s]."""
    times = psutil.cpu_times(percpu=True)
    return sum(
        float(sum(one) - one.idle - getattr(one, "iowait", 0.0))
        for one in (times[core] for core in cores if core < len(times))
    )
