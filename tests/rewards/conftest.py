"""A factor model of the small simulated log."""

import numpy as np
import pytest

from recpo.base.feedback import GRADES
from recpo.log.prepared import Prepared
from recpo.verbs.prepare import prepare


@pytest.fixture(scope="session")
def many(world, tmp_path_factory):
    """The same log in many small shards."""
    out = tmp_path_factory.mktemp("many") / "prepared"
    prepare(str(world / "log"), out=out, rows_per_shard=300)
    return Prepared.open(out)


@pytest.fixture(scope="session")
def events(data):
    """``user [N]``, ``item [N]`` from 0, ``grade [N]`` of all graded training events."""
    shards = [data.load("train", shard) for shard in range(data.num_shards("train"))]
    user = np.concatenate([shard.user_index for shard in shards])
    item = np.concatenate([shard.item_index for shard in shards]) - 1
    grade = np.array(GRADES)[np.concatenate([shard.feedback for shard in shards])]
    known = ~np.isnan(grade)
    return user[known], item[known], grade[known]
