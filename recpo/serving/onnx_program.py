"""A program as ONNX: as it is where ONNX has every operation, with translations of those that torch has none for.

Imported by exports alone, because onnxscript takes a second to import.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir
import torch
from onnxscript import opset18 as op, optimizer, rewriter
from onnxscript.rewriter.rules import common
from torch import Tensor
from torch.export import ExportedProgram

from recpo.serving.program import ServingProgram, exported_program, tracing

_PROTOBUF_LIMIT = 2**31 - 2**24  # bytes of weights, with room for the graph


def save_onnx(program: ServingProgram, file: Path) -> None:
    """Writes the program as ONNX, with its weights beside it where they exceed what one file can hold."""
    exported = exported_program(program)
    with tracing():
        onnx = onnx_of(exported, [one.name for one in program.inputs], program.outputs)
        _simplify(onnx.model)
    size = sum(values.nbytes for values in exported.state_dict.values())
    onnx.save(str(file), external_data=size > _PROTOBUF_LIMIT)


def onnx_of(exported: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> torch.onnx.ONNXProgram:
    """A program as it is: decomposing traces it twice more, which is half of the time of an export."""
    vars(exported)["run_decompositions"] = lambda table: exported
    try:
        return _translated(exported, inputs, outputs)
    except torch.onnx.OnnxExporterError:  # an operation of a block from outside, perhaps
        del vars(exported)["run_decompositions"]
        return _translated(exported, inputs, outputs)


def _translated(exported: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> torch.onnx.ONNXProgram:
    aten = torch.ops.aten
    own: dict[Callable[..., Any], Callable[..., Any]] = {
        aten.to.dtype: _to,
        aten.numpy_T.default: _transposed,
        aten.__and__.Tensor: _and,
        aten.rms_norm.default: _rms_norm,
        aten.nan_to_num.default: _nan_to_num,
        aten.square.default: _square,
        aten.eye.default: _eye,
        aten.diag.default: _diag,
        aten.triu_indices.default: _triu_indices,
    }
    onnx = torch.onnx.export(
        exported, input_names=inputs, output_names=outputs, dynamo=True, verbose=False, optimize=False,
        custom_translation_table=own,
    )  # fmt: skip
    assert onnx is not None
    return onnx


def _to(values: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: Any = None) -> Any:
    return op.Cast(values, to=dtype)


def _transposed(values: Any) -> Any:
    return op.Transpose(values)


def _and(values: Any, others: Any) -> Any:
    return (op.And if values.dtype.name == "BOOL" else op.BitwiseAnd)(values, others)


def _rms_norm(values: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    """``w x / sqrt(mean(x^2) + eps)`` over the last dimensions, in ONNX."""
    dtype = _dtype(values)
    squares = op.ReduceMean(_square(values), _constant(torch.arange(-len(shape), 0)))
    least = _constant(torch.tensor(torch.finfo(dtype).eps if eps is None else eps, dtype=dtype))
    normed = op.Div(values, op.Sqrt(op.Add(squares, least)))
    return normed if weight is None else op.Mul(normed, weight)


def _square(values: Any) -> Any:
    return op.Mul(values, values)


def _nan_to_num(values: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Any:
    """The values, and numbers in place of NaN and of the infinities: 0 and the largest of the type where not given."""
    dtype = _dtype(values)
    largest = torch.finfo(dtype).max

    def number(given: float | None, default: float) -> Any:
        return _constant(torch.tensor(default if given is None else given, dtype=dtype))

    finite = op.Where(op.IsInf(values, detect_negative=0), number(posinf, largest), values)
    finite = op.Where(op.IsInf(values, detect_positive=0), number(neginf, -largest), finite)
    return op.Where(op.IsNaN(values), number(nan, 0.0), finite)


def _eye(size: int, *, dtype: int | None = None, **options: Any) -> Any:
    """The identity matrix of a size."""
    return _constant(torch.eye(size), dtype)


def _diag(values: Any) -> Any:
    """The square matrix with a vector on its diagonal."""
    return op.Mul(_constant(torch.eye(values.shape[0], dtype=_dtype(values))), values)


def _triu_indices(rows: int, columns: int, *, dtype: int | None = None, **options: Any) -> Any:
    """Rows and columns of the upper triangle of a matrix."""
    return _constant(torch.triu_indices(rows, columns), dtype)


def _dtype(values: Any) -> torch.dtype:
    return {"FLOAT16": torch.float16, "DOUBLE": torch.float64}.get(values.dtype.name, torch.float32)


def _constant(values: Tensor, dtype: int | None = None) -> Any:
    """The values in a program, in the type of this number in ONNX, or in their own."""
    array = values.numpy()
    constant: Any = onnx_ir.tensor(array if dtype is None else array.astype(onnx_ir.DataType(dtype).numpy()))
    return op.Constant(value=constant)


def _simplify(model: Any) -> None:
    """What ``onnxscript.optimizer.optimize`` does, with those of its rules that apply to these programs.

    One of the others, for splits into two slices, compares every slice with every other one and finds nothing: it takes
    a fifth to a third of the time of an export.

    Args:
        model: the ``onnx_ir.Model``, changed in place.
    """
    no_op = (
        common.mul_by_1_rule,
        common.add_0_rule,
        common.sub_0_rule,
        common.no_op_cast_rule,
        common.no_op_expand_rule,
    )
    shape = (common.materialize_reshape_shape_rule, common.reshape_reshape_rule, common.squeeze_reshape_1d_rule)
    order = (common.no_op_transpose_rule, common.transpose_transpose_rule, common.unsqueeze_unsqueeze_rule)
    other = (common.cast_cast_rule, common.collapse_slice_rule, common.collapse_slice2_rule)
    optimizer.inline(model)
    for _ in range(2):  # folded constants make further rules apply
        optimizer.fold_constants(model)
        rewriter.rewrite(model, [*no_op, *shape, *order, *other])
    optimizer.optimize(model, num_iterations=0)
