"""Our own router held against the best of all others in the settings of both routing papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from hetero.display import Column, Table
from hetero.errors import require
from hetero.routers import Predictive
from pipelines.bench.measured import Measured
from pipelines.bench.settings import METRICS, TARGET_S, RoutingSetting, settings
from pipelines.studies.heteroserve import Scheduler, against_best

__all__ = ["Contest", "contest", "modes", "settings"]

_LIKE = {"throughput": 0.01, "SLO attainment": 0.005, "P95 TTFT": 0.01}


@dataclass(frozen=True)
class Contest(Measured):
    """A router against the best other one, per setting and metric.

    Attributes
    ----------
    rows
        One row per setting, metric and mode of the router: its mean over the seeds, the best
        other router and its mean, and the verdict ``win``, ``tie`` or ``loss``.
    """

    rows: pd.DataFrame
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.losses_table()}"

    def counts(self, by: Sequence[str] = ("mode", "metric", "load")) -> pd.DataFrame:
        """Wins, ties and losses."""
        found = self.rows.groupby([*by, "verdict"], sort=False).size().unstack(fill_value=0)
        return found.reindex(columns=["win", "tie", "loss"], fill_value=0).reset_index()

    def losses(self) -> pd.DataFrame:
        """The settings lost, the widest first."""
        lost = self.rows[self.rows["verdict"] == "loss"]
        return lost.sort_values("margin").reset_index(drop=True)

    def losses_table(self, most: int = 20) -> Table:
        """The widest losses of each mode."""
        lost = self.losses().groupby("mode", sort=False).head(most)
        columns = ("mode", "setting", "metric", "ours", "best other", "its", "margin")
        rows = tuple(lost[list(columns)].itertuples(index=False, name=None))
        return Table("Widest losses", tuple(Column(name) for name in columns), rows)

    def table(self) -> Table:
        """Wins, ties and losses by mode, metric and load."""
        counts = self.counts()
        rows = tuple(counts.itertuples(index=False, name=None))
        settings = self.rows["setting"].nunique()
        return Table(
            f"Against the best other router per metric: {settings} settings of both papers, "
            f"{len(self.seeds)} seeds",
            tuple(Column(str(name)) for name in counts.columns),
            rows,
        )

    def record(self) -> list[dict[str, object]]:
        """The counts, for JSON."""
        return self.counts().to_dict("records")  # type: ignore[return-value]


def modes(target_s: float) -> dict[str, Scheduler]:
    """Our own router, without a target and with the target of the service."""
    aimed = Predictive(target_s=target_s)
    return {"hetero": Predictive(), "hetero, target": aimed}


def contest(
    chosen: Sequence[RoutingSetting],
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    progress: Callable[[int], None] | None = None,
) -> Contest:
    """Hold our own router against all others.

    A win or a loss is a difference of means that its 95 % t-interval over the seeds, paired, leaves
    on one side of 0 and that is above 1 % (0.5 points of attainment); else it is a tie. The best
    other router is chosen per setting and metric by the same seeds, which favours it.

    Parameters
    ----------
    progress
        Called with 1 for each setting.
    """
    good = len(chosen) > 0 and len(seeds) > 0
    require(good, "A contest needs a setting and a seed.", resolve="give at least one of each.")
    rows = []
    for setting in chosen:
        own = modes(TARGET_S[setting.paper])
        values = {
            name: np.array([setting.measure(scheduler, seed) for seed in seeds])
            for name, scheduler in (setting.entrants | own).items()
        }
        load = "overload" if setting.overload else "up to saturation"
        for (k, metric), mode in product(enumerate(METRICS), own):
            lower, scaled = metric == "P95 TTFT", metric != "SLO attainment"
            others = {name: values[name][:, k] for name in setting.entrants}
            mine = values[mode][:, k]
            found = against_best(mine, others, _LIKE[metric], lower=lower, scaled=scaled)
            rows.append(
                {"paper": setting.paper, "setting": ", ".join(setting.about), "load": load}
                | {"mode": mode, "metric": metric}
                | found
            )
        if progress:
            progress(1)
    return Contest(pd.DataFrame(rows), tuple(seeds))
