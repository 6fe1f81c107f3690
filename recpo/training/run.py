"""A run directory. It is self-contained and relocatable, and altered files are rejected.

::

    run/resolved.yaml      every option of the run; `recpo train --config run/resolved.yaml` repeats it
    run/items.parquet      external item ids of 1..V
    run/feedback.json      how feedback levels are computed from raw events
    run/codes/             the item codes of a policy over semantic ids
    run/features.json      and item_features.parquet, for a policy that reads features (run_features.py)
    run/origin.json        the run's inputs (prepared data, init_from, reward models), with checksums
    run/checkpoints/       best.ckpt (by the validation metric) and last.ckpt: plain tensors and numbers, read with
                           torch.load(weights_only=True); for a sharded run, directories of safetensors
    run/logs/              metrics.csv and TensorBoard events
    run/run.json           written last: the run is finished; checksums of the files above and of itself
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor, nn

from recpo.artifacts import (
    MARKER,
    is_inside,
    kind_of,
    marker,
    other_kind,
    output_file,
    read_json,
    read_yaml,
    seal,
    sha256,
    unseal,
    write_json,
)
from recpo.artifacts.semantic_codes import CODEBOOKS
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.base.feedback import FeedbackDefinition
from recpo.base.frames import Frame, FrameOrPath
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared
from recpo.policies.catalog_search import Precision
from recpo.serving.bundle import Bundle
from recpo.serving.export import export_bundle
from recpo.serving.histories import HistoryReader
from recpo.serving.item_index import IndexOptions
from recpo.serving.recommending import Moment, recommend_lists, score_candidates
from recpo.serving.runtimes import PolicyRuntime
from recpo.training.card_facts import card_facts, evaluation_facts
from recpo.training.checkpoints import saved_tensors
from recpo.training.class_names import validate_class_names
from recpo.training.options import PolicyFactory
from recpo.training.run_features import FEATURE_FILES, VOCABULARIES, hand_over_kept, kept_features, write_features

if TYPE_CHECKING:
    import pandas as pd

    from recpo.evaluation.evaluation import Evaluation

FORMAT_VERSION = 5
RESOLVED, FINISHED, ORIGIN, CHECKPOINTS = "resolved.yaml", "run.json", "origin.json", "checkpoints"
REMEDY = "copy the whole run again, or train it again"
ITEMS, FEEDBACK, CODES = "items.parquet", "feedback.json", "codes"
_LEAVINGS = (".partial", ".recpo-")  # parts of names of what a killed process has begun to write


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        root: its directory.
        facts: content of ``run.json``.
        trust: packages besides ``TRUSTED`` whose classes its configuration may name.
    """

    root: Path
    facts: dict[str, Any] = field(repr=False)
    trust: tuple[str, ...] = ()

    @classmethod
    def open(cls, root: Path | str | Run, trust: Sequence[str] = ()) -> Run:
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
        if isinstance(root, Run):
            return root
        root = Path(root)
        if not (root / FINISHED).is_file():
            if (root / RESOLVED).is_file() and kind_of(root) in (None, "run"):
                raise RecpoError(
                    f"{root} did not finish: resume it with `recpo train --config {root}/{RESOLVED} --resume true`"
                )
            other = other_kind(root, "run") or ""
            raise RecpoError(
                f"{root} is not a run directory{other}: {FINISHED} is missing; make one with `recpo train`"
            )
        facts = read_json(root / FINISHED, REMEDY)
        if facts.get("format_version") != FORMAT_VERSION:
            raise RecpoError(
                f"{root}: format_version {facts.get('format_version')!r}, this recpo reads {FORMAT_VERSION}; train it "
                f"again: recpo train --config {root}/{RESOLVED} --out <another directory>"
            )
        facts = unseal(facts, root / FINISHED, REMEDY)
        missing = {"num_items", "catalog_checksum", "results", "files"} - facts.keys()
        if missing:
            raise RecpoError(f"{root / FINISHED} is damaged: {', '.join(sorted(missing))} missing; train the run again")
        run = cls(root, facts, tuple(trust))
        run.verify([name for name in facts["files"] if not name.startswith(CHECKPOINTS)])
        validate_class_names(run.configuration, run.trust, root / RESOLVED)
        return run

    def verify(self, files: Iterable[str]) -> None:
        """Verifies the checksums of files.

        Raises:
            RecpoError: a file is missing or has changed.
        """
        expected = self.facts["files"]
        wrong = []
        for name in files:
            file = self.root / name
            if not is_inside(name):
                raise RecpoError(f"{self.root / FINISHED}: {name!r} leads out of the directory; {REMEDY}")
            if not file.is_file():
                wrong.append(f"{name} (missing)")
            elif sha256(file) != expected[name]:
                wrong.append(f"{name} (changed)")
        if wrong:
            raise RecpoError(
                f"{self.root} is not as it was written: {', '.join(sorted(wrong))}; copy the whole run again, or train "
                "it again"
            )

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """Every option of the run, from ``resolved.yaml``; item codes are the ones in the run."""
        content: dict[str, Any] = read_yaml(self.root / RESOLVED, REMEDY)
        policy = content.get("policy", {})
        if (self.root / CODES).is_dir():
            # a tilted policy has the codes of its base
            for part in (policy, policy.get("init_args", {}).get("base", {})):
                if "codes" in part.get("init_args", {}):
                    part["init_args"]["codes"] = str(self.root / CODES)
        return content

    @property
    def results(self) -> dict[str, float | None]:
        """The metrics of the last step and of the last validation; None = not a number."""
        return dict(self.facts["results"])

    @property
    def monitor(self) -> str | None:
        """The metric that selected the best checkpoint."""
        return self.facts.get("monitor")

    @property
    def num_items(self) -> int:
        """Catalog size V."""
        return int(self.facts["num_items"])

    @property
    def catalog_checksum(self) -> str:
        """Checksum of the items it was trained on (``Prepared.catalog_checksum``)."""
        return str(self.facts["catalog_checksum"])

    @cached_property
    def items(self) -> IdMap:
        """External ids of the items 1..V."""
        return IdMap.load(self.root / ITEMS)

    @cached_property
    def feedback(self) -> FeedbackDefinition:
        """How feedback levels are computed from raw events."""
        return FeedbackDefinition.from_json(read_json(self.root / FEEDBACK, REMEDY), str(self.root / FEEDBACK))

    def validate_items(self, data: Prepared) -> None:
        """Raises ``RecpoError`` if prepared data has other items than the run was trained on."""
        if self.catalog_checksum == data.catalog_checksum:
            return
        if not self.items.equals(data.item_ids()):  # a longer log of the same items has other counts in the file
            raise RecpoError(
                f"{self.root} was trained on other items than {data.root} holds (items.parquet differs): name the "
                "prepared directory it was trained on, or one with the same items in the same order"
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
        path = checkpoint_path(self.root, name)
        inside = f"{CHECKPOINTS}/{name}.ckpt"
        files = [file for file in self.facts["files"] if file == inside or file.startswith(inside + "/")]
        if not files:
            raise RecpoError(f"{path} is missing: the run kept no such checkpoint")
        self.verify(files)
        return path

    def option(self, name: str, kind: Any) -> Any:
        """The option ``name`` of the run, rebuilt from its configuration."""
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument(f"--{name}", type=kind)
        try:
            return parser.instantiate(parser.parse_object({name: self.configuration[name]}))[name]
        except (ArgumentError, KeyError, ImportError) as error:
            raise RecpoError(
                f"{self.root / RESOLVED}: {name} cannot be built ({' '.join(str(error).split())}); train the run again "
                "with this version"
            ) from error

    def policy(self, checkpoint: str = "best") -> Policy:
        """Rebuilds the policy, in evaluation mode.

        Args:
            checkpoint: ``best`` or ``last``.

        Raises:
            RecpoError: the checkpoint has changed or does not fit the configuration.
        """
        factory: PolicyFactory = self.option("policy", PolicyFactory)
        try:
            policy = factory(self.num_items)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RecpoError(
                f"{self.root / RESOLVED}: policy cannot be built ({' '.join(str(error).split())}); {REMEDY}"
            ) from error
        hand_over_kept(policy, self.root)
        load_weights(policy, self.checkpoint(checkpoint))
        return policy.eval()

    def recommend(
        self,
        histories: Frame,
        k: int | None = None,
        *,
        exclude: Frame | None = None,
        users: Iterable[Any] | None = None,
        user_features: Frame | None = None,
        context: Frame | None = None,
        at: Moment | None = None,
    ) -> pd.DataFrame:
        """The best items for every user, from the best checkpoint; see ``recpo.serving.recommending.recommend_lists``.

        Args:
            histories: raw events, one per row: ``user_id``, ``item_id``, ``timestamp`` and, if the log had them,
                ``watch_time`` and ``duration`` in seconds, ``dislike`` and ``label``; external ids.
            k: list length; None = 10, or all items of a smaller catalog.
            exclude: ``user_id`` and ``item_id`` pairs that must not be listed, in addition to the items of the history.
            users: the users to serve, in this order; may include new users. None = the users of ``histories``.
            user_features: ``user_id`` and columns as in the prepared user table, if the policy reads it.
            context: ``user_id`` and the features of the current requests, if the policy reads them.
            at: when the lists are made: items that are not available then are left out; see ``Bundle.recommend``.

        Returns:
            ``user_id``, ``rank``, ``item_id``, ``score``; ``attrs["counts"]`` reports what was left out, as for a
            bundle.
        """
        k = min(10, self.num_items) if k is None else k
        return recommend_lists(
            self.runtime,
            self.reader,
            histories,
            k=k,
            exclude=exclude,
            users=users,
            user_features=user_features,
            context=context,
            at=at,
        ).to_pandas()

    def score(
        self,
        histories: Frame,
        candidates: Frame,
        *,
        user_features: Frame | None = None,
        context: Frame | None = None,
    ) -> pd.DataFrame:
        """Log-probabilities of given items; see ``recpo.serving.recommending.score_candidates``.

        Args:
            histories: raw events, as in ``recommend``.
            candidates: ``user_id`` and ``item_id``.
            user_features: as in ``recommend``.
            context: as in ``recommend``.

        Returns:
            ``user_id``, ``item_id``, ``score``, in the order of the candidates; nan for unknown items.
        """
        served = score_candidates(
            self.runtime, self.reader, histories, candidates, user_features=user_features, context=context
        )
        return served.to_pandas()

    @cached_property
    def runtime(self) -> PolicyRuntime:
        """Ranks and scores encoded histories with the best checkpoint."""
        return PolicyRuntime(self.policy())

    @cached_property
    def reader(self) -> HistoryReader:
        """Reads histories for this policy."""
        policy = self.runtime.policy
        known = kept_features(policy, self.root)
        parts = known.behaviors, known.user, known.context
        return HistoryReader(self.items, self.feedback, policy.max_history, policy.reads_timestamps, *parts)

    def export(
        self,
        out: Path | str,
        k: int = 100,
        *,
        checkpoint: str = "best",
        item_precision: Precision = "float32",
        index: IndexOptions | None = None,
        repeats: bool = False,
        attributes: FrameOrPath | None = None,
        evaluation: Evaluation | Path | str | None = None,
        overwrite: bool = False,
    ) -> Bundle:
        """Writes the policy as a bundle for serving. It needs nothing but the run.

        Args:
            out: bundle directory to create.
            k: length of its lists; a smaller catalog limits it.
            checkpoint: ``best`` or ``last``.
            item_precision: float32, float16 or int8; see ``recpo.serving.export.export_bundle``.
            index: use an approximate index instead of scoring the complete catalog; see there.
            repeats: items of the history may be listed again; only the items that a request excludes are left out.
            attributes: ``item_id`` and attributes of the items for the filters of requests.
            evaluation: an evaluation with this run as a contender; its metrics, and those of the baselines, go into the
                model card.
            overwrite: replace a bundle in ``out``.

        Raises:
            RecpoError: ``out`` already exists, an option does not fit the policy, or an engine differs from it.
        """
        name, origin = self.root.resolve().name, read_json(self.root / ORIGIN, REMEDY)
        measured = None if evaluation is None else evaluation_facts(evaluation, name)
        policy, weights = self.policy(checkpoint), f"{CHECKPOINTS}/{checkpoint}.ckpt"
        export_bundle(
            policy,
            self.items,
            self.feedback,
            Path(out),
            k=min(k, self.num_items),
            item_precision=item_precision,
            index=index,
            repeats=repeats,
            options=self.configuration["policy"].get("init_args", {}),
            origin={
                "run": name,
                "checkpoint": checkpoint,
                "weights": self.facts["files"].get(weights),
                "catalog_checksum": self.catalog_checksum,
                "user_ids": origin.get("data", {}).get("user_ids"),
                "item_column": origin.get("data", {}).get("item_column"),
            },
            features=kept_features(policy, self.root),
            attributes=attributes,
            card=card_facts(self.configuration, self.facts, origin, measured),
            overwrite=overwrite,
            inputs=[self.root],
        )
        return Bundle.load(Path(out))


def differences(before: Any, after: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys in which two configurations differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted({*before, *after}):
            yield from differences(before.get(name), after.get(name), f"{prefix}{name}.")
    elif before != after:
        yield prefix.rstrip(".").replace("init_args.", "")


def write_start(
    root: Path, resolved: str, data: Prepared, policy: Policy, codes: Path | None, origin: dict[str, Any]
) -> None:
    """Writes the files that a run has before its first step.

    Args:
        root: the run directory.
        resolved: every option, as YAML.
        data: the training data.
        policy: the policy.
        codes: directory of the item codes of its policy.
        origin: the run's inputs.
    """
    write_text(root / MARKER, marker("run"))
    write_text(root / RESOLVED, resolved)
    data.item_ids().save(root / ITEMS)
    write_json(root / FEEDBACK, data.feedback.to_json())
    write_features(root, policy, data)
    if codes is not None:
        ignore = shutil.ignore_patterns(CODEBOOKS)  # only new items would need them
        shutil.copytree(codes, root / CODES, ignore=ignore, dirs_exist_ok=True)
    write_json(root / ORIGIN, {"format_version": FORMAT_VERSION, **origin})


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
    kept = [file for file in (RESOLVED, ITEMS, FEEDBACK, ORIGIN, *FEATURE_FILES) if (root / file).is_file()]
    kept += [
        str(file.relative_to(root)) for part in (CODES, CHECKPOINTS, VOCABULARIES) for file in _files_in(root / part)
    ]
    content = {
        "format_version": FORMAT_VERSION,
        "num_items": policy.num_items,
        "catalog_checksum": data.catalog_checksum,
        "results": results,
        "monitor": monitor,
        "files": {name: sha256(root / name) for name in kept},
    }
    write_json(root / FINISHED, seal(content))


def _files_in(directory: Path) -> list[Path]:
    kept = sorted(file for file in directory.rglob("*") if file.is_file())
    return [file for file in kept if not any(left in str(file.relative_to(directory)) for left in _LEAVINGS)]


def checkpoint_path(run: Path, checkpoint: str = "best") -> Path:
    """The path of the checkpoint ``best`` or ``last``."""
    return Path(run) / CHECKPOINTS / f"{checkpoint}.ckpt"


def write_text(file: Path, text: str) -> None:
    """Writes a file, completely or not at all."""
    with output_file(file) as partial:
        partial.write_text(text, encoding="utf-8")


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
            f"{checkpoint} does not fit the {part} ({len(faults)} faults); use that run's {part} options:\n  {listed}"
        )
    # a table without memory gets its values when it is sharded
    whole = {n: w if isinstance(w, Tensor) or own[n].is_meta else w.whole() for n, w in weights.items()}
    spoiled = [n for n, w in whole.items() if isinstance(w, Tensor) and not w.isfinite().all()]
    if spoiled:
        raise RecpoError(
            f"{checkpoint} holds weights that are not numbers ({', '.join(sorted(spoiled)[:5])}): its training "
            "diverged; train that run again with a lower learning rate"
        )
    module.load_state_dict(whole)
