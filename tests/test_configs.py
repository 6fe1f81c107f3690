"""Every YAML parses, does one step on real batches, and has its command in the header."""

import csv
import importlib
import inspect
import math
import pkgutil
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import recpo.objectives
from recpo.base.contracts import Objective
from recpo.batches.slates import evaluation_batches
from recpo.cli.main import main

FILES = (Path(__file__).parent.parent / "configs").glob("*.yaml")
# in this order: test_tokenize_cli.py, below, test_benchmarks.py, test_sharded_cli.py (it starts processes),
# test_run_features.py
ELSEWHERE = ("tokenize", "published_prepare", "published_codes", "sharded", "features")
BASES = ("on_policy", "preference_lists")  # the others name theirs in the command of their header
CONFIGS = sorted(path for path in FILES if not path.stem.startswith(ELSEWHERE) and path.stem not in BASES)
SMALL = {
    "data.batch_size": 16,
    "data.evaluation_batch_size": 16,
    "data.layout.init_args.history_length": 12,
    "policy.init_args.dim": 8,
    "policy.init_args.heads": 1,
    "policy.init_args.layers": 1,
    "policy.init_args.max_history": 12,
    "trainer.accelerator": "cpu",
    "trainer.max_epochs": 1,
    "trainer.max_steps": 1,
    "trainer.limit_val_batches": 1,
    "trainer.num_sanity_val_steps": 0,
    "trainer.log_every_n_steps": 1,
    "trainer.enable_progress_bar": "false",
    "allocator": "false",
}


PRETRAINING = ["pretrain", "semantic_pretrain"]
ON_OWN_DATA = ["published_catalog", "published_semantic"]  # pre-training too
#: One configuration of every family of objectives that semantic ids can be trained with.
OF_SEVERAL_TOKENS = [
    "dpo",
    "gbpo",
    "grpo",
    "kto",
    "mpo",
    "ppo",
    "q_learning",
    "reinforce",
    "reward_model",
    "softmax_dpo",
]
SEMANTIC = {"policy.init_args.decoder_layers": 1, "policy.init_args.kv_groups": 1, "policy.init_args.beam_width": 10}


def files_of(config):
    """The files of the command in the header: the base, if there is one, and the file itself."""
    (names,) = {
        names
        for names in re.findall(r"recpo train((?: --config configs/\w+\.yaml)+)", config.read_text())
        if config.name in names
    }
    return [config.parent / name for name in re.findall(r"configs/(\w+\.yaml)", names)]


def is_semantic(config):
    return config.stem.startswith(("semantic_", "published_semantic"))


@pytest.fixture(scope="module")
def codes(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("codes") / "codes"
    assert main(["tokenize", "--prepared", str(prepared), "--out", str(out), "--codebook_size", "8"]) == 0
    return out


@pytest.fixture(scope="module")
def options(prepared, codes):
    def of(config, out, semantic=False):
        pairs = {"data.prepared": prepared, "out": out, **SMALL}
        pairs |= {"policy.class_path": "SemanticIdPolicy"} if semantic else {}
        pairs |= {"policy.init_args.codes": codes, **SEMANTIC} if semantic or is_semantic(config) else {}
        files = [word for file in files_of(config) for word in ("--config", str(file))]
        return files + [word for key, value in pairs.items() for word in (f"--{key}", str(value))]

    return of


@pytest.fixture(scope="module")
def pretrained(options, tmp_path_factory):
    root = tmp_path_factory.mktemp("pretrained")
    for name in PRETRAINING:
        assert main(["train", *options(CONFIGS[0].parent / f"{name}.yaml", root / name)]) == 0
    return root


@pytest.fixture(scope="module")
def reward_model(options, pretrained, tmp_path_factory):
    out = tmp_path_factory.mktemp("reward") / "run"
    arguments = options(CONFIGS[0].parent / "reward_model.yaml", out)
    assert main(["train", *arguments, "--init_from", str(pretrained / "pretrain")]) == 0
    return ["--reward.init_args.run", str(out), "--reward.init_args.calibrated", "false"]


@pytest.fixture(scope="module")
def factors(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("factors") / "factors"
    assert main(["factorize", "--prepared", str(prepared), "--out", str(out), "--ranks", "[2]", "--sweeps", "3"]) == 0
    return ["--reward.init_args.factors", str(out)]


@pytest.fixture(scope="module")
def rewards(reward_model, factors):
    def of(config):
        text = "".join(file.read_text() for file in files_of(config))
        if "\n  class_path: FactorReward" in text:
            return factors
        return reward_model if "\n  class_path: LearnedReward" in text else []

    return of


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_does_one_step_and_logs_its_health(config, options, pretrained, rewards, tmp_path):
    out = tmp_path / "run"
    arguments = options(config, out) + rewards(config)
    if config.stem not in PRETRAINING + ON_OWN_DATA:
        arguments += ["--init_from", str(pretrained / PRETRAINING[is_semantic(config)])]
    assert main(["train", *arguments]) == 0
    assert_healthy(out)


@pytest.mark.slow
@pytest.mark.parametrize("config", [c for c in CONFIGS if c.stem in OF_SEVERAL_TOKENS], ids=lambda path: path.stem)
def test_every_family_also_trains_a_policy_of_several_tokens(config, options, pretrained, rewards, tmp_path):
    out = tmp_path / "run"
    start = ["--init_from", str(pretrained / "semantic_pretrain"), *rewards(config)]
    if "candidates: catalog" in config.read_text():
        start += ["--rollout.candidates", "beam"]  # which stand there once each, too
    assert main(["train", *options(config, out, semantic=True), *start]) == 0
    assert_healthy(out)


def assert_healthy(out):
    state = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(value.isfinite().all() for value in state.values())
    with (out / "logs" / "version_0" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        step = next(csv.DictReader(file))
    measured = {name: float(value) for name, value in step.items() if name.startswith("train/") and value}
    assert len(measured) >= 2
    assert all(map(math.isfinite, measured.values())), measured


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_header_holds_the_command_that_runs_it(config):
    header = " ".join(config.read_text().split("\n\n")[0].replace("\\\n#", "").split())
    if config.stem in ON_OWN_DATA:
        assert f"recpo train --config configs/{config.name}" in header
        assert f"\nout: runs/{config.stem}\n" in config.read_text()
    else:
        assert re.search(
            rf"--config configs/{config.name} --data\.prepared demo/fit/prepared .*--out runs/{config.stem}( |$)",
            header,
        )


def test_every_objective_is_known_by_its_bare_name():
    named = set()
    for module in pkgutil.iter_modules(recpo.objectives.__path__, "recpo.objectives."):
        for name, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(cls, Objective) and cls.__module__ == module.name and not inspect.isabstract(cls):
                named.add(name)
    assert named == set(recpo.objectives.__all__)


def test_every_objective_has_a_configuration():
    configured = set()
    for config in CONFIGS:
        options = {}
        for file in files_of(config):  # each parses and trains, above
            options |= yaml.load(file.read_text(), yaml.CSafeLoader)
        configured.add(options["objective"]["class_path"].split(".")[-1])
    assert configured == set(recpo.objectives.__all__)


def test_beauty_is_split_as_in_the_papers(tmp_path):
    config = CONFIGS[0].parent / "published_prepare.yaml"
    assert f"recpo prepare --config configs/{config.name}\n" in config.read_text()
    log = {"user_id": [7] * 5 + [8] * 5, "pos": [*range(5)] * 2, "item_id": [50, 40, 30, 20, 10, 60, 70, 80, 90, 100]}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    files = ["--log", str(tmp_path / "log.parquet"), "--out", str(tmp_path / "prepared")]
    assert main(["prepare", "--config", str(config), *files]) == 0
    seen = {}
    for split in ("valid", "test"):
        (batch,) = evaluation_batches(tmp_path / "prepared", split, 50, 2)
        seen[split] = batch.feedback.histories.item_ids.tolist(), batch.feedback.slates.item_ids.tolist()
    # items of the train period come first: 30, 40 .. 80 are 1 .. 6; then 10, 20, 90 and 100
    assert seen == {
        "valid": ([[3, 2, 1], [4, 5, 6]], [[8], [9]]),
        "test": ([[3, 2, 1, 8], [4, 5, 6, 9]], [[7], [10]]),
    }
