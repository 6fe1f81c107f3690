"""The translations of operations of which torch has none are those operations."""

import onnxruntime
import pytest
import torch

from recpo.serving import onnx_program
from recpo.serving.program import tracing


class Operations(torch.nn.Module):
    """Every operation that is translated or replaced, in each of its forms."""

    def forward(self, values, whole):
        here = torch.eye(4, dtype=torch.bool)
        rows, columns = torch.triu_indices(4, 4)
        return (
            values.nan_to_num(0.0),
            values.nan_to_num(),
            values.nan_to_num(nan=1.5, posinf=2.5, neginf=-3.5),
            torch.nn.functional.rms_norm(values[1:], (4,), whole[0, 0].to(values.dtype), 1e-3),
            torch.nn.functional.rms_norm(whole.to(values.dtype), (2, 4)),
            values[3].square(),
            values[2].diag() + torch.eye(4, dtype=values.dtype),
            torch.where(here, whole[0, 0], 0),
            values[1:, rows[:3]] * values[1:, columns[:3]],
            (whole > 1) & (whole < 5),
            (whole & whole.flip(0)).to(torch.float32),
            values[1:].T,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_translations_are_the_operations(dtype):
    values = torch.randn(4, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    values[0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    given = values, torch.arange(16).view(2, 2, 4)
    with tracing():
        exported = torch.export.export(Operations(), given)
        made = onnx_program.onnx_of(exported, ["values", "whole"], [f"out{number}" for number in range(12)])
    session = onnxruntime.InferenceSession(made.model_proto.SerializeToString())
    found = session.run(None, {"values": given[0].numpy(), "whole": given[1].numpy()})
    for ours, theirs in zip(found, Operations()(*given), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), theirs)
