"""Pages over a small simulated log: three contenders, a table of items with hostile titles, a log of a server."""

from __future__ import annotations

from functools import partial

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpo.artifacts.semantic_codes import Codes
from recpo.explorer.pages import Pages
from recpo.explorer.people_and_items import Catalog, ItemColumns, People
from recpo.explorer.survey import Survey, traffic
from recpo.verbs.contenders import contenders_of

HOSTILE = "<script>alert(\"1\")</script> & 'x'"
PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 40


@pytest.fixture(scope="session")
def item_table(data, tmp_path_factory):
    """Titles, one of them hostile, pictures beside the table and elsewhere, a category, a list, a vector."""
    root = tmp_path_factory.mktemp("items")
    (root / "pictures").mkdir()
    (root / "pictures" / "1.png").write_bytes(PNG)
    (root.parent / "secret.png").write_bytes(b"secret")
    ids = data.item_ids().to_external(range(1, data.num_items + 1)).to_pylist()
    pictures = ["pictures/1.png", "../secret.png", "https://example.com/3.png", "pictures/none.png"]
    table = pa.table(
        {
            "item_id": ids,
            "title": [HOSTILE, *(f"Film {one}" for one in ids[1:])],
            "image": [*pictures, *([None] * (len(ids) - len(pictures)))],
            "category": [("music", "news", HOSTILE)[place % 3] for place in range(len(ids))],
            "tags": [["a", "b"][: place % 3] for place in range(len(ids))],
            "vector": pa.array([[0.5, 1.0]] * len(ids), pa.list_(pa.float32())),
        }
    )
    pq.write_table(table, root / "items.parquet")
    return root / "items.parquet"


@pytest.fixture(scope="session")
def catalog(data, item_table):
    return Catalog(data, ItemColumns(item_table=item_table))


@pytest.fixture(scope="session")
def survey(data, factors):
    contenders = contenders_of(["popularity", factors, "sequential_rules"], data, [5])
    advice = {"factors": ["Train <b>longer</b>."]}
    return Survey.of(data, contenders, split="test", k=5, users=30, grades=factors, advice=advice)


@pytest.fixture(scope="session")
def people(data, survey):
    return People(data, "test", survey.reads)


@pytest.fixture(scope="session")
def server_log(world, tmp_path_factory):
    """A log as a server publishes it, of two variants; one item is unknown."""
    root = tmp_path_factory.mktemp("served")
    log = pd.concat([pd.read_parquet(file) for file in sorted((world / "log").glob("*.parquet"))])
    log = log.sort_values("timestamp").head(400).reset_index(drop=True)
    log["variant"] = ["A" if user % 2 else "B" for user in log["user_id"]]
    log.loc[3, "item_id"] = -7
    log.loc[log.index[::5], "watch_time"] = None
    log.iloc[:200].to_parquet(root / "1.parquet", index=False)
    log.iloc[200:].to_parquet(root / "2.parquet", index=False)
    return root


@pytest.fixture(scope="session")
def codes(data):
    """Two levels: tens and ones of the item index."""
    index = range(1, data.num_items + 1)
    return Codes(
        pd.DataFrame({"tens": [one // 10 for one in index], "ones": [one % 10 for one in index]}).to_numpy(),
        (data.num_items // 10 + 1, 10),
        data.catalog_checksum,
    )


@pytest.fixture(scope="session")
def pages(data, survey, catalog, people, codes, server_log):
    log = partial(traffic, server_log, data)
    return Pages(survey, catalog, people, None, log, codes, "here & <there>")
