"""Skipping the padding only changes the time."""

import pytest
import torch

from recpo.base.types import EventIndices, Histories
from recpo.policies.blocks import Packing
from recpo.policies.encoder import EncoderOptions, HistoryEncoder

LENGTH, DIM = 9, 16


MANY = [3, 0, 1, 5, 2] * 7  # more events than the multiple to which their number is filled up


@pytest.mark.parametrize("lengths", [[0, 1, 3, 9, 2], [0, 0], [9], [1, 0, 0], [], MANY], ids=str)
def test_states_and_gradients_are_those_of_the_padded_encoder(lengths):
    torch.manual_seed(0)
    model = HistoryEncoder(EncoderOptions(dim=DIM, max_history=LENGTH, dropout=0.0)).double()
    lengths = torch.tensor(lengths, dtype=torch.int64)
    items = torch.randn(len(lengths), LENGTH, DIM, dtype=torch.float64)
    feedback = torch.randint(0, 4, (len(lengths), LENGTH))
    real = torch.arange(LENGTH + 1) <= lengths[:, None]
    weights = torch.randn(len(lengths), LENGTH + 1, DIM, dtype=torch.float64) * real[..., None]
    results = []
    for indices in (EventIndices(lengths[:0], LENGTH), None):  # no place to skip, and as counted
        vectors = items.clone().requires_grad_()
        states = model(vectors, Histories(feedback, lengths, feedback, event_indices=indices))
        model.zero_grad()
        (states * weights).sum().backward()
        results.append([states * real[..., None], vectors.grad, *(p.grad.clone() for p in model.parameters())])
    for padded, packed in zip(*results, strict=True):
        torch.testing.assert_close(padded, packed, rtol=0, atol=1e-12)


def test_only_padded_histories_are_packed():
    assert Packing.of(torch.tensor([4, 4]), 4) is None
    packing = Packing.of(torch.tensor([1, 0, 2]), 4)
    assert packing.places.tolist() == [0, 8, 9]
    many = Packing.of(torch.tensor(MANY), LENGTH)
    assert many is not None
    assert len(many.places) == len(set(many.places.tolist())) == 80
    padded = torch.arange(12.0).view(3, 4, 1)
    assert packing.unpack(packing.pack(padded)).flatten().tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 8, 9, 0, 0]
