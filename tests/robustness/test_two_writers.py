"""A process and this one write the same output at the same time: one succeeds, the other one reports an error."""

import signal

import pytest

from recpo.artifacts.checksums import kind_of
from recpo.cli.main import main
from recpo.log.prepared import Prepared
from tests.forks import Command

SMALL = ["--policy.init_args.dim", "8", "--policy.init_args.layers", "1", "--policy.init_args.max_history", "12"]
SMALL += ["--data.layout.init_args.history_length", "12", "--allocator", "false", "--progress", "false"]
SMALL += ["--patience", "null"]  # the first one must still be at it when the second one begins
TAKEN = "another process is writing it; wait until it ends, or choose another output"


def begin(folder, *options):
    folder.mkdir()
    return Command(list(map(str, options)), folder)


def ended(command):
    status, (_, said) = command.ended(), command.printed
    assert "Traceback" not in said
    return status, said


def here(capfd, *options):
    """Status and message of a command in this process."""
    capfd.readouterr()
    status = main(list(map(str, options)))  # a traceback would be an exception here
    return status, capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", ["false", "true"])
def test_two_preparations(world, tmp_path, capfd, overwrite):
    out = tmp_path / "place" / "prepared"
    out.parent.mkdir()
    words = ["prepare", "--log", world / "log", "--out", out, "--overwrite", overwrite]
    other = begin(tmp_path / "printed", *words)
    other.until(lambda: any(out.parent.iterdir()))  # it has begun to write
    results = [here(capfd, *words), ended(other)]
    refused = [said for status, said in results if status == 1]
    assert [status for status, _ in results].count(0) >= 1
    for said in refused:  # while the other one wrote, or after it
        assert TAKEN in said or (overwrite == "false" and ("exists already" in said or "somebody else" in said))
    if overwrite == "false":
        assert len(refused) == 1
    Prepared.open(out).verify()
    assert [path.name for path in out.parent.iterdir()] == ["prepared"]


@pytest.mark.slow
def test_two_trainings_and_two_resumptions(prepared, tmp_path, request, capfd):
    config, out = request.config.rootpath / "configs" / "pretrain.yaml", tmp_path / "place" / "run"
    train = ["train", "--config", config, "--data.prepared", prepared, "--out", out, *SMALL, "--checkpoint_every", "5"]
    train += ["--trainer.max_epochs", "100000"]
    for name, options in (("first", []), ("again", ["--resume", "true"])):
        first = begin(tmp_path / name, *train, *options)
        written = (out / "checkpoints" / "last.ckpt").stat().st_mtime_ns if options else 0
        first.until(lambda w=written: (out / "checkpoints/last.ckpt").exists() and _age(out) > w)
        for more in (["--overwrite", "true"], ["--resume", "true"]):
            status, said = here(capfd, *train, *more)
            assert (status, TAKEN in said) == (1, True), said
        assert first.process.exitcode is None
        first.send(signal.SIGTERM)
        assert ended(first)[0] == 143
    assert kind_of(out) == "run"
    assert [path.name for path in out.parent.iterdir()] == ["run"]


def _age(out):
    return (out / "checkpoints" / "last.ckpt").stat().st_mtime_ns
