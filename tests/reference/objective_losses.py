"""The losses, one scalar at a time in plain Python, directly from the papers' formulas.

Every per-token function returns ``(loss, weight)``: the value and the derivative with respect to ``logp`` (all
stop-gradients honored). Nothing here knows torch or recpo.
"""

from __future__ import annotations

import math

import numpy as np


def clip(x, low, high):
    return min(max(x, low), high)


def ppo(logp, old, a, low=0.2, high=0.2, dual=None):
    ratio = math.exp(logp - old)
    plain, clipped = ratio * a, clip(ratio, 1 - low, 1 + high) * a
    loss = -min(plain, clipped)
    weight = -a * ratio if plain <= clipped else 0.0
    if dual is not None and a < 0 and loss > -dual * a:
        return -dual * a, 0.0
    return loss, weight


def ecpo(logp, old, a, low=0.2, high=0.2, delta=0.1):
    return ppo(logp, max(logp - math.log(1 + high + delta), old), a, low, high)


def aspo(logp, old, a, low=0.2, high=0.2, dual=3.0):
    ratio = math.exp(logp - old)
    if (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low):
        return 0.0, 0.0
    weight = min(1 / ratio if a > 0 else ratio, math.inf if dual is None else dual)
    return -a * weight, -a * weight


def cispo(logp, old, a, low=None, high=1.2):
    weight = clip(math.exp(logp - old), -math.inf if low is None else low, math.inf if high is None else high)
    return -a * weight, -a * weight


def gbpo(logp, old, a):
    pi = math.exp(logp)
    behavior = pi if old is None else math.exp(old)
    bound = pi if a >= 0 else 1 - pi
    weight = -a * pi / max(behavior, bound)
    return weight, weight


def reinforce(logps, olds, a, cap=None, top_k=1):
    """One item, all of its tokens: the weight that each of them gets."""
    pi = math.exp(sum(logps))
    ratio = 1.0 if olds is None else math.exp(sum(logps) - sum(olds))
    if cap is not None:
        ratio = min(ratio, cap)
    return -a * ratio * top_k * (1 - pi) ** (top_k - 1)


def gspo(logps, olds, a, low=3e-4, high=4e-4):
    """One item: its loss and the derivative with respect to each of its tokens."""
    s = math.exp(sum(n - o for n, o in zip(logps, olds, strict=True)) / len(logps))
    plain, clipped = s * a, clip(s, 1 - low, 1 + high) * a
    return -min(plain, clipped), (-a * s / len(logps) if plain <= clipped else 0.0)


def dpo(chosen, rejected, ref_chosen, ref_rejected, beta, smoothing, variant):
    h = (chosen - ref_chosen) - (rejected - ref_rejected)

    def nls(x):
        """-log(sigmoid(x)) without overflow."""
        return math.log1p(math.exp(-abs(x))) + max(-x, 0.0)

    return {
        "sigmoid": (1 - smoothing) * nls(beta * h) + smoothing * nls(-beta * h),
        "robust": ((1 - smoothing) * nls(beta * h) - smoothing * nls(-beta * h)) / (1 - 2 * smoothing),
        "ipo": (h - 1 / (2 * beta)) ** 2,
        "hinge": max(0.0, 1 - beta * h),
    }[variant]


def softmax_dpo(chosen, rejected, ref_chosen, ref_rejected, beta):
    """One list: cross-entropy of the chosen among {chosen} + rejected."""
    rewards = [beta * (chosen - ref_chosen)] + [beta * (p - r) for p, r in zip(rejected, ref_rejected, strict=True)]
    top = max(rewards)
    return top + math.log(sum(math.exp(r - top) for r in rewards)) - rewards[0]


def margin_listwise(chosen, rejected, ref_chosen, ref_rejected, beta, margin, gap_weight, nll_coef):
    """One list, as printed."""
    anchor = -nll_coef * chosen
    if not len(rejected):
        return anchor
    won = beta * (chosen - ref_chosen)
    gaps = [won - beta * (p - r) for p, r in zip(rejected, ref_rejected, strict=True)]
    inner = np.logaddexp.reduce([gap_weight * max(0.0, gap - margin) for gap in gaps])
    return math.log1p(math.exp(-inner)) + anchor


def simpo(chosen, rejected, beta, margin):
    """One pair, of mean log-probabilities."""
    return math.log1p(math.exp(-(beta * (chosen - rejected) - margin)))


def dmpo(chosen, rejected, ref_chosen, ref_rejected, beta, margins):
    """One list: the chosen item against the mean of the others."""
    if not len(rejected):
        return 0.0
    others = sum(beta * (p - r) + m for p, r, m in zip(rejected, ref_rejected, margins, strict=True)) / len(rejected)
    return math.log1p(math.exp(-(beta * (chosen - ref_chosen) - others)))


def kto(logp, ref, sign, point, beta, good, bad):
    """(loss, slope) of one item."""
    weight = {1: good, -1: bad, 0: 0.0}[sign]
    value = 1 / (1 + math.exp(-sign * beta * (logp - ref - point)))
    return weight * (1 - value), -sign * weight * beta * value * (1 - value)


def likelihood_weight(advantage, propensity, temperature, cap, power, ips_cap):
    """What the likelihood of one item counts."""
    return min(math.exp(advantage / temperature), cap) * min(propensity**-power, ips_cap)


def graded(grades, mask, baseline):
    known = [g for g, keep in zip(grades, mask, strict=True) if keep and not math.isnan(g)]
    level = baseline if baseline is not None else sum(known) / max(len(known), 1)
    return [g - level if keep and not math.isnan(g) else 0.0 for g, keep in zip(grades, mask, strict=True)]


def mpo(logps, rewards, temperature, bases=None):
    """(value, weights) of one context, the weights by plain sums."""
    bases = [0.0] * len(rewards) if bases is None else bases
    top = max(b + r / temperature for b, r in zip(bases, rewards, strict=True))
    mass = [math.exp(b + r / temperature - top) for b, r in zip(bases, rewards, strict=True)]
    weights = [m / sum(mass) for m in mass]
    return -sum(w * p for w, p in zip(weights, logps, strict=True)), weights


def mpo_dual(rewards, bases, mask, temperature, kl_target):
    """g(temperature), the convex function that the temperature of MPO minimizes."""
    terms = []
    for row in range(len(rewards)):
        kept = np.flatnonzero(mask[row])
        if len(kept):
            total = np.logaddexp.reduce([bases[row][i] for i in kept])
            terms.append(np.logaddexp.reduce([bases[row][i] - total + rewards[row][i] / temperature for i in kept]))
    return temperature * (kl_target + sum(terms) / len(terms))


def kl(logp, ref, kind):
    k1 = logp - ref
    return {"k1": k1, "abs": abs(k1), "k2": k1 * k1 / 2, "k3": math.exp(-k1) - 1 + k1}.get(
        kind, clip(math.exp(clip(-k1, -20, 20)) - clip(-k1, -20, 20) - 1, -10, 10)
    )


def categorical_kl(p_logits, q_logits):
    p, q = np.exp(p_logits - np.logaddexp.reduce(p_logits)), np.exp(q_logits - np.logaddexp.reduce(q_logits))
    return float(sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0))


def entropy(logits):
    p = np.exp(logits - np.logaddexp.reduce(logits))
    return float(-sum(x * math.log(x) for x in p if x > 0))


def shaped_rewards(score, old, ref, keep, coefficient):
    out = [0.0] * len(old)
    kept = [t for t, k in enumerate(keep) if k]
    for t in kept:
        out[t] = -coefficient * (old[t] - ref[t]) + (score if t == kept[-1] else 0.0)
    return out


def value(v, v_old, target, c):
    near = v_old + clip(v - v_old, -c, c)
    return 0.5 * max((v - target) ** 2, (near - target) ** 2)


def aggregate(values, mask, mode, length):
    rows = [[v for v, k in zip(row, keep, strict=True) if k] for row, keep in zip(values, mask, strict=True)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    scale = {"seq-mean-token-sum": lambda r: 1, "seq-mean-token-mean": len}.get(mode, lambda r: length)
    return sum(sum(row) / scale(row) for row in rows) / len(rows)


def group_normalized(rewards, mask, scale, unbiased, eps):
    kept = [r for r, k in zip(rewards, mask, strict=True) if k]
    if len(kept) < 2 or min(kept) == max(kept):
        return [0.0] * len(rewards)
    mean = sum(kept) / len(kept)
    std = math.sqrt(sum((r - mean) ** 2 for r in kept) / (len(kept) - unbiased)) + eps if scale else 1.0
    return [(r - mean) / std if k else 0.0 for r, k in zip(rewards, mask, strict=True)]


def leave_one_out(rewards, mask):
    kept = [r for r, k in zip(rewards, mask, strict=True) if k]
    if len(kept) < 2 or min(kept) == max(kept):
        return [0.0] * len(rewards)
    return [r - (sum(kept) - r) / (len(kept) - 1) if k else 0.0 for r, k in zip(rewards, mask, strict=True)]


def prefix_group(rewards, codes, mask, min_group, scale, eps):
    """[candidate][token]: reward less the mean of the candidates that share the tokens before it."""
    kept = [i for i in range(len(rewards)) if mask[i]]
    of_group = [rewards[i] for i in kept]
    spread = np.std(of_group, ddof=1) + eps if scale and len(kept) > 1 else eps if scale else 1.0
    table = [[0.0] * len(codes[0]) for _ in rewards]
    if len(set(of_group)) < 2:
        return table
    for i in kept:
        for t in range(len(codes[0])):
            for depth in range(t, -1, -1):
                peers = [rewards[j] for j in kept if list(codes[j][:depth]) == list(codes[i][:depth])]
                if len(peers) >= min_group or depth == 0:
                    table[i][t] = (rewards[i] - sum(peers) / len(peers)) / spread
                    break
    return table


def gate(rewards, items, liked, drawn, max_hit_share, min_separation):
    """Whether a group may learn from its rewards."""
    good = {item for item, yes in zip(items, liked, strict=True) if yes}
    draws = [i for i in range(len(items)) if drawn[i]]
    others = [i for i in draws if items[i] not in good]
    if not good or not others:
        return False
    won = [(rewards[g] > rewards[o]) + 0.5 * (rewards[g] == rewards[o]) for g in np.flatnonzero(liked) for o in others]
    return 1 - len(others) / len(draws) <= max_hit_share and sum(won) / len(won) >= min_separation


def gae(rewards, values, dones, next_value, gamma, lam, mask, truncations, bootstrap):
    """By definition: a discounted sum of temporal differences over the kept steps, up to an end or a cut."""
    steps = [t for t, k in enumerate(mask) if k]
    advantages = [0.0] * len(rewards)
    for i, t in enumerate(steps):
        weight = 1.0
        for j in range(i, len(steps)):
            u = steps[j]
            after = values[steps[j + 1]] if j + 1 < len(steps) else next_value
            after = bootstrap[u] if truncations[u] else after
            advantages[t] += weight * (rewards[u] + (0.0 if dones[u] else gamma * after) - values[u])
            if dones[u] or truncations[u]:
                break
            weight *= gamma * lam
    return advantages


def ternary(quantiles, dislikes, fraction, threshold):
    known = [q for q in quantiles if not math.isnan(q)]
    cut = threshold
    if cut is None:
        cut = float(np.quantile(known, 1 - fraction)) if known else math.inf
    pairs = zip(quantiles, dislikes, strict=True)
    return [-1.0 if dislike else float(q >= cut - 1e-12 and q > 0) for q, dislike in pairs]


def whitened(advantages):
    """A list of kept advantages minus their mean, over their biased standard deviation."""
    mean = sum(advantages) / len(advantages)
    std = math.sqrt(sum((a - mean) ** 2 for a in advantages) / len(advantages))
    return [(a - mean) / (std + 1e-8) for a in advantages]
