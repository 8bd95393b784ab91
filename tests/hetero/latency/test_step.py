from __future__ import annotations

import json

import numpy as np
import pytest

from hetero.errors import DataError, ParameterError
from hetero.latency import Piece, StepModel
from hetero.latency.step import Bends
from hetero.latency.storage import from_json, load, save, to_json


@pytest.fixture
def model():
    return StepModel(
        (Piece(np.array([10.0, 20.0]), np.array([1.0, 3.0]), np.array([0.5, 0.25]), 0.001),),
        source="hand",
        provenance="assumed",
        max_tokens=100,
        max_decoding=2,
    )


def test_floor_line_and_extrapolation(model):
    assert model.seconds([0, 10, 15, 20, 30]).tolist() == [1.0, 1.0, 2.0, 3.0, 5.0]


def test_rates_of_cached_tokens_hold_beyond_the_last_batch(model):
    assert model.seconds(10, [1, 2, 3], 8.0).tolist() == [5.0, 3.0, 3.0]


def test_pairs_of_a_prefill_after_cached_tokens(model):
    # 4 tokens after 6 cached ones: each new token attends the 6 and half of the 4 on average.
    assert float(model.prefill_seconds([4], [6])) == pytest.approx(1.0 + 0.001 * 4 * (6 + 2))


def test_the_larger_piece_counts(model):
    flat = Piece(np.array([0.0]), np.array([2.5]), np.array([0.0]))
    two = StepModel((*model.pieces, flat), source="hand", provenance="assumed")
    assert two.seconds([10, 20]).tolist() == [2.5, 3.0]
    with pytest.raises(ParameterError, match="one or two pieces; received 3"):
        StepModel((flat, flat, flat), source="", provenance="assumed")


def test_table(model):
    assert "5e+08 ns per cached token with one request" in str(model)


@pytest.mark.parametrize(
    ("knots", "times", "cached"),
    [
        ([1.0, 1.0], [1.0, 1.0], [0.0]),
        ([1.0, 2.0], [1.0, -1.0], [0.0]),
        ([1.0], [np.nan], [0.0]),
        ([1.0], [1.0], [-1e-9]),
        ([1.0], [1.0], []),
        ([[1.0]], [[1.0]], [0.0]),
    ],
)
def test_impossible_pieces_are_refused(knots, times, cached):
    with pytest.raises(ParameterError, match="finite times >= 0; received"):
        Piece(np.array(knots), np.array(times), np.array(cached))


def test_arrays_cannot_be_changed_afterwards(model):
    with pytest.raises(ValueError, match="read-only"):
        model.pieces[0].knots_s[0] = 9.0


def test_files_are_whole_and_kept(tmp_path, model):
    path = save(model, tmp_path / "model.json")
    assert load(path).seconds(17.3, 1, 5).item() == model.seconds(17.3, 1, 5).item()
    with pytest.raises(ParameterError, match=r"model\.json exists already"):
        save(StepModel(model.pieces, source="other", provenance="assumed"), path)
    assert load(path).source == "hand"
    save(StepModel(model.pieces, source="other", provenance="assumed"), path, force=True)
    assert load(path).source == "other"
    assert [p.name for p in tmp_path.iterdir()] == ["model.json"]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"provenance": "guessed"}, "model.provenance"),
        (
            {"pieces": [{"Piece": {"knots_s": ["a"]}}]},
            r"model.StepModel.pieces\[0\].Piece.knots",
        ),
        ({"pieces": []}, "model.StepModel: A step model has one or two pieces"),
        ({"extra": 1}, "model.StepModel: has no field 'extra'"),
    ],
)
def test_foreign_files_are_refused_with_the_field(model, change, where):
    values = json.loads(to_json(model))
    with pytest.raises(DataError, match=r"model\.json: format.*Resolve"):
        from_json(json.dumps(values | {"format": "step model 0"}), "model.json")
    values["model"]["StepModel"] |= change
    text = json.dumps(values)
    with pytest.raises(DataError, match=rf"model\.json: {where}.*Resolve"):
        from_json(text, "model.json")


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        load(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match="the text as a whole"):
        load(tmp_path / "broken.json")


def test_bends_are_linear_between_contexts_and_hold_beyond_them():
    bends = Bends(np.array([10.0, 20.0, 40.0]), np.array([[1.0, 3.0, 2.0], [2.0, 0.0, 8.0]]))
    piece = Piece(np.array([0.0]), np.array([5.0]), np.array([0.5, 1.0]), bends=bends)
    step = StepModel((piece,), source="", provenance="assumed")
    for contexts, extra in (
        ([4], 1.0), ([10], 1.0), ([15], 2.0), ([20], 3.0), ([30], 2.5), ([99], 2.0),
        ([5, 5], 2.0), ([10, 20], 1.0), ([0, 40], 0.0), ([20, 40], 4.0), ([99, 1], 8.0),
        ([20, 20, 20], 4.0),  # as two requests with 60 tokens together
    ):  # fmt: skip
        rate = 0.5 if len(contexts) == 1 else 1.0
        whole = 5.0 + rate * sum(contexts) + extra
        assert float(step.decode_seconds(contexts)) == pytest.approx(whole), contexts
    assert float(step.seconds(9, 2, 30)) == 5.0 + 30.0  # beside a prefill there are none
    assert from_json(to_json(step)).pieces[0].bends.extra_s.tolist() == bends.extra_s.tolist()


@pytest.mark.parametrize(
    ("contexts", "extra"),
    [
        ([10.0], [[1.0]]),
        ([10.0, 10.0], [[1.0, 2.0]]),
        ([10.5, 20.0], [[1.0, 2.0]]),
        ([10.0, 20.0], [[1.0, -1.0]]),
        ([10.0, 20.0], [[9.0, 1.0]]),  # falls by more than the line rises
        ([10.0, 20.0], [[1.0, 1.0], [1.0, 1.0]]),
    ],
)
def test_impossible_bends_are_refused(contexts, extra):
    with pytest.raises(ParameterError, match="bends"):
        Piece(
            np.array([0.0]), np.array([5.0]), np.array([0.5]),
            bends=Bends(np.array(contexts), np.array(extra)),
        )  # fmt: skip
