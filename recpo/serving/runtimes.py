"""Engines that rank and score encoded histories: the exported program in ONNX Runtime, or a policy in torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from recpo.base.errors import RecpoError, validate_range
from recpo.base.feedback import HIGHEST
from recpo.serving.encoded_histories import EncodedHistories, PerUser, ProgramInput, ProgramReads, program_inputs
from recpo.serving.manifest import BundleManifest, readable

if TYPE_CHECKING:
    from recpo.base.contracts import Policy

EngineName = Literal["onnx", "torch"]

OUTPUTS: Final = ("top_items", "scores")
CPU_PROVIDER: Final = "CPUExecutionProvider"


class Runtime(ABC):
    """Ranks the catalog, or scores candidates, for encoded histories.

    Every input is checked before it reaches a program. Otherwise an id or a feedback level out of range would index a
    table from its end and return a wrong answer.

    Attributes:
        num_items: catalog size V.
        max_history: H.
        reads: inputs beyond items and feedback.
        k: length of its longest list.
    """

    num_items: int
    max_history: int
    reads: ProgramReads
    k: int

    def __init__(self, like: BundleManifest | Runtime) -> None:
        """The sizes of a bundle or of another runtime."""
        self.num_items, self.max_history = like.num_items, like.max_history
        self.reads, self.k = like.reads, like.k

    def recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The best items that are not excluded, nor in the history unless ``reads.repeats``.

        Args:
            inputs: histories of B users.
            k: list length, at most ``self.k``.

        Returns:
            ids ``[B, k]`` int64, filled up with 0, and log-probabilities ``[B, k]`` float32, -inf for id 0.

        Raises:
            RecpoError: an id, a feedback level, a shape or a type that a policy cannot read.
        """
        if inputs.allowed is not None and not self.reads.mask:
            inputs = _without_mask(inputs)
        self._check(inputs)
        return self._recommend(inputs, k)

    def score(self, inputs: EncodedHistories, candidates: np.ndarray) -> np.ndarray:
        """Log-probabilities ``[B, C]`` float32 of the items ``candidates [B, C]``; nan for id 0.

        Raises:
            RecpoError: as in ``recommend``, or the runtime only ranks.
        """
        self._check(inputs)
        _check_range("candidates", candidates, self.num_items)
        return self._score(inputs, candidates)

    @cached_property
    def _inputs(self) -> tuple[ProgramInput, ...]:
        return program_inputs(self.max_history, self.reads)

    @abstractmethod
    def _recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]: ...

    def _score(self, inputs: EncodedHistories, candidates: np.ndarray) -> np.ndarray:
        raise RecpoError(
            "this engine ranks the catalog and scores no candidates: load the bundle with engine=torch",
            code="unsupported",
            field="engine",
        )

    def _check(self, inputs: EncodedHistories) -> None:
        for one in self._inputs:
            one.of(inputs)
        _check_range("item_ids", inputs.item_ids, self.num_items)
        _check_range("feedback", inputs.feedback, HIGHEST)
        _check_range("exclude", inputs.exclude, self.num_items)
        if self.reads.timestamps and inputs.timestamps is not None:
            _check_range("timestamps", inputs.timestamps, np.iinfo(np.int64).max)


class OnnxRuntime(Runtime):
    """The program of a bundle in ONNX Runtime. It does not import torch.

    Args:
        path: ``model.onnx``.
        manifest: manifest of the bundle.
        threads: 0 = one per core.
        provider: name of an execution provider of ONNX Runtime; the CPU runs operations that it does not support.
        outputs: width of its outputs by name, in order; None = those of a program that lists items.

    Raises:
        RecpoError: the file is not such a program, names files outside its directory, or the provider does not exist.
    """

    def __init__(
        self,
        path: Path,
        manifest: BundleManifest,
        *,
        threads: int = 0,
        provider: str = CPU_PROVIDER,
        outputs: Mapping[str, int] | None = None,
    ) -> None:
        import onnxruntime

        super().__init__(manifest)
        self._inputs = program_inputs(manifest.max_history, manifest.reads, exclude=manifest.index is None)
        outputs = outputs or dict.fromkeys(OUTPUTS, self.k)
        self._outputs = list(outputs)
        if provider not in (available := onnxruntime.get_available_providers()):
            raise RecpoError(
                f"provider is {provider!r}, this build of ONNX Runtime has {', '.join(available)}: name one of them, "
                "or install the build for your device (CUDAExecutionProvider: onnxruntime-gpu)",
                code="unknown_name",
                field="provider",
            )
        _validate_own_files(path)
        with readable(path, Exception):  # ONNX Runtime's own exceptions have no common base class
            settings = onnxruntime.SessionOptions()
            settings.intra_op_num_threads = threads
            # spinning threads would take the cores away from the code that reads the next request
            settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
            providers = list(dict.fromkeys([provider, CPU_PROVIDER]))
            self._session = onnxruntime.InferenceSession(str(path), settings, providers=providers)
        if provider not in self._session.get_providers():  # ONNX Runtime only warns
            raise RecpoError(
                f"provider {provider} does not start here (its libraries or its device are missing): see the warning "
                f"of ONNX Runtime above, or use {CPU_PROVIDER}",
                code="resources",
                field="provider",
            )
        found = {entry.name: entry.shape[1:] for entry in (*self._session.get_inputs(), *self._session.get_outputs())}
        widths = {one.name: list(one.shape) for one in self._inputs} | {name: [one] for name, one in outputs.items()}
        # the exporter chooses the name of a dynamic size
        expected = {
            name: found.get(name, []) if any(isinstance(size, str) for size in shape) else shape
            for name, shape in widths.items()
        }
        if found != expected:
            raise RecpoError(
                f"{path} reads and gives {found}, expected {expected}: export the bundle again",
                code="mismatch",
                field=path.name,
            )

    def run(self, inputs: EncodedHistories) -> list[np.ndarray]:
        """The outputs of the program, in their order."""
        given = {one.name: one.of(inputs) for one in self._inputs}
        results: list[np.ndarray] = self._session.run(self._outputs, given)
        return results

    def _recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]:
        top_items, scores = self.run(inputs)
        return top_items[:, :k], scores[:, :k]


class PolicyRuntime(Runtime):
    """A policy in torch, from a run or rebuilt from a bundle. It runs on the device of its parameters.

    Args:
        policy: in evaluation mode.
        k: length of its longest list; None = the size of the catalog.
        reads: inputs beyond items and feedback; None = times, and whatever the histories contain.
    """

    def __init__(self, policy: Policy, k: int | None = None, reads: ProgramReads | None = None) -> None:
        self.policy = policy
        self.num_items, self.max_history = policy.num_items, policy.max_history
        self.reads = ProgramReads(policy.reads_timestamps) if reads is None else replace(reads, mask=0)
        self.k = policy.num_items if k is None else k

    def _recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]:
        import torch

        with torch.inference_mode():
            histories = self._histories(inputs)
            exclude = self._tensor(excluded(inputs, self.reads.repeats))
            top = self.policy.recommend(histories, k, exclude)
        return top.item_ids.cpu().numpy(), top.scores.cpu().numpy()

    def _score(self, inputs: EncodedHistories, candidates: np.ndarray) -> np.ndarray:
        import torch

        from recpo.base.types import FeedbackBatch, Slates

        with torch.inference_mode():
            histories, items = self._histories(inputs), self._tensor(candidates)
            slates = Slates(items, histories.lengths[:, None].expand_as(items), items > 0)
            rows = torch.arange(len(items), device=items.device)
            scores = self.policy.log_prob(FeedbackBatch(histories, slates, rows)).sum(-1)
        return scores.masked_fill(items == 0, torch.nan).cpu().numpy()

    def _histories(self, inputs: EncodedHistories) -> Any:
        from recpo.base.types import Histories

        item_ids = self._tensor(inputs.item_ids)
        times = self._tensor(inputs.timestamps) if self.reads.timestamps else None
        behaviors = None if inputs.behaviors is None else self._tensor(inputs.behaviors)
        user, context = (
            None if part is None else part.tensors().map(lambda column: column.to(item_ids.device))
            for part in (inputs.user, inputs.context)
        )
        lengths, feedback = (item_ids != 0).sum(1), self._tensor(inputs.feedback)
        return Histories(item_ids, lengths, feedback, times, behaviors, user, context)

    def _tensor(self, values: np.ndarray | None) -> Any:
        import torch

        device = next((parameter.device for parameter in self.policy.parameters()), torch.device("cpu"))
        return torch.from_numpy(values).to(device)


class TorchProgramRuntime(Runtime):
    """A serving program in torch, before its export.

    Args:
        program: from the tensors of ``program_inputs`` to ``(top_items, scores)``.
        like: a bundle or a runtime with the same sizes.
    """

    def __init__(self, program: Callable[..., Any], like: BundleManifest | Runtime) -> None:
        super().__init__(like)
        self._program = program

    def _recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]:
        import torch

        with torch.inference_mode():
            tensors = [torch.from_numpy(one.of(inputs)) for one in self._inputs]
            top_items, scores = self._program(*tensors)
        return top_items[:, :k].numpy(), scores[:, :k].numpy()


def excluded(inputs: EncodedHistories, repeats: bool) -> np.ndarray:
    """``[B, M]`` ids that must not be listed, 0 pads: with those of the history, unless they may be repeated."""
    return inputs.exclude if repeats else np.concatenate([inputs.item_ids, inputs.exclude], 1)


def _without_mask(inputs: EncodedHistories) -> EncodedHistories:
    """The same inputs with the items that may not be listed added to the excluded items."""
    assert inputs.allowed is not None
    row, item = np.nonzero(~inputs.allowed)
    barred = PerUser.of(len(inputs.item_ids), row, items=item).padded(0, len(inputs.item_ids))["items"]
    return inputs._replace(exclude=np.concatenate([inputs.exclude, barred], 1), allowed=None)


def _check_range(name: str, values: np.ndarray, largest: int) -> None:
    if values.size:
        low, high = values.min(), values.max()
        validate_range(0 <= low <= high <= largest, name, f"must be from 0 to {largest}", f"{low}..{high}")


def _validate_own_files(path: Path) -> None:
    """Raises if the program would read weights from any file other than ``model.onnx.data`` beside it."""
    import onnx

    with readable(path, Exception):  # protobuf's own exceptions
        model = onnx.load(str(path), load_external_data=False)
        places = {
            entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == "location"
        }
    if foreign := places - {f"{path.name}.data"}:
        raise RecpoError(
            f"{path} reads weights from {min(foreign)!r}, expected {path.name}.data beside it: recpo does not load it",
            code="untrusted",
            field=min(foreign),
        )


def _tensors(message: Any) -> Iterator[Any]:
    """Every tensor anywhere in a protobuf message."""
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        for part in [value] if hasattr(value, "ListFields") else value:
            if descriptor.message_type.name == "TensorProto":
                yield part
            yield from _tensors(part)
