"""A run directory. It is self-contained and relocatable, and altered files are rejected.

::

    run/resolved.yaml      every option of the run; `recpo train --config run/resolved.yaml` repeats it
    run/items.parquet      external item ids of 1..V
    run/feedback.json      how feedback levels are computed from raw events
    run/codes/             the item codes of a policy over semantic ids
    run/features.json      for a policy that reads features: the fitted schema, and the behaviors in the order of their
                           bits
    run/item_features.parquet  the features of the items; row v - 1 is item v
    run/vocabularies/      of the categories, for raw features in serving
    run/origin.json        the run's inputs (prepared data, init_from, reward models), with checksums
    run/checkpoints/       best.ckpt (by the validation metric) and last.ckpt: plain tensors and numbers, read with
                           torch.load(weights_only=True); for a sharded run, directories of safetensors
    run/logs/              metrics.csv and TensorBoard events
    run/run.json           written last: the run is finished; checksums of the files above and of itself
"""

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import pyarrow.parquet as pq
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor, nn

from recpo.artifacts.artifact import Artifact
from recpo.artifacts.checksums import kind_of, verify
from recpo.artifacts.documents import describe_os_error, read_json, read_yaml
from recpo.artifacts.outputs import output_file, write_json
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError, reading
from recpo.base.feature_encoding import PolicyFeatures
from recpo.base.features import FeatureSchema, Side, read_features
from recpo.base.feedback import FeedbackDefinition
from recpo.base.types import Features
from recpo.log.id_map import IdMap
from recpo.log.prepared import ITEM_FEATURES, Prepared
from recpo.training.checkpoints import load_plain, saved_tensors
from recpo.training.class_names import validate_class_names
from recpo.training.options import PolicyFactory

FEATURE_SCHEMA, VOCABULARIES = "features.json", "vocabularies"
_LEAVINGS = (".partial", ".recpo-")  # parts of names of what a killed process has begun to write

#: Metric to its points ``[step, value]``.
Curves = dict[str, list[list[float]]]

_SHOWN: Final = ("train/loss", "val/")
_MOST_POINTS: Final = 200
_ZERO_GROUPS, _SKIPPED_STEPS, _CLIPPED = 0.5, 0.2, 0.3  # from here on, a share is worth a sentence
_STILL_RISING: Final = 0.1  # share of the whole gain that the last validation adds
_LEAST_VALIDATIONS: Final = 3
_SAME_LISTS: Final = 2  # lists of all users come from fewer items than this many lists hold
_LISTS_OF_A_SMALL_CATALOG: Final = 10


@dataclass(frozen=True)
class Run(Artifact):
    """A finished run, as plain data and a policy. ``recpo.recommend``, ``recpo.score`` and ``recpo.export`` serve it.

    Attributes:
        root: its directory.
        num_items: catalog size V.
        catalog_checksum: checksum of the items it was trained on (``Prepared.catalog_checksum``).
        results: the metrics of the last step and of the last validation; None = not a number.
        monitor: the metric that selected the best checkpoint; None = nothing was validated.
        files: SHA-256 of the other files than ``run.json``, by their path in the directory.
        trust: packages besides ``TRUSTED`` whose classes its configuration may name.
    """

    kind: ClassVar = "run"
    version: ClassVar = 8
    made_by: ClassVar = "recpo train"

    RESOLVED: ClassVar = "resolved.yaml"
    FINISHED: ClassVar = "run.json"
    ORIGIN: ClassVar = "origin.json"
    CHECKPOINTS: ClassVar = "checkpoints"
    ITEMS: ClassVar = "items.parquet"
    FEEDBACK: ClassVar = "feedback.json"
    CODES: ClassVar = "codes"

    root: Path
    num_items: int
    catalog_checksum: str
    results: dict[str, float | None] = field(repr=False)
    monitor: str | None
    files: dict[str, str] = field(repr=False)
    trust: tuple[str, ...] = ()

    @classmethod
    def open(cls, root: Path | str | Self, trust: Sequence[str] = ()) -> Self:
        """Opens and verifies the directory of a finished run. Checkpoints are verified when they are loaded.

        A configuration names classes, and loading a policy imports them, so a directory from somebody else could name
        its own code. ``recpo.training.class_names`` says which classes it may name; nothing else is imported. Weights
        are read without unpickling (``weights_only``).

        Args:
            root: the directory, or an open run.
            trust: further packages whose classes the configuration may name.

        Raises:
            RecpoError: not a run, an unfinished run, another format, changed files, or a configuration that names
                classes of other packages.
        """
        if isinstance(root, Artifact):
            return super().open(root)
        root = Path(root)
        begun = (root / Run.RESOLVED).is_file() and kind_of(root) in (None, "run")
        if begun and not (root / Run.FINISHED).is_file():
            raise RecpoError(
                f"{root} did not finish: resume it with `recpo train --config {root}/{Run.RESOLVED} --resume true`",
                code="unfinished",
                field=Run.FINISHED,
            )
        facts, names = cls.facts_of(root), ("num_items", "catalog_checksum", "results", "monitor", "files")
        if missing := set(names) - facts.keys():
            raise RecpoError(
                f"{root / Run.FINISHED} is damaged: {', '.join(sorted(missing))} missing; train the run again",
                code="damaged",
                field=Run.FINISHED,
            )
        run = cls(root, **{name: facts[name] for name in names}, trust=tuple(trust))
        run.verify([name for name in run.files if not name.startswith(Run.CHECKPOINTS)])
        validate_class_names(run.configuration, run.trust, root / Run.RESOLVED)
        return run

    def verify(self, files: Iterable[str]) -> None:
        """Verifies the checksums of files.

        Raises:
            RecpoError: a file is missing or has changed.
        """
        verify(self.root, {name: self.files[name] for name in files}, Run.remedy())

    @property
    def best_step(self) -> int:
        """Optimizer steps of the best checkpoint; not of a sharded run."""
        return int(load_plain(self.checkpoint())["global_step"])

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """Every option of the run, from ``resolved.yaml``; item codes are the ones in the run."""
        content: dict[str, Any] = read_yaml(self.root / Run.RESOLVED, Run.remedy())
        policy = content.get("policy", {})
        if (self.root / Run.CODES).is_dir():
            # a tilted policy has the codes of its base
            for part in (policy, policy.get("init_args", {}).get("base", {})):
                if "codes" in part.get("init_args", {}):
                    part["init_args"]["codes"] = str(self.root / Run.CODES)
        return content

    @property
    def advice(self) -> list[str]:
        """What went wrong in the training, as sentences that name the option to change.

        Rewards that are constant in most groups, a policy at its KL bound, clipped ratios, a monitor that was best at
        the first or still improving at the last validation, and lists that hardly differ between users.
        """
        curves = _logged(self.root)
        of_training = {name: points for name, points in curves.items() if name.startswith("train/")}
        late = {name: float(np.mean(points[len(points) // 2 :], 0)[1]) for name, points in of_training.items()}
        said = []
        if self.configuration.get("rollout") is not None and late.get("train/zero_group_share", 0.0) > _ZERO_GROUPS:
            said.append(
                f"The reward was constant in {late['train/zero_group_share']:.0%} of the groups in the second half of "
                "the training, and such a group teaches nothing: enlarge rollout.group_size, or choose a finer reward."
            )
        if late.get("train/step_skipped", 0.0) > _SKIPPED_STEPS:
            said.append(
                f"{late['train/step_skipped']:.0%} of the late steps were skipped, because the policy was farther from "
                "its snapshot than rollout.max_kl: lower the learning rate or rollout.epochs, or raise the bound."
            )
        if late.get("train/clip_fraction", 0.0) > _CLIPPED:
            said.append(
                f"{late['train/clip_fraction']:.0%} of the late ratios were clipped, so they had no gradient: lower "
                "the learning rate, rollout.batches or rollout.epochs."
            )
        if self.monitor in curves:
            values = [value for _, value in curves[self.monitor]]
            said += _of_monitor(self.monitor, values, lower_is_better=self.monitor == "val/pair_loss")
        return said + _of_lists(curves, self.num_items)

    @cached_property
    def origin(self) -> dict[str, Any]:
        """The inputs of the run, with checksums, from ``origin.json``."""
        content: dict[str, Any] = read_json(self.root / Run.ORIGIN, Run.remedy())
        return content

    @property
    def repeats(self) -> bool:
        """Whether lists may have items of a user's past, as the prepared data said."""
        return bool(self.origin.get("data", {}).get("repeats"))

    @cached_property
    def items(self) -> IdMap:
        """External ids of the items 1..V."""
        return IdMap.load(self.root / Run.ITEMS)

    @cached_property
    def feedback(self) -> FeedbackDefinition:
        """How feedback levels are computed from raw events."""
        return FeedbackDefinition.from_json(
            read_json(self.root / Run.FEEDBACK, Run.remedy()), str(self.root / Run.FEEDBACK)
        )

    @cached_property
    def _features(self) -> dict[str, Any]:
        return read_json(self.root / FEATURE_SCHEMA, Run.remedy()) if FEATURE_SCHEMA in self.files else {}

    @property
    def feature_schema(self) -> FeatureSchema:
        """The features of the data that it was trained on; empty if its policy reads none."""
        return FeatureSchema.from_json(self._features.get("features"), str(self.root / FEATURE_SCHEMA))

    @property
    def behaviors(self) -> tuple[str, ...]:
        """The behaviors of these data, in the order of their bits; empty if its policy reads no features."""
        return tuple(self._features.get("behaviors", ()))

    def item_features(self) -> Features:
        """The features of the items that its policy reads, as those of ``Prepared``."""
        try:
            table = pq.read_table(self.root / ITEM_FEATURES)
        except OSError as error:
            raise RecpoError(
                f"{describe_os_error(error, str(self.root / ITEM_FEATURES))}; {Run.remedy()}",
                code="missing_file",
                field=ITEM_FEATURES,
            ) from error
        return read_features(self.feature_schema.item, table, first_missing=True).tensors()

    def kept_features(self, policy: Policy) -> PolicyFeatures:
        """The fitted features that its policy reads, and the behaviors.

        Raises:
            RecpoError: a file is missing or damaged.
        """
        read = FeatureSchema(**{side: self.feature_schema.of(side) for side in _sides(policy)})
        behaviors = self.behaviors if policy.reads.behaviors else ()
        return PolicyFeatures.load(self.root, read, behaviors, remedy=Run.remedy())

    def features_that_differ(self, policy: Policy, data: Prepared) -> list[str]:
        """The fitted features of ``data`` that differ from those that it keeps for a policy; empty if it keeps none."""
        if FEATURE_SCHEMA not in self.files:
            return []
        kept, found = self.kept_features(policy), []
        for side in _sides(policy):
            before, now = kept.of(side), data.fitted_features(side)
            if not (before.agrees(now) and now.agrees(before)):
                found.append(f"features of {'requests' if side == 'context' else side + 's'}")
        if policy.reads.behaviors and kept.behaviors != data.behaviors:
            found.append("behaviors")
        return found

    def validate_items(self, data: Prepared) -> None:
        """Raises ``RecpoError`` if prepared data has other items than the run was trained on."""
        if self.catalog_checksum == data.catalog_checksum:
            return
        if not self.items.equals(data.item_ids()):  # a longer log of the same items has other counts in the file
            raise RecpoError(
                f"{self.root} was trained on other items than {data.root} holds (items.parquet differs): name the "
                "prepared directory it was trained on, or one with the same items in the same order",
                code="mismatch",
                field=Run.ITEMS,
            )

    def validate_data(self, data: Prepared) -> None:
        """Raises ``RecpoError`` if the events of prepared data mean something else to the run, or its items differ."""
        self.feedback.validate_same(data.feedback, self.root, data.root)
        self.validate_items(data)

    def checkpoint(self, name: str = "best") -> Path:
        """The checkpoint ``best`` or ``last``, verified.

        Raises:
            RecpoError: there is none, or it has changed.
        """
        path, files = checkpoint_path(self.root, name), self.checkpoint_files(name)
        if not files:
            raise RecpoError(
                f"{path} is missing: the run kept no such checkpoint", code="missing_file", field=path.name
            )
        self.verify(files)
        return path

    def checkpoint_files(self, name: str) -> dict[str, str]:
        """The SHA-256 of a checkpoint: of one file, or of those in the directory of a sharded run."""
        inside = f"{Run.CHECKPOINTS}/{name}.ckpt"
        return {file: one for file, one in self.files.items() if file == inside or file.startswith(inside + "/")}

    def weights_checksum(self, checkpoint: str = "best") -> str | None:
        """SHA-256 of a checkpoint; None if it is the directory of a sharded run."""
        return self.checkpoint_files(checkpoint).get(f"{Run.CHECKPOINTS}/{checkpoint}.ckpt")

    def option(self, name: str, kind: Any) -> Any:
        """The option ``name`` of the run, rebuilt from its configuration."""
        what, remedy = f"{self.root / Run.RESOLVED}: {name}", "train the run again with this version"
        with reading(what, ArgumentError, KeyError, ImportError, remedy=remedy, field=name):
            return built(name, kind, self.configuration[name])

    def policy(self, checkpoint: str = "best") -> Policy:
        """Rebuilds the policy, in evaluation mode.

        Args:
            checkpoint: ``best`` or ``last``.

        Raises:
            RecpoError: the checkpoint has changed or does not fit the configuration.
        """
        factory: PolicyFactory = self.option("policy", PolicyFactory)
        what = f"{self.root / Run.RESOLVED}: policy"
        with reading(what, TypeError, ValueError, RuntimeError, remedy=Run.remedy(), field="policy"):
            policy = factory(self.num_items)
        hand_over(policy, self)
        load_weights(policy, self.checkpoint(checkpoint))
        return policy.eval()


def built(name: str, kind: Any, value: Any) -> Any:
    """The option ``name``, of the type ``kind``, from its value in a configuration."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{name}", type=kind)
    return parser.instantiate(parser.parse_object({name: value}))[name]


def write_items(root: Path, data: Prepared) -> None:
    """Writes the external ids of the items, and how feedback levels are computed."""
    data.item_ids().save(root / Run.ITEMS)
    write_json(root / Run.FEEDBACK, data.feedback.to_json())


def data_facts(data: Prepared) -> dict[str, Any]:
    """Period, counts, type of the user ids and column of the item ids, for the model card and the readers of ids."""
    return {
        "boundaries": dict(data.manifest["boundaries"]),
        "splits": dict(data.manifest["counts"]["splits"]),
        "label": data.manifest["label"]["class_path"],
        "time_unit": data.manifest["config"]["columns"]["time_unit"],
        "user_ids": data.user_id_type,
        "item_column": data.item_column,
        "repeats": data.repeats,
    }


def mark_finished(
    root: Path, policy: Policy, data: Prepared | Run, results: dict[str, float | None], monitor: str | None = None
) -> None:
    """Writes ``run.json``, which marks the run as finished for other verbs.

    Args:
        root: the run directory.
        policy: the trained policy.
        data: its training data, or a run on the same items.
        results: metrics of the last step and the last validation.
        monitor: the metric that selected the best checkpoint.
    """
    files = (Run.RESOLVED, Run.ITEMS, Run.FEEDBACK, Run.ORIGIN, FEATURE_SCHEMA, ITEM_FEATURES)
    kept = [file for file in files if (root / file).is_file()]
    kept += [
        str(file.relative_to(root))
        for part in (Run.CODES, Run.CHECKPOINTS, VOCABULARIES)
        for file in _files_in(root / part)
    ]
    facts = {"num_items": policy.num_items, "catalog_checksum": data.catalog_checksum, "results": results}
    Run.write_facts(root, facts | {"monitor": monitor}, kept)


def _files_in(directory: Path) -> list[Path]:
    kept = sorted(file for file in directory.rglob("*") if file.is_file())
    return [file for file in kept if not any(left in str(file.relative_to(directory)) for left in _LEAVINGS)]


def checkpoint_path(run: Path, checkpoint: str = "best") -> Path:
    """The path of the checkpoint ``best`` or ``last``."""
    return Path(run) / Run.CHECKPOINTS / f"{checkpoint}.ckpt"


def write_configuration(root: Path, configuration: Mapping[str, Any]) -> None:
    """Writes ``resolved.yaml``, completely or not at all."""
    with output_file(root / Run.RESOLVED) as partial:
        partial.write_text(yaml.safe_dump(configuration, sort_keys=False), encoding="utf-8")


def load_weights(
    module: nn.Module,
    checkpoint: Path,
    prefix: str = "policy.",
    adapt: Callable[[dict[str, Any], Mapping[str, Tensor]], dict[str, Any]] | None = None,
) -> None:
    """Copies the weights of the trained policy in ``checkpoint`` into ``module``. Nothing is unpickled.

    Args:
        module: the policy, or another network of the training.
        checkpoint: the file, or the directory of a sharded run.
        prefix: prefix of the network's weights: ``policy.``, ``critic.score.`` and so on.
        adapt: computes the tensors to load from the saved tensors and the network's own; None = load them unchanged.

    Raises:
        RecpoError: the file is missing, or a weight is missing, unexpected, of another shape, or not a number.
    """
    saved = saved_tensors(checkpoint)
    weights = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
    own, part = module.state_dict(), prefix.rstrip(".")
    weights = weights if adapt is None else adapt(weights, own)
    faults = [f"{name}: only in the checkpoint" for name in weights.keys() - own.keys()]
    faults += [f"{name}: only in the {part}" for name in own.keys() - weights.keys()]
    faults += [
        f"{name}: {tuple(weights[name].shape)} in the checkpoint, {tuple(own[name].shape)} in the {part}"
        for name in weights.keys() & own.keys()
        if weights[name].shape != own[name].shape
    ]
    if faults:
        listed = "\n  ".join(sorted(faults)[:10])
        raise RecpoError(
            f"{checkpoint} does not fit the {part} ({len(faults)} faults); use that run's {part} options:\n  {listed}",
            code="mismatch",
            field=checkpoint.name,
        )
    # a table without memory gets its values when it is sharded
    whole = {n: w if isinstance(w, Tensor) or own[n].is_meta else w.whole() for n, w in weights.items()}
    spoiled = [n for n, w in whole.items() if isinstance(w, Tensor) and not w.isfinite().all()]
    if spoiled:
        raise RecpoError(
            f"{checkpoint} holds weights that are not numbers ({', '.join(sorted(spoiled)[:5])}): its training "
            "diverged; train that run again with a lower learning rate",
            code="diverged",
            field=checkpoint.name,
        )
    module.load_state_dict(whole)


def hand_over(policy: Policy, data: Prepared | Run) -> None:
    """Gives a new policy the schema, behaviors and item features of its data, before its weights are loaded.

    Raises:
        RecpoError: the policy reads something that the data does not have.
    """
    policy.set_schema(data.feature_schema, data.behaviors)
    if policy.reads_item_features:
        policy.set_item_features(data.item_features())


def write_features(root: Path, policy: Policy, data: Prepared) -> None:
    """Stores in the run directory ``root`` what ``hand_over`` needs; nothing if the policy reads no features."""
    if not (_sides(policy) or policy.reads.behaviors):
        return
    write_json(root / FEATURE_SCHEMA, {"features": data.feature_schema.to_json(), "behaviors": list(data.behaviors)})
    if policy.reads_item_features:
        names = [feature.name for feature in data.feature_schema.item]
        pq.write_table(data.table(ITEM_FEATURES, names), root / ITEM_FEATURES)
    fitted: dict[str, Any] = {side: data.fitted_features(side) for side in _sides(policy)}
    PolicyFeatures(**fitted).save(root)


def _sides(policy: Policy) -> list[Side]:
    """Whose features it reads: those of items make the vectors of new ones."""
    reads: dict[Side, bool] = {
        "item": policy.reads_item_features,
        "user": policy.reads.user,
        "context": policy.reads.context,
    }
    return [side for side, read in reads.items() if read]


def training_curves(run: Path) -> Curves:
    """The loss and the validation metrics over optimizer steps, thinned to 200 points each.

    A resumed run logs into another file, which continues where the first one ended. Empty where the run has no CSV log.

    Raises:
        RecpoError: a log is no table of numbers.
    """
    return {name: _thinned(points) for name, points in _logged(run).items() if name.startswith(_SHOWN)}


def _of_monitor(name: str, values: Sequence[float], lower_is_better: bool) -> list[str]:
    if len(values) < _LEAST_VALIDATIONS:
        return []
    signed = -np.asarray(values) if lower_is_better else np.asarray(values)
    gain = signed.max() - signed.min()
    if not gain > 0:
        return []
    if signed.argmax() == 0:
        return [
            f"{name} was best at the first of {len(values)} validations: lower the learning rate, or validate earlier "
            "(trainer.val_check_interval)."
        ]
    if signed.argmax() == len(signed) - 1 and signed[-1] - signed[:-1].max() > _STILL_RISING * gain:
        return [f"{name} was still improving at the last of {len(values)} validations: train longer."]
    return []


def _of_lists(curves: Curves, num_items: int) -> list[str]:
    for name, points in curves.items():
        if name.startswith("val/coverage@"):
            k, items = int(name.partition("@")[2]), round(points[-1][1] * num_items)
            if num_items > _LISTS_OF_A_SMALL_CATALOG * k and items < _SAME_LISTS * k:
                return [
                    f"Lists hardly differ between users: those of the validation period come from {items:,} of "
                    f"{num_items:,} items. Compare the policy with the baseline popularity."
                ]
    return []


def _logged(run: Path) -> Curves:
    """Every metric of the CSV logs, in the order of the steps."""
    curves: dict[str, dict[float, float]] = defaultdict(dict)
    for file in sorted((run / "logs").glob("version_*/metrics.csv"), key=_number_of_log):
        remedy = "copy the run again, or remove this file, which only its curves need"
        faults = reading(file, ValueError, KeyError, TypeError, AttributeError, csv.Error, remedy=remedy)
        with faults, file.open(encoding="utf-8", newline="") as handle:
            for row in csv.DictReader(handle):
                for name, text in row.items():
                    if text and name.startswith(("train/", "val/")) and math.isfinite(float(text)):
                        curves[name][float(row["step"])] = float(text)
    return {name: [list(point) for point in sorted(points.items())] for name, points in curves.items()}


def _number_of_log(file: Path) -> int:
    digits = file.parent.name.removeprefix("version_")
    return int(digits) if digits.isdigit() else -1


def _thinned(points: list[list[float]]) -> list[list[float]]:
    stride = max(1, math.ceil(len(points) / _MOST_POINTS))
    return points[::stride] if (len(points) - 1) % stride == 0 else [*points[::stride], points[-1]]
