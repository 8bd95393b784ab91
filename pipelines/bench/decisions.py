"""Decisions on a large fleet: processor time of each, and how well several dispatchers choose.

The engines are simulated; every decision is made on the records that a dispatcher keeps of what it
sees of them. Several dispatchers behind a balancer each get a part of the requests by lot. They
know nothing of each other's; beside that stands what it would be worth to hear after a while of
what was sent where, of first tokens, of ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from hetero import catalog, workload
from hetero.apps.serving.plan import FleetPlan
from hetero.apps.serving.records import FleetRecords
from hetero.deployment import Deployment, Engine, Replica
from hetero.display import Column, Table
from hetero.latency import for_gpu
from hetero.routers.base import FleetState, Request
from hetero.routers.named import factories
from hetero.simulator import simulate
from hetero.streams import stream
from hetero.workload import Trace
from pipelines.bench.measured import Measured, Say, silent

_GPUS: Final = ("H100-SXM", "A100-SXM-80GB", "L40S", "L4")
_KV_TOKENS: Final = 60_000
_MODEL: Final = "Llama-3.1-8B"
_SENT, _FIRST, _ENDED = range(3)
_TIMED: Final = (
    "from hetero.engine.compiled import interpret; interpret(); "
    "from pipelines.bench.decisions import main; main()"
)
#: What dispatchers hear of each other: how many there are, and after how long [s]; None: never.
WAYS: Final = {
    "one": (1, 0.0),
    "two, at once": (2, 0.0),
    "two, after 1 ms": (2, 0.001),
    "two, after 20 ms": (2, 0.02),
    "two, after 200 ms": (2, 0.2),
    "two, never": (2, None),
    "four, after 1 ms": (4, 0.001),
}


class _News(NamedTuple):
    """Something that happened to a request: it was sent, had its first token, or ended."""

    at_s: float
    kind: int
    request: int
    engine: int = 0
    predicted: int = 0
    credit: float = 0.0


class _Dispatcher:
    """A dispatcher's records, and what it has not heard of yet."""

    def __init__(self, deployment: Deployment, trace: Trace, router: str) -> None:
        self.records = FleetRecords(deployment, rows=len(trace) + 1)
        self.router = factories()[router]().live(deployment, np.random.default_rng(0))
        self.up = [True] * len(deployment.replicas)
        self.news: deque[_News] = deque()
        self._rows: dict[int, int] = {}
        self._inputs, self._outputs = trace.input_tokens.tolist(), trace.output_tokens.tolist()

    def take(self, news: _News) -> None:
        """Enter what has happened."""
        records, k = self.records, news.request
        if news.kind == _SENT:
            r = self.open(k, news.predicted, news.at_s)
            records._r[r].credit = news.credit
            records.send(r, news.engine, news.at_s)
        elif news.kind == _FIRST:
            records.first_token(self._rows[k], news.at_s)
        else:
            r = self._rows.pop(k)
            records.first_token(r, news.at_s)
            records.close(r, news.at_s, self._inputs[k], self._outputs[k])

    def open(self, index: int, predicted: int, now_s: float) -> int:
        """Enter a request."""
        r = self._rows[index] = self.records.open(self._inputs[index], predicted, now_s)
        return r

    def decide(self, r: int, now_s: float) -> int:
        """The engine for a request."""
        if not self.records.look(r, now_s, self.up):
            return -1
        choice = self.router.decide(self.records.state, r, now_s)
        assert isinstance(choice, int)  # a pair is for engines that are split by phase
        return choice


class Dispatchers:
    """Dispatchers behind a balancer as one router: each decides on records of its own.

    Parameters
    ----------
    delay_s
        After how long each hears of what the others did and saw; None: never.

    Attributes
    ----------
    log
        All that happened, in order.
    """

    def __init__(
        self,
        deployment: Deployment,
        trace: Trace,
        router: str,
        count: int,
        delay_s: float | None,
        seed: int = 0,
    ) -> None:
        self.name = f"{count} dispatchers"
        self._all = [_Dispatcher(deployment, trace, router) for _ in range(count)]
        self._lot: list[int] = stream(seed, "processes").integers(count, size=len(trace)).tolist()
        self._delay_s = delay_s
        self.log: list[_News] = []

    def choose(self, request: Request, fleet: FleetState) -> int:
        """As the one decides that got the request."""
        one, now_s, k = self._all[self._lot[request.index]], fleet.now_s, request.index
        while one.news and one.news[0].at_s + (self._delay_s or 0.0) <= now_s:
            one.take(one.news.popleft())
        r = one.open(k, request.predicted_tokens, now_s)
        choice = one.decide(r, now_s)
        if choice >= 0:
            one.records.send(r, choice, now_s)
            credit = float(one.records._r[r].credit)
            self._tell(_News(now_s, _SENT, k, choice, request.predicted_tokens, credit))
        return choice

    def on_first_token(self, index: int, now_s: float) -> None:
        """A request has its first token."""
        self._seen(_News(now_s, _FIRST, index))

    def on_finish(self, index: int, now_s: float) -> None:
        """A request has ended."""
        self._seen(_News(now_s, _ENDED, index))

    def _seen(self, news: _News) -> None:
        self._all[self._lot[news.request]].take(news)
        self._tell(news)

    def _tell(self, news: _News) -> None:
        self.log.append(news)
        if self._delay_s is not None:
            for p, other in enumerate(self._all):
                if p != self._lot[news.request]:
                    other.news.append(news)


@dataclass(frozen=True, slots=True, repr=False)
class DecisionBench(Measured):
    """How well dispatchers choose on a large fleet, and what it takes them.

    Attributes
    ----------
    rows
        Dispatchers and what they hear of each other; mean time to the first token, its 99th
        percentile, mean time per later token [ms], mean time to the end [s], and time to the first
        token and to the end over those of one alone [%].
    decision_us
        Processor time of looking, deciding and sending, median and mean [us].
    note
        Under which conditions.
    """

    rows: tuple[tuple[object, ...], ...]
    decision_us: tuple[float, float]
    note: str

    def table(self) -> Table:
        """One row per way."""
        columns = (
            Column("dispatchers"),
            Column("TTFT", "ms", 4),
            Column("TTFT, P99", "ms", 4),
            Column("TPOT", "ms", 4),
            Column("E2E", "s", 4),
            Column("TTFT over one", "%", 2),
            Column("E2E over one", "%", 2),
        )
        median, mean = self.decision_us
        spent = f"processor time of a decision: median {median:.0f} us, mean {mean:.0f} us"
        return Table("Decisions", columns, self.rows, (spent, self.note))

    def record(self) -> dict[str, object]:
        """The same as plain values."""
        names = [column.heading for column in self.table().columns]
        rows = [dict(zip(names, row, strict=True)) for row in self.rows]
        return {"ways": rows, "decision_us": self.decision_us, "note": self.note}


def bench(
    *,
    backends: int = 200,
    router: str = "hetero",
    rate_rps: float = 500.0,
    requests: int = 15_000,
    seed: int = 0,
    progress: Say = silent,
) -> DecisionBench:
    """Send requests to a fleet of four kinds of GPUs in every way."""
    case = backends, rate_rps, requests, seed
    fleet, trace = _case(*case)
    drawn = trace.input_tokens.mean(), trace.output_tokens.mean()
    plan = FleetPlan.of(fleet, *map(float, drawn))
    rows: list[tuple[object, ...]] = []
    first: tuple[float, ...] = ()
    decision_us = (0.0, 0.0)
    for way, (count, delay_s) in WAYS.items():
        dispatchers = Dispatchers(fleet, trace, router, count, delay_s, seed)
        run = simulate(fleet, trace, dispatchers)
        means = tuple(float(np.nanmean(x)) for x in (run.ttft_s, run.tpot_s, run.e2e_s))
        first = first or means
        late_s = float(np.nanquantile(run.ttft_s, 0.99))
        over = [100.0 * (means[k] / first[k] - 1.0) for k in (0, 2)]
        rows.append((way, 1e3 * means[0], 1e3 * late_s, 1e3 * means[1], means[2], *over))
        progress(f"{way}: {means[2]:.3f} s to the end")
        if len(rows) == 1:
            decision_us = _timed(case, router, dispatchers.log)
    note = (
        f"{requests:,} requests at {rate_rps:g}/s, {100 * rate_rps / plan.capacity_rps:.0f} % of "
        f"what {backends} engines carry ({', '.join(_GPUS)}); router {router}"
    )
    return DecisionBench(tuple(rows), decision_us, note)


def _case(backends: int, rate_rps: float, requests: int, seed: int) -> tuple[Deployment, Trace]:
    """The fleet, and what it is sent."""
    llm, rules = catalog.llm(_MODEL), Engine(batching="chunked", admission="paged")
    made = [
        Replica(gpu, for_gpu(catalog.gpu(gpu), llm).step_model(), _KV_TOKENS, engine=rules)
        for gpu in _GPUS
    ]
    fleet = Deployment(
        "large", tuple(replace(made[k % len(made)], name=str(k)) for k in range(backends))
    )
    drawn = workload.load("azure2023_conv").sample(requests, stream(seed, "requests"))
    return fleet, drawn.poisson(rate_rps, stream(seed, "arrivals"))


def _timed(case: tuple[int, float, int, int], router: str, log: list[_News]) -> tuple[float, float]:
    """Processor time of the decisions of a log [us], in a process that interprets the kernels."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "log"
        file.write_text(json.dumps([case, router, log], default=lambda number: number.item()))
        done = subprocess.run(
            [sys.executable, "-c", _TIMED, str(file)],
            check=True,
            capture_output=True,
            text=True,
        )
    median, mean = json.loads(done.stdout)
    return float(median), float(mean)


def main() -> None:
    """Time the decisions of a log that :func:`bench` has written."""
    case, router, log = json.loads(Path(sys.argv[1]).read_text())
    one, spent = _Dispatcher(*_case(*case), router), []
    for news in map(_News._make, log):
        if news.kind != _SENT:
            one.take(news)
            continue
        began = time.process_time()
        r = one.open(news.request, news.predicted, news.at_s)
        one.decide(r, news.at_s)
        one.records.send(r, news.engine, news.at_s)
        spent.append(1e6 * (time.process_time() - began))
    print(json.dumps([float(np.median(spent)), float(np.mean(spent))]))
