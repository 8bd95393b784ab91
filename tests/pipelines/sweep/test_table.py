"""What a sweep says of its points: intervals within their range, changes paired by repeat."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hetero.errors import ParameterError
from hetero.intervals import interval
from pipelines.sweep import spec, table

MEASURES = {"y [s]": {"table": "y", "column": "y"}}


def design(**changes: object) -> spec.Sweep:
    text = {
        "stage": "request_scheduling",
        "along": {"thetas": [0.0, 1.0, 2.0]},
        "repeat": {"seeds": [0, 1, 2, 3]},
        "against": {"thetas": 0.0},
        "labels": {"thetas": "θ"},
        "measures": MEASURES,
    }
    return spec.Sweep.model_validate(text | changes)


def points(values: dict[float, list[float]]) -> pd.DataFrame:
    rows = [
        {"point": "p", "thetas": theta, "seeds": seed, "y [s]": y}
        for theta, ys in values.items()
        for seed, y in enumerate(ys)
    ]
    return pd.DataFrame(rows)


@given(st.lists(st.floats(0.0, 100.0), min_size=2, max_size=12))
def test_the_interval_of_a_share_stays_between_its_ends_and_holds_its_mean(values):
    low, high = table.spread(values, (0.0, 100.0))
    assert -1e-9 <= low <= np.mean(values) + 1e-9
    assert np.mean(values) - 1e-9 <= high <= 100.0 + 1e-9


def test_far_from_its_ends_it_is_students():
    values = [49.0, 50.0, 51.0, 50.5]
    assert table.spread(values, (0.0, 100.0)) == pytest.approx(interval(values), abs=0.01)
    assert table.spread(values) == interval(values)
    assert interval([80.0, 99.0, 100.0])[1] > 100.0 > table.spread([80.0, 99.0, 100.0], (0, 100))[1]


def test_changes_are_paired_and_hold_for_all_values_together():
    base = [10.0, 20.0, 30.0, 40.0]
    found = table.effects_frame(
        points({0.0: base, 1.0: [y + 1.0 for y in base], 2.0: [10.0, 22.0, 31.0, 45.0]}), design()
    ).set_index("value")
    assert np.isnan(found.loc[0.0, "change"])
    assert found.loc[1.0, ["change", "change low", "change high"]].tolist() == pytest.approx(
        [4.0] * 3
    )
    change = np.array([0.0, 2.0, 1.0, 5.0]) / 25.0 * 100.0
    half = stats.t.ppf(1.0 - 0.05 / 4.0, 3) * change.std(ddof=1) / 2.0  # two values, two sides
    assert found.loc[2.0, "change"] == pytest.approx(8.0)
    assert found.loc[2.0, "change high"] == pytest.approx(8.0 + half)


def test_the_sentence_names_the_largest_clear_change_or_what_none_exceeds_or_cannot_tell():
    base = [10.0, 20.0, 30.0, 40.0]
    clear = points({0.0: base, 1.0: [y + 1.0 for y in base], 2.0: [y + 2.0 for y in base]})
    (said,) = table.sentences(table.effects_frame(clear, design()), design())
    assert said == "y [s]: θ = 2 in place of 0 gives +8 % (+8 to +8)."
    noise = points({0.0: base, 1.0: [10.2, 19.9, 30.0, 40.0], 2.0: [9.9, 20.2, 30.1, 39.9]})
    (said,) = table.sentences(table.effects_frame(noise, design()), design())
    low, high = table.effects_frame(noise, design())[["change low", "change high"]].abs().max()
    bound = float(said.partition("changes it by more than ")[2].split()[0])
    assert max(low, high) <= bound <= 1.1 * max(low, high)
    same = table.effects_frame(points({0.0: base, 1.0: base, 2.0: base}), design())
    assert table.sentences(same, design()) == ["y [s]: θ does nothing, every value gives the same."]
    rng = np.random.default_rng(0)
    wide = [points({t: list(rng.normal(25.0, 5.0, n)) for t in (0.0, 1.0, 2.0)}) for n in (4, 300)]
    said, after = (table.sentences(table.effects_frame(one, design()), design()) for one in wide)
    assert said[0].startswith("y [s]: cannot tell; θ may change it by -")
    assert 20 < float(said[0].partition("and about ")[2].split()[0]) < 300
    assert "no value of θ changes it by more than" in after[0]
    share = design(measures={"y [s]": MEASURES["y [s]"] | {"within": [0, 100]}})
    (said,) = table.sentences(table.effects_frame(clear, share), share)
    assert said == "y [s]: θ = 2 in place of 0 gives +2 points (+2 to +2)."
    assert table.sentences(table.effects_frame(clear, design(against={})), design(against={})) == []


def test_texts_are_named_by_what_tells_them_apart_in_the_order_of_the_file():
    texts = ["fleet of 8 L4 for M", "fleet of 2 H100 for M", "fleet of 2 H100, 4 L4 for M"]
    changes = {"along": {}, "grid": {"clusters": texts}, "against": {"clusters": texts[1]}}
    found = design(stage="arena", labels={}, **changes)
    frame = pd.DataFrame(
        [
            {"point": "p", "clusters": text, "seeds": seed, "y [s]": y + seed}
            for text, y in zip(texts, (10.0, 20.0, 15.0), strict=True)
            for seed in (0, 1)
        ]
    )
    main = table.effects_frame(frame, found)
    assert main["value"].tolist() == texts
    (said,) = table.sentences(main, found)
    assert said.startswith("y [s]: clusters = 8 L4 in place of 2 H100 gives -48.8 % (")
    ticks = table.figure(frame, found).axes[1].get_xticklabels()
    assert [one.get_text() for one in ticks] == ["8 L4", "2 H100", "2 H100, 4 L4"]


def test_one_repeat_cannot_tell():
    one = points({0.0: [1.0], 1.0: [2.0], 2.0: [3.0]})
    (said,) = table.sentences(table.effects_frame(one, design(repeat={"seeds": [0]})), design())
    assert said == "y [s]: cannot tell what θ does from one repeat."


def test_changes_share_a_scale_around_none_and_means_start_at_none():
    base = [100.0, 101.0, 99.0, 100.0]
    frame = points({0.0: base, 1.0: [y + 0.1 for y in base], 2.0: base})
    means, changes = table.figure(frame, design()).axes
    assert means.get_ylim()[0] == 0.0
    low, high = changes.get_ylim()
    assert (low, high) == (-high, pytest.approx(5.5))
    assert means.get_xlim() == changes.get_xlim()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"against": {"thetas": 3.0}}, "not run"),
        ({"repeat": {}}, "no 'repeat'"),
        ({"along": {}}, "or 'along'"),
        ({"along": {"thetas": [0.0], "seeds": [0]}}, "at most 1"),
        ({"measures": {"y": MEASURES["y [s]"] | {"within": [1, 1]}}}, "low end below"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        design(**changes)


def test_values_along_a_run_are_one_point_of_it():
    (first, *_), count = (found := spec.points(design())), len(found)
    assert count == 4
    assert first.parameters["thetas"] == [0.0, 1.0, 2.0]
    with pytest.raises(ParameterError):
        spec.points(design(along={"requests": [1, 2]}, against={}))
