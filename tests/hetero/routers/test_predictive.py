"""The predictive router against its equation in plain Python, and what it is for."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hetero.deployment import Deployment, Engine, KvLink, Replica
from hetero.engine.state import IN_DECODE, IN_PREFILL
from hetero.latency.step import StepModel
from hetero.routers import (
    DEFER,
    HeteroServe,
    LatencyAware,
    LeastRequests,
    LeastTokens,
    Normal,
    Oracle,
    Predictive,
    Workload,
)
from hetero.simulator import Event, Slo, metrics, simulate
from tests.hetero.routers.router_states import check, fleet, handed_over, near, trace


class Equation:
    """The cost as its docstring prints it, for engines that prefill first.

    What replicas do at the moment is read from the state; records, averages and the regression of
    true on predicted outputs are kept here.
    """

    def __init__(self, router, deployment, served):
        self.router, self.replicas, self.served = router, deployment.replicas, served
        self.arrived, self.mean_in, self.mean_out = 0, 0.0, 0.0
        self.latest, self.gap, self.noise, self.ended = 0.0, 0.0, 0.0, 0
        self.longest_s = 2 * max(
            float(one.step.prefill_seconds([one.engine.max_step_tokens])) for one in self.replicas
        )
        self.shares = [0.0] * len(self.replicas)  # running averages of T
        self.sent = {}  # index: replica, T, booked tokens, predicted output
        self.waiting, self.open, self.done, self.held = set(), set(), set(), set()
        self.predicted, self.learnt = {}, []

    def output(self, index, predicted):
        pairs = self.learnt
        while len(pairs) < index and len(pairs) in self.done:
            pairs.append((self.predicted[len(pairs)], int(self.served.output_tokens[len(pairs)])))
        if not pairs:
            return max(float(predicted), 1.0)
        x, y = np.array(pairs, float).T
        self.noise = y.var()
        trust = len(x) / (len(x) + 20)
        slope = 1.0
        if x.var() > 0:
            learnt = np.mean((x - x.mean()) * (y - y.mean())) / x.var()
            self.noise = max(self.noise - learnt**2 * x.var(), 0.0)
            slope = 1 + trust * (min(max(learnt, 0.0), 1.0) - 1)
        middle = x.mean() + trust * (y.mean() - x.mean())
        return max(middle + slope * (predicted - x.mean()), 1.0)

    def end_s(self, replies, eligible):
        """T by trying: those that take until then leave none of the held ones over."""
        able = [(x, self.shares[k]) for k, x in enumerate(replies) if eligible[k]]
        taking = ([(x, share) for x, share in able if x <= most] for most, _ in able)
        held = len(self.held)
        return min(
            (held + sum(x / s for x, s in who)) / sum(1 / s for _, s in who) for who in taking
        )

    def expected(self, request, fleet):
        r = self.router
        self.predicted[request.index] = request.predicted_tokens
        again = request.index in self.held
        if not again:
            self.gap += (fleet.now_s - self.latest - self.gap) / min(self.arrived + 1, 200)
            self.latest = fleet.now_s
        if r.target_s is None and not again and self.held:
            self.held.add(request.index)
            return {DEFER}
        i_tokens = request.input_tokens
        o_tokens = self.output(request.index, request.predicted_tokens)
        self.arrived += not again
        weight = 0.0 if again else 1 / min(self.arrived, 200)
        self.mean_in += weight * (i_tokens - self.mean_in)
        self.mean_out += weight * (o_tokens - self.mean_out)
        state, ends = fleet.records[2], fleet.records[3]
        costs, self.last, end_s = {}, {}, math.inf
        mean, kept = self.mean_in + self.mean_out, self.mean_in + self.mean_out / 2
        sizes = [max(min(e.engine.max_batch, e.kv_tokens / mean), 1.0) for e in self.replicas]
        full = [
            float(e.step.seconds(int(batch), int(batch), batch * kept))
            for e, batch in zip(self.replicas, sizes, strict=True)
        ]
        longer, most = max(o_tokens - self.mean_out, 0.0), o_tokens + 3 * math.sqrt(self.noise)
        beside = np.maximum(np.multiply(self.shares, sizes) / self.mean_out - full, 0.0)
        replies = most * np.array(full) + longer * beside
        if again and fleet.now_s - self.latest > 20 * self.gap:
            end_s = self.end_s(replies, fleet.eligible)
        for k, replica in enumerate(self.replicas):
            slots, cache, step = replica.engine.max_batch, replica.kv_tokens, replica.step
            batch, full_s = sizes[k], full[k]
            own = float(step.prefill_seconds([i_tokens]))
            share = own + o_tokens * full_s * max((i_tokens + o_tokens) / cache, 1 / slots)
            self.shares[k] += weight * (share - self.shares[k])
            self.last[k] = share
            self.ended += replies[k] > end_s
            if not fleet.eligible[k] or replies[k] > end_s:
                continue
            mine = [v for index, v in self.sent.items() if index in self.open and v[0] == k]
            taken, places = sum(v[2] for v in mine) + i_tokens + o_tokens, (len(mine) + 1) / slots
            used = max(taken / cache, places)
            s = state[k]
            running, queue = int(s["running"]), int(s["waiting"])
            if r.target_s is None or again:
                held = kept / mean if replica.engine.admission == "paged" else 1.0
                stands = queue and s["mode"] == IN_DECODE
                size = replica.engine.max_step_tokens
                backed = int(s["waiting_tokens"]) * float(step.seconds(size, 0, 0)) / size
                stands = stands or backed > self.longest_s
                spare = 0.9 if r.target_s else 1.0
                if mine and (max(taken * held / cache, places) > spare or stands):
                    continue
            if queue and s["mode"] == IN_DECODE:
                queued = int(s["waiting_tokens"]) + queue * self.mean_out + i_tokens + o_tokens
                used = max(used, 1 + queued / cache)
            decode_s = float(step.seconds(running, running, int(s["cached"]))) if running else 0.0
            rest = {IN_PREFILL: max(float(ends[k]) - fleet.now_s, 0.0), IN_DECODE: decode_s / 2}
            first = rest.get(int(s["mode"]), 0.0)
            ahead = 0
            if used > 1 and queue:
                first += sum(
                    v[1] for index, v in self.sent.items() if index in self.waiting and v[0] == k
                )
            elif used > 1:
                first += (used - 1) * self.shares[k] * batch
            else:
                ahead = int(s["waiting_tokens"])
            first += float(step.seconds(ahead + i_tokens, 0, 0.0, i_tokens**2 / 2))
            price = r.price_s * math.exp(-r.steepness * (1 - min(used, 1)))
            late = r.long_reply * longer**2 / self.mean_out * full_s
            if r.target_s is None or again or first <= r.target_s:
                costs[k] = first + price * share / self.shares[k] + late
        if not costs:
            self.held.add(request.index)
            return {DEFER}
        return near(costs, min(costs.values()))

    def dispatched(self, request, k):
        size = request.input_tokens + request.predicted_tokens
        self.sent[request.index] = (k, self.last[k], size)
        self.held.discard(request.index)
        self.waiting.add(request.index)
        self.open.add(request.index)

    def started(self, index):
        self.waiting.discard(index)

    def finished(self, index):
        self.open.discard(index)
        self.done.add(index)


@pytest.mark.parametrize("predictor", [Oracle(), Normal()])
@pytest.mark.parametrize("rate_rps", [5.0, 30.0])
@pytest.mark.parametrize("admission", ["known", "paged"])
@pytest.mark.parametrize("target_s", [None, 0.4])
def test_every_decision_follows_the_equation(rate_rps, predictor, admission, target_s):
    # With a target little enough is sent that a larger cache evicts nothing, which would wait too.
    cache = 9_024 if target_s is None else 20_000
    engine = Engine(admission=admission, max_batch=12, max_step_tokens=1024)
    deployment = fleet(engine, kv_tokens=(cache,) * 4)
    served = trace(400, rate_rps)
    router = Predictive(target_s=target_s)
    reference = Equation(router, deployment, served)
    chosen = check(router, reference, deployment, served, predictor=predictor, seed=2)
    assert len(set(chosen.tolist())) > 2
    assert rate_rps < 10.0 or (DEFER in chosen and reference.ended)


def split(shared):
    """Two replicas that prefill and three that decode; those of one machine need no link."""
    nodes = tuple(
        replace(one, name=f"{role} {k}", role=role)
        for role, numbers in (("prefill", (0, 2)), ("decode", (0, 1, 3)))
        for k, one in ((k, fleet(Engine(max_batch=16)).replicas[k]) for k in numbers)
    )
    near, far = KvLink(bandwidth_gbs=300.0), KvLink(1.5, 1e-3, media=("wire",) if shared else ())
    links = tuple(
        (p.name, d.name, near if p.name[-1] == d.name[-1] else far)
        for p in nodes[:2]
        for d in nodes[2:]
    )
    return Deployment("split", nodes, links=links)


class Handed:
    """Holds every decode replica against the equation, in plain Python."""

    name, oracle = "handed", True

    def __init__(self, router, deployment):
        self.router, self.deployment = router, deployment
        self.live, self.sent, self.chosen = router.live(deployment), {}, []
        self.seen, self.inputs, self.outputs, self.free_s = 0, 0.0, 0.0, 0.0
        self.links = {(a, b): link for a, b, link in deployment.links}

    def choose(self, request, state):
        found = self.live.choose(request, state)
        if found == DEFER:
            return found
        i, j = found
        # Without targets and predictors who waits comes again, and counts once.
        self.seen += 1
        _, e, _, ends, items = state.records[:5]
        weight = 1 / min(self.seen, 200)
        self.inputs += weight * (request.input_tokens - self.inputs)
        self.outputs += weight * (request.predicted_tokens - self.outputs)
        mean, nodes = self.inputs + self.outputs, self.deployment.replicas
        held = (self.inputs + self.outputs / 2) / mean
        sizes = [max(min(one.kv_tokens / mean, one.engine.max_batch), 1.0) for one in nodes]
        full_s = [
            float(one.step.seconds(int(size), int(size), size * (self.inputs + self.outputs / 2)))
            for one, size in zip(nodes, sizes, strict=True)
        ]
        target_s = self.router.tpot_s or max(full_s[2:])
        tightest = {}
        for k in range(2, len(nodes)):
            one, link = nodes[k], self.links[nodes[i].name, nodes[k].name]
            tokens = int(state.outstanding_tokens[k]) + request.input_tokens
            cached = (tokens + request.predicted_tokens) * held
            count = int(state.outstanding[k]) + 1
            batch = min(count, one.engine.max_batch)
            step_s = float(one.step.seconds(batch, batch, min(cached, one.kv_tokens)))
            at = int(e["media"][i]) + 2 * k
            media = [m for m in items[at : at + 2] if m >= 0]
            free_s = max([state.now_s, *(float(ends[m]) for m in media)])
            sent_s = request.input_tokens * one.kv_bytes_per_token / link.bandwidth_gbs / 1e9
            way_s = free_s - state.now_s + link.latency_s + sent_s
            pace_s = step_s + way_s / max(request.predicted_tokens - 1, 1)
            limits = cached / one.kv_tokens, count / one.engine.max_batch, pace_s / target_s
            tightest[k] = max(limits) + 2.0 * (sent_s if media else 0.0)
        assert j in near(tightest, min(tightest.values()))
        self.chosen.append(j)
        return i, j


@pytest.mark.parametrize("tpot_s", [None, 0.05])
@pytest.mark.parametrize("shared", [False, True])
def test_who_decodes_is_whoever_is_farthest_from_its_tightest_limit(tpot_s, shared):
    router, deployment = Predictive(target_s=100.0, tpot_s=tpot_s), split(shared)
    handed, served = Handed(router, deployment), handed_over(400, 12.0)
    run = simulate(deployment, served, handed, predictor=Oracle())
    assert set(handed.chosen) == {2, 3, 4}
    assert run.finished.all()
    assert (run.requests["decode_node"] == handed.chosen).all()
    same = simulate(deployment, served, router, predictor=Oracle())
    assert (same.requests["decode_node"] == handed.chosen).all()


def test_more_requests_meet_a_target_of_tpot_where_decode_replicas_differ():
    deployment, served, slo = split(shared=True), trace(3000, 14.0), Slo(tpot_s=0.05)
    met = {
        router.name: metrics(simulate(deployment, served, router), slo).attainment["tpot"]
        for router in (LeastRequests(), Predictive(), Predictive(tpot_s=0.045, name="targets"))
    }
    assert min(met["hetero"], met["targets"]) > met["least requests"] + 0.1


def test_caches_stay_in_their_cell_while_it_has_room():
    one = split(shared=True)
    nodes = [replace(node, name=f"{node.name} {c}") for node in one.replicas for c in "ab"]
    ends = [(c, d) for c in "ab" for d in "ab"]
    links = tuple((f"{a} {c}", f"{b} {d}", link) for a, b, link in one.links for c, d in ends)
    deployment, served = Deployment("cells", tuple(nodes), links=links), trace(1000, 8.0)
    decode = np.array([node.role == "decode" for node in nodes])
    cell = np.array([ord(node.name[-1]) for node in nodes])
    gone = [one.name for one in nodes if one.role == "decode" and one.name[-1] == "b"]
    events = [Event(30.0, name, "fail") for name in gone]
    for router, crossing in ((Predictive(), True), (Predictive(cells=2), False)):
        handed = simulate(deployment, served, router).requests
        handed = handed[handed["decode_node"] >= 0]
        assert decode[handed["decode_node"]].all()
        assert (cell[handed["node"]] != cell[handed["decode_node"]]).any() == crossing
    run = simulate(deployment, served, Predictive(cells=2), events=events)
    assert run.finished.all()
    late = run.requests[(run.requests["arrival_s"] > 30.0) & (run.requests["decode_node"] >= 0)]
    assert len(set(cell[late["node"]])) == 2
    assert set(cell[late["decode_node"]]) == {ord("a")}
    # Far beyond what the cell takes, what is left elsewhere is used.
    rest = [Event(0.0, name, "fail") for name in gone[1:]]
    full = simulate(deployment, trace(2000, 25.0), Predictive(cells=2), events=rest).requests
    full = full[full["decode_node"] >= 0]
    crossed = cell[full["node"]] != cell[full["decode_node"]]
    there = cell[full["node"]] == ord("b")
    assert crossed[there].mean() > 0.1 + crossed[~there].mean()


def tail_s(deployment, served, router, **options):
    run = simulate(deployment, served, router, **options)
    return metrics(run, Slo(ttft_s=0.5)).percentiles["ttft_s"][95]


@pytest.mark.parametrize("predictor", [Oracle(), Normal()])
@pytest.mark.parametrize("batching", ["prefill first", "chunked"])
def test_shorter_tail_than_the_published_routers(batching, predictor):
    """Near saturation, seeds 0 to 2 together."""
    deployment = fleet(Engine(batching, max_batch=12))
    others = [LeastRequests(), Workload(), LatencyAware(), HeteroServe()]
    tails = {"ours": 0.0} | {router.name: 0.0 for router in others}
    for seed in range(3):
        served = trace(1500, 13.0, seed)
        tails["ours"] += tail_s(deployment, served, Predictive(), predictor=predictor)
        for router in others:
            tails[router.name] += tail_s(deployment, served, router, predictor=predictor)
    assert tails["ours"] < min(tails[router.name] for router in others)


def test_a_target_is_met_more_often_beyond_capacity():
    deployment, served = fleet(Engine(max_batch=12)), trace(1500, 25.0)
    met = [
        metrics(simulate(deployment, served, router), Slo(ttft_s=0.5)).attainment["ttft"]
        for router in (Predictive(), Predictive(target_s=0.4))
    ]
    assert met[1] > met[0] + 0.1


def test_noise_in_predictions_is_not_mistaken_for_knowledge():
    """A biased predictor without skill serves as well as one that tells the mean."""

    class Shifted:
        def __init__(self, spread):
            self.spread = spread

        def predict(self, served, rng):
            draws = rng.normal(600, self.spread, len(served))
            return np.maximum(np.rint(draws), 1).astype(np.int32)

    deployment, served = fleet(Engine(max_batch=12)), trace(3000, 10.0)
    steady = tail_s(deployment, served, Predictive(), predictor=Shifted(0.0))
    noisy = tail_s(deployment, served, Predictive(), predictor=Shifted(200.0))
    assert noisy < 1.5 * steady + 0.05


@pytest.mark.parametrize(("predictor", "least"), [(Oracle(), 0.95), (Normal(), 0.84)])
def test_unequal_replicas_end_a_batch_together(predictor, least):
    """Ten fleets of two to four kinds, up to 5 to 1, and their parts; 99 % of 5,000 requests."""

    def rate(replicas, served, router=LeastTokens()):  # noqa: B008
        run = simulate(Deployment("x", tuple(replicas)), served, router, predictor=predictor)
        return served.output_tokens.sum() / np.quantile(run.requests["finish_s"], 0.99)

    kept, served = [], trace(5000).all_at_once()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        engine = (Engine(), Engine("chunked", "paged", max_step_tokens=2048))[seed % 2]
        parts = []
        for k, slow in enumerate([1.0, *rng.uniform(1, 5, 1 + seed % 3)]):
            step = StepModel.affine(
                floor_s=8e-3 * slow, per_token_s=2.5e-5 * slow, per_cached_token_s=6e-8 * slow
            )
            one = Replica("", step, int(rng.integers(60_000, 400_000)), engine=engine)
            parts.append([replace(one, name=f"{k}.{i}") for i in range(rng.integers(1, 5))])
        alone = np.cumsum([0, *(rate(part, served.take(np.arange(0, 5000, 4))) for part in parts)])
        ends = np.rint(alone / alone[-1] * 5000).astype(int)
        shares = [served.take(np.arange(*ends[k : k + 2])) for k in range(len(parts))]
        whole, every = sum(map(rate, parts, shares)), [one for part in parts for one in part]
        kept.append(rate(every, served, Predictive()) / whole)
        assert kept[-1] > rate(every, served) / whole
    assert least < min(kept)
    assert np.mean(kept) > least + 0.03
