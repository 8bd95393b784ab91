"""Times of the planners of the arena: one plan each, on the same case of every fleet."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hetero.errors import InfeasibleError
from hetero.planners.effort import EFFORTS
from hetero.search.planners import planners
from hetero.search.portfolio import portfolio
from hetero.timings import Timing
from pipelines.bench.measured import Say, Times, silent, stopwatch
from pipelines.studies.contest import Match, Rules, case_of
from pipelines.studies.league import PORTFOLIO

MATCHES = (
    Match("heteroserve-8", "Qwen2.5-14B", "azure2023_conv"),
    Match("helix-single-24", "Qwen2.5-32B", "azure2023_conv"),
    Match("thunderserve-cloud-32", "Qwen2.5-32B", "azure2023_conv"),
    Match("current-mixed-32", "Llama-3.1-70B", "azure2023_conv"),
    Match("rignall-budget-a", "DeepSeek-V3-R1-671B", "azure2023_conv"),
)
"""A fleet of every size, with the model that the arena serves on it."""
_COMMAND = "hetero bench arena --record"


def bench(
    *,
    matches: Sequence[Match] = MATCHES,
    effort: str = "quick",
    repeats: int = 3,
    rules: Rules | None = None,
    progress: Say = silent,
) -> Times:
    """Measure what one plan takes each planner on this machine.

    Parameters
    ----------
    effort
        ``"quick"``, ``"normal"`` or ``"thorough"``.
    repeats
        Plans of which the best counts, as other work on the machine only ever adds; of the
        portfolio there is one.
    rules
        Of the cases; those of a contest by default.
    """
    used = rules or Rules()
    asked = planners(EFFORTS[effort])
    rows: list[tuple[tuple[object, ...], Timing]] = []

    def add(name: str, match: Match, gpus: int, spent: list[float]) -> None:
        measured = Timing.here(
            f"arena.plan.{name}/{match.cluster}",
            min(spent),
            command=_COMMAND,
            statistic="best" if len(spent) > 1 else "single",
            repeats=len(spent),
            clock="wall",
        )
        rows.append(((name, match.cluster, gpus), measured))

    for match in matches:
        question = case_of(match, used)
        gpus = question.cluster.gpus
        for one in asked:
            if one.unfit(question):
                continue
            progress(f"{one.name} on {match.cluster}")
            spent: list[float] = []
            try:
                one.plan(question)  # compiles, imports and fills what later plans have at hand
                for _ in range(repeats):
                    # A case of its own each time, so that nothing is remembered of the last.
                    fresh = case_of(match, used)
                    with stopwatch(spent, time.perf_counter):
                        one.plan(fresh)
            except InfeasibleError:
                continue
            add(one.name, match, gpus, spent)
        progress(f"{PORTFOLIO} on {match.cluster}")
        fresh = case_of(match, used)
        spent = []
        with stopwatch(spent, time.perf_counter):
            portfolio(fresh, planners=asked, effort=EFFORTS[effort], seeds=used.seeds[:1])
        add(PORTFOLIO, match, gpus, spent)
    return Times(
        "Planners of the arena",
        ("planner", "fleet", "GPUs"),
        tuple(rows),
        "Of one plan; the portfolio asks all planners, plays their plans and improves the best.",
    )
