"""A directory that is filled in place: one writer, and after any failure, the old or the new directory."""

from __future__ import annotations

import os
import signal

import pytest

from recpo.artifacts.checksums import MARKER, kind_of
from recpo.artifacts.outputs import directory_in_place, output_directory
from recpo.base.errors import RecpoError
from tests.refusals import refused


def start(directory):
    (directory / "first").write_text("new")


def begin(place, *, goes_on=False, check=lambda: None):
    return directory_in_place(place, kind="run", start=None if goes_on else start, check=check)


def written(place, content="old"):
    with output_directory(place, kind="run") as working:
        (working / "first").write_text(content)
    return place


def found(place):
    return (place / "first").read_text() if place.exists() else None


def killed(place, when):
    """The exit status of a process that is killed while it fills ``place``; ``when`` gets the function to keep it."""
    child = os.fork()
    if not child:
        with begin(place) as keep:
            when(keep)
            os.kill(os.getpid(), signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("old", [None, "old"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_failure_brings_back_what_stood_there_until_the_new_one_is_kept(tmp_path, old, kept):
    place = tmp_path / "run"
    if old:
        written(place)

    def fill():
        with begin(place) as keep:
            assert (found(place), kind_of(place)) == ("new", "run")
            if kept:
                keep()
                assert [path.name for path in tmp_path.iterdir()] == ["run"]
            raise KeyError

    with pytest.raises(KeyError):
        fill()
    assert found(place) == ("new" if kept else old)
    assert [path.name for path in tmp_path.iterdir()] == (["run"] if kept or old else [])


@pytest.mark.parametrize("kept", [False, True])
def test_the_next_writer_finds_the_old_one_after_a_kill(tmp_path, kept):
    place, seen = written(tmp_path / "run"), []
    assert killed(place, lambda keep: keep() if kept else None) == -signal.SIGKILL
    with begin(place, check=lambda: seen.append(found(place))) as keep:
        keep()
    assert seen == ["new" if kept else "old"]
    assert (found(place), len(list(tmp_path.iterdir()))) == ("new", 1)


def test_other_outputs_settle_it_too(tmp_path):
    place = written(tmp_path / "run")
    assert killed(place, lambda keep: None) == -signal.SIGKILL
    with pytest.raises(KeyError), output_directory(place, kind="run", overwrite=True):
        raise KeyError
    assert (found(place), len(list(tmp_path.iterdir()))) == ("old", 1)


def test_what_was_begun_and_not_yet_marked_is_removed(tmp_path):
    (tmp_path / "run.recpo-unfinished-1-ab").mkdir()
    (tmp_path / "run.recpo-unfinished-2-ab").mkdir()
    (tmp_path / "run.recpo-unfinished-2-ab" / MARKER).write_text("")  # killed while it was written
    (tmp_path / "run.recpo-unfinished-3-ab").mkdir()
    (tmp_path / "run.recpo-unfinished-3-ab" / "notes.txt").write_text("somebody's")
    written(tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.recpo-unfinished-3-ab"]


def test_killed_between_the_two_renames(tmp_path):
    place = written(tmp_path / "run")
    place.rename(tmp_path / "run.recpo-aside-1-ab")
    with begin(place, check=lambda: [][0] if found(place) != "old" else None) as keep:
        keep()
    assert (found(place), len(list(tmp_path.iterdir()))) == ("new", 1)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_second_writer_is_told_and_changes_nothing(tmp_path, goes_on):
    place = written(tmp_path / "run")
    with begin(place) as keep:
        for _ in range(2):
            read, write = os.pipe()
            child = os.fork()
            if not child:
                try:
                    with begin(place, goes_on=goes_on):
                        os.write(write, b"wrote")
                except RecpoError as error:
                    os.write(write, str(error).encode())
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            os.close(write)
            assert "another process is writing it" in os.read(read, 1000).decode()
            os.close(read)
            assert found(place) == "new"
            keep()
            keep = lambda: None  # noqa: E731  once is enough
    assert len(list(tmp_path.iterdir())) == 1


def test_leavings_inside_are_removed_when_it_is_continued(tmp_path):
    place = written(tmp_path / "run")
    (place / "checkpoints" / "last.ckpt.recpo-unfinished-1-ab").mkdir(parents=True)
    (place / "checkpoints" / "best.ckpt.partial").write_text("half")
    with begin(place, goes_on=True):
        assert [path.name for path in (place / "checkpoints").iterdir()] == []
    assert found(place) == "old"


def test_a_check_that_fails_leaves_everything(tmp_path):
    place = written(tmp_path / "run")

    def check():
        raise RecpoError("no")

    with refused("invalid"), begin(place, check=check):
        pass
    assert (found(place), len(list(tmp_path.iterdir()))) == ("old", 1)


def looping(path):
    path.symlink_to(path.name)


def beside_a_link(path):
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (lambda path: path.write_text("thesis"), "out", "a part of this path is a file"),
        (lambda path: path.write_text("thesis"), "out/run", "in the way|a part of this path is a file"),
        (looping, "out", "circle|a part of this path is a file"),
        (looping, "out/run", "circle|in the way"),
        (lambda path: None, "x" * 300, "the path is too long"),
    ],
)
def test_places_where_nothing_can_be_made(tmp_path, make, name, message):
    make(tmp_path / "out")
    before = sorted(path.name for path in tmp_path.iterdir())
    with refused("failed"), begin(tmp_path / name):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_missing_parents_and_links_without_a_target(tmp_path):
    beside_a_link(tmp_path / "link")
    for name in ("a/b/run", "link"):
        with begin(tmp_path / name) as keep:
            keep()
        assert found(tmp_path / name) == "new"
    assert (tmp_path / "link").is_symlink()
    assert found(tmp_path / "elsewhere") == "new"
