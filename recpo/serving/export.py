"""Writes a trained policy as a bundle, and checks it against the policy before it counts."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from recpo import __version__
from recpo.artifacts import output_directory
from recpo.contracts import Policy
from recpo.data.id_map import IdMap
from recpo.errors import RecpoError
from recpo.feedback import HIGHEST, UNKNOWN, FeedbackDefinition
from recpo.serving.bundle import Bundle, load_runtime
from recpo.serving.golden import GOLDEN, write_golden
from recpo.serving.histories import EncodedHistories
from recpo.serving.manifest import ITEMS, ONNX_PROGRAM, BundleManifest
from recpo.serving.recommending import validate_k
from recpo.serving.runtimes import INPUTS, OUTPUTS, PolicyRuntime, Runtime
from recpo.serving.saved_policy import describe_policy, save_policy
from recpo.types import Histories

_EXAMPLE_USERS = 2  # 1 would be taken for a constant
_CHECKED_USERS = (1, 33)  # batch sizes; other than the example's
_SCORE_TOLERANCE = 1e-4
_FIRST_TIME_MS, _LONGEST_GAP_MS = 1_600_000_000_000, 10 * 86_400_000  # times of random histories
_PROTOBUF_LIMIT = 2**31 - 2**24  # bytes of weights, with room for the graph


class ServingProgram(nn.Module):
    """The function that is exported: the policy's own ``recommend`` with what a server hands over.

    ``(item_ids [B, H], feedback [B, H], exclude [B, M], timestamps [B, H]) -> (top_items [B, k], scores [B, k])``; ids
    are internal, rows are padded with 0 on the right, and nothing of the history or of ``exclude`` is recommended.
    ``timestamps`` is an input only of a policy that reads them. A value out of range counts as 0, unknown: in a lookup
    -1 would stand for the last row.
    """

    def __init__(self, policy: Policy, k: int) -> None:
        super().__init__()
        self.policy = policy
        self.k = k

    def forward(
        self, item_ids: Tensor, feedback: Tensor, exclude: Tensor, timestamps: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        item_ids, exclude = (_within(ids, self.policy.num_items) for ids in (item_ids, exclude))
        histories = Histories(item_ids, (item_ids != 0).sum(1), _within(feedback, HIGHEST), timestamps)
        top = self.policy.recommend(histories, self.k, torch.cat([item_ids, exclude], 1))
        return top.item_ids, top.scores


def export_bundle(
    policy: Policy,
    items: IdMap,
    feedback: FeedbackDefinition,
    out: Path,
    *,
    k: int = 100,
    options: Mapping[str, Any] | None = None,
    origin: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    inputs: Iterable[object] = (),
) -> None:
    """Exports ``policy`` to the directory ``out``, which appears only when it is complete and verified.

    Item features are encoded here, once: the bundle has the sum of id rows and features for every item.
    Every engine must give the policy's own lists and scores, within 1e-4, on random histories, empty and full ones
    among them.

    Args:
        policy: a trained policy.
        items: external ids of its catalog.
        feedback: of the data that it was trained on.
        out: the bundle directory.
        k: length of the lists; at most the size of the catalog.
        options: constructor options of the policy, from which the torch engine builds it again; None = the bundle has
            the ONNX program only. Not used for policies that are none of recpo's own.
        origin: where the policy comes from, for the manifest (``BundleManifest.origin``).
        overwrite: replace a bundle in ``out``.
        inputs: files and directories that ``out`` must not touch, such as the run's.

    Raises:
        RecpoError: ``out`` exists, the policy belongs to another catalog, k is out of range, or an engine differs from
            the policy.
    """
    if len(items) != policy.num_items:
        raise RecpoError(f"{len(items)} items are named, the policy has {policy.num_items}: hand over its own items")
    k = validate_k(k, policy.num_items)
    policy = _servable(policy).cpu().eval()
    manifest = BundleManifest(
        num_items=policy.num_items,
        max_history=policy.max_history,
        k=k,
        reads_timestamps=policy.reads_timestamps,
        feedback=feedback,
        policy=describe_policy(policy, options),
        origin=origin or {},
        versions={"recpo": __version__, "torch": torch.__version__},
    )
    with output_directory(out, kind="bundle", overwrite=overwrite, inputs=inputs) as root:
        items.save(root / ITEMS)
        _save_program(ServingProgram(policy, k), root / ONNX_PROGRAM)
        runtime = load_runtime(root, manifest, "onnx")
        verify_runtime(runtime, policy, k)
        write_golden(Bundle(root, manifest, items, runtime), root / GOLDEN)
        if manifest.options is not None:
            save_policy(policy, items, root)
            verify_runtime(load_runtime(root, manifest, "torch"), policy, k)
        manifest.write(root)


def _servable(policy: Policy) -> Policy:
    """The policy with precomputed item vectors: serving costs the same with item features and without.

    Raises:
        RecpoError: it reads of a user what a bundle is not given.
    """
    reads = {"user_features": policy.reads_user, "context_features": policy.reads_context}
    if asked := [name for name, read in {**reads, "behaviors": policy.reads_behaviors}.items() if read]:
        raise RecpoError(
            f"the policy reads {', '.join(asked)}, which the programs of a bundle are not given yet: train it with "
            f"policy.{asked[0]} false to serve it from a bundle, or recommend with the run"
        )
    if policy.reads_item_features:
        policy = copy.deepcopy(policy)
        policy.precompute_item_vectors()
    return policy


def verify_runtime(runtime: Runtime, policy: Policy, k: int, *, seed: int = 0) -> None:
    """Compares a runtime with the policy on random histories, the first of them empty, the last one full.

    The lists must be the same but for the order of items whose scores differ by less than 1e-4.

    Raises:
        RecpoError: they differ.
    """
    generator = torch.Generator().manual_seed(seed)
    for users in _CHECKED_USERS:
        inputs = _random_inputs(policy, users, generator)
        expected_items, expected_scores = map(torch.from_numpy, PolicyRuntime(policy).recommend(inputs, k))
        top_items, scores = map(torch.from_numpy, runtime.recommend(inputs, k))
        gap = (scores - expected_scores).abs().nan_to_num(0.0)  # -inf against -inf, where the list is short
        if scores.isnan().any() or gap.max() > _SCORE_TOLERANCE:
            raise RecpoError(
                f"the exported program's scores are nan or differ from the policy's, by {gap.max().item():.2g}"
            )
        moved = top_items != expected_items
        own = _score_of(top_items, expected_items, expected_scores)
        if bool((moved & ((own - scores).abs() > _SCORE_TOLERANCE)).any()):
            raise RecpoError(f"the exported program recommends other items than the policy ({int(moved.sum())} places)")


def _within(values: Tensor, largest: int) -> Tensor:
    return torch.where((values > 0) & (values <= largest), values, 0)


def _score_of(item_ids: Tensor, listed: Tensor, scores: Tensor) -> Tensor:
    """The score of ``item_ids [B, k]`` in the list that ranks ``listed [B, k]``; for others that of its last place."""
    same = item_ids[:, :, None] == listed[:, None, :]
    return torch.where(same.any(2), scores.gather(1, same.int().argmax(2)), scores[:, -1:])


def _random_inputs(policy: Policy, users: int, generator: torch.Generator) -> EncodedHistories:
    lengths = torch.randint(policy.max_history + 1, (users,), generator=generator)
    lengths[-1], lengths[0] = policy.max_history, 0
    real = torch.arange(policy.max_history) < lengths[:, None]
    item_ids = torch.randint(1, policy.num_items + 1, real.shape, generator=generator) * real
    feedback = torch.randint(UNKNOWN, HIGHEST + 1, real.shape, generator=generator) * real
    exclude = torch.randint(policy.num_items + 1, (users, 3), generator=generator)
    gaps = torch.randint(_LONGEST_GAP_MS, real.shape, generator=generator)
    times = ((_FIRST_TIME_MS + gaps.cumsum(1)) * real).numpy() if policy.reads_timestamps else None
    return EncodedHistories(item_ids.numpy(), feedback.numpy(), exclude.numpy(), times)


def _save_program(program: ServingProgram, file: Path) -> None:
    random = _random_inputs(program.policy, _EXAMPLE_USERS, torch.Generator().manual_seed(0))
    inputs = tuple(torch.from_numpy(values) for values in random if values is not None)
    users, exclude = Dim("users", min=1), Dim("exclude", min=1)
    shapes = ({0: users}, {0: users}, {0: users, 1: exclude}, {0: users})[: len(inputs)]
    with _quiet(), torch.no_grad():
        exported = torch.export.export(program, inputs, dynamic_shapes=shapes)
        _forget_sources(exported)
        onnx = torch.onnx.export(
            exported, input_names=INPUTS[: len(inputs)], output_names=OUTPUTS, dynamo=True, verbose=False
        )
    assert onnx is not None
    size = sum(t.nbytes for t in program.state_dict().values())
    onnx.save(str(file), external_data=size > _PROTOBUF_LIMIT)


def _forget_sources(exported: ExportedProgram) -> None:
    """Drops the stack traces: they name the files of the machine that exports."""
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's notes on its own internals (a missing torchvision, deprecated classes) say nothing to a user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
