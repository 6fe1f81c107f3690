"""The wheel in separate environments: the command and what ``recpo init`` writes, without the repository; and the
server, where nothing is installed but what it needs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.server.conftest import bundles, get, post, process, request  # noqa: F401  `bundles` is a fixture

ROOT = Path(__file__).parents[1]
EXTRAS = {"sharding", "serve", "spark", "notebooks"}


def clean_environment():
    """The variables of this process without those that put the repository on a path."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(*words, where, **environment):
    """Runs a command without the repository on its path."""
    given = clean_environment() | environment
    done = subprocess.run(
        [str(word) for word in words], cwd=where, env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of the tracked files; building in the repository would leave a ``build`` behind."""
    source, out = tmp_path_factory.mktemp("source") / "recpo", tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "*.egg-info", "__pycache__", "runs", "demo", ".*_cache")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "-w", out, source, where=out)
    (built,) = out.glob("recpo-*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_what_the_package_reads(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    kinds = (".py", ".pyi", ".json", ".jinja")
    packaged = {str(file.relative_to(ROOT)) for file in (ROOT / "recpo").rglob("*.*") if file.suffix in kinds}
    configurations = {f"recpo/configs/{file.name}" for file in (ROOT / "configs").glob("*.yaml")}
    assert packaged | configurations | {"recpo/py.typed"} <= names
    assert not [name for name in names if name.startswith("tests/")]
    assert {line.split()[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")} >= EXTRAS


@pytest.mark.slow
def test_the_wheel_runs_where_nothing_else_of_recpo_is(wheel, tmp_path):
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", where=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed")
    run(python, *install, wheel, where=tmp_path)
    place = run(python, "-c", "import recpo; print(recpo.__file__)", where=tmp_path)
    assert place.startswith(str(site))
    command = home / "bin" / "recpo"
    assert "usage: recpo VERB" in run(command, "--help", where=tmp_path)
    run(command, "simulate", "--out", "world", "--users", 60, "--items", 40, "--events", 3000, where=tmp_path)
    run(command, "init", tmp_path / "world" / "log", "--out", "own", where=tmp_path)
    assert {file.name for file in (tmp_path / "own").iterdir()} >= {"prepare.yaml", "pretrain.yaml", "mpo.yaml"}
    run(command, "prepare", "--config", "own/prepare.yaml", where=tmp_path)
    train = ("train", "--config", "own/pretrain.yaml", "--trainer.max_steps", 2, "--allocator", "false")
    train += ("--policy.init_args.dim", 8, "--policy.init_args.layers", 1, "--trainer.limit_val_batches", 1)
    assert "finished" in run(command, *train, where=tmp_path, OMP_NUM_THREADS="1")


def pins(name):
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}


def test_the_server_is_pinned_as_everything_else():
    assert pins("serve.lock") < pins("cpu.lock")


def link_distribution(name, site):
    """Links the files of a package of this environment, which has the same versions; pip would copy 400 MB."""
    for file in distribution(name).files:
        if ".." not in file.parts:  # not its commands
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).symlink_to(file.locate())


@pytest.mark.slow
def test_a_bundle_is_served_where_only_the_packages_of_the_server_are(wheel, bundles, tmp_path):  # noqa: F811
    """With those of examples/deployment/Dockerfile: a request with exploration and re-ranking, and its log."""
    home, log = tmp_path / "environment", tmp_path / "impressions"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", where=tmp_path).strip())
    for pin in pins("serve.lock"):
        link_distribution(pin.partition("==")[0], site)
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*install, "--no-compile", wheel, where=tmp_path)  # most of what is installed is never imported
    absent = "torch", "lightning", "ibis", "duckdb", "scipy", "sklearn"
    code = f"from importlib.util import find_spec; print([name for name in {absent} if find_spec(name)])"
    assert run(home / "bin" / "python", "-c", code, where=tmp_path) == "[]\n"
    flags = ["--log", log, "--publish_on_stop", "true", "--exploration.temperature", 1, "--exploration.shortlist", 10]
    flags += ["--rerank", "MaximalMarginalRelevance", "--rerank_options.shortlist", 10]
    with process(bundles[0], *flags, program=[home / "bin" / "recpo"], environment=clean_environment()) as server:
        shown = post(f"{server.url}/v1/recommend", json=request()).json()
        feedback = {"request_id": shown["request_id"], "outcomes": [{"item_id": shown["items"][0]["item_id"]}]}
        feedback["outcomes"][0] |= {"watch_time": 6.0, "duration": 9.0}
        assert post(f"{server.url}/v1/feedback", json=feedback).json() == {"accepted": 1}
        assert "recpo_impressions_total 1.0" in get(f"{server.url}/metrics").text
    assert server.process.returncode == 0
    rows = pq.read_table(log).to_pylist()
    assert [row["item_id"] for row in rows] == [item["item_id"] for item in shown["items"]]
    assert [row["watch_time"] for row in rows if row["watch_time"] is not None] == [6.0]
