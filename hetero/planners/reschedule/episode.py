"""Whole episodes: a deployment that changes while requests are in flight, in one simulation.

Replicas that a change ends fail at that moment in the simulator, or work off what they hold
first; those that it brings are down before. A group of GPUs that changes its phase is thus two
replicas of one simulated deployment, of which never more than one is up. Nothing is cut: requests
in flight on replicas that stay go on undisturbed, those on replicas that fail are routed again
with the tokens that they have, and while no replica is up they wait at the dispatcher.

What is approximated: a request on a replica that fails prefills all its tokens again, where a
system could move its KV cache; a link that changes interrupts the prefills and transfers of the
replicas at its start; a draining prefill replica counts as empty when the last transfer of the
requests that it prefilled has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from hetero.arrays import Flags, Floats
from hetero.deployment import Deployment, KvLink, Replica
from hetero.display import Column, Shown, Table
from hetero.errors import require
from hetero.routers import PairShares
from hetero.simulator import Event, Run, simulate
from hetero.workload import Trace

Ending: TypeAlias = Literal["abrupt", "drain"]
"""How replicas end: at once, or after the requests that they hold."""


@dataclass(frozen=True, slots=True)
class Era:
    """What serves from a time on.

    Attributes
    ----------
    start_s
        When the replicas that the deployment no longer has end, or begin to drain.
    deployment, weights
        Replicas, and the shares of the pairs of them as :class:`hetero.routers.PairShares`
        takes them by name. A replica that equals the one of that name in the era before goes on.
    ready_s
        When replicas come up that the era before did not have; by default at once.
    change
        How replicas end that the deployment no longer has.
    label
        Name of the era in tables.
    """

    start_s: float
    deployment: Deployment
    weights: Mapping[tuple[str, str], float]
    ready_s: float | None = None
    change: Ending = "abrupt"
    label: str = ""

    @property
    def up_s(self) -> float:
        """When its new replicas come up."""
        return self.start_s if self.ready_s is None else max(self.ready_s, self.start_s)


@dataclass(frozen=True, slots=True)
class Life:
    """A replica of the simulated deployment: which one it stands for, and when it is up."""

    origin: str
    replica: Replica
    first: int
    last: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, repr=False)
class Episode(Shown):
    """A served trace across changes.

    Attributes
    ----------
    run
        What every request saw; its deployment has a replica per life.
    lives
        When each was up.
    waits
        Times in which nothing was up and requests waited.
    """

    eras: tuple[Era, ...]
    run: Run
    lives: tuple[Life, ...]
    waits: tuple[tuple[float, float], ...]

    @property
    def lost(self) -> int:
        """Requests that were not served to their end."""
        return int((~self.run.finished).sum())

    @property
    def too_long(self) -> int:
        """Of the lost requests those that no replica of the last era could ever hold."""
        records = self.run.requests[~self.run.finished]
        nodes = self.eras[-1].deployment.replicas
        first = max(one.kv_tokens for one in nodes if one.role != "decode")
        second = max(one.kv_tokens for one in nodes if one.role != "prefill")
        whole = records["input_tokens"] + records["output_tokens"]
        return int(((records["input_tokens"] > first) | (whole > second)).sum())

    @property
    def routed_again(self) -> int:
        """Times that a request lost its replica and was routed to another."""
        return int(self.run.requests["retries"].sum())

    def in_flight(self, at_s: float) -> int:
        """Requests that had arrived and not ended at a time."""
        records = self.run.requests
        return int(((records["arrival_s"] < at_s) & ~(records["finish_s"] <= at_s)).sum())

    def arrived(self, era: int) -> Flags:
        """Which requests arrived in an era."""
        times = [one.start_s for one in self.eras[1:]] + [np.inf]
        start = 0.0 if era == 0 else self.eras[era].start_s
        arrival = self.run.requests["arrival_s"]
        return np.asarray((arrival >= start) & (arrival < times[era]))

    def table(self) -> Table:
        """One row per era."""

        def high(times: Floats) -> Callable[[int], float]:
            def of(k: int) -> float:
                good = self.arrived(k) & self.run.finished
                return float(np.quantile(times[good], 0.9)) if good.any() else np.nan

            return of

        columns = (
            Column("era", of=lambda k: self.eras[k].label or self.eras[k].deployment.name),
            Column("from", "s", of=lambda k: self.eras[k].start_s),
            Column("requests arrived", of=lambda k: int(self.arrived(k).sum())),
            Column(
                "in flight at its start",
                of=lambda k: self.in_flight(self.eras[k].start_s) if k else 0,
            ),
            Column(
                "of the arrived lost",
                of=lambda k: int((self.arrived(k) & ~self.run.finished).sum()),
            ),
            Column("TTFT P90", "s", of=high(self.run.ttft_s)),
            Column("E2E P90", "s", of=high(self.run.e2e_s)),
        )
        held = sum(end - start for start, end in self.waits)
        notes = [f"{self.routed_again:,} times a request was routed again"]
        if self.too_long:
            notes.append(f"{self.too_long} of the lost are longer than any cache of the last era")
        if self.waits:
            notes.append(f"for {held:.0f} s nothing was up, and requests waited")
        return Table.of("Episode", columns, range(len(self.eras)), *notes)


def play(eras: Sequence[Era], trace: Trace, *, drawn: bool = False, seed: int = 0) -> Episode:
    """Serve a trace while deployments change.

    Parameters
    ----------
    eras
        In order of time; the first starts at 0.
    drawn
        Draw pairs at random instead of rotating through them, see
        :class:`hetero.routers.PairShares`.

    Examples
    --------
    >>> from hetero import workload
    >>> from hetero.latency.step import StepModel
    >>> step = StepModel.affine(floor_s=0.02, per_token_s=1e-4, per_cached_token_s=1e-7)
    >>> roles = {"a": "prefill", "b": "prefill", "c": "decode"}
    >>> nodes = tuple(Replica(n, step, 50_000, role=role) for n, role in roles.items())
    >>> before = Deployment("two to one", nodes, default_link=KvLink(bandwidth_gbs=10.0))
    >>> turned = (nodes[0], replace(nodes[1], role="decode"), nodes[2])
    >>> after = replace(before, replicas=turned)
    >>> eras = [
    ...     Era(0.0, before, {("a", "c"): 1, ("b", "c"): 1}),
    ...     Era(60.0, after, {("a", "b"): 1, ("a", "c"): 1}, change="drain"),
    ... ]
    >>> episode = play(eras, workload.load("azure2023_conv").head(600))
    >>> episode.lost, len(episode.lives), episode.lives[1].end_s == episode.lives[3].begin_s
    (0, 4, True)
    """
    _check(eras)
    lives = _lives(eras)
    for k, era in enumerate(eras):
        ending = [n for n, life in enumerate(lives) if life.last == k - 1]
        if era.change == "drain" and ending:
            if not _continues(eras, lives, k):
                # Nobody else could take requests meanwhile: those in flight are handed over.
                for n in ending:
                    lives[n] = replace(lives[n], end_s=era.start_s)
                continue
            trial = _simulate(eras, lives, trace, drawn, seed)
            for n in ending:
                empty_s = max(_empty_s(trial, n), era.start_s)
                lives[n] = replace(lives[n], end_s=empty_s)
                for m, life in enumerate(lives):
                    if life.first == k and life.origin == lives[n].origin:
                        lives[m] = replace(life, begin_s=max(empty_s, era.up_s))
    run = _simulate(eras, lives, trace, drawn, seed)
    return Episode(tuple(eras), run, tuple(lives), tuple(_waits(lives)))


def _check(eras: Sequence[Era]) -> None:
    times = [era.start_s for era in eras]
    rising = all(np.diff(times) > 0) and all(np.isfinite(times))
    require(
        bool(times) and times[0] == 0 and rising,
        f"Eras start at {', '.join(f'{t:g}' for t in times) or 'no time'} s.",
        resolve="give one or more, the first at 0 s, in order of time.",
    )


def _link(deployment: Deployment, a: str, b: str) -> KvLink | None:
    own = (link for source, target, link in deployment.links if (source, target) == (a, b))
    return next(own, deployment.default_link)


def _same(before: Deployment, after: Deployment, name: str) -> bool:
    """Whether a replica goes on: it and its links to replicas of both eras are the same."""
    old = {replica.name: replica for replica in before.replicas}
    new = {replica.name: replica for replica in after.replicas}
    if name not in old or not _alike(old[name], new[name]):
        return False
    if new[name].role != "prefill":
        return True
    return all(
        _link(before, name, other) == _link(after, name, other)
        for other, replica in new.items()
        if replica.role == "decode" and other in old and _alike(old[other], replica)
    )


def _alike(one: Replica, other: Replica) -> bool:
    """Whether two replicas serve alike; step models of the same numbers are the same."""
    if replace(one, step=other.step) != other or len(one.step.pieces) != len(other.step.pieces):
        return False
    return all(
        np.array_equal(a.knots_tokens, b.knots_tokens)
        and np.array_equal(a.knots_s, b.knots_s)
        and np.array_equal(a.per_cached_token_s, b.per_cached_token_s)
        and a.per_pair_s == b.per_pair_s
        for a, b in zip(one.step.pieces, other.step.pieces, strict=True)
    )


def _lives(eras: Sequence[Era]) -> list[Life]:
    """Replicas of all eras; those that go on are one."""
    lives: list[Life] = []
    current: dict[str, int] = {}
    taken: set[str] = set()
    for k, era in enumerate(eras):
        now: dict[str, int] = {}
        for replica in era.deployment.replicas:
            name = replica.name
            if k and name in current and _same(eras[k - 1].deployment, era.deployment, name):
                now[name] = current[name]
                lives[now[name]] = replace(lives[now[name]], last=k)
                continue
            label = name if name not in taken else f"{name} from {era.start_s:g} s"
            taken.add(label)
            begin = 0.0 if k == 0 else era.up_s
            if era.change == "drain" and name in current:
                begin = np.inf  # until its predecessor is empty
            now[name] = len(lives)
            lives.append(Life(name, replace(replica, name=label), k, k, begin, np.inf))
        for name, n in current.items():
            if now.get(name) != n and era.change == "abrupt":
                lives[n] = replace(lives[n], end_s=era.start_s)
        current = now
    return lives


def _continues(eras: Sequence[Era], lives: list[Life], k: int) -> bool:
    """Whether a pair with a share in era ``k`` was there before it."""
    staying = {life.origin for life in lives if life.first < k <= life.last}
    return any(weight > 0 and {a, b} <= staying for (a, b), weight in eras[k].weights.items())


def _pairs(lives: Sequence[Life]) -> list[tuple[int, int]]:
    return [
        (a, b)
        for a, one in enumerate(lives)
        for b, two in enumerate(lives)
        if (one.replica.role, two.replica.role) == ("prefill", "decode")
        or (a == b and one.replica.role == "both")
    ]


def _waits(lives: Sequence[Life]) -> list[tuple[float, float]]:
    """Times in which no pair is up, from 0 to the last time that one comes up."""
    spans = sorted(
        (max(lives[a].begin_s, lives[b].begin_s), min(lives[a].end_s, lives[b].end_s))
        for a, b in _pairs(lives)
    )
    waits, reached = [], 0.0
    for begin, end in spans:
        if begin >= end or not np.isfinite(begin):
            continue
        if begin > reached:
            waits.append((reached, begin))
        reached = max(reached, end)
    return waits


def _simulate(
    eras: Sequence[Era], lives: Sequence[Life], trace: Trace, drawn: bool, seed: int
) -> Run:
    nodes = [life.replica for life in lives]
    links = []
    for a, b in _pairs(lives):
        if a != b:
            # The pair may never have been up together; then the link of either era will do.
            shared = eras[min(lives[a].last, lives[b].last)].deployment
            link = _link(shared, lives[a].origin, lives[b].origin) or KvLink(1.0)
            links.append((nodes[a].name, nodes[b].name, link))
    deployment = Deployment(eras[0].deployment.name, tuple(nodes), tuple(links))
    parts: list[tuple[float, dict[tuple[str, str], float]]] = []
    for k, era in enumerate(eras):
        names = {life.origin: life.replica.name for life in lives if life.first <= k <= life.last}
        shares = {
            (names[a], names[b]): weight
            for (a, b), weight in era.weights.items()
            if a in names and b in names
        }
        # The same shares go on where they are; a new part would start their rotation anew.
        if not parts or shares != parts[-1][1]:
            parts.append((era.start_s, shares))
    router = PairShares(parts[0][1], parts[1:], drawn=drawn)
    return simulate(deployment, trace, router, events=_events(lives), seed=seed)


def _events(lives: Sequence[Life]) -> list[Event]:
    events = []
    for life in lives:
        name = life.replica.name
        if life.begin_s > 0:
            events.append(Event(0.0, name, "fail"))
        if 0 < life.begin_s < np.inf:
            events.append(Event(life.begin_s, name, "recover"))
        if life.end_s < np.inf:
            events.append(Event(life.end_s, name, "fail"))
    # What comes up does so before what goes down at that time, whose requests it can take.
    return sorted(events, key=lambda event: (event.time_s, event.what == "fail"))


def _empty_s(run: Run, index: int) -> float:
    """When a replica that gets no more requests holds none."""
    records = run.requests
    if run.deployment.replicas[index].role == "prefill":
        here = records["node"] == index
        ends = records["first_token_s"][here] + records["transfer_s"][here]
    else:
        decode = np.where(records["decode_node"] >= 0, records["decode_node"], records["node"])
        ends = records["finish_s"][decode == index]
    return float(np.nanmax(ends, initial=0.0))
