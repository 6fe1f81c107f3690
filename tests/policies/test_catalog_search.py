"""recommend against brute force, block by block and in one block, eager and exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from recpo.base.types import Histories
from recpo.policies import catalog_search
from recpo.policies.blocks import HSTUBlock
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.serving.onnx_program import onnx_of
from recpo.serving.program import tracing

V, H = 300, 7


def brute_force(states: Tensor, table: Tensor, k: int, exclude: Tensor) -> tuple[np.ndarray, np.ndarray]:
    logits = (states.double() @ table[1:].double().T).numpy()
    logp = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    ids, scores = np.zeros((len(logits), k), np.int64), np.full((len(logits), k), -np.inf)
    for row in range(len(logits)):
        barred = set(exclude[row].tolist())
        allowed = [item for item in range(1, len(table)) if item not in barred]
        best = sorted(allowed, key=lambda item: (-logits[row, item - 1], item))[:k]
        ids[row, : len(best)] = best
        scores[row, : len(best)] = logp[row, np.array(best, int) - 1]
    return ids, scores


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 60), st.integers(1, 60), st.booleans(), st.integers(0, 10**6), st.integers(3, 50),
    st.booleans(),
)  # fmt: skip
def test_top_k_is_the_brute_force_ranking(
    contexts: int, items: int, k: int, ties: bool, seed: int, block: int, asks: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    k = min(k, items)
    states = torch.randn(contexts, 3, generator=generator)
    table = torch.randn(items + 1, 3, generator=generator)
    if ties:  # small integers: exact scores and many ties, also at the last place
        states, table = states.round(), table.round()
    exclude = torch.randint(0, items + 1, (contexts, 2 * items // 3 + 1), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            catalog_search, "score_blocks", lambda *_: list(catalog_search.column_blocks(items + 1, 1, block))
        )
        patch.setattr(catalog_search, "KNOWN_AT_ONCE", "cpu" if asks else "no device")
        got = catalog_search.top_k(states, table, k, exclude)
    ids, scores = brute_force(states, table, k, exclude)
    assert (got.item_ids.numpy() == ids).all()
    np.testing.assert_allclose(got.scores.numpy(), scores, rtol=1e-5, atol=1e-5)


def test_a_lower_bound_is_a_product_less_the_root_of_another() -> None:
    generator = torch.Generator().manual_seed(0)
    states, table = torch.randn(5, 7, generator=generator), torch.randn(9, 7, generator=generator)
    states.requires_grad_()
    expected = np.zeros((5, 9))
    for row, state in enumerate(states.tolist()):
        for column, item in enumerate(table.tolist()):
            variance = sum(state[place] * item[place] for place in (4, 5, 6))
            expected[row, column] = sum(state[place] * item[place] for place in range(4)) - max(0.0, variance) ** 0.5
    scores = catalog_search.scores_of(states, table, 3, catalog_search.product)
    np.testing.assert_allclose(scores.detach().numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(catalog_search.scores_of(states.detach(), table, 3).numpy(), expected, atol=1e-5)
    scores[:, 2].sum().backward()
    assert states.grad is not None
    torch.testing.assert_close(states.grad, torch.cat([table[2, :4], torch.zeros(3)]).expand(5, -1))


def test_a_large_catalog_is_searched_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    states, table = torch.randn(20, 8), torch.randn(9001, 8)
    whole = catalog_search.top_k(states, table, 10, None)
    monkeypatch.setattr(catalog_search, "SCORE_BYTES", 1)
    assert len(catalog_search.score_blocks(states, table)) > 5
    assert torch.equal(catalog_search.top_k(states, table, 10, None).item_ids, whole.item_ids)


class _Recommend(nn.Module):
    def __init__(self, policy: CatalogSoftmaxPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, item_ids: Tensor, lengths: Tensor, feedback: Tensor, exclude: Tensor) -> tuple[Tensor, Tensor]:
        best = self.policy.recommend(Histories(item_ids, lengths, feedback), 10, exclude)
        return best.item_ids, best.scores


def _inputs(rows: int, seen: int = 6) -> tuple[Histories, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(0, H + 1, (rows,), generator=generator)
    ids = torch.randint(1, V + 1, (rows, H), generator=generator) * (torch.arange(H) < lengths[:, None])
    return Histories(ids, lengths, ids % 6), torch.randint(0, V + 1, (rows, seen), generator=generator)


@pytest.mark.slow
def test_exported_programs_recommend_the_same(tmp_path: Path) -> None:
    import onnxruntime

    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(V, dim=16, max_history=H, block=HSTUBlock).eval()
    module = _Recommend(policy).eval()
    (known, exclude), batch = _inputs(2), torch.export.Dim("batch", min=1, max=4096)
    seen = torch.export.Dim("seen", min=1, max=1024)
    shapes = {name: {0: batch} for name in ("item_ids", "lengths", "feedback")} | {"exclude": {0: batch, 1: seen}}
    example = (*known[:3], exclude)
    with tracing():
        program = torch.export.export(module, example, dynamic_shapes=shapes)
        onnx_of(program, list(shapes), ["best", "scores"]).save(str(tmp_path / "policy.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    for rows, width in ((1, 6), (2, 1), (33, 50)):
        known, exclude = _inputs(rows, width)
        inputs = (*known[:3], exclude)
        ids, scores = module(*inputs)
        exported_ids, exported_scores = program.module()(*inputs)
        onnx_ids, onnx_scores = session.run(
            None, {slot.name: value.numpy() for slot, value in zip(session.get_inputs(), inputs, strict=True)}
        )
        assert torch.equal(ids, exported_ids)
        assert (ids.numpy() == onnx_ids).all()
        torch.testing.assert_close(scores, exported_scores, rtol=0, atol=1e-5)
        np.testing.assert_allclose(scores.detach().numpy(), onnx_scores, rtol=0, atol=1e-5)
