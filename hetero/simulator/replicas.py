"""Exact simulation of a deployment of whole replicas, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from hetero.arrays import Floats
from hetero.deployment import Deployment, KvLink, Replica
from hetero.engine import state
from hetero.engine.failure import fail, recover
from hetero.engine.limits import limits_of
from hetero.errors import require, require_not_negative, require_positive
from hetero.routers.base import DEFAULT, Builtin, Predictor, Router
from hetero.simulator.drivers import Compiled, Driver, Plain, Progress, Watch
from hetero.simulator.run import Run, Sampler
from hetero.streams import stream
from hetero.workload import Trace

What: TypeAlias = Literal["fail", "recover", "drain"]
"""What may happen to a replica."""


@dataclass(frozen=True, slots=True)
class Event:
    """A replica fails, comes back or begins to drain at a time.

    A failing replica loses its KV cache and the step in progress; its requests, waiting and
    running, are routed again at once, the oldest first, with the tokens they have already streamed
    kept as part of the prompt. KV transfers from or to it are lost as well. Where no other replica
    could take them, they and later ones wait at the dispatcher until one recovers. One that drains
    ends what it was sent and is sent nothing more until it recovers.
    """

    time_s: float
    replica: str
    what: What = "fail"


def simulate(
    deployment: Deployment,
    trace: Trace,
    router: Router | Builtin,
    *,
    events: Sequence[Event] = (),
    predictor: Predictor | None = None,
    seed: int = 0,
    sample_s: float | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Run:
    r"""Serve a trace with a deployment and a router, and report what every request saw.

    Steps cost what the step model of their replica says; between two events of a replica a run
    of n decode steps of a constant batch is summed in closed form, so nothing is approximated.
    At equal times steps end first, then events happen, then requests arrive, then
    batches form.

    Parameters
    ----------
    trace
        Requests that come when it says or, of a closed loop, when its clients send them; when
        that was is in the trace of the run.
    router
        A built-in router, or any object with ``name`` and ``choose(request, fleet)``, which
        returns a replica, or ``DEFER`` to be asked again at the next first token or finish; it may
        have ``on_first_token(index, now_s)`` and ``on_finish(index, now_s)``.
    events
        Failures, recoveries and drains.
    predictor
        What the dispatcher (and ``"predicted"`` admission) believes about outputs: by default a
        normal guess of the workload's mean and spread; ``Oracle()`` for the truth.
    seed
        Of the router's and the predictor's random draws.
    sample_s
        Note every so many seconds what each replica holds, for :meth:`Run.timeline`; nothing else
        changes by it.
    progress
        Called as requests are routed.
    watch
        Ends the run by :class:`~hetero.simulator.drivers.MissedError` where it cannot meet a goal
        any more; without events alone.

    Examples
    --------
    >>> from hetero.latency.step import StepModel
    >>> from hetero.routers import RoundRobin
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> fleet = Deployment("two", tuple(Replica(n, step, kv_tokens=50_000) for n in "ab"))
    >>> from hetero import workload
    >>> run = simulate(fleet, workload.load("azure2023_conv").head(1000), RoundRobin())
    >>> run.counts
    {'finished': 1000, 'rejected': 0}
    """
    predicted = (predictor or DEFAULT).predict(trace, stream(seed, "predictor"))
    requests = state.requests(
        trace.arrival_s, trace.input_tokens, trace.output_tokens, predicted, trace.priorities
    )
    hooks = any(hasattr(router, name) for name in ("on_first_token", "on_finish"))
    log = hooks or trace.clients > 0
    engines, replicas, floats, integers = _build(deployment, trace, log=log)
    arrays = (requests, engines, replicas, floats, integers)
    driver: Driver
    if isinstance(router, Builtin):
        draws = stream(seed, "router").random((len(trace), 2)) if router.draws else np.zeros((1, 2))
        kernel = (router.memory(deployment), draws, router.code)
        driver = Compiled(arrays, trace, progress, kernel)
    else:
        driver = Plain(arrays, trace, progress, router)
    driver.watch = None if events else watch
    sampler = _sampler(arrays, trace, sample_s)
    names = {replica.name: k for k, replica in enumerate(deployment.replicas)}
    last_s = 0.0
    for time_s, together in groupby(_ordered(events, names), key=lambda event: event.time_s):
        _play(driver, time_s, sampler)
        # All that fails or recovers at a time does so before any request is routed again.
        lost: list[NDArray[np.int64]] = []
        for event in together:
            k = names[event.replica]
            if event.what == "fail":
                found = np.empty(driver.next, np.int64)
                lost.append(found[: fail(*arrays, k, time_s, driver.next, found)])
            elif event.what == "drain":
                replicas["draining"][k] = 1
            else:
                recover(replicas[k], time_s)
        driver.fail_over(np.sort(np.concatenate([np.empty(0, np.int64), *lost])), time_s)
        last_s = time_s
    _play(driver, np.inf, sampler)
    driver.drain(last_s)
    ended = (requests["status"] == state.FINISHED) | (requests["status"] == state.REJECTED)
    if not ended.all():
        raise AssertionError(f"request {int(np.argmin(ended))} neither finished nor was rejected")
    samples = sampler.samples(tuple(names)) if sampler else None
    if trace.clients:
        arrival_s = requests["arrival_s"].copy()
        trace = replace(trace, arrival_s=arrival_s, clients=0, think_s=0.0)
    _seen(deployment, requests)
    return Run.of(deployment, trace, router.name, requests, replicas, integers, seed, samples)


def _sampler(arrays: tuple[Any, ...], trace: Trace, sample_s: float | None) -> Sampler | None:
    if sample_s is None:
        return None
    require_positive(sample_s=sample_s)
    return Sampler(arrays, float(trace.arrival_s[0]) if len(trace) else 0.0, sample_s)


def _play(driver: Driver, until: float, sampler: Sampler | None) -> None:
    """Route the requests that come before ``until``, and take the samples due until then."""
    if sampler is not None:
        while sampler.next_s < until:
            t = sampler.next_s
            driver.play(t, inclusive=True)
            driver.advance(t)
            sampler.take()
            if until == np.inf and driver.at_rest:
                break
    driver.play(until)


def _ordered(events: Sequence[Event], names: dict[str, int]) -> list[Event]:
    for event in events:
        require(
            event.replica in names,
            f"An event at {event.time_s} s names the replica '{event.replica}', which the "
            "deployment does not have.",
            resolve=f"use one of {', '.join(names)}.",
        )
        require(
            event.what in get_args(What),
            f"An event of replica {event.replica} at {event.time_s} s is '{event.what}'.",
            resolve=f"use {' or '.join(get_args(What))}.",
        )
        require_not_negative(time_s=event.time_s)
    return sorted(events, key=lambda event: event.time_s)


def _build(deployment: Deployment, trace: Trace, *, log: bool) -> tuple[Any, Any, Floats, Any]:
    limits = [limits_of(replica, trace.block_tokens) for replica in deployment.replicas]
    chains = None
    ids, offsets = trace.prefix_ids, trace.prefix_offsets
    if ids is not None and offsets is not None and any(one["prefix_tokens"] for one in limits):
        chains = (offsets, np.unique(ids, return_inverse=True)[1].astype(np.int64))
    size = len(deployment.replicas)
    latency, per_token = np.zeros((size, size)), np.zeros((size, size))
    media, names = np.full((size, size, 2), -1), dict[str, int]()
    given = {(source, target): link for source, target, link in deployment.links}
    for a, source in enumerate(deployment.replicas):
        if source.role != "prefill":
            continue
        for b, target in enumerate(deployment.replicas):
            link = given.get((source.name, target.name), deployment.default_link)
            if target.role == "decode" and link is not None:
                # Replicas live by clocks that are late by their way from the dispatcher.
                ahead_s = source.network_s - target.network_s
                latency[a, b] = max(0.0, link.latency_s + ahead_s)
                per_token[a, b] = _transfer_s(source, link)
                for k, name in enumerate(link.media):
                    media[a, b, k] = names.setdefault(name, len(names))
    steps = [replica.step for replica in deployment.replicas]
    return state.build(
        steps,
        limits,
        link_latency_s=latency,
        link_s_per_token=per_token,
        media=media,
        request_count=len(trace),
        chains=chains,
        log=log,
    )


def _seen(deployment: Deployment, requests: Any) -> None:
    """Turn times on the clock of a replica into those at which the dispatcher sees tokens.

    A replica lives by a clock that is late by the way of a request to it, and what it sends back
    takes that way once more; both ways with the time in its front end.
    """
    ways = [(one.way_s, one.step.prompt_token_s) for one in deployment.replicas]
    fixed_s, per_token_s = np.array([*ways, (0.0, 0.0)]).T
    if fixed_s.any() or per_token_s.any():
        node, last = requests["node"], requests["decode_node"]
        for name, at in (("first_token_s", node), ("finish_s", np.where(last >= 0, last, node))):
            requests[name] += fixed_s[at] + per_token_s[at] * requests["input_tokens"]


def _transfer_s(source: Replica, link: KvLink) -> float:
    return source.kv_bytes_per_token * link.compression / (link.bandwidth_gbs * 1e9)
