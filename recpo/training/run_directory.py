"""The directory of a run during training: validated first, and replaced or resumed only after the first step."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.utilities import rank_zero_only

from recpo.artifacts.checksums import kind_of, sha256
from recpo.artifacts.documents import lies_in, read_json, read_yaml
from recpo.artifacts.outputs import PARTIAL, directory_in_place, write_json
from recpo.artifacts.semantic_codes import CODEBOOKS
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.rewards.factors import MANIFEST as FACTORS_MANIFEST
from recpo.training import run
from recpo.training.checkpoints import RUN
from recpo.training.class_names import class_names
from recpo.training.module import PreferenceModule
from recpo.training.run import Run
from recpo.training.trainer import TrainOptions

MAY_CHANGE = (
    *("out", "progress", "allocator", "checkpoint_every", "matmul_precision"),
    *("data.num_workers", "data.evaluation_batch_size"),
    *(f"trainer.{name}" for name in ("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time")),
    *(f"trainer.{name}" for name in ("devices", "num_nodes", "accelerator", "strategy", "logger", "profiler")),
    *(f"trainer.{name}" for name in ("log_every_n_steps", "enable_progress_bar", "enable_model_summary")),
    *(f"trainer.{name}" for name in ("num_sanity_val_steps", "enable_checkpointing", "default_root_dir")),
)
"""Options that a resumed run may change. Others, such as a learning rate, would be ignored or give another run."""
_OF_THE_SAME_CONTENT = (  # directories that may have moved
    *("data.prepared", "init_from", "reward.run", "reward.factors"),
    *("validation_reward.run", "validation_reward.factors"),
)
_OF_THE_SAME_STEP = (
    "data.batch_size",
    "trainer.accumulate_grad_batches",
)  # if the size of the optimizer step stays the same


class RunDirectory:
    """The directory that a training writes, and the inputs of the run.

    Args:
        given: every option, with the directory ``out`` and whether the run in it is continued or replaced.
        configuration: the options that the run records.
        options: the same options.
        world_size: number of ranks.

    Attributes:
        identity: checksum of what all parts of a resumed run have in common; its checkpoints contain it.
    """

    def __init__(self, given: Namespace, configuration: dict[str, Any], options: TrainOptions, world_size: int) -> None:
        self._root, self._resume, self._overwrite = Path(given.out), bool(given.resume), bool(given.overwrite)
        self._configuration = configuration
        self._data, self._shards_tables = options.data.prepared, options.trainer.shards_tables
        batch_size = int(configuration["data"]["init_args"]["batch_size"])
        self._origin: dict[str, Any] = {
            "format_version": Run.version,
            "prepared": {
                "path": str(self._data.root),
                "catalog_checksum": self._data.catalog_checksum,
                "manifest_sha256": _sha256_of(self._data.manifest),
            },
            "data": run.data_facts(self._data),
            "contexts_per_step": batch_size * options.trainer.accumulate_grad_batches * world_size,
        }
        base = given.init_from
        if base is not None and (files := _checksum_of(base)) is not None:
            self._origin["init_from"] = {"path": str(base), "files_sha256": files}
        if runs := sorted(set(_reward_runs(configuration))):
            checksums = {path: _checksum_of(Path(path)) for path in runs}
            self._origin["reward_runs"] = {path: one for path, one in checksums.items() if one is not None}
        self.identity = _sha256_of(_in_common(configuration, self._origin))
        self._after_first_step: list[Callable[[], None]] = []

    def validate(self) -> Path | None:
        """Validates the target of a run without changing anything.

        Returns:
            The checkpoint to resume from; None to start.

        Raises:
            RecpoError: it exists, is not a run, was created with other options, or is a finished run without its last
                checkpoint.
        """
        out, last = self._root, run.checkpoint_path(self._root, "last")
        goes_on = last if self._resume and last.exists() else None
        if _is_other_rank() or not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return goes_on
        if not (out / Run.RESOLVED).is_file():
            raise RecpoError(
                f"{out} exists and is not a run directory: choose another --out, or remove it yourself",
                code="wrong_file",
                field="out",
            )
        if not self._resume:
            if not self._overwrite:
                raise RecpoError(
                    f"{out} exists already: pass --resume true to continue, --overwrite true to start again",
                    code="exists",
                    field="out",
                )
            self._validate_no_input()
            return None
        if (
            not (out / Run.ORIGIN).is_file()
            or read_json(out / Run.ORIGIN, Run.remedy()).get("format_version") != Run.version
        ):
            raise RecpoError(
                f"{out} was begun by another version of recpo and cannot be resumed: train it again",
                code="old_format",
                field="out",
            )
        self._validate_same()
        if goes_on is None and (out / Run.FINISHED).is_file():
            raise RecpoError(
                f"{out} is a finished run without {last.relative_to(out)}: there is no state to continue from. Copy "
                "the whole run again, pass --overwrite true to train it from the start, or start another run from its "
                "policy with --init_from",
                code="missing_file",
                field=last.name,
            )
        if goes_on is not None and goes_on.is_dir() != self._shards_tables:
            made = "with ShardedStrategy" if goes_on.is_dir() else "without ShardedStrategy"
            raise RecpoError(
                f"{goes_on} was written {made}: resume the run with the trainer.strategy it was started with, or start "
                "another one from its policy with --init_from",
                code="mismatch",
                field="strategy",
            )
        return goes_on

    def _validate_same(self) -> None:
        out, now, then = self._root, self._origin, read_json(self._root / Run.ORIGIN, Run.remedy())
        recorded = read_yaml(out / Run.RESOLVED, Run.remedy())
        is_same_step = then["contexts_per_step"] == now["contexts_per_step"]
        before, after = (_in_common(*one, is_same_step) for one in ((recorded, then), (self._configuration, now)))
        if "init_from" in then and "init_from" in now:  # a resumed run no longer needs it
            before["init_from"], after["init_from"] = (one["init_from"]["files_sha256"] for one in (then, now))
        if changed := sorted(key for key in before | after if before.get(key) != after.get(key)):
            raise RecpoError(
                f"{out} was started with other options, or with other content of what they name: {', '.join(changed)} "
                f"differ. Resume it with those of {out}/{Run.RESOLVED} (recpo train --config {out}/{Run.RESOLVED} "
                "--resume true; trainer.max_epochs, max_steps and devices may change), or train another run",
                code="mismatch",
                field=", ".join(changed),
            )

    def _validate_no_input(self) -> None:
        """Raises if the directory to be replaced contains, or is, an input of the run."""
        place, prepared = self._root.resolve(), self._configuration["data"]["init_args"]["prepared"]
        inputs = [self._configuration.get("init_from"), *_reward_runs(self._configuration), self._codes]
        inputs += [prepared] if "://" not in str(prepared) else []
        for path in inputs:
            if path is not None and place in (Path(path).resolve(), *Path(path).resolve().parents):
                raise RecpoError(
                    f"{self._root} holds {path}, which the run reads: choose another --out", code="in_use", field="out"
                )

    @property
    def _codes(self) -> Path | None:
        """Directory of the item codes that the policy of the configuration names."""
        codes = self._configuration["policy"].get("init_args", {}).get("codes")
        return None if codes is None else Path(codes)

    @contextmanager
    def opened(self, policy: Policy) -> Iterator[Callback]:
        """Creates or reopens the directory. A failure before the first step leaves the previous content in place.

        Other processes that ask for the lock cannot write to it meanwhile. A run that is replaced is kept aside until
        the first step of the new one is done. If this process is killed before that, the next one restores it. It is
        validated again, because another process may have created a run here meanwhile.

        Args:
            policy: the policy.

        Yields:
            A callback that must be added to the training.

        Raises:
            RecpoError: another process trains here, or an error of ``validate``.
        """
        watch = LambdaCallback(on_train_batch_end=self._end_step, on_save_checkpoint=self._add_identity)
        if _is_other_rank():
            yield watch
            return
        goes_on = self._resume and (self._root / Run.RESOLVED).is_file()

        def start(directory: Path) -> None:
            run.write_configuration(directory, self._configuration)
            run.write_items(directory, self._data)
            run.write_features(directory, policy, self._data)
            if self._codes is not None:
                ignore = shutil.ignore_patterns(CODEBOOKS)  # only new items would need them
                shutil.copytree(self._codes, directory / Run.CODES, ignore=ignore, dirs_exist_ok=True)
            write_json(directory / Run.ORIGIN, self._origin)

        first = None if goes_on else start
        with directory_in_place(self._root, kind="run", start=first, check=self.validate) as keep:
            self._after_first_step = [keep, self._begin_again] if goes_on else [keep]
            yield watch

    def _begin_again(self) -> None:
        (self._root / Run.FINISHED).unlink(missing_ok=True)
        run.write_configuration(self._root, self._configuration)

    def _end_step(self, *_: Any) -> None:
        """Before any checkpoint is written: those are the last callbacks."""
        while self._after_first_step:
            self._after_first_step.pop(0)()

    def _add_identity(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[RUN] = self.identity

    def finish(self, module: PreferenceModule) -> None:
        """Marks the run as finished, unless it already was and nothing was added."""
        if (self._root / Run.FINISHED).is_file():
            return
        best, last = (run.checkpoint_path(self._root, name) for name in ("best", "last"))
        if not best.exists() and last.exists():  # nothing was validated
            partial = best.with_name(best.name + PARTIAL)  # a kill in between must not leave a part of it as the best
            shutil.rmtree(partial, ignore_errors=True)
            (shutil.copytree if last.is_dir() else shutil.copy2)(last, partial)
            os.replace(partial, best)
        metrics = {name: float(value) for name, value in module.trainer.callback_metrics.items()} or module.results
        results = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        run.mark_finished(self._root, module.policy, self._data, results, module.monitor)


def _in_common(configuration: Any, origin: Mapping[str, Any], is_same_step: bool = True) -> dict[str, Any]:
    """What all parts of a resumed run have in common: options, by their keys, and checksums of what they name.

    Args:
        configuration: every option.
        origin: the inputs.
        is_same_step: the optimizer steps have the same size, however they are divided.
    """
    ignored = (*MAY_CHANGE, *_OF_THE_SAME_CONTENT, *(_OF_THE_SAME_STEP if is_same_step else ()))
    kept = {key: value for key, value in _leaves(configuration) if not any(lies_in(key, one) for one in ignored)}
    rewards = sorted(set(origin.get("reward_runs", {}).values()))
    return {**kept, "prepared": origin["prepared"]["manifest_sha256"], "reward": rewards}


def _leaves(configuration: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The options that are not null, by their dotted keys, with recpo's own classes by their bare names."""
    if isinstance(configuration, dict):
        for name, value in configuration.items():
            yield from _leaves(value, prefix if name == "init_args" else f"{prefix}.{name}".lstrip("."))
    elif configuration is not None:
        yield prefix, _plain(configuration)


def _plain(configuration: Any) -> Any:
    """With recpo's own classes by their bare names: the module before them depends on how a class was imported."""
    if isinstance(configuration, dict):
        return {name: _plain(value) for name, value in configuration.items()}
    if isinstance(configuration, list):
        return [_plain(value) for value in configuration]
    own = isinstance(configuration, str) and configuration.startswith("recpo.")
    return configuration.rpartition(".")[2] if own else configuration


def _reward_runs(configuration: Any) -> Iterator[str]:
    """Runs and factors that the rewards of a configuration name, at any depth."""
    options = {"LearnedReward": "run", "FactorReward": "factors"}
    for given in class_names(configuration):
        option = options.get(given.name.rpartition(".")[2], "")
        if option in given.arguments:
            yield str(given.arguments[option])


def _checksum_of(path: Path) -> str | None:
    """Of the files of a finished run, or of factors; None of anything else."""
    if kind_of(path) == "factors":
        return str(read_json(path / FACTORS_MANIFEST, "fit the factors again")["sha256"])
    finished = path / Run.FINISHED
    return _sha256_of(read_json(finished, Run.remedy())["files"]) if finished.is_file() else None


def _is_other_rank() -> bool:
    return bool(getattr(rank_zero_only, "rank", 0))


def _sha256_of(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode())
