"""Mutation testing: changes one operator, constant, sign or mask of a module at a time; its tests have to notice.

    python tests/mutation.py recpo/objectives recpo/ops          # the modules and their own tests (``OWNERS``)
    python tests/mutation.py recpo/objectives/gbpo.py --only 17  # one mutant (or more), with the output of the tests

Prints every mutant that survived, as the line that it changed; the exit status is 1 where there are any that
``EQUIVALENT`` does not name. Works on a copy in a temporary directory, so the checkout may be edited meanwhile. Tests
are imported and collected once; a mutant is put into the functions of a forked process and meets only the tests that
reach its line, so most take a tenth of a second. Changes outside of functions take a new interpreter each.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).parent.parent
LOSSES = [
    "tests/ops/test_pure_ops.py",
    "tests/ops/test_shapes.py",
    "tests/test_vectors.py",
    "tests/test_objective_references.py",
    "tests/objectives",
]
#: the tests of a module, fast ones first; the longest prefix counts
OWNERS = {
    "recpo/objectives": LOSSES,
    "recpo/ops": ["tests/ops", *LOSSES],
    "recpo/ops/kl": LOSSES,
    "recpo/ops/reduce": LOSSES,
    "recpo/ops/surrogate": LOSSES,
    "recpo/ops/sampled_softmax": ["tests/ops/test_sampled_softmax.py", "tests/policies/test_catalog_softmax.py"],
    "recpo/ops/kernels": ["tests/ops/test_kernels.py", "tests/ops/test_linear_logprob.py"],
    "recpo/ops/linear_logprob": ["tests/ops/test_linear_logprob.py"],
    "recpo/ops/sharded_logprob": ["tests/ops/test_sharded_logprob.py"],
    "recpo/ops/item_sets": ["tests/evaluation/test_ranking.py"],
    "recpo/advantages": ["tests/test_advantages.py", "tests/test_vectors.py", "tests/test_objective_references.py"],
    "recpo/rewards": ["tests/rewards", "tests/test_vectors.py"],
    "recpo/evaluation/ranking": ["tests/evaluation/test_ranking.py"],
    "recpo/evaluation/off_policy": ["tests/evaluation/off_policy"],
    "recpo/data/shaping": ["tests/data/test_shaping.py"],
    "recpo/feedback": ["tests/test_feedback.py"],
}
#: modules whose tests start interpreters of their own, which know nothing of a mutant in memory
IN_OTHER_PROCESSES = ("recpo/ops/sharded_logprob", "recpo/ops/row_shard")
PYTEST = ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "-m", "not slow"]
CANNOT = 77
#: survivors that change no result, as ``module: mutated line``, with the reason
EQUIVALENT: dict[str, str] = {
    "recpo/advantages/ternary.py: rank = round(rank) if abs(rank - round(rank)) <= _RANK_ROUNDING else rank": (
        "a rank is a multiple of 2^-53, which 1e-9 is not: they are never equal"
    ),
    "recpo/advantages/ternary.py: value = label": "it is only compared, and no gradient flows through a comparison",
    "recpo/advantages/group.py: "
    "deviation = zero_masked(rewards - rewards.sum(-1, keepdim=True) / size.clamp(min=2), kept)": (
        "a group of one is constant: its deviation is set to 0 in the next line (a reward of nan stays nan)"
    ),
    "recpo/rewards/validity.py: draws = "
    "torch.rand(candidates.mask.shape, device=candidates.mask.device).masked_fill(~candidates.mask, 3.0)": (
        "any number from 1 on is above all draws"
    ),
    "recpo/objectives/ecpo.py: logp = logp": "ppo_loss masks it, and the cap that is made of it",
    "recpo/objectives/ecpo.py: early = logp - math.log(1.0 + clip_high + delta)": "ppo_loss detaches the old policy",
    "recpo/objectives/ecpo.py: old = torch.maximum(early, logp_old.detach())": "ppo_loss masks the old policy",
    "recpo/objectives/ecpo.py: old = torch.maximum(early, zero_masked(logp_old, mask))": (
        "ppo_loss detaches the old policy"
    ),
    "recpo/objectives/cispo.py: weight = guarded_ratio(logp - zero_masked(logp_old.detach(), mask))": (
        "weighted_score detaches the weight"
    ),
    "recpo/objectives/cispo.py: weight = guarded_ratio(logp.detach() - zero_masked(logp_old, mask))": (
        "weighted_score detaches the weight"
    ),
    "recpo/feedback.py: return (label >= np.float32(self.positive_threshold)) & ~dislike": (
        "the same number: labels are float32 or float64"
    ),
    "recpo/feedback.py: return (label < np.float32(self.skip_threshold)) & ~dislike": (
        "the same number: labels are float32 or float64"
    ),
    "recpo/feedback.py: power = np.log(np.where(known, seconds, 2.0) + 1e-06) / np.log(self.duration_base)": (
        "a stand-in for unknown durations, whose power the next line does not read"
    ),
    **dict.fromkeys(
        [
            "recpo/objectives/gbpo.py: old = logp if logp_old is None else zero_masked(logp_old.detach(), mask)",
            "recpo/objectives/gbpo.py: old = logp.detach() if logp_old is None else zero_masked(logp_old, mask)",
            "recpo/objectives/gbpo.py: current = logp",
            "recpo/objectives/aspo.py: log_ratio = logp - zero_masked(logp_old.detach(), mask)",
            "recpo/objectives/aspo.py: log_ratio = logp.detach() - zero_masked(logp_old, mask)",
            "recpo/objectives/reinforce.py: item = logp.sum(-1, keepdim=True)",
            "recpo/objectives/reinforce.py: "
            "old = item if logp_old is None else zero_masked(logp_old, mask).sum(-1, keepdim=True)",
        ],
        "weighted_score detaches the weight",
    ),
    **dict.fromkeys(
        [
            "recpo/objectives/gbpo.py: bound = torch.maximum(old, torch.where(advantages <= 0, complement, current))",
            "recpo/objectives/gbpo.py: return -advantages * weighted_score(weight, logp)",
            "recpo/objectives/aspo.py: weight = guarded_ratio(torch.where(advantages >= 0, -log_ratio, log_ratio))",
            "recpo/ops/surrogate.py: "
            "return torch.where(advantages <= 0, torch.minimum(loss, -dual_clip * advantages), loss)",
        ],
        "an advantage of 0, as masked tokens have it, times a finite weight",
    ),
    **dict.fromkeys(
        [
            "recpo/objectives/gspo.py: log_s = over_tokens(sequence_log_ratio(logp - logp_old.detach(), mask), logp)",
            "recpo/objectives/listwise_dpo.py: "
            "rejected = beta * (logp_rejected - zero_masked(logp_ref_rejected.detach(), kept))",
            "recpo/objectives/listwise_dpo.py: "
            "rejected = beta * (zero_masked(logp_rejected, kept) - logp_ref_rejected.detach())",
            "recpo/objectives/listwise_dpo.py: return (chosen.unsqueeze(-1) - rejected, kept)",
            "recpo/objectives/listwise_dpo.py: "
            "terms = -gaps if pair_weights is None else pair_weights.detach().log() - gaps",
            "recpo/objectives/listwise_dpo.py: scaled = scaled * pair_weights.detach()",
            "recpo/objectives/dpo.py: pairs = dpo_loss(chosen.unsqueeze(-1).expand_as(logp), logp, "
            "ref_chosen.unsqueeze(-1).expand_as(logp), zero_masked(logp_ref, lists.is_rejected), margin=margin, "
            "variant='sigmoid' if self.variant == 'simpo' else self.variant, **options)",
            "recpo/objectives/dpo.py: pairs = dpo_loss(chosen.unsqueeze(-1).expand_as(logp), "
            "zero_masked(logp, lists.is_rejected), ref_chosen.unsqueeze(-1).expand_as(logp), logp_ref, margin=margin, "
            "variant='sigmoid' if self.variant == 'simpo' else self.variant, **options)",
            "recpo/objectives/ppo.py: returns = required(inputs.returns, 'returns', self)",
            "recpo/objectives/ppo.py: old = required(inputs.values_old, 'values_old', self)",
            "recpo/objectives/policy_gradient.py: "
            "advantages = required(inputs.advantages, 'advantages', self).detach()",
            "recpo/objectives/policy_gradient.py: reference = required(inputs.logp.reference, 'reference', self)",
            "recpo/objectives/policy_gradient.py: entropy = required(inputs.entropy, 'entropy', self)",
            "recpo/objectives/likelihood.py: logp = inputs.logp.policy",
            "recpo/objectives/q_learning.py: targets = required(inputs.q_targets, 'q_targets', self).detach()",
            "recpo/objectives/reward_model.py: scores, targets = (zero_masked(scores, mask), targets.to(scores.dtype))",
            "recpo/advantages/gae.py: rewards, values = (rewards.detach(), zero_masked(values.detach(), kept))",
            "recpo/advantages/gae.py: values = values.detach()",
        ],
        "masked again further on, before anything is summed, and what stands between carries no gradient there",
    ),
    **dict.fromkeys(
        [
            "recpo/objectives/gspo.py: return over_tokens(sequence_log_ratio(log_ratio, mask), log_ratio)",
            "recpo/objectives/reinforce.py: return over_tokens(log_ratio.sum(-1), log_ratio)",
            "recpo/objectives/reward_model.py: predicted = scores.sigmoid()",
            "recpo/objectives/health.py: ratio = zero_masked(guarded_ratio(log_ratio), mask).float()",
            "recpo/objectives/health.py: residual = _variance(returns - values, mask)",
            "recpo/objectives/health.py: total = _variance(returns, mask)",
        ],
        "only metrics read it, and they mask it",
    ),
    **dict.fromkeys(
        [
            "recpo/objectives/policy_gradient.py: advantages = "
            "zero_masked(required(inputs.advantages, 'advantages', self), mask.any(-1))",
            "recpo/objectives/policy_gradient.py: old = None if old is None else zero_masked(old, scored)",
            "recpo/objectives/preference.py: logp_ref = "
            "self.item_logp(required(inputs.logp.reference, 'reference', self), inputs.logp.mask)",
            "recpo/objectives/q_learning.py: "
            "targets = zero_masked(required(inputs.q_targets, 'q_targets', self), kept)",
        ],
        "the pure loss detaches it, and metrics are computed without gradients",
    ),
    **dict.fromkeys(
        [
            "recpo/objectives/policy_gradient.py: "
            "metrics |= self._health(surrogate, logp.detach(), old, advantages, scored)",
            "recpo/objectives/policy_gradient.py: "
            "metrics |= self._health(surrogate.detach(), logp, old, advantages, scored)",
            "recpo/objectives/preference.py: return LossOutput(loss, self._health(logp, logp_ref, lists))",
        ],
        "metrics are computed without gradients",
    ),
    "recpo/objectives/policy_gradient.py: if getattr(self, name, 1.0) < 0:": "1 is not negative either",
    "recpo/objectives/q_learning.py: best = next_q.gather(-1, next_q_online.argmax(-1, keepdim=True)).squeeze(-1)": (
        "the place of a maximum has no gradient"
    ),
    "recpo/objectives/q_learning.py: "
    "return torch.where(error.abs() < huber, squared, huber * (error.abs() - 0.5 * huber))": (
        "at the bound both have the same value and the same slope"
    ),
    **dict.fromkeys(
        [
            "recpo/objectives/health.py: return "
            "torch.where(total > 0, 1.0 - residual / torch.where(total >= 0, total, 1.0), 0.0)",
            "recpo/objectives/health.py: return "
            "torch.where(total > 0, 1.0 - residual / torch.where(total > 0, total, 2.0), 0.0)",
        ],
        "a divisor for the case that the outer condition leaves out",
    ),
    **dict.fromkeys(
        [
            "recpo/ops/surrogate.py: return "
            "torch.where(x >= -math.log(2.0), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))",
            "recpo/ops/surrogate.py: return "
            "torch.where(x > -2.0, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))",
            "recpo/ops/surrogate.py: return "
            "torch.where(x > -math.log(3.0), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))",
        ],
        "between log(1/2) and -2 both forms keep their digits",
    ),
    "recpo/ops/sampled_softmax.py: ids = torch.searchsorted(cdf, draws, right=False).clamp_(1, len(cdf) - 1)": (
        "they differ for a draw that equals a cumulative probability, one in 2^53"
    ),
    "recpo/ops/sampled_softmax.py: ids = torch.searchsorted(cdf, draws, right=True).clamp_(1, len(cdf) + 1)": (
        "a draw lies below cdf[V] = 1, so its id is at most V"
    ),
    "recpo/ops/linear_logprob.py: sums = sum_over_catalog(states, table, padding_rows, want_expected_row=needs_states, "
    "keep_bytes=keep_bytes if needs_table else 1)": "no softmax fits into one byte",
    "recpo/rewards/hit.py: width = batch.histories.item_ids.shape[1] + 2": "any stride above what a position may see",
    "recpo/rewards/hit.py: discount = 2.0 / torch.log2(rank.double() + 1.0)": "a factor of what is normalized next",
    **dict.fromkeys(
        [
            "recpo/ops/kernels.py: BLOCK_BYTES = {'cpu': 9 << 20}",
            "recpo/ops/kernels.py: BLOCK_BYTES_ACCELERATOR = 257 << 20",
            "recpo/ops/kernels.py: BLOCK_BYTES_ACCELERATOR = 256 << 21",
            "recpo/ops/kernels.py: KEEP_BYTES = 193 << 20",
            "recpo/ops/kernels.py: KEEP_BYTES = 192 << 21",
            "recpo/ops/kernels.py: BLOCK_ROWS_OF_TABLE = 8193",
            "recpo/ops/kernels.py: narrow_inputs = rows.shape[1] <= grad.shape[1]",
            "recpo/ops/kernels.py: grad_weight = "
            "_onednn(grad.T, rows.T) if narrow_inputs else _onednn(rows.T, grad.T).T.contiguous()",
            "recpo/ops/kernels.py: words = "
            "torch.empty((values.numel() + 8) // 8, dtype=torch.int64).random_(_LEAST_INT64, None)",
            "recpo/ops/kernels.py: words = "
            "torch.empty((values.numel() + 7) * 8, dtype=torch.int64).random_(_LEAST_INT64, None)",
        ],
        "how much is done at a time or in which order: speed and memory, not the result",
    ),
    "recpo/ops/kernels.py: with nullcontext() if left.is_cuda else full_precision():": (
        "on a CPU, where the tests run, the setting changes nothing"
    ),
    **dict.fromkeys(
        [
            "recpo/ops/item_sets.py: _NARROW = 33",
            "recpo/ops/item_sets.py: if not sorted_set.shape[1] <= _NARROW:",
            "recpo/ops/item_sets.py: if sorted_set.shape[1] < _NARROW:",
        ],
        "both ways of looking an item up find the same: which one is quicker",
    ),
    **dict.fromkeys(
        [
            "recpo/ops/item_sets.py: "
            "kept, order = item_ids.long().masked_fill(~mask, NO_ITEM).sort(dim=1, stable=False)",
            "recpo/evaluation/ranking.py: ascending, by_item = kept.sort(dim=1, stable=False)",
        ],
        "on a CPU PyTorch sorts stably either way; the argument asks for what the next line needs",
    ),
    "recpo/evaluation/ranking.py: "
    "return _defined(torch.stack([first * (first > 1 / k - 1e-07) for k in ks], 1), hits)": "no 1 / rank is that bound",
    **dict.fromkeys(
        [
            "recpo/evaluation/ranking.py: "
            "rank = torch.arange(1, hits.hit.shape[1] + 2, device=hits.hit.device, dtype=torch.float32)",
            "recpo/evaluation/ranking.py: "
            "return 1 / torch.log2(torch.arange(2, places + 3, device=like.device, dtype=torch.float32))",
        ],
        "a weight beyond the last place, which is not read",
    ),
    "recpo/evaluation/ranking.py: "
    "return 2 / torch.log2(torch.arange(2, places + 2, device=like.device, dtype=torch.float32))": (
        "a factor that both sides of the ratio have"
    ),
    "recpo/ops/item_sets.py: "
    "return kept.sort(1).values if kept.shape[1] else kept.new_full((len(kept), 2), NO_ITEM)": "no items twice",
    "recpo/data/shaping.py: return _with_label(events, events, ibis.ifelse(ratio >= 1.0, 1.0, ratio))": "1 either way",
    "recpo/data/shaping.py: _WTG_RESOLUTION: Final = 1000001.0": (
        "which gains count as equal is a matter of the seventh digit either way"
    ),
    "recpo/data/shaping.py: keyed = keyed.mutate(gain=(gain * _WTG_RESOLUTION).round().cast('int64'), "
    "everyone=ibis.literal(1, 'int8'))": "a name for the one group of all",
    "recpo/evaluation/off_policy/additive_model.py: "
    "totals -= [len(reward), reward.sum(), (reward.astype(np.float64) ** 2).sum()]": "only their ratios are read",
    **dict.fromkeys(
        [
            "recpo/evaluation/off_policy/additive_model.py: "
            "return cls(mean, torch.from_numpy(users), torch.from_numpy(items))",
            "recpo/evaluation/off_policy/additive_model.py: squares += (residual ** 2).sum()",
            "recpo/evaluation/off_policy/additive_model.py: "
            "return (effect, max(squares - explained, 0.0) / rows_in_all)",
        ],
        "a float of NumPy for one of Python",
    ),
    "recpo/objectives/q_learning.py: mask = inputs.logp.mask": "any and zero_masked take numbers as they take bools",
}

SWAPS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Pow: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
    **{ast.And: ast.Or, ast.Or: ast.And},
}
NAMES = {"any": "all", "all": "any", "maximum": "minimum", "minimum": "maximum", "amax": "amin", "amin": "amax"}
NAMES |= {"clamp_min": "clamp_max", "clamp_max": "clamp_min", "argmax": "argmin"}
KEYWORDS = {"min": "max", "max": "min"}
#: calls whose removal leaves a program that runs
TRANSPARENT = {"detach", "square", "sqrt", "exp", "log", "neg", "abs", "bool", "float", "double", "flip", "zero_masked"}


def mutants(tree: ast.Module) -> Iterator[tuple[ast.Module, tuple[int, int], bool]]:
    """Every tree that differs from ``tree`` in one place, the lines of it, and whether the code of a function has it.

    Default arguments, constants of modules and fields of classes are not in the code of a function.
    """
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = [(node.body[0].lineno, node.body[-1].end_lineno or 0) for node in bodies]
    places = list(_places(tree))
    for number, (node, parent, _, _) in enumerate(places):
        for choice in range(len(_changes(node, parent))):
            changed = copy.deepcopy(tree)
            again, its_parent, field, index = list(_places(changed))[number]
            new = _changes(again, its_parent)[choice]
            if index is None:
                setattr(its_parent, field, new)
            else:
                getattr(its_parent, field)[index] = new
            at = node if hasattr(node, "lineno") else parent
            lines = at.lineno, at.end_lineno or at.lineno
            yield ast.fix_missing_locations(changed), lines, any(a <= lines[0] and lines[1] <= b for a, b in spans)


def _places(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, str, int | None]]:
    """Every node that may be changed, with its parent and where it is held; no annotations, messages or docstrings."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            skipped = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
            if not isinstance(child, ast.AST) or isinstance(child, skipped):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict" and getattr(node.func, "id", "") == "zip":  # type: ignore[attr-defined]
                continue  # a check of lengths, as an assert is
            yield child, node, field, index
            yield from _places(child)


def _changes(node: ast.AST, parent: ast.AST) -> list[ast.AST]:  # noqa: C901  one line per kind
    """What may stand in the place of a node."""
    new: list[ast.AST] = []
    if type(node) in SWAPS:
        new.append(SWAPS[type(node)]())
    elif isinstance(node, ast.UnaryOp):
        # the last axis: of [B, S] it is the axis 1 as well, so it becomes the first one
        is_axis = ast.unparse(node) == "-1" and isinstance(parent, ast.Call | ast.keyword)
        new.append(ast.Constant(0) if is_axis else node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        new.append(ast.Constant(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        new.append(ast.Constant(node.value + 1))
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        new.append(ast.Attribute(node.value, NAMES[node.attr], node.ctx))
    elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
        new.append(ast.keyword(KEYWORDS[node.arg], node.value))
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        new.append(ast.Return(ast.Constant(None)))
    elif isinstance(node, ast.IfExp):
        new.append(ast.IfExp(node.test, node.orelse, node.body))
    elif isinstance(node, ast.If):
        new.append(ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse))
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in TRANSPARENT:
            new.append(node.func.value if isinstance(node.func, ast.Attribute) and not node.args else node.args[0])
    return new


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def difference(before: str, after: str) -> str:
    """The first line that differs, as it is now."""
    lines = zip(before.splitlines(), after.splitlines(), strict=False)
    return next((new.strip() for old, new in lines if old != new), after.splitlines()[-1].strip())


def tests_of(module: str, tree: Path) -> list[str]:
    """The tests that own a module."""
    prefix = max((prefix for prefix in OWNERS if module.startswith(prefix)), key=len, default=None)
    if prefix is None:
        raise SystemExit(f"{module}: say in OWNERS of tests/mutation.py which tests are its own")
    return [path for path in OWNERS[prefix] if (tree / path).exists()]


class Tests:
    """The tests of a module: collected once, run in forks of this process, each with another mutant in memory.

    A pytest plugin that runs mutants in place of tests. ``lines`` says which lines of the module a test reaches and
    ``seconds`` how long it takes; a mutant meets only the tests that reach it, fast ones first.
    """

    def __init__(self, module: str, tree: Path, only: list[int] | None) -> None:
        self._module, self._path, self._only = module, tree / module, only
        self._quiet, self._failed = only is None, False
        self._lines: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}
        self._functions: list[FunctionType] = []
        self.results: list[dict[str, object]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes a failure."""
        self._failed |= report.failed

    def pytest_runtestloop(self, session: Any) -> bool:
        """Runs every mutant."""
        if session.testsfailed:
            raise SystemExit("the tests cannot be collected")
        with tempfile.NamedTemporaryFile("r") as file:
            if self._fork(lambda: self._measure(session, Path(file.name)), 1200):
                raise SystemExit("the tests fail on the unchanged module: run them by themselves")
            self._lines, self._seconds = json.load(file)
        functions = (thing for thing in gc.get_objects() if type(thing) is FunctionType)
        self._functions = [function for function in functions if function.__code__.co_filename == str(self._path)]
        gc.disable()  # a collection would copy the memory that the forks share
        source = self._path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        plain = ast.unparse(tree)
        for number, (mutant, lines, in_function) in enumerate(mutants(tree)):
            if self._only is not None and number not in self._only:
                continue
            text = ast.unparse(mutant)
            items = self._reaching(session.items, lines if in_function else None)
            limit = 10 + 5 * sum(self._seconds[item.nodeid] for item in items)
            fast = in_function and not any(self._module.startswith(prefix) for prefix in IN_OTHER_PROCESSES)
            if fast:
                status = self._fork(lambda mutant=mutant, items=items: self._try(mutant, items), limit) if items else 0
            if not fast or status == CANNOT:
                self._path.write_text(text, encoding="utf-8")
                status = self._fork(lambda: _fresh(tests_of(self._module, Path.cwd())), limit + 60)
                self._path.write_text(source, encoding="utf-8")
            key = f"{self._module}: {difference(plain, text)}"
            self.results.append({"number": number, "key": key, "killed": status != 0, "line": lines[0]})
            if status == 0 and key not in EQUIVALENT:
                print(f"SURVIVED #{number} line {lines[0]} of {key}", flush=True)
        killed = sum(bool(result["killed"]) for result in self.results)
        print(f"{self._module}: {killed} of {len(self.results)} killed", flush=True)
        return True

    def _reaching(self, items: list[Any], lines: tuple[int, int] | None) -> list[Any]:
        """The items that reach any of the lines, fast ones first; None = all items."""
        if lines is not None:
            wanted = set(range(lines[0], lines[1] + 1))
            items = [item for item in items if wanted & set(self._lines[item.nodeid])]
        return sorted(items, key=lambda item: self._seconds[item.nodeid])

    def _measure(self, session: Any, to: Path) -> int:
        """Runs all tests on the unchanged module."""
        reached: set[int] = set()
        name = str(self._path)

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != name:
                return None
            reached.add(frame.f_lineno)
            return trace

        lines, seconds = {}, {}
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            begin = time.monotonic()
            reached.clear()
            sys.settrace(trace)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            sys.settrace(None)
            lines[item.nodeid], seconds[item.nodeid] = sorted(reached), time.monotonic() - begin
        to.write_text(json.dumps([lines, seconds]))
        return int(self._failed)

    def _try(self, mutant: ast.Module, items: list[Any]) -> int:
        """Puts the mutant's code into the module's functions, then runs the items until one fails."""
        codes: dict[str, Any] = {}

        def collect(code: Any) -> None:
            for constant in code.co_consts:
                if hasattr(constant, "co_qualname"):
                    codes[f"{constant.co_qualname}:{constant.co_firstlineno}"] = constant
                    collect(constant)

        collect(compile(mutant, str(self._path), "exec"))
        for function in self._functions:
            code = codes.get(f"{function.__code__.co_qualname}:{function.__code__.co_firstlineno}")
            if code is None or len(code.co_freevars) != len(function.__code__.co_freevars):
                return CANNOT
            function.__code__ = code
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return 1
        return 0

    def _fork(self, run: Callable[[], int], limit: float) -> int:
        """Exit status of ``run`` in a forked process; 124 = too slow."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if self._quiet:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                os.dup2(null, 2)
            status = 1  # whatever breaks the run was noticed
            try:
                status = run()
            finally:
                os._exit(status)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 124


def _fresh(tests: list[str]) -> int:
    """Exit status of the tests in a new interpreter."""
    return subprocess.run([sys.executable, "-m", "pytest", "-x", *PYTEST, *tests], check=False).returncode


def mutate_module(module: str, only: list[int] | None) -> list[dict[str, object]]:
    """Runs the tests of a module on each of its mutants, in a process of its own; the results, one for each."""
    tree = Path.cwd()
    tests, report = tests_of(module, tree), tree / "report.json"
    report.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        import pytest

        plugin, status = Tests(module, tree, only), 1
        try:
            pytest.main(["-p", "no:terminal", "--capture=no", *PYTEST, *tests], plugins=[plugin])
            report.write_text(json.dumps(plugin.results))
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.waitpid(pid, 0)
    if not report.exists():
        raise SystemExit(f"{module}: no result")
    results: list[dict[str, object]] = json.loads(report.read_text())
    return results


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help="modules or packages, relative to the repository")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of mutants; prints the output of the tests")
    parser.add_argument("--report", type=Path, help="JSON file with every mutant")
    options = parser.parse_args()
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1"}
    files = [f for path in options.paths for f in (sorted(Path(ROOT, path).rglob("*.py")) or [Path(ROOT, path)])]
    modules = [str(f.relative_to(ROOT)) for f in files if f.name != "__init__.py"]
    report = None if options.report is None else options.report.resolve()
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        for part in ("recpo", "tests"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("pyproject.toml", "configs", "docs", "README.md"):
            (tree / part).symlink_to(ROOT / part)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = name
        sys.path[:] = [name, *(entry for entry in sys.path if Path(entry).resolve() not in (ROOT, ROOT / "tests"))]
        results = [result for module in modules for result in mutate_module(module, options.only)]
    left = [result for result in results if not result["killed"] and result["key"] not in EQUIVALENT]
    killed = sum(bool(result["killed"]) for result in results)
    print(f"{len(results)} mutants: {killed} killed, {len(results) - killed - len(left)} equivalent, {len(left)} left")
    if report is not None:
        report.write_text(json.dumps(results, indent=1))
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
