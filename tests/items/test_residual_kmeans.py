"""Residual k-means against NumPy loops and scikit-learn; balance; the frozen codebooks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from recpo.base.errors import RecpoError
from recpo.items.residual_kmeans import Codebooks, ResidualKMeans, nearest
from recpo.items.tokenization import reconstruction_errors
from tests.reference.code_loops import relative_errors, residual_encode
from tests.refusals import refused


def vectors(items=600, dim=8, clusters=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(clusters, dim, generator=generator)
    which = torch.randint(clusters, (items,), generator=generator)
    return centers[which] + 0.3 * torch.randn(items, dim, generator=generator)


SMALL = ResidualKMeans(levels=3, codebook_size=16, normalize="none", capacity_slack=None)


def test_codes_and_errors_agree_with_loops_over_items():
    points = vectors(150)
    books, codes = SMALL.fit(points, 0)
    expected, losses = residual_encode(points, books.centroids)
    assert np.array_equal(codes, expected)
    assert torch.equal(books.encode(points), codes)
    errors = reconstruction_errors(points, books, codes)
    assert errors == pytest.approx(relative_errors(points, books.centroids.numpy(), expected), rel=1e-4)
    spread = float(((points - points.mean(0)) ** 2).sum())
    assert errors == pytest.approx(losses.sum(0) / spread, rel=1e-4)


def test_every_level_is_about_as_good_as_the_k_means_of_scikit_learn():
    residual = vectors(2000, dim=6, clusters=200)
    books, codes = ResidualKMeans(levels=3, codebook_size=32, normalize="none", capacity_slack=None).fit(residual, 0)
    for level, centroids in enumerate(books.centroids):
        peer = KMeans(32, n_init=3, random_state=0).fit(residual.numpy())
        own = float((residual - centroids[codes[:, level]]).square().sum())
        assert own < 1.05 * peer.inertia_
        residual = residual - centroids[codes[:, level]]


def test_centroids_are_the_means_of_their_items_once_it_has_converged():
    points = vectors(400, dim=4)
    books, codes = replace(SMALL, levels=1, codebook_size=8, iterations=100).fit(points, 0)
    for code in range(8):
        mean = points[codes[:, 0] == code].mean(0)
        assert torch.allclose(mean, books.centroids[0, code], atol=1e-5)


def test_the_error_falls_from_level_to_level_and_is_0_for_few_different_items():
    points = vectors()
    books, codes = SMALL.fit(points, 0)
    errors = reconstruction_errors(points, books, codes)
    assert 1 > errors[0] > errors[1] > errors[2] > 0
    repeated = vectors(16).repeat(10, 1)
    books, codes = SMALL.fit(repeated, 0)
    assert reconstruction_errors(repeated, books, codes)[0] == pytest.approx(0, abs=1e-6)


def test_equal_seeds_give_equal_codes_and_other_seeds_others():
    points = vectors()
    first, again, other = (SMALL.fit(points, seed) for seed in (3, 3, 4))
    assert torch.equal(first[0].centroids, again[0].centroids)
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


def test_more_codes_than_items_and_equal_items():
    points = vectors(5)
    books, codes = SMALL.fit(points, 0)
    assert len(codes.unique(dim=0)) == 5
    assert books.centroids.isfinite().all()
    books, codes = SMALL.fit(torch.ones(40, 8), 0)
    assert books.centroids.isfinite().all()
    assert len(codes.unique(dim=0)) == 1


def test_no_code_is_empty_where_there_are_enough_items():
    far = torch.cat([torch.zeros(500, 2), torch.randn(40, 2) * 100])
    _, codes = replace(SMALL, levels=1).fit(far, 0)
    assert len(codes.unique()) == 16


@pytest.mark.parametrize("slack", [1.0, 1.1, 2.0])
def test_balanced_codes_keep_their_capacity(slack):
    points = vectors(1000, clusters=3)
    options = ResidualKMeans(levels=2, codebook_size=16, normalize="none", capacity_slack=slack)
    _, codes = options.fit(points, 0)
    _, free = SMALL.fit(points, 0)
    for level in range(2):
        assert torch.bincount(codes[:, level]).max() <= -(-slack * 1000 // 16)
    assert torch.bincount(free[:, 1]).max() > -(-1.1 * 1000 // 16)


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ("none", [[3.0, 4.0, 5.0], [0.0, 0.0, 5.0], [0.0, 2.0, 5.0]]),
        ("l2", [[0.6 / 2**0.5, 0.8 / 2**0.5, 1 / 2**0.5], [0, 0, 1.0], [0, 2 / 29**0.5, 5 / 29**0.5]]),
        ("standardize", [[2**0.5, 2 / (8 / 3) ** 0.5, 0], [-(0.5**0.5), -2 / (8 / 3) ** 0.5, 0], [-(0.5**0.5), 0, 0]]),
    ],
)
def test_normalization(normalize, expected):
    points = torch.tensor([[3.0, 4.0, 5.0], [0.0, 0.0, 5.0], [0.0, 2.0, 5.0]])
    books, _ = ResidualKMeans(levels=1, codebook_size=2, normalize=normalize).fit(points, 0)
    assert torch.allclose(books.normalize(points), torch.tensor(expected), atol=1e-6)
    assert points[0, 0] == 3  # the vectors themselves stay


def test_a_zero_vector_has_no_direction():
    books, codes = ResidualKMeans(levels=1, codebook_size=2).fit(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), 0)
    assert books.normalize(torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]
    assert codes.unique().numel() == 2


def test_codebooks_are_frozen_on_disk(tmp_path):
    points = vectors()
    books, codes = replace(SMALL, levels=2, normalize="l2").fit(points, 0)
    books.save(tmp_path)
    frozen = Codebooks.load(tmp_path)
    assert torch.equal(frozen.encode(frozen.normalize(points)), codes)
    bytes_before = (tmp_path / "codebooks.safetensors").read_bytes()
    frozen.save(tmp_path)
    assert (tmp_path / "codebooks.safetensors").read_bytes() == bytes_before
    with refused("wrong_shape", "vectors"):
        frozen.normalize(torch.zeros(1, 5))
    (tmp_path / "codebooks.safetensors").write_bytes(bytes_before[:100])
    with refused("damaged", "codebooks.safetensors"):
        Codebooks.load(tmp_path)


@pytest.mark.parametrize(
    "options", [{"levels": 0}, {"codebook_size": 0}, {"iterations": 0}, {"sample": 0}, {"capacity_slack": 0.9}]
)
def test_options_that_make_no_codes_are_refused(options):
    with pytest.raises(RecpoError) as error:
        ResidualKMeans(**options)
    assert (error.value.code, error.value.field) == ("out_of_range", next(iter(options)))


def test_values_whose_squares_overflow_are_refused():
    with refused("out_of_range", "vectors"):
        SMALL.fit(torch.tensor([[1e20], [0.0]]), 0)


def test_nearest_works_in_blocks(monkeypatch):
    monkeypatch.setattr("recpo.items.residual_kmeans._BLOCK", 40)
    points, centroids = vectors(33), vectors(16, seed=1)
    code, distance = nearest(points, centroids)
    table = torch.cdist(points.double(), centroids.double()).square()
    assert torch.equal(code, table.argmin(1))
    assert torch.allclose(distance.double(), table.amin(1), atol=1e-4)


@pytest.mark.gpu
def test_a_gpu_gives_codes_as_good_and_the_same_every_time():
    points = vectors(5000)
    books, codes = SMALL.fit(points.cuda(), 0)
    again = SMALL.fit(points.cuda(), 0)[1]
    assert torch.equal(codes, again)
    own = SMALL.fit(points, 0)
    assert reconstruction_errors(points.cuda(), books, codes)[-1] == pytest.approx(
        reconstruction_errors(points, *own)[-1], rel=0.05
    )
