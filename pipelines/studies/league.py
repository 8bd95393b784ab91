"""League of planners: who wins where, by how much, and at what price.

Everything here reads the table of a contest (:mod:`pipelines.studies.contest`): one row per case,
planner, router and load. A case is a cluster, a model and a workload.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from hetero.cluster.fleets import AS
from hetero.intervals import interval

CASE: Final = ["cluster", "model", "workload"]
"""Columns that name a case."""
GOODPUT: Final = "goodput [requests/s]"
PRICE: Final = "price [$/h]"
VLLM: Final = "vLLM refuses"
"""Column that says why an export for vLLM refuses a plan; empty where it writes one."""
OWN: Final = "its own"
"""Router of a row that plays a plan with the rule it came with."""
PORTFOLIO: Final = "portfolio"
"""Name of the planner that tries the others; it is never the measure of a case."""
TIE: Final = 0.02
"""Goodputs this close are equal: as close as the search for them goes."""


def plans_frame(table: pd.DataFrame) -> pd.DataFrame:
    """One row per case and planner, simulated with the router it came with, with two more columns.

    ``share of best`` is the goodput over the highest of any single planner in the case (the
    portfolio may exceed 1), 0 where a planner found no plan or its plan meets the targets at no
    rate, and ``wins`` whether no single planner is more than 2 % better.
    """
    own = table[table["router"] == OWN].drop_duplicates([*CASE, "planner"]).copy()
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
                "geometric mean [% of best]": 100 * geometric_mean(served),
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


def geometric_mean(shares: np.ndarray) -> float:
    """Geometric mean of positive numbers; NaN of none.

    Examples
    --------
    >>> round(geometric_mean(np.array([0.5, 2.0])), 9)
    1.0
    """
    return float(np.exp(np.log(shares).mean())) if len(shares) else float("nan")


def shares_frame(table: pd.DataFrame) -> pd.DataFrame:
    """Share of the best goodput by case (rows) and planner (columns); NaN without a plan.

    Rows and columns stand in the order of the table.
    """
    own = plans_frame(table)
    values = own["share of best"].where(own[GOODPUT].notna())
    wide = own.assign(value=values).pivot(index=CASE, columns="planner", values="value")
    rows = pd.MultiIndex.from_frame(own[CASE].drop_duplicates())
    return wide.reindex(index=rows, columns=list(own["planner"].drop_duplicates()))


def pareto_frame(table: pd.DataFrame, among: list[str]) -> pd.DataFrame:
    """Plans with a price and a goodput, and whether none is at most as dear and carries more.

    Parameters
    ----------
    among
        Columns within which plans are compared, such as model and workload.

    Returns
    -------
    pandas.DataFrame
        The rows of :func:`plans_frame` that have both, with the columns ``efficient`` and ``goodput
        per dollar [requests/$]``.
    """
    own = plans_frame(table)
    own = own[own[PRICE].notna() & (own[GOODPUT] > 0)].copy()
    own["goodput per dollar [requests/$]"] = 3600.0 * own[GOODPUT] / own[PRICE]
    own["efficient"] = False
    for _, group in own.groupby(among, sort=False):
        ordered = group.sort_values([PRICE, GOODPUT], ascending=[True, False], kind="stable")
        best = -np.inf
        for index, goodput in zip(ordered.index, ordered[GOODPUT], strict=True):
            own.loc[index, "efficient"] = bool(goodput > best)
            best = max(best, float(goodput))
    return own.reset_index(drop=True)


def routers_frame(table: pd.DataFrame) -> pd.DataFrame:
    """Every router on the replicas of every plan, against the rule that the plan came with.

    Returns
    -------
    pandas.DataFrame
        One row per case, planner and router other than its own, with ``over its own [%]``: the
        goodput over that of the plan's own rule, less 1.
    """
    keys = [*CASE, "planner"]
    once = table.drop_duplicates([*keys, "router"])
    own = once[once["router"] == OWN].set_index(keys)[GOODPUT].rename("own")
    other = once[(once["router"] != OWN) & once[GOODPUT].notna()].join(own, on=keys)
    other = other[other["own"] > 0].copy()
    other["over its own [%]"] = 100.0 * (other[GOODPUT] / other["own"] - 1.0)
    return other[[*keys, "router", GOODPUT, "over its own [%]"]].reset_index(drop=True)


def ingredients_frame(table: pd.DataFrame) -> pd.DataFrame:
    """What a mixed fleet, phases apart, a router that predicts, and the search are each worth.

    Each is a ratio of two goodputs of the same case: the best plan on the mixed fleet over the best
    on a homogeneous one of equal price; the best plan of any single planner that serves prefill and
    decode apart over the best that does not; our router over least requests on the same replicas;
    the portfolio, which searches by simulation, over the best single planner.

    Returns
    -------
    pandas.DataFrame
        One row each: the number of ratios, their geometric mean less 1 with its 95 % interval over
        cases (Student's t of the logarithms), the lowest and the highest [%].
    """
    own = plans_frame(table)
    own = own[own[GOODPUT] > 0]
    single = own[own["planner"] != PORTFOLIO]
    split = single["groups"].str.contains("(prefill)", regex=False)

    def best(rows: pd.DataFrame) -> pd.Series:
        return rows.groupby(CASE, sort=False)[GOODPUT].max()

    swapped = routers_frame(table).pivot_table(
        index=[*CASE, "planner"], columns="router", values=GOODPUT, sort=False
    )
    usual = swapped.get("least requests", pd.Series(dtype=float))
    ratios = {
        "mixed fleet, over homogeneous of equal price": mixed_over_alike_frame(table)[
            "mixed over homogeneous"
        ],
        "prefill and decode apart, over both on every replica": best(single[split])
        / best(single[~split]),
        "router hetero, over least requests": swapped.get("hetero", usual) / usual,
        "portfolio, over the best single planner": best(own[own["planner"] == PORTFOLIO])
        / best(single),
    }
    rows = []
    for what, ratio in ratios.items():
        found = ratio.to_numpy(np.float64)
        logs = np.log(found[np.isfinite(found) & (found > 0)])
        if len(logs):
            sure = interval(logs) if len(logs) > 1 else (np.nan, np.nan)
            shown = 100.0 * np.expm1([logs.mean(), *sure, logs.min(), logs.max()])
            rows.append((what, len(logs), *shown))
    columns = ("mean", "95 % low", "95 % high", "lowest", "highest")
    return pd.DataFrame(rows, columns=["ingredient", "ratios", *(f"{one} [%]" for one in columns)])


def takeaway(table: pd.DataFrame) -> str:
    """What a reader should take away, in sentences whose every number is computed."""
    own = plans_frame(table)
    ranked = league_frame(table)
    single = ranked[ranked["planner"] != PORTFOLIO]
    cases = int(own.groupby(CASE).ngroups)
    # What a fixed choice costs is told by the planner that loses least over all cases.
    steady = single.sort_values("mean over all cases [% of best]", ascending=False).iloc[0]
    most = single.sort_values("wins", ascending=False, kind="stable").iloc[0]
    winners = int((single["wins"] > 0).sum())
    first = (
        f"{most['planner']} is within 2 % of the best in {_cases(cases)} of {cases}"
        if int(most["wins"]) == cases
        else f"No planner is best everywhere: {winners} of {len(single)} win somewhere, "
        f"{most['planner']} most often ({int(most['wins'])} of {cases} cases)"
    )
    text = [
        first,
        f"whoever always takes {steady['planner']} keeps "
        f"{steady['mean over all cases [% of best]']:.0f} % of what the best planner of each case "
        "carries",
    ]
    whole = ranked[ranked["planner"] == PORTFOLIO]
    if len(whole):
        reach = whole["geometric mean [% of best]"].iloc[0]
        text.append(f"the portfolio, which tries them all, {reach:.0f} %")
    sentences = "; ".join(text) + "."
    mixed = mixed_over_alike_frame(table)
    if len(mixed):
        ratio = geometric_mean(mixed["mixed over homogeneous"].to_numpy())
        ahead = int((mixed["mixed over homogeneous"] > 1 + TIE).sum())
        sentences += (
            f" A mixed fleet carries {ratio:.2f} times what the best homogeneous one of the same "
            f"price does (geometric mean of {_cases(len(mixed))}, ahead in {ahead})."
        )
    swapped = routers_frame(table)
    if len(swapped):
        gains = swapped.groupby([*CASE, "planner"])["over its own [%]"].max()
        losses = swapped.groupby([*CASE, "planner"])["over its own [%]"].min()
        sentences += (
            f" On the same replicas the best other router moves goodput by {gains.median():+.0f} % "
            f"(median over plans) and the worst by {losses.median():+.0f} %."
        )
    return sentences


def _cases(count: int) -> str:
    return "1 case" if count == 1 else f"{count} cases"


def mixed_over_alike_frame(table: pd.DataFrame) -> pd.DataFrame:
    """Best goodput of each mixed fleet over that of its best homogeneous counterpart.

    Returns
    -------
    pandas.DataFrame
        One row per case of a mixed fleet that has counterparts: both goodputs, the counterpart,
        and ``mixed over homogeneous``.
    """
    own = plans_frame(table)
    own = own[own[GOODPUT].notna()]
    best = own.loc[own.groupby(CASE, sort=False)[GOODPUT].idxmax()]
    base = best["cluster"].str.split(AS).str[0]
    rows = []
    for _, row in best[best["cluster"] == base].iterrows():
        same = (base == row["cluster"]) & (best["cluster"] != base)
        for column in ("model", "workload"):
            same &= best[column] == row[column]
        rivals = best[same]
        if not len(rivals):
            continue
        rival = rivals.loc[rivals[GOODPUT].idxmax()]
        rows.append(
            {
                **{column: row[column] for column in CASE},
                GOODPUT: row[GOODPUT],
                "planner": row["planner"],
                "homogeneous": rival["cluster"],
                "its " + GOODPUT: rival[GOODPUT],
                "its planner": rival["planner"],
                "mixed over homogeneous": row[GOODPUT] / rival[GOODPUT]
                if rival[GOODPUT] > 0
                else np.inf,
            }
        )
    return pd.DataFrame(rows, columns=list(_MIXED))


_MIXED: Final = (
    *CASE,
    *(GOODPUT, "planner", "homogeneous", "its " + GOODPUT, "its planner"),
    "mixed over homogeneous",
)
