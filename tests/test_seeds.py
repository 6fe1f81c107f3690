"""Every option that is a seed takes the numbers that NumPy, scikit-learn and torch all take, and refuses others."""

import pytest

import recpo
from recpo.base.errors import MAX_SEED
from recpo.batches.datamodule import FeedbackDataModule
from recpo.evaluation.off_policy.estimators import OffPolicyOptions
from recpo.rewards.graded import FactorOptions
from recpo.rewards.implicit import ImplicitOptions
from recpo.training.options import LearningOptions
from recpo.verbs.loop import loop
from recpo.worlds.parameters import SimulationParameters
from tests.refusals import refused

OPTIONS = {
    LearningOptions: "seed",
    FactorOptions: "seed",
    ImplicitOptions: "seed",
    OffPolicyOptions: "off_policy.seed",
    SimulationParameters: "seed",
}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda kind: kind.__name__)
def test_options_take_a_seed_up_to_the_largest(options):
    assert options(seed=MAX_SEED).seed == MAX_SEED
    for seed in (-1, MAX_SEED + 1, 99999999999999999999):
        with refused("out_of_range", OPTIONS[options]):
            options(seed=seed)


VERBS = {
    "tokenize": lambda prepared, out: recpo.tokenize(prepared, out, seed=-1),
    "factorize": lambda prepared, out: recpo.factorize(prepared, out, seed=-1),
    "calibrate": lambda prepared, out: recpo.calibrate(prepared, [], out=out, seed=-1),
    "data": lambda prepared, out: FeedbackDataModule(prepared, seed=-1),
    "simulate": lambda prepared, out: recpo.simulate(out, seed=-1),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_refuse_a_seed_before_they_write(prepared, tmp_path, verb):
    with refused("out_of_range", "data.seed" if verb == "data" else "seed"):
        VERBS[verb](prepared, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_seed_of_a_loop_leaves_room_for_those_of_its_rounds(tmp_path):
    with refused("out_of_range", "seed"):
        loop(tmp_path / "out", recipe=["configs/pretrain.yaml"], seed=4_294_967)
