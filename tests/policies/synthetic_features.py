"""Features made up for tests: every kind of them, with missing and unknown values."""

from __future__ import annotations

import torch

from recpo.base.features import Categories, Category, Feature, FeatureSchema, Number, Vector
from recpo.base.feedback import HIGHEST
from recpo.base.types import Features, Histories

FEATURES: tuple[Feature, ...] = (
    Category("author", num_codes=7),
    Vector("text", width=5),
    Categories("tags", length=3, num_codes=6),
    Number("age", mean=0.0, std=1.0),
    Category("language", num_codes=4),
    Number("size", mean=0.0, std=1.0),
)
SCHEMA = FeatureSchema(item=FEATURES, user=FEATURES[:1] + FEATURES[3:4], context=FEATURES[4:])
BEHAVIORS = ("like", "follow", "share")


def random_features(features: tuple[Feature, ...], *shape: int, seed: int = 0) -> Features:
    """Features with the leading ``shape``; about a fifth of all values is missing."""
    generator = torch.Generator().manual_seed(seed)

    def codes(*sizes: int) -> torch.Tensor:
        drawn = [torch.randint(1, size, shape, generator=generator) for size in sizes]
        return torch.stack(drawn, -1) if drawn else torch.zeros(*shape, 0, dtype=torch.long)

    def hidden(values: torch.Tensor, missing: float) -> torch.Tensor:
        return values.masked_fill(torch.rand(values.shape[:-1], generator=generator)[..., None] < 0.2, missing)

    categories = [one for one in features if isinstance(one, Category)]
    lists = [one for one in features if isinstance(one, Categories)]
    numbers = [one for one in features if isinstance(one, Number)]
    vectors = [one for one in features if isinstance(one, Vector)]
    listed = []
    for one in lists:  # different codes, filled from the front
        order = torch.rand(*shape, one.num_codes - 1, generator=generator).argsort(-1)[..., : one.length] + 1
        count = torch.randint(0, one.length + 1, shape, generator=generator)[..., None]
        listed.append(order * (torch.arange(one.length) < count))
    return Features(
        hidden(codes(*(one.num_codes for one in categories)), 0),
        tuple(listed),
        torch.stack([hidden(torch.randn(*shape, 1, generator=generator), torch.nan)[..., 0] for _ in numbers], -1)
        if numbers
        else torch.zeros(*shape, 0),
        tuple(hidden(3 * torch.randn(*shape, one.width, generator=generator), torch.nan) for one in vectors),
    )


def random_histories(num_items: int, batch: int, length: int, seed: int = 0) -> Histories:
    """Right-padded histories with everything that a policy may read; the first one is empty, the last one full."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, length + 1, (batch,), generator=generator)
    lengths[0], lengths[-1] = 0, length
    real = torch.arange(length) < lengths[:, None]
    times = 1_600_000_000_000 + torch.randint(1, 10**9, real.shape, generator=generator).cumsum(1)
    answered = torch.arange(length + 1) <= lengths[:, None]
    return Histories(
        torch.randint(1, num_items + 1, real.shape, generator=generator) * real,
        lengths,
        torch.randint(0, HIGHEST + 1, real.shape, generator=generator) * real,
        times * real,
        torch.randint(0, 2 ** len(BEHAVIORS), real.shape, generator=generator) * real,
        random_features(SCHEMA.user, batch, seed=seed),
        random_features(SCHEMA.context, batch, length + 1, seed=seed).where(answered),
    )
