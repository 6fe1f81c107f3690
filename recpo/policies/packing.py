"""Histories without their padding, for layers that treat every event by itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

# Share of the places that hold an event from which on packing costs more than the padding.
_NOT_WORTH_IT = 0.75


class Packing(NamedTuple):
    """Where the events of right-padded histories are.

    Most users of a log have few events and a batch is as wide as its longest history, so that most of it is padding
    (86 % of Amazon Beauty at 50 events, where an encoder that skips it is several times faster).

    Attributes:
        places: ``[N]``, the places of the events in the flattened ``[B, H]``.
        batch: B.
        length: H.
    """

    places: Tensor
    batch: int
    length: int

    @classmethod
    def of(cls, lengths: Tensor, length: int) -> Packing | None:
        """The packing of histories with ``lengths [B]`` events, padded to ``length``; None where it is not worth it.

        An exported program keeps the padding: its shapes must not depend on values.
        """
        if torch.compiler.is_exporting():
            return None
        places = (torch.arange(length, device=lengths.device) < lengths[:, None]).reshape(-1).nonzero().squeeze(1)
        worth_it = 0 < len(places) < _NOT_WORTH_IT * len(lengths) * length
        return cls(places, len(lengths), length) if worth_it else None

    def pack(self, padded: Tensor) -> Tensor:
        """``[B, H, d]`` to ``[N, d]``."""
        # an embedding lookup, because its gradient is several times faster than that of indexing on a CPU
        return F.embedding(self.places, padded.reshape(-1, padded.shape[-1]))

    def unpack(self, packed: Tensor) -> Tensor:
        """``[N, d]`` to ``[B, H, d]``, zero where there is no event."""
        padded = packed.new_zeros(self.batch * self.length, packed.shape[-1])
        return padded.index_copy(0, self.places, packed).view(self.batch, self.length, -1)


def rows_of(states: Tensor, places: Tensor) -> Tensor:
    """Rows ``places [B]`` of ``states [..., d]`` with all but the last axis flattened: ``[B, d]``."""
    # an embedding lookup, because its gradient is several times faster than that of indexing on a CPU
    return F.embedding(places, states.reshape(-1, states.shape[-1]))
