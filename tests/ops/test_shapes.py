"""No public function of ops and objectives broadcasts arguments of a wrong shape; the error names both shapes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch

import recpo.objectives
from recpo.base.types import LogProbs, ObjectiveInputs
from recpo.objectives import DPO, GBPO, GRPO, Likelihood, QLearning
from recpo.objectives.grpo import aspo_loss, cispo_loss, ecpo_loss, gbpo_loss, gspo_loss
from recpo.objectives.likelihood import likelihood_weights, weighted_likelihood_loss
from recpo.objectives.listwise_dpo import margin_listwise_dpo_loss, softmax_dpo_loss
from recpo.objectives.mpo import dual_temperature, mpo_loss, mpo_target
from recpo.objectives.policy_gradient import catalog_policy_gradient_loss, entropy, ppo_loss, reinforce_loss, value_loss
from recpo.objectives.preference import dmpo_loss, dpo_loss, grade_gaps, kto_loss, preference_lists, simpo_loss
from recpo.objectives.q_learning import bellman_target, q_loss
from recpo.objectives.reward_model import pairwise_reward_loss, pointwise_reward_loss
from recpo.ops import kl, reduce, surrogate
from tests.refusals import refused

B, S, T = 4, 5, 3
TOKENS, ITEMS = (B, S, T), (B, S)
SHAPES = {
    aspo_loss: {"logp": TOKENS, "logp_old": TOKENS, "advantages": ITEMS, "mask": TOKENS},
    cispo_loss: {"logp": TOKENS, "logp_old": TOKENS, "advantages": ITEMS, "mask": TOKENS},
    ecpo_loss: {"logp": TOKENS, "logp_old": TOKENS, "advantages": ITEMS, "mask": TOKENS},
    gbpo_loss: {"logp": TOKENS, "advantages": ITEMS, "logp_old": TOKENS, "mask": TOKENS},
    gspo_loss: {"logp": TOKENS, "logp_old": TOKENS, "advantages": ITEMS, "mask": TOKENS},
    ppo_loss: {"logp": TOKENS, "logp_old": TOKENS, "advantages": ITEMS, "mask": TOKENS},
    reinforce_loss: {"logp": TOKENS, "advantages": ITEMS, "logp_old": TOKENS, "mask": TOKENS},
    dpo_loss: dict.fromkeys(("logp_chosen", "logp_rejected", "logp_ref_chosen", "logp_ref_rejected"), (B,)),
    softmax_dpo_loss: {
        **{"logp_chosen": (B,), "logp_rejected": (B, S), "logp_ref_chosen": (B,), "logp_ref_rejected": (B, S)},
        **{"mask": (B, S), "pair_weights": (B, S)},
    },
    margin_listwise_dpo_loss: {
        **{"logp_chosen": (B,), "logp_rejected": (B, S), "logp_ref_chosen": (B,), "logp_ref_rejected": (B, S)},
        **{"mask": (B, S), "pair_weights": (B, S)},
    },
    simpo_loss: dict.fromkeys(("logp_chosen", "logp_rejected"), (B,)),
    dmpo_loss: {
        **{"logp_chosen": (B,), "logp_rejected": (B, S), "logp_ref_chosen": (B,), "logp_ref_rejected": (B, S)},
        **{"margin": (B, S), "mask": (B, S)},
    },
    kto_loss: dict.fromkeys(("logp", "logp_ref", "signs", "mask"), ITEMS),
    catalog_policy_gradient_loss: dict.fromkeys(("logp", "rewards", "logp_ref", "mask"), ITEMS),
    likelihood_weights: dict.fromkeys(("advantages", "logp_behavior", "mask"), ITEMS),
    weighted_likelihood_loss: {"logp": TOKENS, "weights": ITEMS, "mask": TOKENS},
    mpo_target: dict.fromkeys(("rewards", "log_base", "mask"), ITEMS),
    dual_temperature: dict.fromkeys(("rewards", "log_base", "mask"), ITEMS),
    mpo_loss: dict.fromkeys(("logp", "rewards", "log_base", "mask"), ITEMS),
    value_loss: {"values": ITEMS, "values_old": ITEMS, "returns": ITEMS},
    entropy: {"logits": ITEMS, "mask": ITEMS},
    bellman_target: {"rewards": ITEMS, "next_q": (B, S, 7), "dones": ITEMS, "next_q_online": (B, S, 7)},
    q_loss: {"q_values": ITEMS, "q_targets": ITEMS},
    pairwise_reward_loss: {"chosen": ITEMS, "rejected": ITEMS, "margin": ITEMS},
    pointwise_reward_loss: {"scores": TOKENS, "targets": TOKENS, "mask": TOKENS, "positive_weight": (T,)},
    kl.kl_estimate: {"logp": TOKENS, "logp_ref": TOKENS},
    kl.masked_log_softmax: {"logits": ITEMS, "mask": ITEMS},
    kl.categorical_kl: {"logits": ITEMS, "logits_ref": ITEMS, "mask": ITEMS},
    kl.kl_shaped_rewards: {"scores": ITEMS, "logp_old": TOKENS, "logp_ref": TOKENS, "mask": TOKENS},
    reduce.aggregate: {"values": TOKENS, "mask": TOKENS},
    reduce.over_tokens: {"values": TOKENS, "logp": TOKENS},
    surrogate.weighted_score: {"weight": TOKENS, "logp": TOKENS},
    surrogate.sequence_log_ratio: {"log_ratio": TOKENS, "mask": TOKENS},
    surrogate.is_clipped: {"log_ratio": TOKENS, "advantages": TOKENS},
    surrogate.clipped_surrogate: {"log_ratio": TOKENS, "advantages": TOKENS},
}
#: of one tensor; or, zero_masked, with a mask that may be broadcast to it
OF_ONE_SHAPE = {reduce.denominator, surrogate.guarded_ratio, surrogate.log1mexp, reduce.zero_masked}
#: one number of all contexts together
OF_ALL_CONTEXTS = {reduce.aggregate, dual_temperature}
MAY_HAVE_ONE_AXIS_MORE = {(reduce.over_tokens, "logp"), (surrogate.clipped_surrogate, "log_ratio")}
OTHERS = {
    "kl_coef": 0.1,
    "temperature": 0.5,
    "kl_target": 0.1,
    "reference_point": torch.tensor(0.1),
    "clip_low": 0.2,
    "clip_high": 0.2,
}
ARGUMENTS = [(function, name) for function, shapes in SHAPES.items() for name in shapes]


def arguments(function):
    parameters = inspect.signature(function).parameters
    named = {name: torch.rand(shape) for name, shape in SHAPES[function].items()}
    for name in named.keys() & {"mask", "dones"}:
        named[name] = named[name] < 0.7
    required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    return named | {name: value for name, value in OTHERS.items() if name in required}


def wrong_shapes(right, function, name):
    """Shapes that PyTorch would broadcast, or that only look right."""
    if (function, name) not in MAY_HAVE_ONE_AXIS_MORE:
        yield (*right, 1)
    yield (1, *right)
    yield (*right[:-1], 1)
    if len(right) > 1:
        yield right[1:]
    if name not in ("advantages", "values"):  # which may lack the last axis, or have it
        yield right[:-1]


def test_every_public_function_is_here():
    modules = [kl, reduce, surrogate]
    modules += [
        importlib.import_module(m.name) for m in pkgutil.iter_modules(recpo.objectives.__path__, "recpo.objectives.")
    ]
    public = {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    # metrics of objectives, what the objectives themselves check with, and advantages, which have their own tests
    own = {f for f in public if f.__module__.rpartition(".")[2] in ("inputs", "advantages", "gae")}
    assert public - own - {reduce.check_same_shape, preference_lists, grade_gaps} == SHAPES.keys() | OF_ONE_SHAPE


@pytest.mark.parametrize("function", SHAPES)
def test_the_right_shapes_are_taken(function):
    assert function(**arguments(function)) is not None


@pytest.mark.parametrize(("function", "name"), ARGUMENTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_wrong_shape_is_named(function, name):
    named = arguments(function)
    right = tuple(named[name].shape)
    for shape in wrong_shapes(right, function, name):
        wrong = torch.ones(shape, dtype=named[name].dtype)
        with refused("wrong_shape", ...) as error:
            function(**(named | {name: wrong}))
        others = {str(tuple(value.shape)) for other, value in named.items() if isinstance(value, torch.Tensor)}
        assert any(text in str(error.value) for text in others | {str(right[:-1])}), error.value


def numbers(keeps):
    """A mask as NumPy or a file may hold it; what is not 0 keeps."""
    return 2 * keeps.to(torch.uint8)


@pytest.mark.parametrize("function", SHAPES)
def test_a_mask_may_be_of_numbers(function):
    named = arguments(function)
    masks = {name: numbers(value) for name, value in named.items() if value is not None and name in ("mask", "dones")}
    for name, value in masks.items():
        torch.testing.assert_close(function(**(named | {name: value})), function(**named), rtol=0, atol=0)


@pytest.mark.parametrize("function", [f for f in SHAPES if f not in OF_ALL_CONTEXTS])
def test_leading_axes_are_taken_one_by_one(function):
    one, other = arguments(function), arguments(function)
    shared = one.keys() - SHAPES[function].keys() | {"positive_weight"}
    other |= {name: one[name] for name in one.keys() & shared}
    both = {name: one[name] if name in shared else torch.stack([one[name], other[name]]) for name in one}
    torch.testing.assert_close(function(**both), torch.stack([function(**one), function(**other)]))


def test_a_mask_does_not_widen_values():
    assert reduce.zero_masked(torch.ones(2, 3), torch.tensor([True, False, True])).shape == (2, 3)
    with refused("wrong_shape", "mask"):
        reduce.zero_masked(torch.ones(3), torch.ones(2, 3))


# ---------------------------------------------------------------- what an objective is given
def inputs(**changes):
    torch.manual_seed(0)
    logp = -torch.rand(2, 3, 1) - 0.1
    chosen = torch.tensor([[True, False, False]] * 2)
    named = {"policy": logp, "mask": torch.ones_like(logp).bool(), "old": logp.clone(), "reference": logp.clone()}
    rows = {"advantages": torch.ones(2, 3), "q_values": torch.zeros(2, 3), "q_targets": torch.zeros(2, 3)}
    return ObjectiveInputs(LogProbs(**(named | changes)), chosen=chosen, **rows)


@pytest.mark.parametrize(
    "objective", [GRPO(), GBPO(), DPO(), Likelihood(), QLearning()], ids=lambda o: type(o).__name__
)
def test_values_that_are_not_log_probabilities_are_refused(objective):
    objective(inputs(policy=torch.full((2, 3, 1), 1e-6)))  # a log-softmax may end a rounding above 0
    for name in ("policy", "old", "reference"):
        wrong = torch.full((2, 3, 1), -1.0)
        wrong[1, 2] = 0.5
        with refused("bad_value", name):
            objective(inputs(**{name: wrong}))
        kept = torch.ones(2, 3, 1).bool()
        kept[1, 2] = False
        objective(inputs(**{name: wrong.masked_fill(~kept, torch.nan), "mask": kept}))
        objective(inputs(**{name: wrong, "mask": kept}))
        with refused("wrong_shape", "mask" if name == "policy" else name):
            objective(inputs(**{name: -torch.ones(2, 3)}))
