import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from hetero import latency
from hetero.latency.models import layers
from hetero.latency.sources import measured
from pipelines.studies import latency_fitting as study

FORMS = {"OLS": {"weights": "none"}, "weighted": {}, "weighted, floor": {"floor": True}}


@pytest.fixture(scope="module")
def table():
    return next(t for t in measured.splitwise() if t.label == "Llama-2-70B on H100-SXM x4")


@pytest.fixture(scope="module")
def fits(table):
    return {
        (table.label, form): latency.fit(table, form="cross", **options)
        for form, options in FORMS.items()
    }


def test_errors_of_fits_leave_out_decodes_with_a_floor(table, fits):
    errors = study.fit_errors(fits)
    assert errors[["fit", "phase"]].to_numpy().tolist() == [
        ["OLS", "prefill"],
        ["OLS", "decode"],
        ["weighted", "prefill"],
        ["weighted", "decode"],
        ["weighted, floor", "prefill"],
    ]
    rows = table.phase("decode")
    fitted = fits[table.label, "weighted"][1].predict(rows.batch, rows.length_tokens).seconds
    error = 100 * np.abs(fitted / rows.seconds - 1).mean()
    assert errors[study.MEAN][3] == pytest.approx(error)


def test_residuals_are_cut_and_drawn_by_form(table, fits):
    panels = [("OLS", 0), ("weighted", 0), ("weighted, floor", 0), ("weighted", 1)]
    figure = study.residuals_figure([table], fits, panels)
    for axis, (_, phase) in zip(figure.axes, panels, strict=True):
        points = axis.collections[0].get_offsets()
        assert len(points) == len(table.phase(study.PHASES[phase]).batch)
        assert np.abs(points[:, 1]).max() <= 75
    title = figure.axes[3].get_title(loc="left") or figure.axes[3].get_title()
    assert title.startswith("decode, weighted: mean error ")
    plt.close(figure)


def test_intervals_are_drawn_with_what_was_measured(table, fits):
    figure = study.intervals_figure(table, fits)
    left, right = figure.axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        "weighted",
        "weighted, floor",
        "measured",
    ]
    assert len(right.lines) == 1
    assert right.lines[0].get_ydata()[0] == pytest.approx(
        1e3 * fits[table.label, "weighted"][1].predict([1], [576.0]).seconds[0]
    )
    plt.close(figure)


def test_layers_are_drawn_beside_the_roofline():
    nodes = layers.layer_latencies()
    node = next(n for n in nodes if (n.gpu, n.llm) == ("L4", "Llama-2-70B"))
    figure = study.layers_figure([node])
    assert [len(axis.lines) for axis in figure.axes] == [3, 2]
    assert np.allclose(figure.axes[1].lines[1].get_ydata()[0], node.decode_layer_ms(1))
    assert figure.axes[0].get_yscale() == "log"
    plt.close(figure)


def test_three_models_of_a_table_are_compared_and_drawn():
    tables = measured.aiconfigurator()[:1]
    compared = study.compare_models(tables)
    assert list(compared["model"]) == ["affine", "roofline", "step model"] * 2
    assert (compared[study.MEAN] <= compared[study.LARGEST]).all()
    affine = latency.fit(tables[0])[0].accuracy
    assert compared[study.MEAN][0] == pytest.approx(affine.mape_percent)
    figure = study.models_figure(compared)
    heights = [bars[0].get_height() for bars in figure.axes[0].containers]
    assert heights == pytest.approx(list(compared[study.MEAN][:3]))
    plt.close(figure)


def test_errors_beyond_the_limit_of_the_roofline_figure_are_written():
    errors = pd.DataFrame(
        {
            "source": ["b", "a"] * 2,
            "gpu": ["L4", "T4"] * 2,
            "engine": "x",
            "phase": ["prefill", "prefill", "decode", "decode"],
            "mape_percent": [2.0, 4.0, 6.0, 8.0],
            "held_out_llm_percent": [3.0, 50.0, 7.0, 9.0],
            "held_out_degree_percent": [np.nan, 5.0, 7.0, 9.0],
        }
    )
    figure = study.roofline_figure(errors, ["a", "b"], limit=35)
    prefill = figure.axes[0]
    assert [tick.get_text() for tick in prefill.get_yticklabels()] == ["T4, x", "L4, x"]
    assert [bar.get_width() for bar in prefill.patches] == [4.0, 2.0]
    assert [text.get_text() for text in prefill.texts] == ["50 %", "4.0", "2.0"]
    plt.close(figure)
