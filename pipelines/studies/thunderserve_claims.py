"""What was measured for ThunderServe's claims, as arguments of `ResultFolder.claim`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from hetero import timings
from hetero.errors import DataError
from hetero.intervals import interval, ranking
from hetero.planners.reschedule.policy import Policy
from hetero.planners.reschedule.service import PhaseService
from hetero.planners.thunderserve.phases import PhasePlan
from pipelines.studies.results import Rows, claim_rows
from pipelines.studies.thunderserve import (
    GRID,
    KINDS,
    LENGTHS,
    OUTPUTS,
    SCALE,
    SYSTEMS,
    TPS,
    Key,
    Scales,
)
from pipelines.studies.thunderserve_changes import Losses, reload_s

_NAMES = ("coding", "conversation")
_OTHERS = ("HexGen", "DistServe", "vLLM")


def _rows(figure: str, note: str, **values: float | str) -> Rows:
    """Rows of one figure with the same note, by number of the claim."""
    return claim_rows("thunderserve", figure, note, {k[1:]: v for k, v in values.items()})


def _means(figure: str, note: str, **samples: ArrayLike) -> Rows:
    """Means over seeds, with their intervals where there are several."""
    rows = _rows(
        figure, note, **{k: float(np.asarray(x, np.float64).mean()) for k, x in samples.items()}
    )
    for row, sample in zip(rows, samples.values(), strict=True):
        if np.size(sample) > 1:
            row["interval"] = interval(sample)
    return rows


def _ratio(frame: pd.DataFrame, values: str, over: str, under: str, *index: str) -> Any:
    """A quantity of one system over that of another: a series by index and seed."""
    wide = frame.pivot_table(index=[*index, "seed"], columns="system", values=values)
    return wide[over] / wide[under]


def throughput(overloaded: pd.DataFrame, rate_rps: float) -> Rows:
    """Claims 4, 5, 19a and 19b, with the plans for a rate."""
    ratios = [_ratio(overloaded, TPS, "ThunderServe", s, "workload") for s in _OTHERS[:2]]
    a, b, c, d = (ratio.loc[name].to_numpy() for ratio in ratios for name in _NAMES)
    figure, every = "fig9_throughput", np.array([a, c, b, d])
    note = f"tokens/s under overload with the plans for {rate_rps:g} req/s"
    over = "of the four ratios over workloads and the two systems of Fig. 9"
    return [
        *_means(figure, note, _4a=a, _4b=b, _5a=c, _5b=d),
        *_means(figure, f"largest {over}, by seed", _19a=every.max(axis=0)),
        *_means(figure, f"mean {over}", _19b=every.mean(axis=0)),
    ]


def deadlines(
    smallest: pd.DataFrame, scales: Mapping[Key, Sequence[Scales]], plan_scale: float
) -> Rows:
    """Claims 6, 7, 19c, 19d and 26."""
    keys = ["workload", "rate [req/s]", "goal [%]"]
    e2e = smallest[smallest["target"] == "E2E"]
    ratios = [_ratio(e2e, SCALE, system, "ThunderServe", *keys) for system in _OTHERS]
    a, b = (ratios[0].loc[[name]].groupby("seed").mean() for name in _NAMES)
    by_seed = [ratio.groupby("seed").mean() for ratio in ratios]
    largest = np.max([ratio.groupby("seed").max() for ratio in ratios], axis=0)
    rates = list(dict.fromkeys(rate for _, rate, _ in scales))
    told = ", ".join(f"{rate:g}" for rate in rates)
    note = f"smallest E2E deadline at 90 and 99 %, mean over {told} req/s"
    note += f"; plans for scale {plan_scale:g}"
    stronger = (
        f"{note}; the calibrated A100 and its links are stronger against the cloud GPUs than "
    )
    largest_note = "largest ratio over workloads, rates, goals and systems, by seed"
    grid_note = (
        "attainment averaged over SLO scales of 0.25 to 64 on a log axis; plans are made for the "
        "end-to-end target, so that a queue before prefill is traded for fast decode"
    )
    return [
        *_means("fig7_cloud", note, _6a=a, _6b=b),
        *_means("fig8_in_house", f"{stronger}the paper measured", _7=np.mean(by_seed[1:], axis=0)),
        *_means("deadlines", largest_note, _19c=largest),
        *_means("deadlines", f"{note}, and over the three systems", _19d=np.mean(by_seed, axis=0)),
        *_means("fig7_cloud", grid_note, _26=_wins(scales, rates)),
    ]


def _wins(scales: Mapping[Key, Sequence[Scales]], rates: Sequence[float]) -> list[float]:
    """Share of workloads, rates and kinds of target with more attained than HexGen [%], by seed."""
    shares = []
    for k in range(len(scales[_NAMES[0], rates[0], "HexGen"])):
        grid = [
            [np.mean(scales[name, rate, s][k].attained(kind, GRID)) for s in SYSTEMS[:2]]
            for name, rate, kind in product(_NAMES, rates, KINDS)
        ]
        wins = [bool(ours > theirs) for ours, theirs in grid if ours != theirs]
        shares.append(100 * sum(wins) / max(len(wins), 1))
    return shares


def plans(
    made: Mapping[str, Sequence[PhasePlan]],
    printed: Mapping[str, PhasePlan],
    rate_rps: float,
    plan_scale: float,
) -> Rows:
    """Claims 8 and 9 over seeds; ``printed`` plans have the figures of ThunderServe's Table 1."""
    at = f"at {rate_rps:g} req/s, scale {plan_scale:g}"
    orders, totals, shares = Rows(), Rows(), Rows()
    for k, name in enumerate(_NAMES):
        counts = {
            "prefill": [len(one.prefill) for one in made[name]],
            "decode": [len(one.decode) for one in made[name]],
        }
        told = ", ".join(f"{p}:{d}" for p, d in zip(*counts.values(), strict=True))
        orders += _rows("table3", f"{told} by seed, {at}", **{f"_8{'ab'[k]}": ranking(counts)})
        totals += _means("table3", at, **{f"_8{'cd'[k]}": np.sum(list(counts.values()), axis=0)})
    phases = product((("A40", "prefill"), ("RTX-3090Ti", "decode")), _NAMES)
    for letter, (phase, name) in zip("abcd", phases, strict=True):
        note = f"data sheet figures, {rate_rps:g} req/s; as printed "
        note += f"{100 * printed[name].gpu_share(*phase):.0f} %"
        share = [100 * one.gpu_share(*phase) for one in made[name]]
        shares += _means("deployments", note, **{f"_9{letter}": share})
    return orders + totals + shares


def search_times() -> Rows:
    """Claim 10, as far as the benchmark has been run."""
    rows = Rows()
    for number, size in (("_10a", 16), ("_10b", 24), ("_10c", 32)):
        with suppress(DataError):
            known = timings.timing(f"phases.tabu.{size}")
            rows += _rows("fig10_convergence", known.note, **{number: known.seconds})
    return rows


def rescheduling(
    steady: Mapping[tuple[str, str, str], Sequence[Scales]],
    service: PhaseService,
    search_s: Mapping[Policy, float | None],
    rate_rps: float,
    plan_scale: float,
) -> Rows:
    """Claims 11 and 12; ``service`` is the one that full rescheduling loads anew."""
    start = f"from the plans of Table 3 at {rate_rps:g} req/s, scale {plan_scale:g}, steady state"
    none, light, full = (
        np.array([[one.attained("e2e", [plan_scale])[0] for one in steady[key]] for key in keys])
        for keys in ([(k, "Table 3", x) for k in _NAMES] for x in ("none", "light", "full"))
    )
    note = f"{start}; full rescheduling is Algorithm 1"
    rows = _means("fig11_loss", note, _11a=(light / full).min(axis=0))
    rows += _means("fig11_loss", start, _11b=100 * (light - none).min(axis=0))
    whole, quick = search_s["full"], search_s["light"]
    if whole is not None and quick is not None:
        note = "recorded search times; reload computed, each layer read once per machine"
        rows += _rows("table4", note, _12=(whole + reload_s(service, "per machine")) / quick)
    return rows


def ablation(table: pd.DataFrame, rate_rps: float) -> Rows:
    """Claim 13."""
    note = f"mean E2E time at {rate_rps:g} req/s; 40 Gbit/s between machines is assumed"
    labels = ("full system", "without compression", "and random dispatch")
    ratios = [_ratio(table, "mean E2E [s]", labels[k + 1], labels[k], "workload") for k in (0, 1)]
    a, b, c, d = (ratio.loc[name] for ratio in ratios for name in _NAMES)
    return _means("fig12_ablation", note, _13a=a, _13b=b, _13c=c, _13d=d)


def kv_shares(table: pd.DataFrame) -> Rows:
    """Claim 14."""
    by_bits = table[table["output [tokens]"] == OUTPUTS].groupby("bits")["KV share [%]"]
    a, b, c, d = (float(end[bits]) for bits in (16, 4) for end in (by_bits.min(), by_bits.max()))
    note = f"inputs of {LENGTHS[0]} to {LENGTHS[-1]}, {OUTPUTS} outputs; the paper prints neither"
    return _rows("fig18_kv_share", note, _14a=a, _14b=b, _14c=c, _14d=d)


def two_machines(table: pd.DataFrame, best: Mapping[str, PhasePlan]) -> Rows:
    """Claims 15 and 16."""
    tps = table.set_index("configuration")[TPS]
    ours = table.set_index("configuration")["our design [tokens/s]"] / tps["baseline"]
    rows = Rows()
    for key, label in (("_15a", "40 Gbit/s"), ("_15b", "5 Gbit/s")):
        note = f"{OUTPUTS} outputs; fed continuously, printed design; ours {ours[label]:.2f}"
        rows += _rows("table5_8", note, **{key: tps[label] / tps["baseline"]})
    c, d, e, f = (
        sum(group.gpu_counts.get(gpu, 0) for group in best[label].prefill)
        for label in ("40 Gbit/s", "5 Gbit/s")
        for gpu in ("A40", "RTX-3090Ti")
    )
    note = "best of all designs for throughput"
    rows += _rows("fig17_plans", note, _15c=c, _15d=d, _15e=e, _15f=f)
    bits = tps["40 Gbit/s"] / tps["40 Gbit/s, 16 bits"]
    return rows + _rows("table5_8", f"{OUTPUTS} outputs; printed design", _16=bits)


def replicas(table: pd.DataFrame, rescheduled: Losses, rate_rps: float) -> Rows:
    """Claims 20, 22 and 27; ``rate_rps`` is the one at which GPUs are lost."""
    in_house = table.loc[table["system"] == "vLLM", "replicas for both"].mean()
    ours = table[table["system"] == "ThunderServe"].set_index(["workload", "rate [req/s]", "seed"])
    ours = ours[["prefill replicas", "decode replicas"]]
    ratio = ours.sum(axis=1).groupby("seed").mean() / in_house
    rows = _means("plans", "mean over workloads and rates, vLLM's replicas in house", _20=ratio)
    for key, name in zip(("_22a", "_22b"), _NAMES, strict=True):
        light = rescheduled[name, "Table 3", "light"]
        before, after = ("{}:{}".format(*s.ratio) for s in (light.before, light.after))
        note = f"{before} to {after}; {len(light.turned)} groups change their phase at "
        # The paper turns one, from prefill to decode.
        to_decode = light.after.ratio[0] < light.before.ratio[0]
        count = len(light.turned) if to_decode else -len(light.turned)
        rows += _rows("fig11_loss", f"{note}{rate_rps:g} req/s", **{key: count})
    coding = ours.loc["coding"]
    ratios = (coding["prefill replicas"] / coding["decode replicas"]).unstack("seed")
    if len(ratios) > 1:
        told = ", ".join(f"{r:.2g}" for r in ratios.mean(axis=1))
        rates = ", ".join(f"{rate:g}" for rate in ratios.index)
        note = f"prefill:decode replicas {told} at {rates} req/s, means over seeds"
        rows += _means("plans", note, _27=np.mean(np.diff(ratios, axis=0) <= 0, axis=0))
    return rows


def alone(table: pd.DataFrame) -> Rows:
    """Claims 29 and 30: one request alone on the two machines."""
    ms = table.set_index("configuration")[["prefill [ms]", "KV transfer [ms]", "decode [ms]"]]
    values = ms.loc[["baseline", "40 Gbit/s", "5 Gbit/s"]].to_numpy().ravel()
    numbers = {f"_29{letter}": float(v) for letter, v in zip("abcdefghi", values, strict=True)}
    few, most = ms["KV transfer [ms]"][["40 Gbit/s", "40 Gbit/s, 16 bits"]]
    line = "56 % of the line rate, as this figure of the paper implies"
    return [
        *_rows("table5_8", f"one request alone, {OUTPUTS} outputs (not printed)", **numbers),
        *_rows("table5_8", line, _30a=float(most)),
        *_rows("table5_8", "a quarter of the bytes, and the codec", _30b=float(few)),
        *_rows("table5_8", "the bits allow 4, the codec takes some of it", _30c=most / few),
    ]
