"""Vocabularies: the meaning of codes, for any values and any order of rows."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from recpo.base.feature_encoding import Vocabulary, of_side
from recpo.base.features import Categories, Category
from recpo.log.engine import DuckDBEngine
from recpo.log.feature_tables import fit_features
from recpo.log.prepared import vocabulary_file
from tests.refusals import refused

# texts that sort, compare and normalize in unlike ways; whole numbers of both signs
TEXTS = st.sampled_from(["a", "A", "b", "ä", "z", "Z", "10", "9", "", " ", "ab", "\N{GRINNING FACE}"])
WHOLE = st.integers(-(2**53), 2**53)
VALUES = st.one_of(st.lists(TEXTS, unique=True), st.lists(WHOLE, unique=True))


def column(values, kind):
    return pa.array(values, pa.string() if kind is str else pa.int64())


@given(VALUES, st.data())
def test_a_code_leads_back_to_its_value_and_the_others_are_missing_or_unknown(values, data):
    kind = type(values[0]) if values else data.draw(st.sampled_from([str, int]))
    asked = data.draw(st.lists(st.one_of(st.none(), TEXTS if kind is str else WHOLE)))
    vocabulary = Vocabulary(column(values, kind))
    codes = vocabulary.codes(column(asked, kind))
    assert vocabulary.num_codes == len(values) + 2
    assert codes.dtype == np.int32
    for value, code in zip(asked, codes.tolist(), strict=True):
        if value is None:
            assert code == 0
        elif value in values:
            assert vocabulary.values[code - 2].as_py() == value
        else:
            assert code == 1
    order = data.draw(st.permutations(range(len(asked))))
    again = vocabulary.codes(column([asked[place] for place in order], kind))
    assert again.tolist() == codes[list(order)].tolist()


@given(VALUES.filter(len), st.lists(st.lists(st.integers(0, 14), max_size=6), max_size=5), st.integers(1, 4))
def test_lists_hold_every_code_once_the_most_frequent_first_and_unknown_last(values, places, length):
    kind = type(values[0])
    strange = "never seen" if kind is str else 2**53 + 1
    rows = [[values[place] if place < len(values) else strange for place in row] for row in places]
    feature = Categories("tags", length=length, num_codes=len(values) + 2)
    fitted = of_side([feature], {"tags": column(values, kind)})
    encoded = fitted.encode(pa.table({"tags": pa.array(rows, pa.list_(column([], kind).type))}))
    for row, codes in zip(places, encoded["tags"].to_pylist(), strict=True):
        known = sorted({place + 2 for place in row if place < len(values)})
        unknown = [1] if any(place >= len(values) for place in row) else []
        assert codes == (known + unknown)[:length]


def test_strings_are_not_looked_up_among_integers():
    with refused("wrong_type"):
        Vocabulary(pa.array([3])).codes(pa.array(["3"]))
    assert Vocabulary(pa.array([], pa.int64())).codes(pa.array(["3", None])).tolist() == [1, 0]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with DuckDBEngine(tmp_path_factory.mktemp("engine"), threads=1) as engine:
        yield engine


@pytest.mark.slow
@settings(max_examples=12)
@given(st.lists(st.one_of(st.none(), TEXTS), min_size=1), st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_vocabulary_is_fitted_by_descending_count_then_value_for_any_order_of_rows(
    engine, tmp_path_factory, values, min_count, random
):
    """Counted by hand. Texts are ordered by their bytes in UTF-8, as they are by code points."""
    counts = Counter(value for value in values if value is not None)
    kept = [value for value in counts if counts[value] >= min_count]
    expected = sorted(kept, key=lambda value: (-counts[value], value))
    for _ in range(2):
        root = tmp_path_factory.mktemp("vocabularies")
        pq.write_table(pa.table({"plain": column(values, str)}), root / "rows.parquet")
        rows = engine.read_parquet([root / "rows.parquet"], ["plain"])
        feature = Category("word", min_count=min_count)
        fitted = fit_features(engine, "item", (feature,), rows, {"word": "plain"}, root)
        assert fitted.vocabularies["word"].values.to_pylist() == expected
        assert fitted.features[0].num_codes == len(expected) + 2
        written = pq.read_table(root / vocabulary_file("item", "word"))
        assert written["value"].to_pylist() == expected
        assert written["count"].to_pylist() == [counts[value] for value in expected]
        random.shuffle(values)
