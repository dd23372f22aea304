"""Sets of heads: the grammar, its inverse, set algebra, files, choice by score and by chance, and the errors."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asu_interp.errors import HeadError, RunError
from asu_interp.heads import HeadSet


@dataclass(frozen=True)
class Shape:
    n_layers: int = 12
    n_heads: int = 5


SHAPE = Shape()
EVERYTHING = frozenset((layer, head) for layer in range(12) for head in range(5))

shapes = st.builds(Shape, st.integers(1, 13), st.integers(1, 12))


def pairs_of(shape: Shape) -> st.SearchStrategy[frozenset[tuple[int, int]]]:
    pair = st.tuples(st.integers(0, shape.n_layers - 1), st.integers(0, shape.n_heads - 1))
    return st.frozensets(pair)


@st.composite
def shaped_pairs(draw: st.DrawFn, n: int = 1) -> tuple[Any, ...]:
    """A shape and n sets of pairs in it."""
    shape = draw(shapes)
    return shape, *(draw(pairs_of(shape)) for _ in range(n))


# ---- the grammar --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("all", EVERYTHING),
        ("*.*", EVERYTHING),
        ("none", set()),
        ("*.1", {(layer, 1) for layer in range(12)}),
        ("6-8.*", {(layer, head) for layer in (6, 7, 8) for head in range(5)}),
        ("3.4,10.0-2", {(3, 4), (10, 0), (10, 1), (10, 2)}),
        ("0-1.3-4", {(0, 3), (0, 4), (1, 3), (1, 4)}),
        (" 3.4 , 10.0 - 2 ", {(3, 4), (10, 0), (10, 1), (10, 2)}),
        ("3.4,3.4,3.*", {(3, head) for head in range(5)}),
        ("none,3.4", {(3, 4)}),
        ("11-11.4-4", {(11, 4)}),
    ],
)
def test_parse(text: str, pairs: set[tuple[int, int]]) -> None:
    heads = HeadSet.parse(text, SHAPE)
    assert heads.pairs == pairs
    assert (heads.n_layers, heads.n_heads, heads.origin) == (12, 5, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12.2", 'HeadSet "12.2": layer 12, this model has layers 0-11'),
        ("3.5", 'HeadSet "3.5": head 5, this model has heads 0-4'),
        ("3.1,10-12.0", 'HeadSet "3.1,10-12.0": layer 12, this model has layers 0-11'),
        ("0.3-7", 'HeadSet "0.3-7": head 7, this model has heads 0-4'),
        ("8-6.*", 'HeadSet "8-6.*": layers 8-6 run backwards'),
        ("3.4-2", 'HeadSet "3.4-2": heads 4-2 run backwards'),
        ("3", 'HeadSet "3": "3" is not layer.head; allowed: "all", "none", "*.1"'),
        ("", 'HeadSet "": "" is not layer.head; allowed: '),
        ("3.4,", 'HeadSet "3.4,": "" is not layer.head; allowed: '),
        ("everything", '"everything" is not layer.head'),
        ("a.1", 'HeadSet "a.1": "a" is no layer; allowed: '),
        ("1.b", 'HeadSet "1.b": "b" is no head; allowed: '),
        ("1.", 'HeadSet "1.": "" is no head; allowed: '),
        (".1", 'HeadSet ".1": "" is no layer; allowed: '),
        ("-1.2", '"-1" is no layer'),
        ("1.2.3", '"2.3" is no head'),
        ("1-2-3.0", '"1-2-3" is no layer'),
        ("1.2;3.4", '"2;3.4" is no head'),
        ("1.²", '"²" is no head'),
        ("All", '"All" is not layer.head'),
    ],
)
def test_texts_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(HeadError, match=re.escape(message)):
        HeadSet.parse(text, SHAPE)


@given(shaped_pairs())
def test_parse_reads_what_str_writes(shaped: tuple[Shape, frozenset[tuple[int, int]]]) -> None:
    shape, pairs = shaped
    heads = HeadSet.of(pairs, shape)
    assert HeadSet.parse(str(heads), shape) == heads


@given(st.text(alphabet="0123456789.,-* alno", max_size=12))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """No other error than HeadError, and nothing outside the model."""
    try:
        heads = HeadSet.parse(text, SHAPE)
    except HeadError:
        return
    assert heads.pairs <= EVERYTHING
    assert HeadSet.parse(str(heads), SHAPE) == heads


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("*.*", "all"),
        ("none", "none"),
        ("10.2,3.4,10.0,10.1", "3.4,10.0-2"),
        ("6.*,7.*,8.*", "6-8.*"),
        ("*.1", "0-11.1"),
        ("1.0,1.2,2.0,2.2", "1-2.0,1-2.2"),
    ],
)
def test_str_is_short(text: str, shortest: str) -> None:
    assert str(HeadSet.parse(text, SHAPE)) == shortest


# ---- algebra ------------------------------------------------------------------------------------


@given(shaped_pairs(2))
def test_the_algebra_is_that_of_sets(shaped: tuple[Shape, Any, Any]) -> None:
    shape, a, b = shaped
    everything = {(layer, head) for layer in range(shape.n_layers) for head in range(shape.n_heads)}
    left, right = HeadSet.of(a, shape), HeadSet.of(b, shape)
    assert (left | right).pairs == a | b
    assert (left & right).pairs == a & b
    assert (left - right).pairs == a - b
    assert (left ^ right).pairs == a ^ b
    assert (~left).pairs == everything - a
    assert len(left) == len(a)
    assert list(left) == sorted(a)
    assert all((pair in left) == (pair in a) for pair in everything)
    assert left.layers == sorted({layer for layer, _ in a})
    assert (left == right) == (a == b)
    assert left != right or hash(left) == hash(right)


@given(shaped_pairs())
def test_the_mask_and_back(shaped: tuple[Shape, frozenset[tuple[int, int]]]) -> None:
    shape, pairs = shaped
    heads = HeadSet.of(pairs, shape)
    assert heads.mask.shape == (shape.n_layers, shape.n_heads)
    assert {tuple(place) for place in heads.mask.nonzero().tolist()} == pairs
    assert HeadSet.from_mask(heads.mask) == heads


def test_the_origin_tells_how_a_set_was_made_and_does_not_count() -> None:
    a, b = HeadSet.parse("1.*", SHAPE), HeadSet.parse("1.0-4", SHAPE)
    assert a == b and hash(a) == hash(b)
    assert (a - HeadSet.parse("*.1", SHAPE)).origin == "(1.* - *.1)"
    assert (~a).origin == "~1.*"


@pytest.mark.parametrize("other", [Shape(12, 6), Shape(11, 5)])
def test_sets_of_different_models_do_not_mix(other: Shape) -> None:
    ours, theirs = HeadSet.parse("1.1", SHAPE), HeadSet.parse("1.1", other)
    assert ours != theirs
    message = rf"model with {other.n_layers} layers of {other.n_heads} heads; this model has 12 of 5"
    for combine in (ours.__or__, ours.__and__, ours.__sub__, ours.__xor__):
        with pytest.raises(HeadError, match=message):
            combine(theirs)
    with pytest.raises(HeadError, match=message):
        theirs.require(SHAPE)
    assert ours.require(SHAPE) is ours


@pytest.mark.parametrize("pair", [(12, 0), (0, 5), (-1, 0), (0, -1)])
def test_pairs_outside_the_model_are_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(HeadError, match=rf'HeadSet "{pair[0]}\.{pair[1]}": (layer|head) -?\d+, this model has'):
        HeadSet.of([(0, 0), pair], SHAPE)


# ---- choice -------------------------------------------------------------------------------------


def test_top_takes_the_highest_scores() -> None:
    scores = torch.tensor([[0.1, 5.0, -1.0], [3.0, 3.0, float("nan")]])
    assert HeadSet.top(scores, 0).pairs == set()
    assert HeadSet.top(scores, 1).pairs == {(0, 1)}
    assert HeadSet.top(scores, 2).pairs == {(0, 1), (1, 0)}, "ties go to the earlier head"
    assert HeadSet.top(scores, 3).pairs == {(0, 1), (1, 0), (1, 1)}
    assert HeadSet.top(scores, 5) == ~HeadSet.of([(1, 2)], Shape(2, 3))
    assert str(HeadSet.top(torch.zeros(12, 5), 7)) == "0.*,1.0-1"
    assert HeadSet.top(scores, 2).origin == "top 2"
    assert HeadSet.top(scores, 2, "located").origin == "located"


@pytest.mark.parametrize("k", [-1, 7])
def test_top_of_more_heads_than_there_are(k: int) -> None:
    with pytest.raises(HeadError, match=f"top {k}: 6 heads have a score"):
        HeadSet.top(torch.zeros(2, 3), k)


def test_top_never_chooses_nan() -> None:
    scores = torch.tensor([[float("nan"), 1.0, -torch.inf], [0.0, 2.0, float("nan")]])
    assert HeadSet.top(scores, 4).pairs == {(0, 1), (0, 2), (1, 0), (1, 1)}
    with pytest.raises(HeadError, match="top 5: 4 heads have a score"):
        HeadSet.top(scores, 5)


@given(st.integers(0, 60), st.integers(0, 2**31))
def test_random_draws_k_heads_from_the_seed_alone(k: int, seed: int) -> None:
    heads = HeadSet.random(SHAPE, k, seed)
    assert len(heads) == k
    torch.rand(3)
    assert HeadSet.random(SHAPE, k, seed) == heads
    assert heads.origin == f"random {k}, seed {seed}"


def test_random_is_fair() -> None:
    counts = sum(HeadSet.random(SHAPE, 6, seed).mask.long() for seed in range(500))
    assert isinstance(counts, torch.Tensor)
    assert counts.sum() == 3000
    assert counts.min() > 20 and counts.max() < 85  # 50 expected of each, standard deviation 6.7


# ---- files --------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    heads = HeadSet.parse("3.4,10.0-2", SHAPE)
    heads.save(tmp_path / "heads.json")
    assert json.loads((tmp_path / "heads.json").read_text()) == {
        "heads": "3.4,10.0-2",
        "n_layers": 12,
        "n_heads": 5,
        "origin": "3.4,10.0-2",
    }
    loaded = HeadSet.load(tmp_path / "heads.json")
    assert (loaded, loaded.origin) == (heads, heads.origin)


@given(shaped_pairs())
def test_dicts_round_trip(shaped: tuple[Shape, frozenset[tuple[int, int]]]) -> None:
    shape, pairs = shaped
    heads = HeadSet.of(pairs, shape, origin="drawn")
    again = HeadSet.from_dict(json.loads(json.dumps(heads.to_dict())))
    assert (again, again.origin) == (heads, "drawn")


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        None,
        "all",
        {"heads": "all", "n_layers": 2},
        {"heads": 5, "n_layers": 2, "n_heads": 2},
        {"heads": "all", "n_layers": None, "n_heads": 2},
        {"heads": "all", "n_layers": "two", "n_heads": 2},
    ],
)
def test_what_is_no_head_set(data: Any, tmp_path: Path) -> None:
    (tmp_path / "heads.json").write_text(json.dumps(data))
    with pytest.raises(HeadError, match="not a head set: needs heads, n_layers, n_heads"):
        HeadSet.load(tmp_path / "heads.json")


def test_heads_in_a_file_that_do_not_fit_its_shape() -> None:
    with pytest.raises(HeadError, match=r'HeadSet "3\.0": layer 3, this model has layers 0-1'):
        HeadSet.from_dict({"heads": "3.0", "n_layers": 2, "n_heads": 2})


def test_a_file_that_is_broken_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(RunError, match=r"head set .*broken\.json: not readable as JSON"):
        HeadSet.load(tmp_path / "broken.json")
    with pytest.raises(RunError, match=r"head set .*none\.json: no such file"):
        HeadSet.load(tmp_path / "none.json")
