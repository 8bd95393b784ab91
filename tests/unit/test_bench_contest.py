"""Our own router against the best other one."""

from __future__ import annotations

import numpy as np

from pipelines.bench import contest
from pipelines.studies.heteroserve import verdict


def test_a_few_settings_by_hand() -> None:
    chosen = contest.settings(requests=200, decodes=("calibrated",), loads=(0.9,), rates=(8.0,))
    assert len(chosen) == 7 + 6 + 12
    few = [chosen[0], chosen[-1]]
    found = contest.contest(few, seeds=(0, 1))
    assert len(found.rows) == 2 * 3 * 2
    setting = few[0]
    own = contest.modes(0.5)["hetero"]
    ours = [setting.measure(own, seed)[2] for seed in (0, 1)]
    others = {
        name: np.mean([setting.measure(scheduler, seed)[2] for seed in (0, 1)])
        for name, scheduler in setting.entrants.items()
    }
    row = found.rows[(found.rows["metric"] == "P95 TTFT") & (found.rows["mode"] == "hetero")].iloc[
        0
    ]
    assert row["ours"] == np.mean(ours)
    assert row["its"] == min(others.values())
    assert others[row["best other"]] == row["its"]
    counts = found.counts()
    assert counts[["win", "tie", "loss"]].to_numpy().sum() == len(found.rows)
    assert str(found)
    assert str(found.losses_table())


def test_verdicts_need_a_difference_that_is_clear_and_not_small() -> None:
    assert verdict(np.array([0.05, 0.06, 0.055]), 0.01) == "win"
    assert verdict(-np.array([0.05, 0.06, 0.055]), 0.01) == "loss"
    assert verdict(np.array([0.005, 0.006, 0.0055]), 0.01) == "tie"
    assert verdict(np.array([0.5, -0.4, 0.05]), 0.01) == "tie"
