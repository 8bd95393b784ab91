"""The picture of a plan card shows the figures of the card."""

from __future__ import annotations

import pytest

from hetero import workload
from hetero.plots.figures import close
from pipelines.studies.quickstart import card_figure, served_by_group
from tests.hetero.apps.cards.quick_cards import two_kinds


def test_the_picture_says_what_the_card_says() -> None:
    card = two_kinds()
    run = card.plan.simulate(workload.load("azure2023_conv").head(400).rescale(rate_rps=2.0))
    shares = served_by_group(card, run)
    assert len(shares) == len(card.groups)
    assert shares.sum() == pytest.approx(100.0)
    figure = card_figure(card, run)
    by_group, delivered, latencies = figure.axes
    widths = [bar.get_width() for bar in by_group.patches]
    assert widths == pytest.approx(list(shares))
    named = zip(delivered.get_yticklabels(), delivered.patches, strict=True)
    drawn = {label.get_text(): bar.get_width() for label, bar in named}
    assert card.bound is not None
    assert drawn == {
        "asked for": 2.0,
        "goodput": pytest.approx(card.goodput_rps.value),
        "bound": pytest.approx(card.bound.rate_rps),
    }
    assert len(latencies.patches) == 3 * len(card.question.targets_s)
    close(figure)
