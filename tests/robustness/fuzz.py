"""Mutates every file that recpo reads, and runs its reader.

::

    python -m tests.robustness.fuzz --seconds 600                    # the whole campaign, seed and targets: --help
    python -m tests.robustness.fuzz --engine atheris --target yaml   # guided by coverage (pip install atheris)

Two kinds of targets:

- what recpo wrote and reads again, with checksums: a changed file gives a ``RecpoError`` or exactly what was there;
- what people write (logs, histories, lists, tables of items, configurations): the command ends with status 0, 1 or 2,
  that is with a result or one message.

Never another exception, never a hang, never a process that dies. Batches of inputs run in forked children with limits
on time and memory, so that the input that kills one is known: target, seed and number repeat it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

from recpo.base.errors import RecpoError

_BATCH = 20  # inputs of a child
_LONGEST_S = 60  # of CPU time, one input; the slowest whole ones take 2
_MEMORY = 6 << 30  # on top of what the process has
_TOKENS = [b"null", b"NaN", b"-1", b"1e999", b"[]", b"{}", b'""', b"true", b"9" * 30, b"0", b"[" * 300, b"\xff\xfe"]
_TOKENS += [b"\x00", b"!!python/object/apply:os.system [id]", b"&a [*a]", b"../../etc", b"\n", b",", b'"']


class Target(NamedTuple):
    """Something that reads files.

    Attributes:
        files: of a directory, which of them are changed; patterns.
        read: reads the directory, and returns what it found there as comparable text.
        sealed: what was changed must be noticed.
        change: changes the content of a file.
        seal: corrects the checksums of the directory afterwards, as somebody who hands it over could.
    """

    files: tuple[str, ...]
    read: Callable[[Path], str]
    sealed: bool
    change: Callable[[bytes, random.Random], bytes]
    seal: Callable[[Path], None]


def target(
    *files: str,
    read: Callable[[Path], str],
    sealed: bool = False,
    change: Callable[[bytes, random.Random], bytes] | None = None,
    seal: Callable[[Path], None] | None = None,
) -> Target:
    """A target whose files get ``mutations`` and keep their old checksums, unless something else is given."""
    return Target(files, read, sealed, change or mutations, seal or (lambda root: None))


def mutations(content: bytes, choose: random.Random) -> bytes:
    """``content`` with one to four changes."""
    changed = bytearray(content)
    for _ in range(choose.choice((1, 1, 1, 2, 4))):
        _mutate(changed, choose)
    return bytes(changed)


def _mutate(content: bytearray, choose: random.Random) -> None:
    size = len(content)
    place, length = choose.randrange(size + 1), min(choose.choice((1, 2, 4, 8, 64, 1024)), size)
    how = choose.randrange(8)
    if not size:
        content[:] = choose.choice(_TOKENS)
    elif how <= 1:
        content[place % size] ^= 1 << choose.randrange(8)
    elif how == 2:
        content[place % size] = choose.choice((0, 1, 0x7F, 0x80, 0xFF, choose.randrange(256)))
    elif how == 3:
        del content[place : place + length]
    elif how == 4:
        content[place:place] = content[place : place + length]
    elif how == 5:
        content[place:place] = choose.choice(_TOKENS)
    elif how == 6:
        content[place : place + length] = choose.choice(
            (bytes(length), choose.randbytes(length), choose.choice(_TOKENS))
        )
    else:
        del content[choose.choice((place, 0, size - length)) :]


#: what a run should never name; the first part is a package beside the run, whose import leaves a file
_NAMES = ["fuzz_payload.P", "recpo.cli.main.os.system", "recpo.verbs.tilt.tilt", "recpo.training.run.shutil.rmtree"]
_NAMES += ["builtins.exec", "os.system", "subprocess.Popen", "recpo.cli.main.main", "recpo.cli.main", "recpo.Bundle"]
_NAMES += [
    "recpo.CatalogSoftmaxPolicy",
    "recpo.GBPO",
    "lightning.Trainer",
    "torch.optim.Adam",
    "torch.hub.load",
    "eval",
]
_RAN = "fuzz_payload_ran"


def foreign_names(content: bytes, choose: random.Random) -> bytes:
    """The configuration of a run with one or two options that name something to import, in any form that is parsed."""
    import yaml

    configuration = yaml.safe_load(content)
    for _ in range(choose.choice((1, 1, 2))):
        place = configuration
        key = choose.choice(("policy", "objective", "critic", "data", "optimizer", "trainer", *configuration))
        while isinstance(place.get(key), dict) and place[key] and choose.random() < 0.6:
            place, key = place[key], choose.choice(list(place[key]))
        place[key] = _naming(choose)
    return yaml.safe_dump(configuration).encode()


def _naming(choose: random.Random) -> Any:
    name = choose.choice(_NAMES) if choose.random() < 0.6 else _attribute(choose)
    arguments = {"command": f"touch {_RAN}", "path": _RAN, "trust": ["fuzz_payload"], "base": name, "num_items": 5}
    arguments = {key: value for key, value in arguments.items() if choose.random() < 0.4}
    whole = {"class_path": name, "init_args": arguments}
    forms: list[Any] = [
        name,
        whole,
        {"class_path": name},
        [name],
        [whole],
        {"class_path": name, "dict_kwargs": arguments},
    ]
    forms += [f"{{class_path: {name}}}", f"class_path:\t{name}", f"class_path: {name}\ninit_args: {arguments}"]
    forms += [str(_BASE[0] / "options.yaml"), {"trust": [name]}, {"init_args": whole}]
    return choose.choice(forms)


def _attribute(choose: random.Random) -> str:
    """An attribute of a module that is loaded already, at the end of a chain of attributes."""
    module = choose.choice(sorted(name for name in sys.modules if name.startswith(("recpo.", "torch.optim."))))
    found, path = sys.modules[module], [module]
    for _ in range(choose.choice((1, 2, 3))):
        inside = sorted(name for name in vars(found) if name.isidentifier()) if hasattr(found, "__dict__") else []
        if not inside:
            break
        path.append(choose.choice(inside))
        found = vars(found)[path[-1]]
    return ".".join(path)


def outside_names(content: bytes, choose: random.Random) -> bytes:
    """A manifest of prepared data, sealed, that names a file outside of its directory."""
    from recpo.artifacts.checksums import seal

    manifest = json.loads(content)
    manifest.pop("sha256")
    shards = [shard for period in manifest["shards"].values() for shard in period]
    shard, names = choose.choice(shards), list(manifest["files"])
    own = choose.choice([shard["file"], *names])
    outside = choose.choice(
        (
            f"../prepared/{own}",
            f"{_BASE[0]}/prepared/{own}",
            f"train/../../prepared/{own}",
            f"./{own}",
            f"x//{own}",
            "",
            "..",
        )
    )
    key = choose.choice(("file", "past", "files"))
    if key == "files":
        manifest["files"][outside] = manifest["files"].pop(choose.choice(names))
    else:
        shard[key] = outside
    return json.dumps(seal(manifest)).encode()


def archives(content: bytes, choose: random.Random) -> bytes:
    """An archive of torch with records that inflate, that are named twice, or whose pickle says something else."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as whole, zipfile.ZipFile(made, "w") as out:
        names = whole.namelist()
        pickled = next(name for name in names if name.endswith("data.pkl"))
        chosen, how = choose.choice([pickled, pickled, *names]), choose.randrange(6)
        for name in names:
            record = zipfile.ZipInfo(name)
            data = whole.read(name)
            if name == chosen and how in (0, 1):
                record.compress_type = choose.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
                data = data if how else b"\x80\x02](" + choose.choice((b"N", b"\x00", b"]")) * (1 << 26)
            elif name == chosen and how in (2, 3):
                data = choose.choice(_PICKLES) if name == pickled and how == 2 else mutations(data, choose)
            elif name == chosen and how == 4:
                out.writestr(zipfile.ZipInfo(name), mutations(data, choose))
            out.writestr(record, data)
        for record in out.infolist():  # torch writes none
            record.external_attr = 0
    inflated = bytearray(made.getvalue())
    if how == 5:
        entry = inflated.rindex(chosen.encode()) - 46  # of the central directory
        for place in choose.sample((20, 24, 42), choose.choice((1, 2, 3))):  # sizes, and where the record is
            inflated[entry + place : entry + place + 4] = choose.choice((b"\xff" * 4, b"\x00\x00\x00\x7f", bytes(4)))
    return bytes(inflated)


_WEIGHTS = b"\x80\x02}X\x0a\x00\x00\x00state_dict"
#: pickles that declare much or nothing: a large buffer, nested lists, a missing memo, an operating system call
_PICKLES = [_WEIGHTS + b"c__builtin__\nbytearray\n\x8a\x05\x00\xe8vH\x17\x85Rs.", b"\x80\x02" + b"]" * 200_000 + b"."]
_PICKLES += [
    _WEIGHTS + b"]s.",
    _WEIGHTS + b"}K\x01K\x02ss.",
    b"\x80\x02Nr\xff\xff\xff\xff.",
    b"\x80\x02h\x05.",
    b"N.",
    b"",
]
_PICKLES += [b"cos\nsystem\nX\x15\x00\x00\x00touch fuzz_payload_ran\x85R."]


def targets(base: Path) -> dict[str, Target]:
    """Every reader, on what ``make_base`` made."""
    return {
        "prepared": target("prepared/**/*", read=_prepared, sealed=True),
        "run": target("run/*.json", "run/*.yaml", "run/*.parquet", "run/checkpoints/*", read=_run, sealed=True),
        "reward": target("reward/*.json", "reward/checkpoints/best.ckpt", read=_reward, sealed=True),
        "checkpoint": target("run/checkpoints/last.ckpt", read=_checkpoint, sealed=True),
        "codes": target("codes/*", read=_codes, sealed=True),
        "factors": target("factors/*", read=_factors, sealed=True),
        "bundle": target("bundle/*", read=_bundle, sealed=True),
        "evaluation": target("evaluation/*.json", "evaluation/*.yaml", read=_evaluation, sealed=True),
        "comparison": target("comparison/*.json", read=_comparison, sealed=True),
        "simulation": target("log/truth/*", read=_simulation, sealed=True),
        "journal": target("served/_journal/*/*", read=_journal),
        "parquet log": target("log/log/*.parquet", read=_parquet_log),
        "csv log": target("log.csv", read=_csv_log),
        "histories": target("histories.parquet", read=_histories),
        "lists": target("lists.parquet", "lists.csv", read=_lists),
        "item table": target("items.parquet", read=_item_table),
        "feature table": target("items.parquet", read=_feature_table),
        "yaml": target("train.yaml", "resolved.yaml", read=_yaml),
        "run names": target("run/resolved.yaml", read=_run_unharmed, change=foreign_names, seal=_seal_run),
        "manifest names": target("prepared/manifest.json", read=_prepared, sealed=True, change=outside_names),
        "archives": target("run/checkpoints/*", read=_run_weights, change=archives, seal=_seal_run),
        "index": target("indexed/index.faiss", read=_indexed, seal=_seal_bundle),
        "options": target("options/*.yaml", read=_options, change=wrong_values),
    }


#: targets that need trained runs
MODELS = frozenset({"run", "reward", "factors", "bundle", "comparison", "histories", "run names", "archives", "index"})


def make_base(base: Path, configs: Path, models: bool = True) -> None:
    """One output of every kind, and files as people have them, below ``base``.

    Args:
        base: an existing directory.
        configs: directory of the YAML files.
        models: also trained runs, and what is made of them.
    """
    from tests.robustness.crashes import import_everything, make_inputs

    if models:
        import_everything()
    make_inputs(base, configs, None if models else ["prepare"])
    prepared, bundles = str(base / "prepared"), ["--old", str(base / "bundle"), "--new", str(base / "bundle")]
    commands = [
        ["tokenize", "--prepared", prepared, "--out", str(base / "codes"), "--codebook_size", "8"],
        ["evaluate", "--prepared", prepared, "--contenders", "[popularity,random]", "--out", str(base / "evaluation")],
    ]
    if models:
        commands += [
            ["calibrate", "--rewards", str(base / "reward"), "--prepared", prepared, "--resamples", "5"],
            ["compare", *bundles, "--prepared", prepared, "--out", str(base / "comparison"), "--off_policy", "null"],
            [
                "export",
                "--run",
                str(base / "run"),
                "--out",
                str(base / "indexed"),
                "--index",
                "{recall: .01, lists: 4}",
            ],
        ]
    for command in commands:
        if "--out" not in command or not Path(command[command.index("--out") + 1]).exists():
            status, said = quiet(command)
            assert status == 0, said
    _make_files(base)
    _make_payload(base)
    _make_options(base / "options")
    _make_journal(base / "served")
    shutil.copy2(configs / "gbpo.yaml", base / "train.yaml")
    shutil.copy2(base / "run" / "resolved.yaml" if models else configs / "pretrain.yaml", base / "resolved.yaml")
    if not models:
        _make_checkpoint(base / "run" / "checkpoints")


def _make_files(base: Path) -> None:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    from recpo.log.prepared import Prepared

    log = pq.read_table(base / "log" / "log").slice(0, 300)
    pyarrow.csv.write_csv(log, base / "log.csv")
    data = Prepared.open(base / "prepared")
    events = data.table("histories.parquet").slice(0, 200)
    pq.write_table(events, base / "histories.parquet")
    ids = data.item_ids().to_external(range(1, 11))
    users = data.table("users.parquet", ["user_id"]).column(0).slice(0, 5)
    lists = pa.table({"user_id": [u for u in users.to_pylist() for _ in range(10)], "item_id": ids.to_pylist() * 5})
    lists = lists.append_column("rank", pa.array(list(range(1, 11)) * 5))
    pq.write_table(lists, base / "lists.parquet")
    pyarrow.csv.write_csv(lists, base / "lists.csv")
    number = range(data.num_items)
    items = {"item_id": data.item_ids().to_external([n + 1 for n in number]), "tags": [f"tag {n % 3}" for n in number]}
    items |= {"code_0": list(number), "code_1": [f"<a_{n % 7}>" for n in number], "age": [n / 7 for n in number]}
    items |= {"vector": pa.array([[n / 7.0, 1.0, -float(n)] for n in number], pa.list_(pa.float32()))}
    pq.write_table(pa.table(items), base / "items.parquet")


def _make_payload(base: Path) -> None:
    """A package whose import leaves a file, and options that name it."""
    (base / "payload").mkdir()
    ran = str(base / "payload" / _RAN)
    (base / "payload" / "fuzz_payload.py").write_text(f"open({ran!r}, 'w').close()\nclass P: pass\n")
    (base / "options.yaml").write_text("class_path: fuzz_payload.P\n")


def _make_checkpoint(directory: Path) -> None:
    import torch

    directory.mkdir(parents=True)
    weights = {"policy.table": torch.arange(60.0).view(20, 3), "policy.bias": torch.ones(3)}
    content = {"state_dict": weights, "global_step": 7, "optimizer_states": [{"state": {}, "lr": 0.1}]}
    torch.save(content, directory / "last.ckpt")


def _make_journal(root: Path) -> None:
    from recpo.server.impressions import ImpressionLog, LogLayout

    log = ImpressionLog(root, LogLayout("integer", "integer"), outcome_window_s=1e9, sync=False)
    for user in range(20):
        identifier, written = log.add(user, [user + 1, user + 2], [0.5, 0.5], [False, False])
        written.result(10)
        found = log.find(identifier)
        assert found is not None
        log.add_outcomes(found[0], {user + 1: {"watch_time": 3.0, "duration": 5.0}}).result(10)
    log.close()


def quiet(arguments: Sequence[str]) -> tuple[int, str]:
    """Status of a verb and what it said; a traceback raises, as nothing may end in one."""
    from recpo.cli.main import main

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = main(list(arguments))
    if "Traceback (most recent call last)" in said.getvalue():
        raise AssertionError(f"a traceback is no message: {said.getvalue()[-2000:]}")
    return status, said.getvalue()


def _text(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def _arrays(values: Any) -> list[bytes]:
    return [value.tobytes() for value in values if value is not None]


def _tensors(weights: Any) -> list[tuple[str, bytes]]:
    return [(name, value.numpy().tobytes()) for name, value in sorted(weights.items())]


def _prepared(root: Path) -> str:
    from recpo.log.prepared import Prepared

    data = Prepared.open(root / "prepared")
    read: list[Any] = [json.dumps(data.manifest, sort_keys=True), str(data.feedback), data.num_items]
    read += [data.item_ids().to_external(range(1, data.num_items + 1)).to_pylist(), data.item_counts().tobytes()]
    data.verify()
    for period in ("train", "valid", "test"):
        for shard in range(data.num_shards(period)):  # type: ignore[arg-type]
            read += _arrays(data.load(period, shard)[:8])  # type: ignore[arg-type]
    return _text(read)


def _run(root: Path) -> str:
    from recpo.training.run import Run

    run = Run.open(root / "run")
    configuration = {name: part for name, part in run.configuration.items() if name != "out"}
    weights = [_tensors(run.policy(name).state_dict()) for name in ("best", "last")]
    return _text(run.facts, configuration, str(run.feedback), run.items.to_external([1, 2]).to_pylist(), weights)


def _run_weights(root: Path) -> str:
    from recpo.training.checkpoints import validate_checkpoint
    from recpo.training.run import Run

    for name in ("best", "last"):
        validate_checkpoint(root / "run" / "checkpoints" / f"{name}.ckpt")
    return _text([_tensors(Run.open(root / "run").policy(name).state_dict()) for name in ("best", "last")])


def _run_unharmed(root: Path) -> str:
    """Reads a run whose configuration may name anything: none of it may be imported or called."""
    from recpo.base.contracts import Objective
    from recpo.training.options import CriticOptions
    from recpo.training.run import Run

    os.chdir(root)
    if (payload := str(_BASE[0] / "payload")) not in sys.path:
        sys.path.insert(0, payload)
    try:
        run = Run.open(root / "run")
        return _text(
            run.policy().state_dict().keys(), run.option("objective", Objective), run.option("critic", CriticOptions)
        )
    finally:
        ran = [path for path in (root / _RAN, _BASE[0] / "payload" / _RAN) if path.exists()]
        for path in ran:
            path.unlink()
        imported = sys.modules.pop("fuzz_payload", None)
        assert not ran, "somebody else's code ran"
        assert imported is None, "somebody else's code was imported"


def _seal_run(root: Path) -> None:
    from recpo.artifacts.checksums import seal, sha256
    from recpo.artifacts.outputs import write_json

    facts = json.loads((root / "run" / "run.json").read_bytes())
    facts.pop("sha256")
    facts["files"] = {name: sha256(root / "run" / name) for name in facts["files"]}
    write_json(root / "run" / "run.json", seal(facts))


def _seal_bundle(root: Path) -> None:
    from recpo.artifacts.checksums import seal, sha256

    manifest = json.loads((root / "indexed" / "manifest.json").read_bytes())
    manifest.pop("sha256")
    manifest["files"] = {name: sha256(root / "indexed" / name) for name in manifest["files"]}
    (root / "indexed" / "manifest.json").write_text(json.dumps(seal(manifest)))


def _indexed(root: Path) -> str:
    import numpy as np

    from recpo.serving.manifest import BundleManifest
    from recpo.serving.runtimes import ItemIndex

    manifest = BundleManifest.open(root / "indexed")
    index = ItemIndex.load(root / "indexed", manifest)
    states = np.ascontiguousarray(index.vectors[1:4])
    ids, scores = index.search(states, np.zeros((3, 1), np.int64), min(5, manifest.num_items))
    assert 0 <= ids.min() <= ids.max() <= manifest.num_items
    return _text(ids.tobytes(), scores.tobytes())


def _reward(root: Path) -> str:
    from recpo.training.learned_reward import load_calibration, load_reward_model
    from recpo.training.run import Run

    run = Run.open(root / "reward")
    model = load_reward_model(run, "best")
    return _text(load_calibration(run, "best", model.objective.target_names), _tensors(model.policy.state_dict()))


def _checkpoint(root: Path) -> str:
    import torch

    from recpo.training.checkpoints import validate_checkpoint

    file = root / "run" / "checkpoints" / "last.ckpt"
    validate_checkpoint(file)
    content = torch.load(file, weights_only=True)
    return _text(_tensors(content["state_dict"]), content["global_step"], str(content["optimizer_states"]))


def _codes(root: Path) -> str:
    from recpo.artifacts.semantic_codes import Codes
    from recpo.items.residual_kmeans import Codebooks

    codes = Codes.open(root / "codes")
    books = Codebooks.load(root / "codes")
    rows = codes.to_pandas().to_csv()
    return _text(codes.codes.tobytes(), rows, codes.manifest, books.centroids.numpy().tobytes())


def _factors(root: Path) -> str:
    from recpo.rewards.factors import Factors

    factors = Factors.open(root / "factors")
    return _text(
        _tensors(factors.tensors), factors.mean, factors.ridge, factors.noise, factors.lower_bound, factors.facts
    )


def _bundle(root: Path) -> str:
    from recpo.serving.bundle import Bundle, check_golden

    bundle = Bundle.open(root / "bundle", threads=1)
    check_golden(bundle)
    return _text(bundle.manifest, bundle.recommend_one([]), Bundle.open(root / "bundle", "torch").recommend_one([]))


def _evaluation(root: Path) -> str:
    from recpo.evaluation.evaluation import Evaluation

    evaluation = Evaluation.open(root / "evaluation")
    return _text(json.dumps(evaluation.document, sort_keys=True), evaluation.options)


def _comparison(root: Path) -> str:
    from recpo.evaluation.comparison import Comparison

    return _text(json.dumps(Comparison.open(root / "comparison").document, sort_keys=True))


def _simulation(root: Path) -> str:
    from recpo.worlds.log import Simulation

    truth = Simulation.open(root / "log").truth
    arrays = [_arrays(part) for part in (truth.preferences.users, truth.preferences.items)]
    return _text(truth.world, truth.preferences.parameters, arrays)


def _journal(root: Path) -> str:
    import pyarrow.parquet as pq

    from recpo.server.impressions import settle

    settle(root / "served")
    files = sorted((root / "served").glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    written = {
        (user, user + 1 + place): (3.0, 5.0) if not place else (None, None) for user in range(20) for place in (0, 1)
    }
    for (
        row
    ) in rows:  # what is published was logged: an impression may be missing, or an outcome of it, and nothing else
        outcome = (row["watch_time"], row["duration"])
        known = written.get((row["user_id"], row["item_id"]))
        assert known is not None, row
        assert outcome in (known, (None, None)), row
        assert row["propensity"] == 0.5, row
    return str(len(rows))


def _parquet_log(root: Path) -> str:
    out = ["--out", str(root / "out"), "--progress", "false", "--overwrite", "true"]
    return _status(quiet(["prepare", "--log", str(root / "log" / "log"), *out]))


def _csv_log(root: Path) -> str:
    out = ["--out", str(root / "out"), "--progress", "false", "--overwrite", "true"]
    return _status(quiet(["prepare", "--log", str(root / "log.csv"), *out]))


def _histories(root: Path) -> str:
    out = ["--histories", str(root / "histories.parquet"), "--out", str(root / "answer.parquet"), "--k", "3"]
    return _status(quiet(["recommend", "--source", str(_BASE[0] / "bundle"), *out]))


def _lists(root: Path) -> str:
    from recpo.evaluation.contenders import Lists, read_lists
    from recpo.log.prepared import Prepared

    data = Prepared.open(_BASE[0] / "prepared")
    read = [read_lists(Lists("mine", str(root / name)), data) for name in ("lists.parquet", "lists.csv")]
    for listed in read:
        assert len(listed.items) == 0 or 1 <= listed.items.min() <= listed.items.max() <= data.num_items
    return "read"


def _item_table(root: Path) -> str:
    from recpo.evaluation.beyond_accuracy import ItemFeatures, item_facts
    from recpo.items.sources import CodesFromFile, VectorsFromParquet
    from recpo.log.prepared import Prepared

    data, file = Prepared.open(_BASE[0] / "prepared"), root / "items.parquet"
    item_facts(data, ItemFeatures(file=file, tags="tags"))
    with suppress(RecpoError):
        VectorsFromParquet(file=file, missing="mean").read(data, data.item_ids(), 0)
    with suppress(RecpoError):
        CodesFromFile(file=file, codes=["code_0", "code_1"]).read(data.item_ids())
    return "read"


def _feature_table(root: Path) -> str:
    out = ["--out", str(root / "out"), "--progress", "false", "--overwrite", "true"]
    log = str(_BASE[0] / "log.csv")
    return _status(quiet(["prepare", "--log", log, "--items", str(root / "items.parquet"), *out]))


def _yaml(root: Path) -> str:
    from jsonargparse import ArgumentError

    from recpo.training.fit import parse_arguments, resolved

    found = []
    for name in ("train.yaml", "resolved.yaml"):
        try:
            found.append(resolved(parse_arguments(["--config", str(root / name), "--init_from", "null"])))
        except ArgumentError:
            found.append("refused")
    return _text(found)


_WRONG_VALUES = ["3", "[]", "[a]", "[[1]]", "{}", "{a: 1}", "word", "null", "true", "-1", "0", ".inf", ".nan", "9" * 20]
_OPTIONS = {
    "prepare": "columns: {}\nfeatures: {}\nfeedback: {positive_threshold: 0.75}\ncsv: {}\nlabel: WatchQuantiles\n"
    "split: {class_path: TemporalSplit, init_args: {test_days: 1}}\nmax_context: 20\nretire: []\nbehaviors: null\n"
    "max_watch_time: 100.0\nitems: null\nlog: LOG\n",
    "evaluate": "rerank_options: {}\nbaseline_options: {}\noff_policy: {}\nitem_features: null\nrerank: []\n"
    "ks: [5]\nbaselines: false\nreward: {dislike_cost: 1.0}\ncontenders: [popularity]\nbootstrap_resamples: 0\n",
    "tokenize": "vectors: VectorsFromCooccurrence\nlevels: 2\ncodebook_size: 8\ncapacity_slack: null\nseed: 0\n"
    "collisions: null\niterations: 3\n",
    "simulate": "exploration: null\nafter: null\nusers: 20\nitems: 20\nevents: 100\ndays: 3\nseed: 0\n",
}


def _make_options(directory: Path) -> None:
    directory.mkdir()
    for verb, text in _OPTIONS.items():
        log = str(directory.parent / "log.csv")
        (directory / f"{verb}.yaml").write_text(text.replace("LOG", log), encoding="utf-8")


def wrong_values(content: bytes, choose: random.Random) -> bytes:
    """Options with one to three values of another kind, such as a number in place of a group."""
    lines = content.decode().splitlines()
    for _ in range(choose.choice((1, 1, 2, 3))):
        place = choose.randrange(len(lines))
        name = lines[place].partition(":")[0]
        lines[place] = f"{name}: {choose.choice(_WRONG_VALUES)}"
    return "\n".join(lines).encode()


def _options(root: Path) -> str:
    found = []
    for verb in _OPTIONS:
        file = root / "options" / f"{verb}.yaml"
        whole = _BASE[0] / "options" / f"{verb}.yaml"
        if file.read_bytes() != whole.read_bytes():  # the others would only take time
            needed = [] if verb in ("prepare", "simulate") else ["--prepared", str(_BASE[0] / "prepared")]
            out = ["--out", str(root / "out"), "--overwrite", "true"]
            found.append(_status(quiet([verb, "--config", str(file), *needed, *out])))
    return _text(found)


def _status(ended: tuple[int, str]) -> str:
    status, said = ended
    assert status in (0, 1, 2), said
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == int(status > 0), (status, said[-2000:])
    return str(status)


_BASE = [Path()]


class Fault(NamedTuple):
    """An input that a reader did not stand."""

    target: str
    number: int
    file: str
    reason: str


class Fuzzer:
    """Changes the files of a target, one at a time, and reads them.

    Args:
        name: of the target.
        base: what ``make_base`` made.
        work: a directory for the copies.
        seed: with the number of an input it gives the same input again.
    """

    def __init__(self, name: str, base: Path, work: Path, seed: int) -> None:
        self.name, self.target, self.base, self.seed = name, targets(base)[name], base, seed
        _BASE[0] = base
        self.root = work / name.replace(" ", "-")
        self.files = sorted({f for pattern in self.target.files for f in base.glob(pattern) if f.is_file()})
        assert self.files, f"{name}: {self.target.files} matches nothing"
        self.fresh()
        self.whole = self.target.read(self.root)

    def fresh(self) -> None:
        """Copies what the target reads."""
        shutil.rmtree(self.root, ignore_errors=True)
        for part in sorted({pattern.split("/")[0] for pattern in self.target.files}):
            (self.root / part).parent.mkdir(parents=True, exist_ok=True)
            source = self.base / part
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, self.root / part)

    def attempt(self, number: int) -> tuple[str, Fault | None]:
        """Input ``number``: its outcome in a word, and the fault that it shows."""
        choose = random.Random(f"{self.name} {self.seed} {number}")
        file = choose.choice(self.files)
        content = self.target.change(file.read_bytes(), choose)
        return self.read(number, file, content)

    def read(self, number: int, file: Path, content: bytes) -> tuple[str, Fault | None]:
        """Reads the target with another content of one file."""
        shown = file.relative_to(self.base)
        if self.name == "journal":
            self.fresh()  # reading moves its files
        (self.root / shown).write_bytes(content)
        self.target.seal(self.root)
        try:
            found = self.target.read(self.root)
        except RecpoError as error:
            message = str(error)
            fault = None if message.strip() else Fault(self.name, number, str(shown), "an empty message")
            return "refused", fault
        except BaseException:
            return "raised", Fault(self.name, number, str(shown), traceback.format_exc()[-1500:])
        finally:
            shutil.copy2(file, self.root / shown)
            self.target.seal(self.root)
        if self.target.sealed and found != self.whole:
            return "wrong", Fault(self.name, number, str(shown), "read as other data")
        return "same" if found == self.whole else "read", None

    def batch(self, numbers: Sequence[int]) -> Iterator[tuple[str, Fault | None]]:
        """The inputs ``numbers``, in a child of their own; one that does not come back is the fault of the last one."""
        with tempfile.TemporaryFile() as results:
            child = os.fork()
            if not child:
                self._in_child(numbers, results.fileno())
            _, status = os.waitpid(child, 0)
            results.seek(0)
            lines = [json.loads(line) for line in results.read().splitlines()]
        for _, outcome, fault in (line for line in lines if len(line) == 3):
            yield outcome, None if fault is None else Fault(*fault)
        begun, done = ([line[0] for line in lines if len(line) == size] for size in (1, 3))
        if status or len(done) < len(numbers):
            self.fresh()
            lost = next(iter(set(begun) - set(done)), -1)
            yield (
                "died",
                Fault(self.name, lost, "?", f"the process ended with status {os.waitstatus_to_exitcode(status)}"),
            )

    def _in_child(self, numbers: Sequence[int], results: int) -> None:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        for number in numbers:
            spent = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(spent.ru_utime + spent.ru_stime) + _LONGEST_S
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            os.write(results, (json.dumps([number]) + "\n").encode())
            outcome, fault = self.attempt(number)
            os.write(results, (json.dumps([number, outcome, fault]) + "\n").encode())
        os._exit(0)


def campaign(names: Sequence[str], base: Path, work: Path, seconds: float, seed: int) -> int:
    """Shares the time among the targets; prints what each did and returns the number of faults."""
    faults = 0
    for name in names:
        fuzzer = Fuzzer(name, base, work, seed)
        outcomes, begun, number = Counter[str](), _cpu_seconds(), 0
        while _cpu_seconds() - begun < seconds / len(names):
            for outcome, fault in fuzzer.batch(range(number, number + _BATCH)):
                outcomes[outcome] += 1
                if fault is not None:
                    faults += 1
                    print(
                        f"FAULT {fault.target} seed {seed} input {fault.number} {fault.file}\n{fault.reason}",
                        flush=True,
                    )
            number += _BATCH
        print(f"{name}: {sum(outcomes.values())} inputs, {dict(outcomes)}", flush=True)
    return faults


def _cpu_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def guided(name: str, base: Path, work: Path, seconds: float, seed: int) -> None:
    """Lets atheris choose the bytes of the target's first file, by the branches of recpo that they reach."""
    import atheris

    with atheris.instrument_imports(include=["recpo", "jsonargparse", "yaml"]):
        import recpo.server.write_ahead
        import recpo.serving.manifest
        import recpo.training.fit  # noqa: F401
    fuzzer = Fuzzer(name, base, work, seed)
    seeds = work / "corpus"
    seeds.mkdir(exist_ok=True)
    shutil.copy2(fuzzer.files[0], seeds / "whole")

    def one(content: bytes) -> None:
        _, fault = fuzzer.read(0, fuzzer.files[0], content)
        if fault is not None:
            raise AssertionError(fault)

    atheris.Setup([sys.argv[0], f"-max_total_time={int(seconds)}", f"-seed={seed + 1}", str(seeds)], one)
    atheris.Fuzz()


def main() -> int:
    """Parses the options and runs a campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="CPU seconds of all targets together")
    parser.add_argument("--target", nargs="*", default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--input", type=int, default=None, help="this input of --target only, in this process")
    parser.add_argument("--engine", choices=["mutation", "atheris"], default="mutation")
    parser.add_argument("--models", choices=["true", "false"], default="true", help="false: without trained runs")
    parser.add_argument("--work", type=Path, default=None, help="directory of the inputs; kept and used again")
    given = parser.parse_args()
    configs, models = Path(__file__).parents[2] / "configs", given.models == "true"
    with tempfile.TemporaryDirectory(prefix="recpo-fuzz-") as temporary:
        root = Path(temporary) if given.work is None else given.work.resolve()
        base, work = root / "base", root / "work"
        if not (root / "complete").exists():
            for directory in (base, work):
                directory.mkdir(parents=True, exist_ok=True)
            child = os.fork()  # so that no thread of Arrow or torch stands in the process that forks
            if not child:
                make_base(base, configs, models)
                (root / "complete").touch()
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                return 1
        names = given.target or [name for name in targets(base) if models or name not in MODELS]
        if given.engine == "atheris":
            guided(names[0], base, work, given.seconds, given.seed)
        if given.input is not None:
            print(Fuzzer(names[0], base, work, given.seed).attempt(given.input))
            return 0
        return int(campaign(names, base, work, given.seconds, given.seed) > 0)


if __name__ == "__main__":
    sys.exit(main())
