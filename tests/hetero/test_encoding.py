"""Values as JSON: what is written is read back, and nothing else is built."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from hetero.encoding import Decoder, Encoder, EncodingError, fits
from hetero.errors import ParameterError


@dataclass(frozen=True, eq=False)
class Leaf:
    name: str
    weights: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tree:
    leaf: Leaf
    other: Leaf
    height: float = math.inf
    where: tuple[tuple[str, int], ...] = ()
    pairs: dict[tuple[str, str], float] = field(default_factory=dict)
    prefix_index: tuple[object, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.height < 0:
            raise ParameterError("A tree grows upwards.", resolve="give a height above 0.")


KNOWN = (Tree, Leaf)


def again(value: object, shared: Sequence[type] = (Leaf,)) -> object:
    encoder = Encoder(KNOWN, shared)
    text = json.dumps([encoder.encode(value), encoder.shared], allow_nan=False)
    made, apart = json.loads(text)
    return Decoder(KNOWN, apart).decode(made)


def test_a_value_comes_back_with_every_digit() -> None:
    leaf = Leaf("oak", np.array([0.1 + 0.2, math.nan, -math.inf]))
    tree = Tree(leaf, leaf, where=(("a", 1),), pairs={("a", "b"): 1 / 3}, prefix_index=(object(),))
    found = again(tree)
    assert isinstance(found, Tree)
    np.testing.assert_array_equal(found.leaf.weights, leaf.weights)
    assert found.leaf is found.other  # written once, and one object again
    assert (found.height, found.where, found.pairs) == (math.inf, tree.where, tree.pairs)
    assert found.prefix_index == ()  # no part of the value


def test_equal_values_are_shared_though_they_are_not_one_object() -> None:
    encoder = Encoder(KNOWN, (Leaf,))
    encoder.encode([Leaf("a", np.ones(2)), Leaf("a", np.ones(2)), Leaf("b", np.ones(2))])
    assert len(encoder.shared) == 2


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3), np.array([True]), np.zeros((0, 4))])
def test_arrays_keep_their_shape_and_type(array) -> None:
    found = again(array)
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(found, array)


LEAF = {"Leaf": {"name": "a", "weights": {"array": [1.0], "dtype": "float64", "shape": [1]}}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({"Popen": {"args": "ls"}}, "no value of a known kind"),
        ({}, "no value of a known kind"),
        ({"Leaf": {"name": 3, "weights": {"array": [], "dtype": "float64"}}}, "Leaf.name"),
        ({"Leaf": {"title": "a"}}, "has no field 'title'"),
        ({"Leaf": {"name": "a"}}, "weights"),
        ({"Leaf": {"name": "a\nb"}}, "control characters"),
        ({"shared": 0}, "no shared value"),
        ({"shared": True}, "no shared value 1|no shared value True"),
        ({"array": ["a"], "dtype": "float64", "shape": [1]}, "no number"),
        ({"array": [1], "dtype": "object", "shape": [1]}, "its type is"),
        ({"array": [1], "dtype": "int64", "shape": [2]}, "no array"),
        ({"mapping": [1]}, "no mapping"),
        ({"mapping": [[{"mapping": []}, 1]]}, "no mapping"),
        ({"Tree": {"leaf": LEAF, "other": LEAF, "height": -1}}, "A tree grows upwards"),
        ({"Tree": {"leaf": 1, "other": LEAF}}, "Tree.leaf"),
    ],
)
def test_what_is_no_value_is_refused_in_words(text, says) -> None:
    with pytest.raises(EncodingError, match=says):
        Decoder(KNOWN).decode(text)


def test_shared_values_cannot_hold_themselves() -> None:
    with pytest.raises(EncodingError, match="nested too deeply"):
        Decoder(KNOWN, [[{"shared": 0}]]).decode({"shared": 0})


def test_what_cannot_be_written_is_an_error() -> None:
    with pytest.raises(TypeError, match="object cannot be written"):
        Encoder(KNOWN).encode(object())


def test_annotations_are_followed() -> None:
    assert fits((1, "a"), tuple[int, str])
    assert not fits((1, "a", 2), tuple[int, str])
    assert fits(None, float | None)
    assert not fits(True, int)
    assert fits(np.ones(2), ArrayLike)
    assert fits((1.0, 2.0), Sequence[float])
    assert not fits({"a": "b"}, dict[str, float])
