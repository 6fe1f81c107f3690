"""Writes a trained policy as a bundle: one program, exported twice, and checked against the policy before it counts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from recpo import __version__
from recpo.artifacts import output_directory
from recpo.contracts import Policy
from recpo.data.id_map import IdMap
from recpo.errors import RecpoError
from recpo.serving.manifest import ITEMS, ONNX_PROGRAM, TORCH_PROGRAM, write_manifest
from recpo.serving.runtimes import INPUTS, OUTPUTS, Runtime, RuntimeName, load_runtime
from recpo.types import Histories

_EXAMPLE_USERS = 2  # 1 would be taken for a constant
_CHECKED_USERS = (1, 33)  # batch sizes; other than the example's
_SCORE_TOLERANCE = 1e-4
_NUM_FEEDBACK_LEVELS = 6
_FIRST_TIME_MS, _LONGEST_GAP_MS = 1_600_000_000_000, 10 * 86_400_000  # times of random histories
_PROTOBUF_LIMIT = 2**31 - 2**24  # bytes of weights, with room for the graph


class ServingProgram(nn.Module):
    """The function that is exported: the policy's own ``recommend`` with what a server hands over.

    ``(item_ids [B, H], feedback [B, H], blocked [B, M], timestamps [B, H]) -> (top_items [B, k], scores [B, k])``; ids
    are internal, rows are padded with 0 on the right, and nothing of the history or of ``blocked`` is recommended.
    ``timestamps`` is an input only of a policy that reads them.
    """

    def __init__(self, policy: Policy, k: int) -> None:
        super().__init__()
        self.policy = policy
        self.k = k

    def forward(
        self, item_ids: Tensor, feedback: Tensor, blocked: Tensor, timestamps: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        histories = Histories(item_ids, (item_ids != 0).sum(1), feedback, timestamps)
        top = self.policy.recommend(histories, self.k, torch.cat([item_ids, blocked], 1))
        return top.item_ids, top.scores


def export_bundle(
    policy: Policy,
    prepared: Path,
    out: Path,
    *,
    k: int = 100,
    feedback: dict[str, Any] | None = None,
    origin: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Exports ``policy`` to the directory ``out``, which appears only when it is complete and verified.

    Both programs must give the policy's own lists and scores, within 1e-4, on random histories, empty and full ones
    among them.

    Args:
        policy: a trained policy.
        prepared: the prepared directory that it was trained on; its ``items.parquet`` names the items.
        out: the bundle directory.
        k: length of the lists; at most the size of the catalog.
        feedback: how feedback levels are computed, for the manifest.
        origin: where the policy comes from (its class path and options, say), for the manifest.
        overwrite: replace an existing ``out``.

    Raises:
        RecpoError: ``out`` exists, the policy belongs to another catalog, k is out of range, or a program differs
            from the policy.
    """
    items = IdMap.load(Path(prepared) / ITEMS)
    if len(items) != policy.num_items:
        raise RecpoError(
            f"{prepared} has {len(items)} items, the policy {policy.num_items}: name the data it was trained on"
        )
    if not 1 <= k <= policy.num_items:
        raise RecpoError(f"k is {k}, expected 1 to {policy.num_items}, the size of the catalog")
    policy = policy.cpu().eval()
    with output_directory(out, kind="bundle", overwrite=overwrite) as root:
        items.save(root / ITEMS)
        _save_programs(ServingProgram(policy, k), root)
        for engine in get_args(RuntimeName):
            verify_program(load_runtime(root, engine), policy, k)
        write_manifest(root, _description(policy, k) | {"feedback": feedback, "origin": origin})


def verify_program(engine: Runtime, policy: Policy, k: int, *, seed: int = 0) -> None:
    """Compares an exported program with the policy on random histories, the first of them empty, the last one full.

    The lists must be the same but for the order of items whose scores differ by less than 1e-4.

    Raises:
        RecpoError: they differ.
    """
    generator = torch.Generator().manual_seed(seed)
    for users in _CHECKED_USERS:
        inputs = _random_inputs(policy, users, generator)
        with torch.inference_mode():
            expected_items, expected_scores = ServingProgram(policy, k)(*inputs)
        top_items, scores = map(torch.from_numpy, engine(*(t.numpy() for t in inputs)))
        gap = (scores - expected_scores).abs().nan_to_num(0.0)  # -inf against -inf, where the list is short
        if scores.isnan().any() or gap.max() > _SCORE_TOLERANCE:
            raise RecpoError(
                f"the exported program's scores are nan or differ from the policy's, by {gap.max().item():.2g}"
            )
        moved = top_items != expected_items
        own = _score_of(top_items, expected_items, expected_scores)
        if bool((moved & ((own - scores).abs() > _SCORE_TOLERANCE)).any()):
            raise RecpoError(f"the exported program recommends other items than the policy ({int(moved.sum())} places)")


def _score_of(item_ids: Tensor, listed: Tensor, scores: Tensor) -> Tensor:
    """The score of ``item_ids [B, k]`` in the list that ranks ``listed [B, k]``; for others that of its last place."""
    same = item_ids[:, :, None] == listed[:, None, :]
    return torch.where(same.any(2), scores.gather(1, same.int().argmax(2)), scores[:, -1:])


def _random_inputs(policy: Policy, users: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    lengths = torch.randint(policy.max_history + 1, (users,), generator=generator)
    lengths[-1], lengths[0] = policy.max_history, 0
    real = torch.arange(policy.max_history) < lengths[:, None]
    item_ids = torch.randint(1, policy.num_items + 1, real.shape, generator=generator) * real
    feedback = torch.randint(_NUM_FEEDBACK_LEVELS, real.shape, generator=generator) * real
    blocked = torch.randint(policy.num_items + 1, (users, 3), generator=generator)
    if not policy.reads_timestamps:
        return item_ids, feedback, blocked
    gaps = torch.randint(_LONGEST_GAP_MS, real.shape, generator=generator)
    return item_ids, feedback, blocked, (_FIRST_TIME_MS + gaps.cumsum(1)) * real


def _save_programs(program: ServingProgram, root: Path) -> None:
    inputs = _random_inputs(program.policy, _EXAMPLE_USERS, torch.Generator().manual_seed(0))
    users, blocked = Dim("users", min=1), Dim("blocked", min=1)
    shapes = ({0: users}, {0: users}, {0: users, 1: blocked}, {0: users})[: len(inputs)]
    with _quiet(), torch.no_grad():
        exported = torch.export.export(program, inputs, dynamic_shapes=shapes)
        _forget_sources(exported)
        torch.export.save(exported, root / TORCH_PROGRAM)
        onnx = torch.onnx.export(
            exported, input_names=INPUTS[: len(inputs)], output_names=OUTPUTS, dynamo=True, verbose=False
        )
    assert onnx is not None
    size = sum(t.nbytes for t in program.state_dict().values())
    onnx.save(str(root / ONNX_PROGRAM), external_data=size > _PROTOBUF_LIMIT)


def _forget_sources(exported: ExportedProgram) -> None:
    """Drops the stack traces: they name the files of the machine that exports."""
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)


def _description(policy: Policy, k: int) -> dict[str, Any]:
    users, history = "users", policy.max_history
    timestamps = {"shape": [users, history], "type": "int64", "meaning": "milliseconds since the epoch, 0 pads"}
    return {
        "recpo_version": __version__,
        "torch_version": torch.__version__,
        "policy": f"{type(policy).__module__}.{type(policy).__qualname__}",
        "num_items": policy.num_items,
        "max_history": history,
        "k": k,
        "inputs": {
            "item_ids": {"shape": [users, history], "type": "int64", "meaning": "item_index, oldest first, 0 pads"},
            "feedback": {
                "shape": [users, history],
                "type": "int64",
                "meaning": "feedback level of each event, 0 unknown",
            },
            "blocked": {"shape": [users, "blocked"], "type": "int64", "meaning": "item_index not to show, 0 pads"},
            **({"timestamps": timestamps} if policy.reads_timestamps else {}),
        },
        "outputs": {
            "top_items": {
                "shape": [users, k],
                "type": "int64",
                "meaning": "item_index, best first, 0 where none is left",
            },
            "scores": {"shape": [users, k], "type": "float32", "meaning": "natural-log probabilities"},
        },
    }


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
