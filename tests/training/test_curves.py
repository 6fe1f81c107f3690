"""Training curves out of the CSV log of a run."""

import pytest

from recpo.training.validation import training_curves
from tests.refusals import refused


def test_the_points_of_a_log(tmp_path):
    log = tmp_path / "logs" / "version_0" / "metrics.csv"
    log.parent.mkdir(parents=True)
    log.write_text("step,train/loss,other\n1,2.5,9\n2,,9\n3,1.5,9\n", encoding="utf-8")
    assert training_curves(tmp_path) == {"train/loss": [[1.0, 2.5], [3.0, 1.5]]}


BROKEN = [b"step,train/loss\n1,\xff\xfe\n", b"step,train/loss\n1,high\n", b"train/loss\n1\n"]


@pytest.mark.parametrize("content", BROKEN)
def test_a_log_that_is_no_table_of_numbers_is_one_message(tmp_path, content):
    log = tmp_path / "logs" / "version_0" / "metrics.csv"
    log.parent.mkdir(parents=True)
    log.write_bytes(content)
    with refused("damaged", "metrics.csv") as error:
        training_curves(tmp_path)
    assert error.value.field == "metrics.csv"
