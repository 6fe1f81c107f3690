"""The contract of every objective. New objectives are found automatically, with every option of their fields.

The instances: each concrete ``Objective`` of ``recpo.objectives`` at its defaults, and one more per choice of a
``Literal`` field, per flipped bool and per weight (``*_coef``) switched on or off. Kinds of a KL penalty come with one.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import math
import pkgutil
import typing

import pytest
import torch

import recpo.objectives
from recpo.base.contracts import Objective, Requirement
from recpo.base.types import LogProbs, ObjectiveInputs
from tests.refusals import refused

SCORES = 2
WITH_GRADIENT = ("policy", "values", "entropy", "divergence", "q_values", "scores")
# finite differences see through a stop-gradient: tests/test_objective_references.py has the closed forms of these
STOP_GRADIENT = {"GBPO", "ASPO", "ECPO", "CISPO", "Reinforce", "KTO"}


def concrete_objectives():
    for module in pkgutil.iter_modules(recpo.objectives.__path__, "recpo.objectives."):
        for _, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if cls.__module__ == module.name and issubclass(cls, Objective) and not inspect.isabstract(cls):
                yield cls


CLASSES = sorted(concrete_objectives(), key=lambda cls: cls.__name__)


def options(cls, field):
    """Other values of a field, where they can be enumerated."""
    now = getattr(cls(), field.name)
    hint = typing.get_type_hints(cls)[field.name]
    if typing.get_origin(hint) is typing.Literal:
        return [option for option in typing.get_args(hint) if option != now]
    if isinstance(now, bool):
        return [not now]
    if field.name.endswith("_coef"):
        return [0.0 if now else 0.3]
    return []


def instances():
    """Every class at its defaults, and every option of every field on the first class that has the field."""
    seen = set()
    for cls in CLASSES:
        yield cls.__name__, cls()
        for field in dataclasses.fields(cls):
            owner = next(b for b in reversed(cls.__mro__) if field.name in inspect.get_annotations(b))
            if (owner, field.name) not in seen:
                seen.add((owner, field.name))
                weight = {"kl_coef": 0.3} if field.name == "kl_kind" else {}
                for option in options(cls, field):
                    yield f"{cls.__name__}-{field.name}={option}", cls(**{field.name: option}, **weight)


OBJECTIVES = dict(instances())
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())


def tensors(seed=0, shape=(4, 5, 3), dtype=torch.float64):
    """Everything that an objective may ask for, by name; the mask is ragged, and each row has a kept chosen item."""
    torch.manual_seed(seed)
    rows = shape[:2]
    policy = -torch.rand(shape, dtype=dtype) * 3 - 0.05
    tokens = torch.rand(shape) < 0.8
    items = torch.rand(rows) < 0.8
    items[:, 1] = True
    tokens[:, 1, 0] = True
    chosen = torch.zeros(rows, dtype=torch.bool)
    chosen[:, 1] = True
    return {
        "policy": policy,
        "mask": tokens & items.unsqueeze(-1),
        "old": (policy + 0.3 * torch.randn(shape, dtype=dtype)).clamp(max=-0.01),
        "reference": (policy + 0.5 * torch.randn(shape, dtype=dtype)).clamp(max=-0.01),
        "chosen": chosen,
        "advantages": torch.randn(rows, dtype=dtype) * (torch.rand(rows) < 0.8),
        "entropy": torch.rand(rows, dtype=dtype),
        "divergence": torch.rand(shape, dtype=dtype),
        **{
            name: torch.randn(rows, dtype=dtype)
            for name in ("rewards", "values", "values_old", "returns", "q_values", "q_targets")
        },
        "scores": torch.randn(*rows, SCORES, dtype=dtype),
        "label": torch.rand(rows, dtype=dtype),
        "dislike": torch.rand(rows) < 0.3,
        "grades": torch.rand(rows, dtype=dtype),
        "positive": torch.rand(rows) < 0.5,
    }


def normalized(logp, mask):
    """Probabilities of the kept items that sum to 1 in every row; the first kept token of an item carries them."""
    items = mask.bool().any(-1)
    total = torch.where(mask.bool(), logp, 0.0).sum(-1)
    outside = torch.where(items.any(-1, keepdim=True), -torch.inf, 0.0).to(total.dtype)
    of_items = torch.where(items, total, outside).log_softmax(-1)
    first = mask.bool() & (mask.bool().cumsum(-1) == 1)
    return torch.where(first, of_items.unsqueeze(-1), torch.where(mask.bool(), 0.0, logp))


def as_inputs(objective, named, denominator=None, requires=None):
    """Only what the objective requires, so that it cannot lean on anything else."""
    requires = objective.requires if requires is None else requires
    if "catalog" in objective.requires:
        named = named | {n: normalized(named[n], named["mask"]) for n in ("policy", "reference")}
    kept = {name for requirement in requires for name in Requirement(requirement).fields}
    logp = LogProbs(named["policy"], named["mask"], *(named[n] if n in kept else None for n in ("old", "reference")))
    rest = {n: named[n] for n in kept - {"old", "reference"}}
    return ObjectiveInputs(logp, **rest, denominator=denominator)


def run(objective, named, denominator=None):
    """The output and the gradients of whatever carries one (zeros where nothing flows)."""
    leaves = {n: named[n].clone().requires_grad_() for n in WITH_GRADIENT}
    output = objective(as_inputs(objective, named | leaves, denominator))
    gradients = torch.autograd.grad(output.loss, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves, gradients, strict=True)
    return output, {n: torch.zeros_like(named[n]) if g is None else g for n, g in pairs}


def assert_same(first, second):
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def select(named, rows=None, slots=None):
    rows = slice(None) if rows is None else rows
    slots = slice(None) if slots is None else slots
    return {name: x[rows][:, slots] for name, x in named.items()}


def test_objectives_are_found():
    assert {"Likelihood", "DPO", "PPO", "GBPO", "QLearning"} <= {cls.__name__ for cls in CLASSES}
    assert not any(name.endswith("Objective") for name in OBJECTIVES)


@pytest.mark.parametrize("cls", CLASSES)
def test_is_a_frozen_dataclass_whose_fields_are_documented(cls):
    objective = cls()
    assert hash(objective) == hash(cls())
    with pytest.raises(dataclasses.FrozenInstanceError):
        objective.anything = 1
    docs = "\n".join(inspect.getdoc(base) or "" for base in cls.__mro__)
    assert not [f.name for f in dataclasses.fields(cls) if f"{f.name}: " not in docs]


@every_objective
def test_runs_on_what_it_requires_and_says_what_it_lacks(objective):
    named = tensors()
    assert objective.requires <= set(Requirement)
    output, _ = run(objective, named)
    assert output.loss.shape == ()
    assert output.loss.isfinite()
    for name, metric in output.metrics.items():
        assert metric.shape == (), name
        assert not metric.requires_grad, name
        assert metric.isfinite(), name
    for missing in map(Requirement, objective.requires - {"catalog", "propensities"}):  # which are no inputs
        with refused("missing_option", missing.option):
            objective(as_inputs(objective, named, requires=objective.requires - {missing}))


@every_objective
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_finite_at_extreme_probabilities(objective, dtype):
    extremes = [-1e3, math.log(1e-12), -30.0, -1e-12, 0.0]
    grid = torch.tensor(list(itertools.product(extremes, repeat=3)), dtype=dtype)
    n = len(grid) * 3
    named = tensors(shape=(n, 2, 1), dtype=dtype)
    policy, old, reference = (x.repeat(3).view(n, 1, 1).expand(n, 2, 1) for x in grid.T)
    shift = torch.tensor([0.0, -1e3]).to(dtype).view(1, 2, 1)
    named |= {"policy": (policy + shift).clamp(min=-1e3), "old": old.clone(), "reference": reference.clone()}
    signs = torch.tensor([1.0, -1.0, 0.0], dtype=dtype).repeat_interleave(len(grid))
    named |= {"mask": torch.ones(n, 2, 1, dtype=torch.bool), "advantages": signs.unsqueeze(1).repeat(1, 2)}
    output, gradients = run(objective, named)
    assert output.loss.isfinite()
    assert all(g.isfinite().all() for g in gradients.values())
    assert all(m.isfinite() for m in output.metrics.values())


@every_objective
def test_zero_advantage_gives_zero_gradient_and_need_not_be_scored(objective):
    if not objective.zero_advantage_is_inert:
        pytest.skip("a penalty, a critic or the objective itself acts on every position")
    named = tensors()
    zero = named["advantages"] == 0
    assert (zero & named["mask"].any(-1)).any()
    output, gradients = run(objective, named)
    assert (gradients["policy"][zero] == 0).all()
    unscored = named | {n: named[n].masked_fill(zero.unsqueeze(-1), math.nan) for n in ("policy", "old")}
    other, other_gradients = run(objective, unscored)
    assert_same(
        [output.loss, *gradients.values(), *output.metrics.values()],
        [other.loss, *other_gradients.values(), *other.metrics.values()],
    )
    _, gradients = run(objective, named | {"advantages": torch.zeros_like(named["advantages"])})
    assert all((g == 0).all() for g in gradients.values())


def assert_signs_over_the_catalog(objective, named, gradient):
    """On the logits: items above the expected reward go up, the others down."""
    mask, rewards = named["mask"], named["rewards"]
    pi = torch.where(mask, normalized(named["policy"], mask), 0.0).sum(-1).exp() * mask.any(-1)
    better = (rewards - (pi * rewards).sum(-1, keepdim=True)).unsqueeze(-1).expand_as(gradient)
    if not objective.entropy_coef:  # which pulls towards the uniform policy
        torch.testing.assert_close(-gradient.sign()[mask], better.sign()[mask])


# as a loss, k1 lowers every token alike
SIGNED = {name: objective for name, objective in OBJECTIVES.items() if not name.endswith("kl_kind=k1")}


@pytest.mark.parametrize("objective", SIGNED.values(), ids=SIGNED.keys())
def test_gradient_has_the_right_sign(objective):
    """Descent raises what is good and lowers what is bad, at the old policy (ratio 1)."""
    named = tensors()
    named |= {"old": named["policy"], "reference": named["policy"]}
    _, gradients = run(objective, named)
    mask, policy = named["mask"], gradients["policy"]
    if "advantages" in objective.requires:
        sign = named["advantages"].sign().unsqueeze(-1).expand_as(policy)
        if type(objective).__name__ == "Likelihood":
            sign = sign.clamp(min=0.0)
        if type(objective).__name__ == "WeightedLikelihood":  # imitates the bad ones less, and never pushes down
            sign = torch.ones_like(sign)
        torch.testing.assert_close(-policy.sign()[mask], sign[mask])
    elif "catalog" in objective.requires:
        assert_signs_over_the_catalog(objective, named, policy)
    elif "dislikes" in objective.requires:
        targets, _ = objective.targets(named["grades"], named["dislike"], positive=named["positive"])
        kept = mask.any(-1)
        above = (targets - named["scores"].sigmoid()).sign()
        torch.testing.assert_close(-gradients["scores"].sign()[kept], above[kept].double())
    elif "score" in objective.requires:
        scores = gradients["scores"][..., 0]
        assert (scores[named["chosen"]] <= 0).all()
        assert (scores[~named["chosen"]] >= 0).all()
        assert scores.abs().sum() > 0
    elif "chosen" in objective.requires:
        chosen = named["chosen"].unsqueeze(-1) & mask
        assert (policy[chosen] <= 0).all()
        assert (policy[~chosen] >= 0).all()
        assert policy.abs().sum() > 0 or type(objective).__name__ == "MarginListwiseDPO"
    else:
        assert (policy[mask] <= 0).all()
    if "q_value" in objective.requires:
        error, kept = named["q_values"] - named["q_targets"], mask.any(-1)
        if objective.q_coef:
            torch.testing.assert_close(gradients["q_values"].sign()[kept], error.sign()[kept])


@every_objective
def test_reads_log_probabilities_or_says_that_it_does_not(objective):
    _, gradients = run(objective, tensors())
    assert objective.reads_log_prob == bool((gradients["policy"] != 0).any())


def hostile_padding(named, axis, amount=2):
    """Appends masked entries that hold nan (or inf) everywhere along ``axis``: 0 rows, 1 slate positions, 2 tokens."""
    padded = {}
    for name, x in named.items():
        if axis >= x.dim() or (axis == 2 and name == "scores"):
            padded[name] = x
            continue
        shape = [amount if d == axis else n for d, n in enumerate(x.shape)]
        bad = math.inf if name in ("old", "returns") else math.nan
        filler = torch.zeros(shape, dtype=x.dtype) if x.dtype == torch.bool else torch.full(shape, bad, dtype=x.dtype)
        padded[name] = torch.cat([x, filler], axis)
    return padded


@every_objective
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_masked_equals_removed(objective, axis):
    if hasattr(objective, "length"):
        objective = dataclasses.replace(objective, length=3.0)
    named = tensors(1)
    padded = hostile_padding(named, axis)
    output, gradients = run(objective, named)
    other, padded_gradients = run(objective, padded)
    original = tuple(slice(n) for n in named["policy"].shape)
    kept = {n: g[original[: g.dim()]] for n, g in padded_gradients.items()}
    assert_same([output.loss, *gradients.values()], [other.loss, *kept.values()])
    for n, g in padded_gradients.items():
        rest = g.clone()
        rest[original[: g.dim()]] = 0.0
        assert (rest == 0).all(), n
    torch.testing.assert_close(*(objective.count(as_inputs(objective, x)) for x in (named, padded)))
    for name in output.metrics.keys() - {"dropped_list_share"}:
        torch.testing.assert_close(output.metrics[name], other.metrics[name])


@every_objective
def test_entries_under_the_mask_do_not_matter(objective):
    named = tensors(2)
    tokens, items = named["mask"], named["mask"].any(-1)
    masks = {2: items, 3: tokens, "scores": items.unsqueeze(-1)}
    hostile = {
        name: x if x.dtype == torch.bool else torch.where(masks["scores" if name == "scores" else x.dim()], x, math.nan)
        for name, x in named.items()
    }
    output, gradients = run(objective, named)
    other, other_gradients = run(objective, hostile)
    assert_same([output.loss, *gradients.values()], [other.loss, *other_gradients.values()])


@every_objective
def test_masks_may_be_of_numbers(objective):
    named = tensors(7)
    numbers = named | {n: 2 * x.to(torch.uint8) for n, x in named.items() if x.dtype == torch.bool}
    output, gradients = run(objective, named)
    other, other_gradients = run(objective, numbers)
    assert_same([output.loss, *gradients.values()], [other.loss, *other_gradients.values()])
    assert_same(output.metrics.values(), other.metrics.values())
    assert objective.count(as_inputs(objective, named)) == objective.count(as_inputs(objective, numbers))


@every_objective
def test_fully_masked_batch_gives_zero(objective):
    named = tensors()
    named = {n: x if x.dtype == torch.bool else torch.full_like(x, math.nan) for n, x in named.items()}
    named["mask"] = torch.zeros_like(named["mask"])
    output, gradients = run(objective, named)
    assert output.loss == 0
    assert all((g == 0).all() for g in gradients.values())
    assert all(m.isfinite() for m in output.metrics.values())
    assert objective.count(as_inputs(objective, named)) == 0


@every_objective
def test_order_does_not_matter(objective):
    named = tensors(3)
    rows, slots = torch.randperm(4), torch.randperm(5)
    output, gradients = run(objective, named)
    other, shuffled = run(objective, {n: x[rows][:, slots] for n, x in named.items()})
    assert_same([output.loss], [other.loss])
    assert_same([g[rows][:, slots] for g in gradients.values()], shuffled.values())
    torch.testing.assert_close(output.metrics, other.metrics)


@every_objective
def test_no_gradient_flows_into_what_is_fixed(objective):
    fixed = [n for n, x in tensors().items() if n not in WITH_GRADIENT and x.dtype != torch.bool]
    named = {n: x.requires_grad_() if n in fixed or n == "policy" else x for n, x in tensors().items()}
    inputs = as_inputs(objective, named)
    loss = objective(inputs).loss + 0 * named["policy"].sum()
    gradients = torch.autograd.grad(loss, [named[n] for n in fixed], allow_unused=True)
    assert [n for n, g in zip(fixed, gradients, strict=True) if g is not None] == []


@every_objective
def test_gradient_is_that_of_the_value(objective):
    if type(objective).__name__ in STOP_GRADIENT or getattr(objective, "level", "") == "token":
        pytest.skip("weighs grad logp by detached weights; closed forms in test_objective_references.py")
    named = tensors(4, shape=(2, 3, 2))

    def loss(*values):
        return objective(as_inputs(objective, named | dict(zip(WITH_GRADIENT, values, strict=True)))).loss

    leaves = [named[n].requires_grad_() for n in WITH_GRADIENT]
    anything = sum(x.sum() for x in leaves) * 0  # every leaf takes part, read or not
    assert torch.autograd.gradcheck(lambda *x: loss(*x) + sum(y.sum() for y in x) * 0 + anything.detach(), leaves)


@every_objective
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3]], [[0, 1, 2], [3]], [[3, 1], [0, 2]]])
def test_a_split_step_is_the_same_step(objective, parts):
    """Micro-batches and ranks: with the step's denominator, losses and gradients of the parts add up."""
    if getattr(objective, "reference_point", "") == "batch":
        pytest.skip("its reference point is that of a micro-batch, as in the paper")
    named = tensors(5)
    named["mask"][3, 2:] = False
    whole, gradients = run(objective, named)
    pieces = [select(named, rows=torch.tensor(rows)) for rows in parts]
    denominator = sum(objective.count(as_inputs(objective, piece)) for piece in pieces)
    torch.testing.assert_close(denominator, objective.count(as_inputs(objective, named)))
    outputs = [run(objective, piece, denominator) for piece in pieces]
    assert_same([whole.loss], [sum(output.loss for output, _ in outputs)])
    order = torch.tensor(list(itertools.chain.from_iterable(parts))).argsort()
    for name, gradient in gradients.items():
        assert_same([gradient], [torch.cat([g[name] for _, g in outputs])[order]])


@every_objective
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_smaller_formats(objective, dtype, tolerance):
    named = {n: x if x.dtype == torch.bool else x.to(dtype) for n, x in tensors(6).items()}
    exact = {n: x if x.dtype == torch.bool else x.double() for n, x in named.items()}
    output, gradients = run(objective, named)
    want, _ = run(objective, exact)
    assert gradients["policy"].dtype == dtype
    assert all(g.isfinite().all() for g in gradients.values())
    torch.testing.assert_close(output.loss.double(), want.loss, rtol=tolerance, atol=tolerance)
