"""Phases and ranges of given islands for DeepSeek-V3 (Rignall, chapters 4 and 5.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Final, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hetero import catalog, cluster, workload
from hetero.latency.models.moe import MoeModel
from hetero.latency.models.moe_devices import moe_device, moe_devices
from hetero.latency.models.reference_quirks import CORRECTED, FAITHFUL, LETTERS, Quirks
from hetero.planners.rignall import parallelism
from hetero.planners.rignall.assignment import Assignment
from hetero.planners.rignall.exact import exact
from hetero.planners.rignall.inner import solve
from hetero.planners.rignall.model import IslandModel, layout_of
from hetero.planners.rignall.parallelism import READINGS, Benchmark
from hetero.planners.rignall.rates import PHASES, Phase, RateTable
from hetero.planners.rignall.replay import deployment, router
from hetero.routers import LeastTokens, Oracle
from hetero.simulator import metrics, simulate
from hetero.simulator.sustained import saturation
from hetero.streams import stream
from hetero.workload.synthetic import TruncatedNormal
from pipelines.studies.island_evaluator import Evaluation

#: GPU types that figures show.
SHOWN: Final = ("B300", "Rubin-NVL144", "H200", "H800", "H20", "MI300X")
#: What an quirk of the latency model is seen by.
SEEN: Final = ("prefill, 64 GPUs", "prefill, 8 GPUs", "decode step", "largest batch")
#: The workload of fig. 4.2 [tokens].
INPUT, LIMIT = TruncatedNormal(500, 2000, 0, 7999), 8000
OUTPUT, MAX_OUTPUT = 100, 1000
#: Table 5.2.
LAYOUTS: Final = {name: layout_of(cluster.cluster(f"rignall-islands-{name}")) for name in "abcd"}
#: Half of inventory (b) of Table 5.1, and the islands that a simulated plan may have [GPUs].
INVENTORY: Final = {"H200-SXM": 16, "H800-SXM": 64, "H20": 64}
SIZES: Final = (2, 4, 8, 16, 32, 64)

#: Readings other than the one that figures show.
OTHERS: Final = ("printed", "whole", "fitting")
#: What a claim's record takes: id, value, figure, note.
Record = tuple[str, float | str, str, str]


def latency(gpu: str, quirks: Quirks = FAITHFUL) -> MoeModel:
    """Step times of DeepSeek-V3 on a GPU type."""
    return MoeModel(catalog.llm("DeepSeek-V3"), moe_device(gpu), quirks)


def quirks_frame() -> pd.DataFrame:
    """Change [%] of what :data:`SEEN` tells when each quirk is mended alone, and all together.

    A prompt of 4,096 tokens of which half is cached (tp1 dp64, tp4 dp2), a decode step of 16
    requests per GPU at that length (tp4 on 64 GPUs), and the largest batch that fits there.
    """

    def typical(gpu: str, mended: Quirks) -> NDArray[np.float64]:
        model = latency(gpu, mended)
        decode = model.decode(4096, 16, tp=4, gpus=64, output_tokens=1000)
        prefills = (model.prefill(4096, tp=tp, dp=dp, hit_rate=0.5) for tp, dp in ((1, 64), (4, 2)))
        return np.array([*(p.total_ms for p in prefills), decode.tpot_ms, decode.max_batch], float)

    mended = {
        f"{letter} {name.replace('_', ' ')}": FAITHFUL.mend(letter)
        for letter, name in LETTERS.items()
    } | {"all mended": CORRECTED}
    usual = {gpu: typical(gpu, FAITHFUL) for gpu in SHOWN}
    changes = np.array(
        [[100 * (typical(gpu, each) / usual[gpu] - 1) for gpu in SHOWN] for each in mended.values()]
    )
    columns = {
        f"{what}, {gpu} [%]": changes[:, k, w].round(9)
        for (w, what), (k, gpu) in product(enumerate(SEEN), enumerate(SHOWN))
    }
    return pd.DataFrame({"oddity mended": list(mended), **columns})


def islands(reading: str, width_tokens: int) -> IslandModel:
    """The workload of fig. 4.2 in ranges of this width, under one reading."""
    return IslandModel.of(
        INPUT,
        width_tokens,
        limit_tokens=LIMIT,
        output_tokens=OUTPUT,
        max_output_tokens=MAX_OUTPUT,
        reading=READINGS[reading],
    )


@cache
def benchmark64(gpu: str, phase: Phase, reading: str, lengths: int) -> Benchmark:
    """Every parallelism of 64 GPUs at input lengths of 16 to 8,192 tokens (4.6)."""
    grid = np.unique(np.geomspace(16, 8192, lengths).round())
    even, how = np.full(len(grid), 1 / len(grid)), READINGS[reading]
    if phase == "prefill":
        return parallelism.benchmark_prefill(latency(gpu), 64, grid, even, how)
    outputs = {"output_tokens": OUTPUT, "max_output_tokens": MAX_OUTPUT}
    return parallelism.benchmark_decode(latency(gpu), 64, grid, even, how, **outputs)


def fitting(measured: Benchmark) -> tuple[int, int]:
    """Configurations that fit at no length, and those that fit only at some."""
    never = int((~measured.rps.any(axis=1)).sum())
    return never, int((measured.rps == 0).any(axis=1).sum()) - never


def best64_frame(lengths: int) -> pd.DataFrame:
    """Parallelism chosen for 64 GPUs of each type, by reading."""
    rows = []
    for gpu in (device.name for device in moe_devices()):
        row: dict[str, object] = {"GPU": gpu}
        for reading in ("printed", "whole"):
            prefill = benchmark64(gpu, "prefill", reading, lengths)
            wins = prefill.winners[prefill.length_tokens > 128]
            row[f"prefill, {reading}"] = prefill.choice
            row[f"tp64 dp1 best above 128, {reading} [% of lengths]"] = 100 * np.mean(
                [prefill.names[k] == "tp64 dp1" for k in wins]
            )
        for reading in ("printed", "thesis", "whole"):
            row[f"decode, {reading}"] = benchmark64(gpu, "decode", reading, lengths).choice
        never, partly = fitting(benchmark64(gpu, "decode", "thesis", lengths))
        row["decode configurations that never fit"] = never
        row["that do not fit some lengths"] = never + partly
        rows.append(row)
    return pd.DataFrame(rows)


class Solution(NamedTuple):
    """A layout with the program of 4.8.1, and as maximum concurrent flow."""

    rates: RateTable
    plan: Assignment
    flow: Assignment


#: By reading and layout.
Solutions = Mapping[tuple[str, str], Solution]


def solutions(width_tokens: int) -> dict[tuple[str, str], Solution]:
    """Every layout of Rignall's Table 5.2 under every reading."""
    solved = {}
    for reading, (name, layout) in product(READINGS, LAYOUTS.items()):
        rates = islands(reading, width_tokens).rates(layout)
        plan, flow = (solve(rates, layout, form) for form in ("aggregated", "flow aggregated"))
        solved[reading, name] = Solution(rates, plan, flow)
    return solved


def count(plan: Assignment, phase: Phase) -> int:
    """Islands of a phase."""
    return sum(group.count for group in plan.of(phase))


def largest(plan: Assignment, phase: Phase) -> int:
    """GPUs of the largest island of a phase."""
    return max(group.island.size for group in plan.of(phase))


def mismatch(plan: Assignment) -> float:
    """|R_prefill - R_decode| over the larger."""
    prefill, decode = (plan.rate_rps(phase).sum() for phase in PHASES)
    return float(abs(prefill - decode) / max(prefill, decode))


def solution_frame(solved: Solutions) -> pd.DataFrame:
    """Islands, throughput and load of every solution."""
    return pd.DataFrame(
        {
            "reading": reading,
            "layout": f"({name})",
            **{f"{phase} islands": count(plan, phase) for phase in PHASES},
            "largest decode island [GPUs]": largest(plan, "decode"),
            **{f"R {phase} [requests/s]": float(plan.rate_rps(phase).sum()) for phase in PHASES},
            "mismatch": round(mismatch(plan), 6),
            "D_total [requests/s]": round(plan.deviation_rps, 6),
            "flow: load [requests/s]": flow.served_rps,
            "flow: decode islands": count(flow, "decode"),
            "status": plan.status,
        }
        for (reading, name), (_, plan, flow) in solved.items()
    )


def halves(evaluated: Evaluation, phase: Phase) -> tuple[float, float]:
    """Shares of ranges evaluated above the model below the middle, and below it above."""
    ranges = evaluated.assignment.rates.ranges
    gap = evaluated.evaluated_rps[phase] - evaluated.model_rps[phase]
    of = ranges.index(evaluated.tokens)
    lower = evaluated.tokens < ranges.middle_tokens[of]
    early, late = (
        np.bincount(of[part], gap[part], minlength=len(ranges)) for part in (lower, ~lower)
    )
    used = evaluated.assignment.rate_rps(phase) > 1e-9
    return float(np.mean(early[used] > 0)), float(np.mean(late[used] < 0))


def evaluation_frame(evaluated: Mapping[str, Evaluation]) -> pd.DataFrame:
    """Throughput of each layout and phase by the model of ranges, and at every length."""
    rows = []
    for (name, each), phase in product(evaluated.items(), PHASES):
        above, below = halves(each, phase)
        rows.append(
            {
                "layout": f"({name})",
                "phase": phase,
                "model [requests/s]": float(each.model_rps[phase].sum()),
                "evaluated [requests/s]": float(each.evaluated_rps[phase].sum()),
                "carried of the mix [requests/s]": each.goodput_rps[phase],
                "evaluated above the model below the middle [% of ranges]": 100 * above,
                "evaluated below the model above the middle [% of ranges]": 100 * below,
            }
        )
    return pd.DataFrame(rows)


def replay(
    trace: workload.Trace, label: str, width_tokens: int, by_range: bool, requests: int, seed: int
) -> tuple[dict[str, object], Assignment]:
    """What routers sustain of the load that the exact optimum for a trace promises.

    Parameters
    ----------
    label
        Names the trace in the table and in the streams of random numbers.
    by_range
        Plan with a mean output per range instead of one for all.
    """
    model = IslandModel.of_trace(trace, width_tokens, by_range=by_range)
    classes = [(gpu, size) for gpu, held in INVENTORY.items() for size in SIZES if size <= held]
    plan = exact(model.rates(classes), INVENTORY, sizes=SIZES)
    fleet = deployment(model, plan)
    drawn = stream(seed, f"{label} requests").integers(0, len(trace), requests)
    load = trace.all_at_once().take(drawn).poisson(100.0, stream(seed, f"{label} arrivals"))
    routers = {
        "by shares": router(model, plan),
        "by load": router(model, plan, among="load"),
        "least tokens, no plan": LeastTokens(),
    }
    busy, told, sustained, ttft_s = load.rescale(rate_rps=0.8 * plan.served_rps), Oracle(), {}, {}
    for name, each in routers.items():
        sustained[name] = saturation(fleet, load, each, predictor=told)
        run = simulate(fleet, busy, each, predictor=told)
        ttft_s[name] = metrics(run).percentiles["ttft_s"][99]
    row: dict[str, object] = {
        "trace": label,
        "W [tokens]": width_tokens,
        "mean output": "per range" if by_range else "one for all",
        "ranges": len(model.ranges),
        "replicas": len(fleet.replicas),
        "plan [requests/s]": plan.served_rps,
        **{f"sustained, {name} [requests/s]": rate for name, rate in sustained.items()},
        "by shares over plan [%]": 100 * sustained["by shares"] / plan.served_rps,
        **{f"TTFT P99 at 80 % of the plan, {name} [s]": late for name, late in ttft_s.items()},
    }
    return row, plan


def parallelism_claims(table: pd.DataFrame) -> Iterator[Record]:
    """Claims 5 and 6 from :func:`best64_frame`."""
    won = table["tp64 dp1 best above 128, printed [% of lengths]"]
    beaten = [
        f"{g} at {w:.0f} % of the lengths"
        for g, w in zip(table["GPU"], won, strict=True)
        if w < 100
    ]
    least = int((table["prefill, whole"] == "tp1 dp64").sum())
    yield (
        "rignall-5",
        float(np.mean(won == 100)),
        "best64",
        "1000 / t as printed, one prompt per island, 12 GPU types"
        + (f"; not {', '.join(beaten)}" if beaten else "")
        + ". With a prompt per data-parallel group (whole) the least divided configuration wins at "
        f"every length on {least} of 12 types.",
    )
    kinds = {reading: table[f"decode, {reading}"] for reading in ("thesis", "printed", "whole")}
    chosen = ", ".join(f"{k} {n}" for k, n in kinds["printed"].value_counts(sort=False).items())
    yield (
        "rignall-6a",
        int(kinds["printed"].nunique()),
        "best64",
        f"Chosen for 64 GPUs of 12 types: {chosen}. thesis: {kinds['thesis'].nunique()}; whole: "
        f"{kinds['whole'].nunique()}.",
    )
    yield (
        "rignall-6b",
        int(table["decode configurations that never fit"].sum()),
        "best64",
        f"Of {12 * 28} pairs of GPU type and configuration, at every length up to 8,192 tokens; "
        f"{int(table['that do not fit some lengths'].sum())} at some length. The same under every "
        "reading.",
    )


def idle(reading: str, phase: Phase, width_tokens: int) -> list[str]:
    """Island classes of all layouts without throughput in a phase."""
    model = islands(reading, width_tokens)
    classes = sorted({island for layout in LAYOUTS.values() for island in layout})
    measured = [model.benchmark(island.gpu, island.size, phase) for island in classes]
    return [f"{each.size} x {each.gpu}" for each in measured if not each.rps.any()]


def split_claims(solved: Solutions) -> Iterator[Record]:
    """Claim 8: how many islands decode for each that prefills, and how large they are."""

    def split(reading: str, name: str) -> str:
        plan = solved[reading, name].plan
        return f"{count(plan, 'decode')} decode, {count(plan, 'prefill')} prefill"

    def decoding(plan: Assignment) -> str:
        return ", ".join(f"{group.count} of {group.island}" for group in plan.of("decode"))

    for name in LAYOUTS:
        plan = solved["thesis", name].plan
        others = "; ".join(f"{r}: {split(r, name)}" for r in OTHERS)
        yield (
            f"rignall-8{name}",
            count(plan, "decode") / count(plan, "prefill"),
            "readings",
            f"{split('thesis', name)}; {decoding(plan)} decode. Other readings: {others}. Read to "
            "the letter decode is the bottleneck, not prefill.",
        )
    for claim, name in (("rignall-8e", "b"), ("rignall-8f", "d")):
        _, plan, flow = solved["thesis", name]
        sizes = "; ".join(f"{r}: {largest(solved[r, name].plan, 'decode')} GPUs" for r in OTHERS)
        yield (
            claim,
            largest(plan, "decode") / max(island.size for island in LAYOUTS[name]),
            "readings",
            f"The proven optimum has {decoding(plan)} decode, not one large island: small ones "
            f"match prefill's throughput to {100 * mismatch(plan):.0f} % and leave it most GPUs. "
            f"Maximum concurrent flow: {decoding(flow)}. Largest in other readings: {sizes}.",
        )


def ordered(values: Mapping[str, float]) -> str:
    """Names from the smallest value to the largest; ``=`` where equal to six digits.

    Examples
    --------
    >>> ordered({"a": 2.0, "b": 1.0, "c": 1.0})
    'b=c<a'
    """
    rounded = {name: round(value, 6) for name, value in values.items()}
    text = ""
    for name in sorted(rounded, key=lambda name: rounded[name]):
        sign = "" if not text else "=" if rounded[name] == rounded[text[-1]] else "<"
        text += sign + name
    return text


def resemblance(plan: Assignment) -> float:
    """Mean over islands of the correlation of their time per range with the ranges' shares."""
    groups = [group for group in plan.groups if group.share.std() > 0]
    alike = [np.corrcoef(group.share, plan.rates.share)[0, 1] for group in groups]
    return float(np.average(alike, weights=[group.count for group in groups]))


def order_claims(solved: Solutions) -> Iterator[Record]:
    """Claims 9 and 20: which layouts match their phases, and follow the workload, how well."""
    apart = {r: {n: mismatch(solved[r, n].plan) for n in LAYOUTS} for r in READINGS}
    told = ", ".join(f"({name}) {value:.3f}" for name, value in apart["thesis"].items())
    others = "; ".join(f"{r}: {ordered(apart[r])}" for r in OTHERS)
    yield (
        "rignall-9",
        ordered(apart["thesis"]),
        "readings",
        f"Mismatch {told}; {others}. It comes from having to use every island's whole time: "
        "maximum concurrent flow aligns the phases in every layout.",
    )
    alike = {name: resemblance(solved["thesis", name].plan) for name in LAYOUTS}
    told = ", ".join(f"({name}) {value:.2f}" for name, value in alike.items())
    yield (
        "rignall-20",
        ordered(alike),
        "fig52_assignment",
        f"Mean over islands of the correlation of their time per range with p: {told}. Islands of "
        "a class are interchangeable, so their mean is taken.",
    )
