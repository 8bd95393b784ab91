"""League of planners: who wins where, by how much, and at what price.

Everything here reads the table of a contest (:mod:`pipelines.studies.contest`): one row per case,
planner and load. A case is a cluster, a model and a workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from hetero.cluster.fleets import AS, fleet, gpu_prices
from hetero.intervals import interval

CASE: Final = ["cluster", "model", "workload"]
"""Columns that name a case."""
GOODPUT: Final = "goodput [requests/s]"
PRICE: Final = "price [$/h]"
VLLM: Final = "vLLM refuses"
"""Column that says why an export for vLLM refuses a plan; empty where it writes one."""
PORTFOLIO: Final = "portfolio"
"""Name of the planner that tries the others; it is never the measure of a case."""
SEARCHED: Final = "seen by the search [requests/s]"
PLAIN: Final = "by least requests [requests/s]"
ALONE: Final = "best planner alone [requests/s]"
RATIO: Final = "mixed over homogeneous"
TIE: Final = 0.02
"""Goodputs this close are equal: as close as the search for them goes."""
DRAWN: Final = tuple(f"with step times of draw {d} [requests/s]" for d in range(1, 6))


WORLDS: Final = {
    "as planned": GOODPUT,
    "least requests in place of its router": PLAIN,
    "best planner alone, no search": ALONE,
    **{one.removesuffix(" [requests/s]"): one for one in DRAWN},
    "prefill and decode apart where that is better": GOODPUT,
}
"""What the comparison is made with, one thing changed at a time, and the column that tells it."""


#: CPU time of a case on fleets below 9, below 25 and of more GPUs, alone and with all planners [s]
#: (AMD EPYC, 2026-11-28).
CASE_CPU_S: Final = (9.0, 9.0, 20.0)
CONTEST_CPU_S: Final = (40.0, 40.0, 80.0)


def plans_frame(table: pd.DataFrame) -> pd.DataFrame:
    """One row per case and planner, with two more columns.

    ``share of best`` is the goodput over the highest of any single planner in the case (the
    portfolio may exceed 1), 0 where a planner found no plan or its plan meets the targets at no
    rate, and ``wins`` whether no single planner is more than 2 % better.
    """
    own = table.drop_duplicates([*CASE, "planner"]).copy()
    best = own[own["planner"] != PORTFOLIO].groupby(CASE, sort=False)[GOODPUT].max().rename("best")
    own = own.merge(best, on=CASE, how="left")
    own_rps, top = own[GOODPUT].fillna(0.0).to_numpy(), own.pop("best").fillna(0.0).to_numpy()
    share = np.divide(own_rps, top, out=np.zeros_like(own_rps), where=top > 0)
    own["share of best"] = share
    own["wins"] = share >= 1.0 - TIE
    return own


def league_frame(table: pd.DataFrame) -> pd.DataFrame:
    """Planners, ranked by the geometric mean of their share of the best goodput.

    The mean is over the cases that a planner serves; those it cannot take, or serves at no rate,
    are counted beside it, and the last column takes them as 0. The portfolio stands first or
    where it belongs, measured by the best single planner like all others.

    Returns
    -------
    pandas.DataFrame
        Columns rank, planner, cases served, those of them whose plan vLLM runs, cases, wins,
        geometric mean and lowest share of the best [%], and the mean over all cases with 0 where
        there is none [%].
    """
    own = plans_frame(table)
    rows = []
    for name, group in own.groupby("planner", sort=False):
        share = group["share of best"].to_numpy()
        served = share[share > 0]
        rows.append(
            {
                "planner": name,
                "cases served": len(served),
                "of them on vLLM": int(group.loc[share > 0, VLLM].isna().sum()),
                "cases": len(share),
                "wins": int(group["wins"].sum()),
                "geometric mean [% of best]": 100 * np.exp(np.log(served).mean())
                if len(served)
                else np.nan,
                "lowest [% of best]": 100 * served.min() if len(served) else np.nan,
                "mean over all cases [% of best]": 100 * share.mean(),
            }
        )
    found = pd.DataFrame(rows).sort_values(
        ["geometric mean [% of best]", "cases served"],
        ascending=False,
        kind="stable",
        na_position="last",
    )
    found.insert(0, "rank", np.arange(1, len(found) + 1))
    return found.reset_index(drop=True)


def shares_frame(table: pd.DataFrame) -> pd.DataFrame:
    """Share of the best goodput by case (rows) and planner (columns); NaN without a plan.

    Rows and columns stand in the order of the table.
    """
    own = plans_frame(table)
    values = own["share of best"].where(own[GOODPUT].notna())
    wide = own.assign(value=values).pivot(index=CASE, columns="planner", values="value")
    rows = pd.MultiIndex.from_frame(own[CASE].drop_duplicates())
    return wide.reindex(index=rows, columns=list(own["planner"].drop_duplicates()))


def _sides(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """By case and seed what the mixed fleet carries, and the best of the homogeneous ones."""
    rows = rows.assign(
        fleet=rows["cluster"].str.split(AS).str[0],
        seen=rows[SEARCHED].fillna(0.0).astype(float),
        value=rows[value].fillna(0.0).astype(float),
    )
    rows["side"] = np.where(rows["cluster"] == rows["fleet"], "mixed", "alike")
    rows["mean"] = rows.groupby(CASE)["seen"].transform("mean")
    own = ["fleet", *CASE[1:], "side"]
    best = rows[rows["mean"] == rows.groupby(own)["mean"].transform("max")]
    keys = ["fleet", *CASE[1:], "seed"]
    return best.pivot_table(index=keys, columns="side", values="value", sort=False)


def _worlds(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The two sides in each world."""
    apart = table["apart"].astype(bool)
    both = table[table["seed"].isin(table["seed"][apart])]
    ranked = both.sort_values(SEARCHED, kind="stable", na_position="first")
    either = ranked.drop_duplicates([*CASE, "seed"], keep="last").sort_index()
    tables = (*(table[~apart],) * (len(WORLDS) - 1), either)
    return {w: _sides(t, WORLDS[w]) for w, t in zip(WORLDS, tables, strict=True)}


def _logs(above: pd.Series, below: pd.Series) -> pd.Series:
    """Logarithms of ratios, where both carry something."""
    ratio = above / below.where(below > 0)
    return ratio[ratio > 0].apply(np.log)


def pays_frame(table: pd.DataFrame) -> pd.DataFrame:
    """One row per case, the best ratios first: what the mixed fleet carries over the best other.

    Columns ``low`` and ``high`` are a 95 % interval over seeds. ``parts apart`` is what the GPUs of
    the fleet would carry if each type carried as much for its money as it does in a fleet of its
    own, over the best of these; ``mixing adds`` is the rest of the ratio.
    """
    sides, rows = _worlds(table)["as planned"], []
    for case, of in sides.groupby(["fleet", *CASE[1:]], sort=False):
        logs = _logs(of["mixed"], of["alike"])
        low, high = interval(logs) if len(logs) else (np.nan, np.nan)
        mixed, ratio = fleet(str(case[0])), float(np.exp(logs.mean()))
        own = (table[CASE[1:]] == [*case[1:]]).all(axis=1) & ~table["apart"].astype(bool)
        means = table[own].groupby("cluster")[[SEARCHED, GOODPUT, PRICE]].mean().fillna(0.0)
        alike = {kind: means.loc[f"{case[0]}{AS}{kind}"] for kind in mixed.gpu_types}
        rival = max(alike, key=lambda kind: alike[kind][SEARCHED])
        usd = {kind: mixed.gpu_counts[kind] * one for kind, one in gpu_prices(mixed).items()}
        apart = sum(usd[kind] * one[GOODPUT] / one[PRICE] for kind, one in alike.items())
        parts = apart / of["alike"].mean() if of["alike"].mean() > 0 else np.nan
        counts = fleet(f"{case[0]}{AS}{rival}").gpu_counts
        rows.append(
            {
                **dict(zip(CASE, case, strict=True)),
                "GPUs": " + ".join(f"{n} {name}" for name, n in mixed.gpu_counts.items()),
                GOODPUT: of["mixed"].mean(),
                "homogeneous": " + ".join(f"{n} {name}" for name, n in counts.items()),
                "its " + GOODPUT: of["alike"].mean(),
                RATIO: ratio,
                "low": np.exp(low),
                "high": np.exp(high),
                "per dollar spent": ratio * alike[rival][PRICE] / (mixed.usd_per_h or np.nan),
                "parts apart": parts,
                "mixing adds [%]": 100.0 * (ratio / parts - 1.0),
            }
        )
    return pd.DataFrame(rows).sort_values(RATIO, ascending=False, ignore_index=True)


def worlds_frame(table: pd.DataFrame) -> pd.DataFrame:
    """What a mixed fleet carries over the best homogeneous one, as planned and otherwise.

    Geometric means; intervals are over fleets, of which each counts once with the mean of its
    workloads and seeds. The last columns say how the change moves either side [%].
    """
    worlds, rows = _worlds(table), []
    first = worlds["as planned"]
    for name, sides in worlds.items():
        logs = _logs(sides["mixed"], sides["alike"])
        by_case, fleets = np.exp(logs.groupby(["fleet", *CASE[1:]]).mean()), logs.groupby("fleet")
        means = fleets.mean()
        low, high = interval(means)
        moved = (_logs(sides[one], first[one]).mean() for one in ("mixed", "alike"))
        rows.append(
            (name, len(means), len(by_case), *np.exp([means.mean(), low, high]),
             int((by_case > 1 + TIE).sum()), int((by_case < 1 - TIE).sum()),
             *(100.0 * np.expm1(one) for one in moved))
        )  # fmt: skip
    columns = ["comparison", "fleets", "cases", RATIO, "low", "high", "pays in", "loses in"]
    return pd.DataFrame(rows, columns=[*columns, "mixed moves [%]", "homogeneous moves [%]"])


def headline(pays: pd.DataFrame, worlds: pd.DataFrame) -> str:
    """Whether a mixed fleet pays, what each ingredient moves, and the cases against it."""
    first, ratios = worlds.iloc[0], worlds.set_index("comparison")[RATIO]
    erring = ratios[[name for name, of in WORLDS.items() if of in DRAWN]]
    ratios = ratios.drop(erring.index)
    others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.iloc[1:].items())
    others += f", with step times that err {erring.min():.2f} to {erring.max():.2f} by draw"
    # Frames have the best first: against a loss speak the first, against a gain the last.
    against = pays.dropna(subset=RATIO).iloc[:: 1 if first[RATIO] < 1 else -1].head(3)
    cases = "; ".join(
        f"{one['cluster']} ({one['workload']}) {one[RATIO]:.2f}, its types apart "
        f"{one['parts apart']:.2f} and mixing {one['mixing adds [%]']:+.0f} %"
        for _, one in against.iterrows()
    )
    return (
        f"A mixed fleet carries {first[RATIO]:.2f} times what the best single GPU type for as much "
        f"money does (95 % over {_counted(first['fleets'], 'fleet')}: {first['low']:.2f} to "
        f"{first['high']:.2f}); it pays in {first['pays in']} and loses in {first['loses in']} of "
        f"{_counted(first['cases'], 'case')}. Both are even where that type costs "
        f"{1 / first[RATIO]:.2f} times as much per GPU, if what it carries goes with their number. "
        f"Otherwise: {others}. Against it most: {cases}."
    )


def forecast(section: Mapping[str, Any]) -> str:
    """How long the cases of the paper profile take, by some on fleets of three sizes."""
    runs, contests = (len(section[of]) for of in ("alike_workloads", "workloads"))
    runs, hours = runs * (len(section["seeds"]) + 1), 0.0
    for name in (text.split()[0] for text in section["clusters"]):
        at, types = np.searchsorted((9, 25), fleet(name).gpus), len(fleet(name).gpu_types)
        hours += contests * CONTEST_CPU_S[at] / 3600
        hours += runs * (1 + types) * CASE_CPU_S[at] / 3600 if name in section["alike"] else 0
    return f"The contest, and fleets of equal price: about {hours:.1f} CPU hours."


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
