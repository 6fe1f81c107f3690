"""Beam search and sampling code by code, with a decoder whose probabilities are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats
from torch import Tensor, nn

from recpo.base.types import SamplingOptions
from recpo.policies.semantic_search import CodeSearch, Trie
from recpo.serving.onnx_program import onnx_of
from recpo.serving.program import tracing
from tests.reference.code_tries import tuple_probabilities
from tests.refusals import refused


class TableDecoder(CodeSearch):
    """Logits looked up by the whole prefix, which is its cache, and mixed by the context ``[B, C]``."""

    def __init__(self, contexts: Tensor, tables: list[Tensor], trie: Trie) -> None:
        super().__init__(trie, contexts.shape[0], "trie")
        self.contexts, self.tables, self.sizes = contexts, tables, trie.codebook_sizes

    def normalized(self, normalizer: Any) -> TableDecoder:
        self.normalizer = normalizer
        return self

    def step(self, level: int, previous: Tensor | None, cache: Any) -> tuple[Tensor, Tensor]:
        if previous is None:
            prefixes = torch.zeros_like(self.contexts[:, :1], dtype=torch.long)
        else:
            prefixes = cache * self.sizes[level - 1] + previous
        return (self.tables[level][prefixes] * self.contexts[:, None, :, None]).sum(2), prefixes

    def reorder(self, cache: Any, beams: Tensor) -> Tensor:
        return cache.gather(1, beams)

    def scores_of(self, row: int) -> Callable[[list[int]], list[float]]:
        def scores(prefix: list[int]) -> list[float]:
            index = 0
            for code, size in zip(prefix, self.sizes, strict=False):
                index = index * size + code
            return (self.tables[len(prefix)][index] * self.contexts[row][:, None]).sum(0).tolist()

        return scores


class World:
    """A catalog of random different tuples and a decoder of random tables."""

    def __init__(self, items: int, sizes: tuple[int, ...], contexts: int = 2, seed: int = 0, scale: float = 1) -> None:
        rng = np.random.default_rng(seed)
        product = int(np.prod(sizes))
        places = rng.permutation(product)[: min(items, product)]
        self.sizes, self.codes = sizes, torch.from_numpy(np.stack(np.unravel_index(places, sizes), 1))
        generator = torch.Generator().manual_seed(seed)
        above = [int(np.prod(sizes[:level], dtype=int)) for level in range(len(sizes))]
        self.tables = [
            torch.randn(n, 3, size, generator=generator) * scale for n, size in zip(above, sizes, strict=True)
        ]
        self.trie = Trie(self.codes, sizes)
        self.decoder = TableDecoder(torch.randn(contexts, 3, generator=generator), self.tables, self.trie)

    def probabilities(self, row: int, normalizer: str, options: SamplingOptions = SamplingOptions()) -> dict:
        """Token probabilities by tuple."""
        return tuple_probabilities(
            self.codes.tolist(),
            self.sizes,
            self.decoder.scores_of(row),
            normalizer == "trie",
            options.temperature,
            options.top_p,
        )

    def item_logp(self, row: int, normalizer: str) -> np.ndarray:
        """``[V]``."""
        found = self.probabilities(row, normalizer)
        return np.array([np.log(found[tuple(codes)]).sum() for codes in self.codes.tolist()])

    def search(self, k: int, width: int, exclude: Tensor | None = None, normalizer: Any = "trie") -> Any:
        return self.decoder.normalized(normalizer).beam_search(k, width, exclude)

    def sample(self, group: int, options: SamplingOptions, normalizer: Any = "trie") -> tuple[Tensor, Tensor]:
        return self.decoder.normalized(normalizer).sample(group, options)


NORMALIZERS = st.sampled_from(["trie", "codebook"])
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@given(st.integers(1, 40), SIZES, st.integers(0, 999), NORMALIZERS, st.floats(0, 1), st.integers(0, 3))
def test_a_beam_of_the_catalogs_size_is_the_exact_ranking(
    items: int, sizes: tuple[int, ...], seed: int, normalizer: str, barred: float, more: int
) -> None:
    world = World(items, sizes, seed=seed)
    num_items = len(world.codes)
    generator = torch.Generator().manual_seed(seed)
    exclude = torch.randint(0, num_items + 1, (2, int(2 * barred * num_items)), generator=generator)
    got = world.search(num_items + more, num_items + 5, exclude, normalizer)
    for row in range(2):
        exact = world.item_logp(row, normalizer)
        if normalizer == "trie":
            assert np.exp(exact).sum() == pytest.approx(1, abs=1e-6)
        left = sorted(set(range(1, num_items + 1)) - set(exclude[row].tolist()), key=lambda item: -exact[item - 1])
        assert got.item_ids[row].tolist() == left + [0] * (num_items + more - len(left))
        np.testing.assert_allclose(got.scores[row, : len(left)].numpy(), exact[np.array(left, int) - 1], atol=1e-4)
        assert (got.scores[row, len(left) :] == -torch.inf).all()


@given(st.integers(1, 60), SIZES, st.integers(0, 999), st.integers(1, 9), st.integers(1, 9), st.floats(0, 1))
def test_a_narrow_beam_fills_its_list_with_what_is_left(
    items: int, sizes: tuple[int, ...], seed: int, k: int, width: int, barred: float
) -> None:
    world = World(items, sizes, seed=seed, scale=4)
    num_items = len(world.codes)
    # the most probable items are excluded, so that whole prefixes are
    best = world.search(num_items, num_items).item_ids
    exclude = torch.cat([best[:, : int(barred * num_items)], torch.zeros(2, 2, dtype=torch.long), best[:, :1]], 1)
    got = world.search(k, width, exclude)
    for row in range(2):
        left = set(range(1, num_items + 1)) - set(exclude[row].tolist())
        ids = [item for item in got.item_ids[row].tolist() if item]
        assert len(ids) == len(set(ids)) == min(k, len(left))
        assert set(ids) <= left
        exact = world.item_logp(row, "trie")[np.array(ids, int) - 1]
        np.testing.assert_allclose(got.scores[row, : len(ids)].numpy(), exact, atol=1e-3)
        assert (np.diff(exact) <= 1e-4).all()


def test_equal_items_stand_in_the_order_of_their_ids() -> None:
    world = World(12, (3, 4), contexts=1)
    world.decoder.tables = [torch.zeros_like(table) for table in world.tables]
    assert world.search(12, 12).item_ids.tolist() == [list(range(1, 13))]


def test_an_empty_list_of_excluded_items() -> None:
    world = World(12, (3, 4))
    none = torch.zeros(2, 0, dtype=torch.long)
    assert torch.equal(world.search(5, 12, none).item_ids, world.search(5, 12).item_ids)


def tuple_of(world: World, index: Tensor) -> np.ndarray:
    return np.ravel_multi_index(world.codes[index - 1].T.numpy(), world.sizes)


def chi_square(observed: np.ndarray, p: np.ndarray) -> bool:
    """Whether counts follow probabilities; what is expected less than 5 times is one class."""
    expected = p * observed.sum() / p.sum()
    assert p.sum() == pytest.approx(1, abs=1e-5)
    assert not observed[p == 0].any()
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    return len(expected) == 1 or stats.chisquare(observed, expected).pvalue > 1e-3


def law(world: World, row: int, normalizer: str, options: SamplingOptions) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities ``[V + 1]`` of no item and of the items, and token log-probabilities ``[V + 1, T]``."""
    found = world.probabilities(row, normalizer, options)
    tokens = np.array([[1.0] * len(world.sizes), *[found[tuple(codes)] for codes in world.codes.tolist()]])
    p = tokens.prod(1)
    p[0] = 0
    p[0] = sum(np.prod(factors) for factors in found.values()) - p.sum()
    with np.errstate(divide="ignore"):
        return np.where(p < 1e-9, 0, p), np.log(tokens)


OPTIONS = [SamplingOptions(), SamplingOptions(0.5), SamplingOptions(2.0, 0.6), SamplingOptions(1.0, 0.01)]


@pytest.mark.parametrize("normalizer", ["trie", "codebook"])
@pytest.mark.parametrize("options", OPTIONS)
def test_draws_with_replacement_follow_the_policy(options: SamplingOptions, normalizer: str) -> None:
    torch.manual_seed(0)
    world = World(20, (4, 3, 5))
    ids, logp = world.sample(20_000, options, normalizer)
    assert logp.shape == (2, 20_000, 3)
    assert logp.isfinite().all()
    for row in range(2):
        p, tokens = law(world, row, normalizer, options)
        assert chi_square(np.bincount(ids[row].numpy(), minlength=21), p)
        items = ids[row] > 0
        np.testing.assert_allclose(logp[row][items].numpy(), tokens[ids[row][items].numpy()], atol=1e-5)


@pytest.mark.parametrize("normalizer", ["trie", "codebook"])
@pytest.mark.parametrize("options", OPTIONS[:3])
def test_draws_without_replacement_follow_the_sequential_law(options: SamplingOptions, normalizer: str) -> None:
    torch.manual_seed(0)
    # every tuple is an item, so that no draw is hidden behind the id 0 of tuples that are none
    world = World(12, (2, 2, 3)) if normalizer == "codebook" else World(9, (2, 3, 4))
    world.decoder.contexts, world.decoder.batch = world.decoder.contexts[:1].expand(20_000, -1), 20_000
    ids, logp = world.sample(3, options._replace(replacement=False), normalizer)
    p, tokens = law(world, 0, normalizer, options)
    assert chi_square(np.bincount(ids[:, 0].numpy(), minlength=len(p)), p)
    drawn = (ids > 0).numpy()
    np.testing.assert_allclose(logp.numpy()[drawn], tokens[ids.numpy()[drawn]], atol=1e-5)
    with np.errstate(divide="ignore", invalid="ignore"):
        pairs = np.where(p[:, None] > 0, p[:, None] * p / (1 - p[:, None]), 0) * (1 - np.eye(len(p)))
    assert chi_square(np.bincount((ids[:, 0] * len(p) + ids[:, 1]).numpy(), minlength=len(p) ** 2), pairs.reshape(-1))
    # inclusion of the third draw: sum over ordered pairs of p_ij p_k / (1 - p_i - p_j)
    rest = 1 - p[:, None] - p
    third = np.zeros(len(p))
    for i, j in zip(*np.nonzero(pairs), strict=True):
        if rest[i, j] > 1e-9:
            third += pairs[i, j] * np.where(np.isin(np.arange(len(p)), [i, j]), 0, p) / rest[i, j]
    third[0] = max(0, 1 - third.sum())  # nothing is left
    assert chi_square(np.bincount(ids[:, 2].numpy(), minlength=len(p)), np.where(third < 1e-9, 0, third))


def test_without_replacement_tuples_differ_and_run_out() -> None:
    torch.manual_seed(0)
    world, options = World(9, (2, 3, 4)), SamplingOptions(replacement=False)
    ids, logp = world.sample(12, options)
    assert (ids[:, :9].sort(1).values == torch.arange(1, 10)).all()
    assert not ids[:, 9:].any()
    assert not logp[:, 9:].any()
    ids, logp = world.sample(30, options, "codebook")
    assert ((ids > 0).sum(1) == 9).all()
    assert (logp.sum(2)[:, :24] < 0).all()
    assert not logp[:, 24:].any()
    np.testing.assert_allclose(logp[:, :24].sum(2).exp().sum(1), 1, atol=1e-5)


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("scale", [300.0, 1e4])
def test_certain_and_impossible_codes_make_no_nan(scale: float, replacement: bool) -> None:
    torch.manual_seed(0)
    world = World(20, (4, 3, 5), contexts=50, scale=scale)
    best = world.search(1, 20)
    ids, logp = world.sample(4, SamplingOptions(0.1, 1.0, replacement))
    assert logp.isfinite().all()
    assert torch.equal(ids[:, :1], best.item_ids)
    assert (ids > 0).all()


def test_one_item_and_fewer_items_than_beams() -> None:
    for items, width in ((1, 50), (3, 50)):
        world = World(items, (4, 3, 5))
        got = world.search(items, width)
        assert (got.item_ids.sort(1).values == torch.arange(1, items + 1)).all()
        for replacement in (True, False):
            ids, _ = world.sample(2, SamplingOptions(replacement=replacement))
            assert (ids[:, 0] > 0).all()


def test_options_that_describe_no_distribution_are_refused() -> None:
    with refused("out_of_range", "temperature"):
        World(3, (4,)).sample(2, SamplingOptions(0.0))


class _Search(nn.Module):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.trie = world.trie
        self.tables = nn.ParameterList(world.tables)

    def forward(self, contexts: Tensor, exclude: Tensor) -> tuple[Tensor, ...]:
        best = TableDecoder(contexts, list(self.tables), self.trie).beam_search(8, 12, exclude)
        return *best, self.trie.codes(best.item_ids)


@pytest.mark.slow
def test_exported_programs_find_the_same(tmp_path: Path) -> None:
    import onnxruntime

    world = World(60, (140, 300), scale=2)
    # masks from bits and from lists of children
    assert [world.trie.get_buffer(f"_bitmap_{level}") is None for level in range(2)] == [False, True]
    module = _Search(world).eval()

    def inputs(rows: int, seen: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(rows)
        return torch.randn(rows, 3, generator=generator), torch.randint(0, 61, (rows, seen), generator=generator)

    batch, seen = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("seen", min=1, max=1024)
    shapes = {"contexts": {0: batch}, "exclude": {0: batch, 1: seen}}
    with tracing():
        program = torch.export.export(module, inputs(2, 6), dynamic_shapes=shapes)
        onnx_of(program, list(shapes), ["item_ids", "scores", "codes"]).save(str(tmp_path / "search.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "search.onnx")
    for rows, width in ((1, 6), (2, 1), (7, 58), (7, 200)):
        contexts, exclude = inputs(rows, width)
        expected, exported = module(contexts, exclude), program.module()(contexts, exclude)
        onnx = session.run(None, {"contexts": contexts.numpy(), "exclude": exclude.numpy()})
        for want, got, interchanged in zip(expected, exported, onnx, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
            np.testing.assert_allclose(interchanged, want.detach().numpy(), rtol=0, atol=1e-5)
