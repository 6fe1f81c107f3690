"""Draws what every objective pushes: one picture per entry of docs/objectives.md, ``python docs/plot_objectives.py``.

Every curve is a gradient that autograd took through ``recpo.objectives``; no formula is typed here a second time. What
is drawn is the *push*, minus the gradient of the loss: above 0 a descent step raises the log-probability (or score),
below 0 it lowers it. Two runs give identical files.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from recpo.artifacts.outputs import output_file
from recpo.base.contracts import Objective
from recpo.base.types import LogProbs, ObjectiveInputs
from recpo.objectives import ASPO, CISPO, DAPO, ECPO, GBPO, GRPO, GSPO, PPO, DrGRPO, Likelihood, Reinforce
from recpo.objectives.likelihood import likelihood_weights, weighted_likelihood_loss
from recpo.objectives.listwise_dpo import margin_listwise_dpo_loss, softmax_dpo_loss
from recpo.objectives.mpo import mpo_loss
from recpo.objectives.policy_gradient import catalog_policy_gradient_loss
from recpo.objectives.preference import PairVariant, dpo_loss, kto_loss
from recpo.objectives.q_learning import q_loss
from recpo.objectives.reward_model import pairwise_reward_loss, pointwise_reward_loss

BLUE, ORANGE, GRAY, GREEN = "#3b6fb6", "#d9662b", "#8a8f98", "#3f8f5f"
# Color and dashes say the same thing, so that a print in gray can be read.
UP: dict[str, Any] = {"color": BLUE, "linestyle": "-"}
DOWN: dict[str, Any] = {"color": ORANGE, "linestyle": "--"}
OTHER: dict[str, Any] = {"color": GRAY, "linestyle": ":", "linewidth": 2.0}
FOURTH: dict[str, Any] = {"color": GREEN, "linestyle": "-."}
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": 9,
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.hashsalt": "recpo",
}
RATIOS = torch.linspace(0.03, 4.0, 398, dtype=torch.float64)
RATIO = "ratio  $\\rho = \\pi / \\pi_{old}$"
PUSH = "push on $\\log\\,\\pi$"


def push(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Minus the gradient of the summed ``loss`` for each input; 0 where the loss does not read it."""
    return tuple(-gradient for gradient in torch.autograd.grad(loss.sum(), inputs, materialize_grads=True))


def push_of_tokens(
    objective: Objective, logp: Tensor, advantage: float, *, old: Tensor | None = None, reference: Tensor | None = None
) -> Tensor:
    """What ``objective`` pushes: items ``logp [N, T]``, each a batch of its own with one ``advantage``; ``[N, T]``."""
    logp = logp.detach().unsqueeze(1).requires_grad_()
    old, reference = (None if x is None else x.unsqueeze(1) for x in (old, reference))
    tokens = LogProbs(logp, torch.ones_like(logp, dtype=torch.bool), old, reference)
    advantages = torch.full(logp.shape[:2], advantage, dtype=logp.dtype)
    one = torch.ones((), dtype=logp.dtype)
    return push(objective(ObjectiveInputs(tokens, advantages, denominator=one)).loss, logp)[0].squeeze(1)


def push_at_ratios(objective: Objective, ratios: Tensor, advantage: float, tokens: int = 1) -> Tensor:
    """The push on the first of ``tokens`` tokens that share a ratio to the old policy, which is the reference too."""
    old = torch.full((len(ratios), tokens), 1e-3, dtype=torch.float64).log()
    logp = old + ratios.log().unsqueeze(-1)
    return push_of_tokens(objective, logp, advantage, old=old, reference=old)[:, 0]


def push_at_probabilities(objective: Objective, pi: Tensor, advantage: float, old: float | None = None) -> Tensor:
    """The push on an item of one token, where its probability was ``old``; None = no old policy."""
    logp = pi.log().unsqueeze(-1)
    before = None if old is None else torch.full_like(logp, old).log()
    return push_of_tokens(objective, logp, advantage, old=before)[:, 0]


def probabilities(highest: float = 1.0) -> Tensor:
    """Probabilities from one in a million to ``highest``, evenly spaced in their logarithm."""
    return torch.logspace(-6, math.log10(highest), 200, dtype=torch.float64).clamp(max=highest)


def framed(axes: Axes, x: str, y: str = PUSH, *, legend: Any = "best") -> None:
    """Zero line, labels and legend."""
    axes.axhline(0.0, color="black", linewidth=0.6, zorder=0)
    axes.set(xlabel=x, ylabel=y)
    axes.legend(loc=legend)


def over_probability(axes: Axes) -> None:
    """A logarithmic axis of probabilities with few ticks, each of which costs bytes."""
    axes.set(xscale="log", xticks=[1e-6, 1e-4, 1e-2, 1.0])
    axes.minorticks_off()


def against_ratio(axes: Axes, objective: Objective, *, tokens: int = 1, name: str = "", legend: Any = "best") -> None:
    """Both signs of the advantage against the ratio."""
    axes.axvline(1.0, color=GRAY, linewidth=0.6, zorder=0)
    axes.plot(RATIOS, push_at_ratios(objective, RATIOS, 1.0, tokens), label=f"{name}A = +1", **UP)
    axes.plot(RATIOS, push_at_ratios(objective, RATIOS, -1.0, tokens), label=f"{name}A = -1", **DOWN)
    axes.set_ylim(-4.3, 3.4)
    framed(axes, RATIO, legend=legend)


def beside_ppo(axes: Axes, objective: Objective) -> None:
    """An objective against the ratio, with PPO (clip 0.2, no dual clip) in gray."""
    yardstick = PPO(value_coef=0.0)
    for advantage, label in ((1.0, "PPO, both signs"), (-1.0, None)):
        axes.plot(RATIOS, push_at_ratios(yardstick, RATIOS, advantage), label=label, **OTHER)
    against_ratio(axes, objective, legend="lower left")


def likelihood(axes: Axes) -> None:
    """Against the probability."""
    p = probabilities()
    axes.plot(p, push_at_probabilities(Likelihood(), p, -1.0), label="every counted token", **UP)
    filtered = Likelihood(positive_only=True)
    axes.plot(p, push_at_probabilities(filtered, p, -1.0), label="positive_only: an item without A > 0", **DOWN)
    over_probability(axes)
    axes.set_ylim(-0.2, 1.4)
    framed(axes, "probability  $\\pi$", legend="center left")


def weighted_likelihood(axes: Axes) -> None:
    """Against the advantage, by the temperature."""
    advantages = torch.linspace(-1, 1, 161, dtype=torch.float64)
    logp = torch.full((len(advantages), 1), -3.0, dtype=torch.float64, requires_grad=True)
    for temperature, style in ((0.25, UP), (0.5, DOWN), (1.0, FOURTH)):
        weights = likelihood_weights(advantages, temperature=temperature)
        (curve,) = push(weighted_likelihood_loss(logp, weights), logp)
        axes.plot(advantages, curve.squeeze(-1), label=f"temperature {temperature}", **style)
    axes.set(yscale="log", yticks=[0.02, 0.1, 1.0, 10.0])
    axes.minorticks_off()
    framed(axes, "advantage A", legend="upper left")


def kto(axes: Axes) -> None:
    """Both labels against the log-ratio."""
    h = torch.linspace(-8, 8, 200, dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros_like(h), torch.ones_like(h)
    for point, names in ((0.0, ("desirable", "undesirable")), (2.0, ("both, z = 2", None))):
        for sign, label, style in zip((one, -one), names, (UP, DOWN) if not point else (OTHER, OTHER), strict=True):
            (curve,) = push(kto_loss(h, zero, sign, torch.tensor(point), beta=1.0), h)
            axes.plot(h.detach(), curve, label=label, **style)
    framed(axes, "log-ratio  h   (β = 1, z = 0)", legend="lower right")


def gbpo(axes: Axes) -> None:
    """Against the probability, with and without an old policy."""
    p = probabilities(0.99)
    axes.plot(p, push_at_probabilities(GBPO(), p, 1.0), label="A = +1", **UP)
    axes.plot(p, push_at_probabilities(GBPO(), p, -1.0), label="A = -1", **DOWN)
    axes.plot(p, push_at_probabilities(GBPO(), p, 1.0, 0.01), label="A = +1, $\\pi_{old}$ = 0.01", **FOURTH)
    axes.plot(p, push_at_probabilities(GBPO(), p, -1.0, 0.01), label="A = -1, $\\pi_{old}$ = 0.01", **OTHER)
    over_probability(axes)
    axes.set_ylim(-3, 1.3)
    framed(axes, "probability  $\\pi$", legend="lower left")


def dpo(axes: Axes) -> None:
    """The push on the chosen item against the implicit margin, of all variants."""
    h = torch.linspace(-6, 6, 300, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros_like(h)
    variants: tuple[tuple[PairVariant, float, dict[str, Any]], ...]
    variants = (("sigmoid", 0.0, UP), ("robust", 0.2, DOWN), ("hinge", 0.0, FOURTH), ("ipo", 0.0, OTHER))
    for variant, smoothing, style in variants:
        loss = dpo_loss(h, zero, zero, zero, beta=1.0, variant=variant, label_smoothing=smoothing)
        label = f"{variant}, {smoothing}" if smoothing else variant
        axes.plot(h.detach(), push(loss, h)[0], label=label, **style)
    (later,) = push(dpo_loss(h, zero, zero, zero, beta=1.0, margin=2.0), h)
    axes.plot(h.detach(), later, label="sigmoid, margin 2", color=BLUE, linewidth=0.8)
    axes.axvline(0.0, color=GRAY, linewidth=0.6, zorder=0)
    axes.set_ylim(-1.5, 2.6)
    framed(axes, "implicit margin  h   (β = 1)", "push on the chosen $\\log\\,\\pi$", legend="upper right")


def against_list(axes: Axes, list_loss: Callable[..., Tensor], reach: float) -> None:
    """A chosen and three rejected items of fixed rewards, against the margin of the chosen over the hardest one."""
    chosen = torch.linspace(-6, 6, 300, dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.0, -1.0, -3.0], dtype=torch.float64).expand(len(chosen), -1).clone().requires_grad_()
    loss = list_loss(chosen, rejected, torch.zeros_like(chosen), torch.zeros_like(rejected))
    on_chosen, on_rejected = push(loss, chosen, rejected)
    margin = chosen.detach()
    axes.axvspan(-6, 0, color=GRAY, alpha=0.13, linewidth=0)
    axes.plot(margin, on_chosen, label="chosen", **UP)
    names = ("hardest rejected", "1 behind it", "3 behind it")
    for column, name, style in zip(on_rejected.T, names, (DOWN, FOURTH, OTHER), strict=True):
        axes.plot(margin, column, label=name, **style)
    axes.set(xlim=(-6, 6), ylim=(-1.35 * reach, 1.2 * reach))
    axes.text(-5.8, 1.15 * reach, "hardest pair mis-ordered", fontsize=8, va="top")
    framed(axes, "lead of the chosen over the hardest rejected", legend="lower right")


def softmax_dpo(axes: Axes) -> None:
    """The push on the chosen and on three rejected items, against the margin."""
    against_list(axes, softmax_dpo_loss, 1.05)


def margin_listwise_dpo(axes: Axes) -> None:
    """The same list under the printed margin form, without its likelihood term."""
    against_list(axes, partial(margin_listwise_dpo_loss, beta=1.0, nll_coef=0.0), 0.17)


def ppo(axes: Axes) -> None:
    """With and without the dual clip."""
    against_ratio(axes, PPO(value_coef=0.0, dual_clip=3.0), legend="lower left")
    beyond = RATIOS[RATIOS > 3.0]
    axes.plot(beyond, push_at_ratios(PPO(value_coef=0.0), beyond, -1.0), label="A = -1, no dual clip", **OTHER)
    axes.legend(loc="lower left")


def grpo(axes: Axes) -> None:
    """With its KL penalty, where the reference is the old policy."""
    against_ratio(axes, GRPO())
    axes.plot(RATIOS, push_at_ratios(GRPO(), RATIOS, 0.0), label="A = 0: only the KL penalty", **OTHER)
    axes.legend(loc="lower left")


def dr_grpo(axes: Axes) -> None:
    """The same push on a token of short and long items, where GRPO divides by the length."""
    for tokens, label in ((1, "GRPO, A = +1: items of 1 and of 3 tokens"), (3, None)):
        axes.plot(RATIOS, push_at_ratios(GRPO(kl_coef=0.0), RATIOS, 1.0, tokens), label=label, **OTHER)
    against_ratio(axes, DrGRPO(length=2), tokens=3, name="length 2, any item, ", legend="lower left")
    axes.set_ylim(-3.3, 1.6)


def dapo(axes: Axes) -> None:
    """More room above than PPO."""
    beside_ppo(axes, DAPO())


def gspo(axes: Axes) -> None:
    """Against the ratio of an item of three tokens, on each of them."""
    against_ratio(axes, GSPO(clip_low=0.2, clip_high=0.2), tokens=3, name="clips 0.2, ")
    axes.plot(RATIOS, push_at_ratios(GSPO(), RATIOS, 1.0, 3), label="the paper's clips, A = +1", **OTHER)
    axes.set_ylim(-1.5, 0.7)
    framed(axes, "ratio  s  of an item of 3 tokens", "push on $\\log\\,\\pi$ of a token", legend="lower left")


def aspo(axes: Axes) -> None:
    """The flipped weight of positives."""
    beside_ppo(axes, ASPO())


def ecpo(axes: Axes) -> None:
    """The bounded negatives."""
    beside_ppo(axes, ECPO())


def cispo(axes: Axes) -> None:
    """Capped, never cut."""
    beside_ppo(axes, CISPO())


def reinforce(axes: Axes) -> None:
    """Against the probability, with the top-K correction."""
    p = probabilities()
    for top_k, style in ((1, UP), (4, DOWN), (16, FOURTH)):
        axes.plot(p, push_at_probabilities(Reinforce(top_k=top_k), p, 1.0), label=f"top_k {top_k}", **style)
    over_probability(axes)
    framed(axes, "probability  $\\pi$   (A = +1)")


def mpo(axes: Axes) -> None:
    """Candidates of evenly spaced rewards and equal base, by the temperature."""
    rewards = torch.linspace(0, 1, 101, dtype=torch.float64)
    logp = torch.full_like(rewards, 1 / len(rewards)).log().requires_grad_()
    for temperature, style in ((0.05, UP), (0.2, DOWN), (1.0, OTHER)):
        (curve,) = push(mpo_loss(logp, rewards, temperature=temperature), logp)
        axes.plot(rewards, len(rewards) * curve, label=f"temperature {temperature}", **style)
    axes.axhline(1.0, color=GRAY, linewidth=0.6, zorder=0)
    axes.text(0.0, 1.2, "the base", fontsize=8, color=GRAY)
    framed(axes, "reward of the candidate", "push, in units of the base", legend="upper left")


def catalog_policy_gradient(axes: Axes) -> None:
    """Two outcomes, the good item and all the rest, against the probability of the good one."""
    p = torch.logspace(-4, -0.001, 200, dtype=torch.float64)
    logits = torch.stack([p.log(), (1 - p).log()], -1).requires_grad_()
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64).expand_as(logits)
    logp = logits.log_softmax(-1)
    (exact,) = push(catalog_policy_gradient_loss(logp, rewards), logits)
    axes.plot(p, exact[:, 0], label="exact policy gradient", **UP)
    fitted = mpo_loss(logits.log_softmax(-1), rewards, temperature=0.2, log_base=logits.detach())
    axes.plot(p, push(fitted, logits)[0][:, 0], label="MPO, temperature 0.2, base = policy", **DOWN)
    axes.set(xscale="log", xticks=[1e-4, 1e-2, 1.0])
    axes.minorticks_off()
    framed(axes, "probability of the only good item", "push on its logit", legend="upper left")


def q_learning(axes: Axes) -> None:
    """Against the temporal-difference error."""
    error = torch.linspace(-3, 3, 121, dtype=torch.float64, requires_grad=True)
    for huber, label, style in ((None, "squared", UP), (1.0, "huber 1.0", DOWN)):
        (curve,) = push(q_loss(error, torch.zeros_like(error), huber=huber), error)
        axes.plot(error.detach(), curve, label=label, **style)
    framed(axes, "error  Q(s, a) - y", "push on Q(s, a)")


def pairwise_reward(axes: Axes) -> None:
    """Against the gap of the scores."""
    gap = torch.linspace(-6, 6, 200, dtype=torch.float64, requires_grad=True)
    other = torch.zeros_like(gap, requires_grad=True)
    chosen, rejected = push(pairwise_reward_loss(gap, other), gap, other)
    (wider,) = push(pairwise_reward_loss(gap, other, 2.0), gap)
    axes.plot(gap.detach(), chosen, label="chosen", **UP)
    axes.plot(gap.detach(), rejected, label="rejected", **DOWN)
    axes.plot(gap.detach(), wider, label="chosen, margin 2", **OTHER)
    axes.set_ylim(-1.1, 1.1)
    framed(axes, "score of the chosen, less that of the rejected", "push on the score", legend="lower right")


def pointwise_reward(axes: Axes) -> None:
    """Against the score."""
    score = torch.linspace(-6, 6, 200, dtype=torch.float64, requires_grad=True)
    kept = torch.ones_like(score, dtype=torch.bool)
    (happened,) = push(pointwise_reward_loss(score, kept, kept), score)
    (did_not,) = push(pointwise_reward_loss(score, ~kept, kept), score)
    (heavier,) = push(pointwise_reward_loss(score, kept, kept, torch.tensor(2.0)), score)
    axes.plot(score.detach(), happened, label="it happened", **UP)
    axes.plot(score.detach(), did_not, label="it did not", **DOWN)
    axes.plot(score.detach(), heavier, label="it happened, weight 2", **OTHER)
    framed(axes, "score of a target", "push on the score", legend="upper right")


PICTURES = (
    *(
        likelihood,
        weighted_likelihood,
        kto,
        gbpo,
        dpo,
        softmax_dpo,
        margin_listwise_dpo,
        ppo,
        grpo,
        dr_grpo,
        dapo,
        gspo,
        aspo,
        ecpo,
        cispo,
    ),
    *(reinforce, mpo, catalog_policy_gradient, q_learning, pairwise_reward, pointwise_reward),
)
"""In the order of docs/objectives.md; a file is called as its function."""


def write(picture: Callable[[Axes], None], out: Path) -> None:
    """``out/<picture>.svg``."""
    with matplotlib.rc_context(STYLE):
        picture((figure := Figure(figsize=(4.8, 2.9))).subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    with output_file(out / f"{picture.__name__}.svg") as path:
        path.write_text(text.getvalue(), encoding="utf-8")


def main() -> None:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images", help="folder of the pictures")
    names = [picture.__name__ for picture in PICTURES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    arguments = parser.parse_args()
    for picture in PICTURES:
        if picture.__name__ in arguments.only:
            write(picture, arguments.out)


if __name__ == "__main__":
    main()
