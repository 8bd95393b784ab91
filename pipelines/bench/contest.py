"""Our own router held against the best of all others in the settings of both routing papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hetero.display import Column, Shown, Table
from hetero.errors import ParameterError
from hetero.intervals import interval
from hetero.routers import Builtin, Predictive
from pipelines.bench.settings import METRICS, TARGET_S, Setting, as_is, settings

__all__ = ["Contest", "Setting", "contest", "modes", "settings"]

Floats = NDArray[np.float64]
_LIKE = {"throughput": 0.01, "SLO attainment": 0.005, "P95 TTFT": 0.01}


@dataclass(frozen=True)
class Contest(Shown):
    """A router against the best other one, per setting and metric.

    Attributes
    ----------
    rows
        One row per setting, metric and mode of the router: its mean over the seeds, the best
        other router and its mean, and the verdict ``win``, ``tie`` or ``loss``.
    """

    rows: pd.DataFrame
    seeds: tuple[int, ...]
    notes: tuple[str, ...] = field(default=())

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
            self.notes,
        )


def modes(target_s: float) -> dict[str, Builtin]:
    """Our own router, without a target and with the target of the service."""
    return {"hetero": Predictive(), "hetero, target": Predictive(target_s=target_s)}


def contest(
    chosen: Sequence[Setting],
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
    if not chosen or not seeds:
        raise ParameterError(
            "A contest needs a setting and a seed.", resolve="give at least one of each."
        )
    rows = []
    for setting in chosen:
        own = modes(TARGET_S[setting.paper])
        entries = [*setting.entrants, *((name, router, as_is) for name, router in own.items())]
        values = {
            name: np.array([setting.measure(router, limits, seed) for seed in seeds])
            for name, router, limits in entries
        }
        for k, metric in enumerate(METRICS):
            sign = -1.0 if metric == "P95 TTFT" else 1.0
            others = [name for name, _, _ in setting.entrants]
            best = max(others, key=lambda name: sign * float(values[name][:, k].mean()))
            for mode in own:
                ours, theirs = values[mode][:, k], values[best][:, k]
                scale = 1.0 if metric == "SLO attainment" else max(float(theirs.mean()), 1e-12)
                rows.append(
                    {
                        "paper": setting.paper,
                        "setting": ", ".join(setting.about),
                        "load": "overload" if setting.overload else "up to saturation",
                        "mode": mode,
                        "metric": metric,
                        "ours": float(ours.mean()),
                        "best other": best,
                        "its": float(theirs.mean()),
                        "margin": sign * float((ours - theirs).mean()) / scale,
                        "verdict": _verdict(sign * (ours - theirs) / scale, _LIKE[metric]),
                    }
                )
        if progress:
            progress(1)
    return Contest(pd.DataFrame(rows), tuple(seeds))


def _verdict(gain: Floats, like: float) -> str:
    low, high = interval(gain)
    if low > 0 and gain.mean() > like:
        return "win"
    return "loss" if high < 0 and gain.mean() < -like else "tie"
