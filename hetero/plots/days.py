"""A plan over a day as a picture: GPUs by type, hour by hour, against the load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np

from hetero.plots.figures import gpu_colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hetero.apps.capacity.curve import DayPlan


def draw(plan: DayPlan) -> Figure:
    """GPUs kept the whole day (full) and rented by the hour (hatched), the load below.

    Parameters
    ----------
    plan
        What :func:`hetero.apps.capacity.curve.day` found.
    """
    rates = np.asarray(plan.curve.rates_rps)
    hours = np.arange(len(rates) + 1)
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(7.0, 4.6), height_ratios=(2.2, 1.0)
    )
    base = np.zeros(len(rates))
    for reserved in (True, False):
        each = [plan.gpus(hour, reserved=reserved) for hour in range(len(rates))]
        for name in dict.fromkeys(name for one in each for name in one):
            count = np.array([one.get(name, 0) for one in each], np.float64)
            top.stairs(
                base + count, hours, baseline=base, fill=True, facecolor=gpu_colour(name),
                edgecolor="white", hatch=None if reserved else "////", linewidth=0.0,
                label=f"{name}, {'all day' if reserved else 'by the hour'}",
            )  # fmt: skip
            base = base + count
    top.set_title(f"{plan.market.llm.name}: {plan.usd:.2f} $ over {len(rates)} hours")
    top.set(ylabel="GPUs", ylim=(0, base.max() * 1.05))
    top.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    bottom.stairs(rates, hours, color="#333333", linewidth=1.6, baseline=None)
    bottom.set(
        ylabel="load [requests/s]", xlabel="hour", ylim=(0, rates.max() * 1.1),
        xlim=(0, len(rates)), xticks=hours[:: 3 if len(rates) > 12 else 1],
    )  # fmt: skip
    figure.align_ylabels()
    return figure
