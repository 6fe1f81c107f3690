"""A run directory: self-contained, verified, and started and resumed without destroying anything."""

import inspect
import json
import shutil
import subprocess
import sys
from functools import partial
from pydoc import locate
from types import UnionType

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import yaml
from jsonargparse._parameter_resolvers import get_signature_parameters

import recpo
from recpo.artifacts.checksums import sha256
from recpo.artifacts.outputs import write_json
from recpo.batches.datamodule import FeedbackDataModule
from recpo.batches.slates import SequenceLayout
from recpo.cli.main import main
from recpo.log.id_map import IdMap
from recpo.log.schema import ALWAYS, NEVER
from recpo.objectives import GBPO, PointwiseReward
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.training.class_names import _OWN as OWN, _is_group as is_group, without_trust
from recpo.training.fit import parse_arguments, train_parser
from recpo.training.module import PreferenceModule
from recpo.training.options import CriticOptions, LearningOptions
from recpo.training.run import Run
from recpo.training.trainer import TrainerOptions
from recpo.verbs.train import train
from tests.conftest import resealed
from tests.refusals import refused

SIZES = {"dim": 8, "layers": 1, "heads": 1, "max_history": 12}
QUICK = {"max_epochs": 1, "limit_train_batches": 4, "accelerator": "cpu", "num_sanity_val_steps": 0, "logger": False}
OPTIONS = {
    "policy": partial(CatalogSoftmaxPolicy, **SIZES),
    "trainer": QUICK,
    "data.layout": SequenceLayout(12),
    "data.batch_size": 32,
    "allocator": False,
}


@pytest.fixture(scope="module")
def base(prepared, tmp_path_factory):
    return train(prepared, out=tmp_path_factory.mktemp("base") / "run", **OPTIONS)


@pytest.fixture
def copy(base, tmp_path):
    return Run.open(shutil.copytree(base.root, tmp_path / "run"))


def content(root):
    return {str(file): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


@pytest.mark.slow
def test_a_run_of_python_is_complete_and_equals_that_of_the_command_line(prepared, base, tmp_path, capfd):
    capfd.readouterr()
    again = ["train", "--config", str(base.root / "resolved.yaml"), "--out", str(tmp_path / "again")]
    assert main(again) == 0
    other = Run.open(tmp_path / "again")
    one, two = (torch.load(run.checkpoint("last"), weights_only=True)["state_dict"] for run in (base, other))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    written = yaml.safe_load((base.root / "resolved.yaml").read_text())
    assert not {"overwrite", "resume", "trust", "config"} & written.keys()
    assert recpo.load(base.root).results == base.results
    assert base.results.keys() >= {"train/loss", "val/NDCG@10", "train/positions_per_second", "train/peak_memory_mib"}


@pytest.mark.slow
def test_a_run_gives_its_policy_without_lightning_and_the_compiler(base):
    code = f"import sys\nfrom recpo.training.run import Run\nRun.open({str(base.root)!r}).policy()\n"
    code += "print(sorted({'lightning', 'torch._dynamo', 'sympy'} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines()[-1] == "[]"


def test_the_groups_of_classes_that_are_not_imported_are_what_their_signatures_say():
    for (_, name), groups in OWN.items():
        own = locate(name)
        assert groups == tuple(one for one in inspect.signature(own).parameters if is_group(own, one))


@pytest.mark.slow
def test_training_from_python_prints_nothing(prepared, tmp_path, capfd):
    train(prepared, out=tmp_path / "run", **OPTIONS)
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_alignment_takes_what_is_not_given_from_the_run_it_starts_from(prepared, base, tmp_path):
    run = train(prepared, objective=GBPO(), init_from=base, out=tmp_path / "gbpo", trainer=QUICK, allocator=False)
    policy = run.configuration["policy"]["init_args"]
    assert {name: policy[name] for name in SIZES} == SIZES
    assert run.configuration["data"]["init_args"]["layout"]["init_args"]["history_length"] == 12
    assert run.configuration["advantage"]["class_path"].endswith(".TernaryAdvantage")
    assert run.configuration["advantage"]["init_args"]["positive_fraction"] == 0.25


@pytest.mark.slow
def test_a_run_is_read_elsewhere_without_what_it_was_made_from(prepared, base, tmp_path, monkeypatch):
    histories = pd.read_parquet(prepared / "histories.parquet")
    before = recpo.recommend(base, histories, k=3)
    data = shutil.copytree(prepared, tmp_path / "data")
    run = train(data, out=tmp_path / "first", **OPTIONS)
    shutil.rmtree(data)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.move(run.root, moved / "run")
    monkeypatch.chdir(moved)
    pd.testing.assert_frame_equal(recpo.recommend("run", histories, k=3), before)


def test_a_run_lists_an_item_from_the_time_on_at_which_it_is_available(copy):
    ids, times = copy.items.to_external(range(1, copy.num_items + 1)), np.full((2, copy.num_items), ALWAYS)
    times[1] = NEVER
    times[0, 0] = 2_000_000_000_000  # 2033-05-18
    (copy.root / "items.parquet").unlink()
    IdMap(ids, None, times).save(copy.root / "items.parquet")
    facts = json.loads((copy.root / "run.json").read_text())
    facts["files"]["items.parquet"] = sha256(copy.root / "items.parquet")
    write_json(copy.root / "run.json", resealed(facts))
    run, first = Run.open(copy.root), ids[0].as_py()
    nothing = {"user_id": pa.array([], pa.int64()), "item_id": ids[:0], "timestamp": pa.array([], pa.int64())}
    for at, listed in (("2033-05-17", False), ("2033-05-19", True)):
        lists = recpo.recommend(run, nothing, copy.num_items, users=[1], at=at)
        assert (first in set(lists["item_id"])) is listed
        assert len(lists) == copy.num_items - (not listed)


@pytest.mark.slow
def test_a_run_of_semantic_ids_carries_its_codes(prepared, tmp_path, monkeypatch):
    codes = recpo.tokenize(prepared, tmp_path / "codes", levels=2, codebook_size=8, capacity_slack=None)
    sizes = {**SIZES, "codes": codes, "decoder_layers": 1, "kv_groups": 1, "beam_width": 8}
    policy = {"class_path": "SemanticIdPolicy", "init_args": sizes}
    monkeypatch.chdir(tmp_path)
    run = train(prepared, out="run", **{**OPTIONS, "policy": policy})
    root = run.root.resolve()
    shutil.rmtree(tmp_path / "codes")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert Run.open(root).policy().num_items == run.num_items


@pytest.mark.parametrize("file", ["checkpoints/best.ckpt", "items.parquet", "feedback.json", "resolved.yaml"])
def test_a_flipped_bit_is_refused(copy, file):
    damaged = bytearray((copy.root / file).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (copy.root / file).write_bytes(damaged)
    with refused("damaged", file):
        Run.open(copy.root).policy()


def test_other_formats_are_refused_with_what_to_do(copy):
    (copy.root / "run.json").write_text(json.dumps({"num_items": 60, "catalog_checksum": "x", "results": {}}))
    with refused("old_format", "format_version"):
        Run.open(copy.root)


FOREIGN = """
from pathlib import Path

from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy

Path({ran!r}).touch()


class P(CatalogSoftmaxPolicy):
    pass
"""
FOREIGN_NAMES = {  # where a run names it: the option
    "policy": {"class_path": "payload.P", "init_args": {}},
    "policy.base": {"class_path": "recpo.policies.tilted.RerankedPolicy", "init_args": {"base": "payload.P"}},
    "objective.level": {"class_path": "recpo.GBPO", "init_args": {"level": "payload.P"}},
    "optimizer": "payload.P",
    "trainer.callbacks": {
        "class_path": "recpo.training.trainer.TrainerOptions",
        "init_args": {"callbacks": ["payload.P"]},
    },
}


@pytest.fixture
def payload(copy, monkeypatch):
    """A package beside the run, and the file that importing it writes."""
    ran = copy.root.parent / "ran"
    (copy.root / "payload.py").write_text(FOREIGN.format(ran=str(ran)))
    monkeypatch.chdir(copy.root)
    monkeypatch.syspath_prepend(str(copy.root))
    yield ran
    sys.modules.pop("payload", None)


def hand_over(root, **changes):
    """Other options in a finished run, with a right checksum, as whoever hands it over could write them."""
    configuration = yaml.safe_load((root / "resolved.yaml").read_text()) | changes
    (root / "resolved.yaml").write_text(yaml.safe_dump(configuration))
    facts = json.loads((root / "run.json").read_text())
    facts["files"]["resolved.yaml"] = sha256(root / "resolved.yaml")
    write_json(root / "run.json", resealed(facts))


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_a_run_of_somebody_else_imports_no_code(copy, payload, name):
    hand_over(copy.root, **{name.partition(".")[0]: FOREIGN_NAMES[name]})
    with refused("untrusted", name) as caught:
        Run.open(copy.root)
    assert """--trust '["payload"]'""" in str(caught.value)
    assert not payload.exists()


def test_a_package_that_the_caller_trusts_is_imported(copy, payload):
    hand_over(copy.root, policy=copy.configuration["policy"] | {"class_path": "payload.P"})
    assert type(Run.open(copy.root, trust=["payload"]).policy()).__name__ == "P"
    assert payload.exists()


def shell(ran):
    return {"class_path": "recpo.cli.main.os.system", "init_args": {"command": f"touch {ran}"}}


def tilting(ran):
    options = {"run": "run", "factors": "factors", "prepared": "prepared", "out": str(ran), "trust": ["payload"]}
    return {"class_path": "recpo.verbs.tilt.tilt", "init_args": options}


def multiplied():
    value = ["x"] * 10
    for _ in range(12):
        value = [value] * 10
    return value


TRUSTING = {
    "class_path": "recpo.training.learned_reward.LearnedReward",
    "init_args": {"run": "r", "trust": ["payload"]},
}
ON_SHELL = "recpo.policies.tilted.RerankedPolicy"
ATTACKS = {
    "attribute of a module": lambda ran: {"policy": shell(ran)},
    "attribute, short": lambda ran: {"policy": "recpo.cli.main.os.system"},
    "attribute of a trusted package": lambda ran: {"policy": shell(ran) | {"class_path": "payload.Path.touch"}},
    "imported class of another package": lambda ran: {"policy": {"class_path": "payload.Path", "init_args": {}}},
    "function": lambda ran: {"policy": tilting(ran)},
    "function without trust": lambda ran: {"policy": "recpo.verbs.tilt.tilt"},
    "module": lambda ran: {"policy": "recpo.cli.main"},
    "class of another base": lambda ran: {"policy": {"class_path": "recpo.Bundle", "init_args": {}}},
    "class of another option": lambda ran: {"objective": {"class_path": "recpo.CatalogSoftmaxPolicy"}},
    "base of a policy": lambda ran: {"policy": {"class_path": ON_SHELL, "init_args": {"base": shell(ran)}}},
    "bare name": lambda ran: {"policy": {"class_path": "system", "init_args": {}}},
    "objective": lambda ran: {"objective": shell(ran)},
    "layout": lambda ran: {"data": {"init_args": {"layout": shell(ran)}}},
    "optimizer": lambda ran: {"optimizer": shell(ran)},
    "callback": lambda ran: {"trainer": {"init_args": {"callbacks": [shell(ran)]}}},
    "YAML in text": lambda ran: {"policy": "{class_path: payload2.P}"},
    "YAML in lines of text": lambda ran: {"policy": "class_path: payload2.P\ninit_args: {}"},
    "YAML with tabs in text": lambda ran: {"policy": "{class_path:\tpayload2.P}"},
    "YAML in YAML in text": lambda ran: {"policy": "{class_path: recpo.X, init_args: '{base: \"payload2.P\"}'}"},
    "deep text": lambda ran: {"policy": "[" * 100_000},
    "anchors that multiply": lambda ran: {"objective": multiplied()},
    "file of options": lambda ran: {"critic": str(ran.parent / "options")},
    "dict_kwargs": lambda ran: {
        "policy": {"class_path": "recpo.CatalogSoftmaxPolicy", "dict_kwargs": {"x": shell(ran)}}
    },
    "trust of a reward": lambda ran: {"reward": TRUSTING},
}

OTHER_CODES = {"deep text": "out_of_range", "anchors that multiply": "damaged", "file of options": "wrong_type"}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_run_names_classes_and_nothing_else(copy, payload, name):
    (payload.parent / "options").write_text("{class_path: payload2.P}")
    (copy.root / "payload2.py").write_text((copy.root / "payload.py").read_text())
    trust = ["payload"] if name in ("attribute of a trusted package", "imported class of another package") else []
    hand_over(copy.root, **ATTACKS[name](payload))
    with refused(OTHER_CODES.get(name, "untrusted"), ...) as caught:
        recpo.load(copy.root, trust=trust).policy()
    assert caught.value.field.partition(".")[0] in {*ATTACKS[name](payload), "resolved"}
    assert payload.exists() == bool(trust)  # importing a package that the caller trusts is all that happened
    assert "payload2" not in sys.modules


@pytest.mark.parametrize("verb", ["export", "recommend", "evaluate", "train"])
def test_no_verb_runs_what_a_run_of_somebody_else_names(prepared, copy, payload, tmp_path, verb, capfd):
    hand_over(copy.root, policy=shell(payload))
    out, data = str(tmp_path / "out"), ["--data.prepared", str(prepared)]
    arguments = {
        "export": ["--run", str(copy.root)],
        "recommend": ["--source", str(copy.root), "--histories", str(prepared / "histories.parquet")],
        "evaluate": ["--prepared", str(prepared), "--contenders", str(copy.root)],
        "train": ["--init_from", str(copy.root), "--trainer.max_steps", "1", *data],
    }[verb]
    assert main([verb, *arguments, "--out", out]) == 1
    said = capfd.readouterr().err
    assert "policy names recpo.cli.main.os.system" in said
    assert "Traceback" not in said
    assert not payload.exists()
    assert not (tmp_path / "out").exists()


def test_a_run_does_not_record_whom_its_training_trusted():
    reward = {"class_path": "recpo.HitReward", "init_args": {}}
    assert without_trust({"trust": ["a"], "reward": reward | {"trust": ["b"]}, "x": [{"trust": "c"}]}) == {
        "reward": reward,
        "x": [{}],
    }


def build_policy(num_items: int) -> CatalogSoftmaxPolicy:
    return CatalogSoftmaxPolicy(num_items, **SIZES)


def test_a_function_for_a_class_is_refused_before_training(prepared, tmp_path):
    with refused("untrusted", "policy"):
        train(prepared, out=tmp_path / "run", **OPTIONS | {"policy": f"{__name__}.build_policy"})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_another_learning_rate_is_refused_and_more_epochs_are_not(prepared, copy):
    before = content(copy.root)
    options = {**OPTIONS, "out": copy.root, "resume": True}
    rate = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.5}}
    with refused("mismatch", "optimizer.lr"):
        train(prepared, optimizer=rate, **options)
    with refused("mismatch", "data.batch_size"):
        train(prepared, **{**options, "data.batch_size": 16})
    assert content(copy.root) == before
    run = train(prepared, **{**options, "trainer": {**QUICK, "max_epochs": 2}})
    assert run.configuration["trainer"]["init_args"]["max_epochs"] == 2
    assert run.checkpoint("last").is_file()


def test_a_finished_run_without_its_last_checkpoint_is_not_trained_from_the_start(prepared, copy):
    (copy.root / "checkpoints" / "last.ckpt").unlink()
    before = content(copy.root)
    with refused("missing_file", "last.ckpt"):
        train(prepared, **{**OPTIONS, "out": copy.root, "resume": True})
    assert content(copy.root) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"policy": {"class_path": "CatalogSoftmaxPolicy", "init_args": {**SIZES, "dim": 16}}},
        {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}},
        {"seed": 7},
    ],
    ids=["other shapes", "other optimizer", "other seed"],
)
def test_the_last_checkpoint_of_another_run_is_refused(prepared, copy, tmp_path, options):
    other = train(prepared, **{**OPTIONS, "out": tmp_path / "other", **options})
    shutil.copy(other.root / "checkpoints" / "last.ckpt", copy.root / "checkpoints" / "last.ckpt")
    before = content(copy.root)
    with refused("mismatch", "last.ckpt"):
        train(prepared, **{**OPTIONS, "out": copy.root, "resume": True, "trainer": {**QUICK, "max_epochs": 2}})
    assert content(copy.root) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"init_from": "nowhere"}, ("wrong_file", "run.json")),
        ({"anchor_coef": -1.0}, ("out_of_range", "anchor_coef")),
        ({"optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": -1.0}}}, ("bad_value", "optimizer")),
        ({"trainer": {**QUICK, "limit_train_batches": 0}}, ("out_of_range", "trainer.limit_train_batches")),
        ({"trainer": {**QUICK, "max_time": {"seconds": 0}}}, ("empty",)),
    ],
)
def test_overwrite_destroys_nothing_before_the_first_step(prepared, copy, options, refusal):
    before = content(copy.root)
    with refused(*refusal):
        train(prepared, **{**OPTIONS, "out": copy.root, "overwrite": True, **options})
    assert content(copy.root) == before
    assert [path.name for path in copy.root.parent.iterdir()] == [copy.root.name]


@pytest.mark.slow
def test_overwrite_replaces_a_run_and_nothing_else(prepared, copy, tmp_path):
    (copy.root / "mine.txt").write_text("old")
    train(prepared, **{**OPTIONS, "out": copy.root, "overwrite": True})
    assert not (copy.root / "mine.txt").exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with refused("wrong_file", "out"):
        train(prepared, **{**OPTIONS, "out": foreign, "overwrite": True})
    with refused("in_use", "out"):
        train(prepared, **{**OPTIONS, "out": copy.root, "init_from": copy, "overwrite": True})
    assert (foreign / "thesis.txt").read_text() == "years of work"


@pytest.mark.slow
def test_a_diverged_run_stops_at_once_and_keeps_what_was_good(prepared, base, tmp_path):
    explode = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1e38}}
    with refused("diverged"):
        train(prepared, **{**OPTIONS, "out": tmp_path / "run", "optimizer": explode})
    spoiled = shutil.copytree(base.root, tmp_path / "spoiled")
    checkpoint = spoiled / "checkpoints" / "best.ckpt"
    state = torch.load(checkpoint, weights_only=True)
    state["state_dict"]["policy.item_table.weight"][1] = torch.nan
    torch.save(state, checkpoint)
    facts = json.loads((spoiled / "run.json").read_text())
    facts["files"]["checkpoints/best.ckpt"] = sha256(checkpoint)
    write_json(spoiled / "run.json", resealed(facts))
    with refused("diverged", "best.ckpt"):
        train(prepared, init_from=spoiled, out=tmp_path / "next", trainer=QUICK, allocator=False)


@pytest.mark.slow
def test_max_steps_below_an_epoch_is_validated_and_early_stopping_sees_it(prepared, tmp_path):
    stopping = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val/NDCG@10"}}
    trainer = {**QUICK, "max_steps": 2, "callbacks": [stopping]}
    run = train(prepared, **{**OPTIONS, "out": tmp_path / "run", "trainer": trainer})
    assert "val/NDCG@10" in run.results
    assert run.policy("best").num_items == run.num_items
    unvalidated = {**QUICK, "max_steps": 2, "limit_val_batches": 0}
    assert train(prepared, **{**OPTIONS, "out": tmp_path / "plain", "trainer": unvalidated}).policy("best")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"trainer.precision": "16-mixed"}, ("unsupported", "trainer.precision")),
        ({"trainer.precision": 16}, ("unsupported", "trainer.precision")),
        ({"trainer.precision": "transformer-engine"}, ("bad_value", "trainer")),
        ({"trainer.check_val_every_n_epoch": 0}, ("out_of_range", "trainer.check_val_every_n_epoch")),
        ({"patience": 2, "trainer.limit_val_batches": 0}, ("conflicting_options", "patience")),
        ({"trainer.val_check_interval": 0}, ("out_of_range", "trainer.val_check_interval")),
        ({"trainer.val_check_interval": 100_000}, ("bad_value", "trainer")),
        ({"seed": 2**32}, ("out_of_range", "seed")),
        ({"seed": 99999999999999999999}, ("out_of_range", "seed")),
        ({"data.seed": -1}, ("out_of_range", "data.seed")),
    ],
    ids=str,
)
def test_options_that_lightning_or_numpy_would_stumble_over_are_one_error(prepared, tmp_path, options, refusal):
    with refused(*refusal) as error:
        train(prepared, **{**OPTIONS, "out": tmp_path / "run", **options})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_making_a_module_changes_nothing_of_the_policy(prepared):
    data = FeedbackDataModule(prepared, layout=SequenceLayout(12))
    policy = CatalogSoftmaxPolicy(data.prepared.num_items, **SIZES)
    options = LearningOptions(objective=PointwiseReward(), critic=CriticOptions(shares_encoder=False))
    module = PreferenceModule(policy, options)
    assert all(weight.requires_grad for weight in policy.parameters())
    weights = [weight.clone() for weight in policy.parameters()]
    TrainerOptions(**QUICK, enable_checkpointing=False).build(prepared.parent / "run").fit(module, datamodule=data)
    assert all(weight.requires_grad for weight in policy.parameters())
    assert all(torch.equal(one, two) for one, two in zip(weights, policy.parameters(), strict=True))


def test_trainer_options_build_as_often_as_asked(tmp_path):
    options = TrainerOptions(**QUICK | {"logger": None})
    one, two = (options.build(tmp_path / name) for name in ("one", "two"))
    assert (one.default_root_dir, two.default_root_dir) == (str(tmp_path / "one"), str(tmp_path / "two"))
    assert len(one.callbacks) == len(two.callbacks)
    assert [str(tmp_path / "two") in str(logger.log_dir) for logger in two.loggers] == [True, True]


@pytest.mark.slow
def test_training_without_an_end_takes_ten_epochs_and_says_so(prepared, tmp_path):
    run = train(prepared, out=tmp_path / "run", **{**OPTIONS, "trainer": {"limit_train_batches": 1}})
    assert run.configuration["trainer"]["init_args"]["max_epochs"] == 10
    assert torch.load(run.checkpoint("last"), weights_only=True)["epoch"] == 9
    assert Run.open(run.root).monitor == "val/NDCG@10"


@pytest.mark.parametrize(
    "name",
    ["limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches"],
)
def test_one_batch_is_not_read_as_all_of_them(name):
    """Whatever another package has imported: typing's cache takes ``Union[float, int]`` for ``Union[int, float]``."""
    parameters = {one.name: one.annotation for one in get_signature_parameters(TrainerOptions, None)}
    assert parameters[name].__args__[:2] == (int, float)
    assert isinstance(parameters[name], UnionType)  # typing has no cache of it
    given = train_parser().parse_args(["--data.prepared=x", "--out=y", f"--trainer.{name}=1"], defaults=False)
    assert type(given.trainer.init_args[name]) is int


@pytest.mark.parametrize(
    ("given", "epochs"),
    [
        ({}, 10),
        ({"max_steps": -1}, 10),
        ({"max_epochs": 3}, 3),
        ({"max_epochs": -1}, -1),
        ({"max_steps": 5}, None),
        ({"max_time": {"hours": 1}}, None),
    ],
)
def test_the_default_of_epochs_gives_way_to_any_other_end(tmp_path, given, epochs):
    assert TrainerOptions(**given, accelerator="cpu", logger=False).build(tmp_path).max_epochs == epochs
    flags = [word for name, value in given.items() for word in (f"--trainer.{name}", json.dumps(value))]
    trainer = parse_arguments(["--data.prepared", "x", "--out", "y", *flags]).trainer.init_args
    assert trainer.max_epochs == epochs
