"""A training step of every objective on a device that is not the CPU: nothing mixes devices, nothing waits.

``tests.training.fake_device`` runs the steps on fake tensors, in a process of its own.
"""

import pyarrow as pa
import pytest

from recpo.artifacts.semantic_codes import Codes
from recpo.log.prepared import Prepared
from recpo.verbs.factorize import factorize
from tests.forks import forked
from tests.training.fake_device import OF_CODES, SAME_STEP, steps_on_a_device
from tests.training.test_objectives_learn import BYSTANDERS, LEARNERS, ON_CATALOGS

pytestmark = pytest.mark.slow

#: What a policy that scores several codes per item cannot do.
OF_ONE_TOKEN = {"gbpo_logged", *ON_CATALOGS}
#: Candidates of the policy, and what the device decides of what the log shows: a learned reward, advantages of tokens.
BESIDE = {"grpo_rollout", "grpo_learned_reward", "grpo_tokens"}


@pytest.fixture(scope="module")
def results(prepared, tmp_path_factory):
    """Case to error; None = it ran."""
    root = tmp_path_factory.mktemp("another_device")
    factorize(str(prepared), root / "factors", ranks=[4])
    (root / "codes").mkdir()
    items = range(Prepared.open(prepared).num_items)
    codes = pa.table({"first": [item // 8 for item in items], "second": [item % 8 for item in items]})
    table = codes.to_pandas().to_numpy()
    Codes(table, (len(items) // 8 + 1, 8), "any").save(root / "codes", pa.array(items), {})
    return forked(steps_on_a_device, prepared, root / "factors", root / "codes")


@pytest.mark.parametrize("family", ["catalog", "semantic"])
def test_a_step_mixes_no_devices_and_waits_for_none(results, family):
    found = {case.partition(" ")[2]: failed for case, failed in results.items() if case.startswith(family)}
    tried = {*LEARNERS, *BYSTANDERS, *ON_CATALOGS, *BESIDE} - SAME_STEP
    assert {*found} == (tried if family == "catalog" else tried & OF_CODES)
    refused = OF_ONE_TOKEN & OF_CODES if family == "semantic" else set()
    failed = {case: error for case, error in found.items() if error is not None and case not in refused}
    assert failed == {}
    assert all(found[case] == "refused: unsupported" for case in refused)
