"""Outputs appear complete or not at all, and never replace foreign files."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recpo import artifacts
from recpo.artifacts import outputs
from recpo.artifacts.checksums import kind_of, sha256, verify
from recpo.artifacts.documents import describe_os_error, read_json, write_tensors
from recpo.artifacts.outputs import directory_in_place, directory_of_steps, output_directory, output_file, write_json
from tests.refusals import refused

HANGING = """
import signal, sys
from recpo.artifacts.outputs import output_directory, output_file
from pathlib import Path
target, what, overwrite = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "overwrite"
make = output_file(target) if what == "file" else output_directory(target, kind=what, overwrite=overwrite)
with make as working:
    (working if what == "file" else working / "content").write_text("half")
    print("working", flush=True)
    signal.pause()
"""


def make(target, content="new", kind="prepared", **options):
    with output_directory(target, kind=kind, **options) as working:
        (working / "content").write_text(content)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def hanging():
    """Starts a process that hangs in the middle of writing; all of them are killed in the end."""
    processes = []

    def start(target, what="prepared", overwrite="keep"):
        process = subprocess.Popen(
            [sys.executable, "-c", HANGING, str(target), what, overwrite],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(artifacts.__file__).parents[2])},
        )
        processes.append(process)
        assert process.stdout.readline() == b"working\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_directory_appears_whole_and_says_what_it_is(tmp_path):
    with output_directory(tmp_path / "a/b/out", kind="codes") as working:
        assert working.parent == tmp_path / "a/b"
        assert not (tmp_path / "a/b/out").exists()
        (working / "content").write_text("new")
    assert names(tmp_path / "a/b") == ["out"]
    assert names(tmp_path / "a/b/out") == ["content", "recpo.json"]
    assert kind_of(tmp_path / "a/b/out") == "codes"
    assert kind_of(tmp_path) is None


def test_a_failure_leaves_nothing_not_even_the_directories_above(tmp_path):
    with pytest.raises(ZeroDivisionError), output_directory(tmp_path / "a/b/out", kind="codes") as working:
        (working / "content").write_text(str(1 / 0))
    with pytest.raises(ZeroDivisionError), output_file(tmp_path / "c/d/out") as working:
        working.write_text(str(1 / 0))
    assert names(tmp_path) == []


def test_an_existing_directory_is_replaced_only_on_request(tmp_path):
    make(tmp_path / "out", "old")
    with refused("exists"):
        make(tmp_path / "out")
    with pytest.raises(ZeroDivisionError), output_directory(tmp_path / "out", kind="prepared", overwrite=True):
        raise ZeroDivisionError
    assert (tmp_path / "out/content").read_text() == "old"
    make(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out/content").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_where_names_cannot_be_exchanged_the_old_one_is_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "_exchange", lambda first, second: False)
    make(tmp_path / "out", "old")
    make(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out/content").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_what_a_killed_process_had_set_aside_comes_back(tmp_path):
    make(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / "out.recpo-replaced-1-0")  # killed between the two renames
    with refused("exists"):
        make(tmp_path / "out")
    assert (tmp_path / "out/content").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_a_failed_rename_keeps_the_old_directory(tmp_path, monkeypatch):
    make(tmp_path / "out", "old")
    monkeypatch.setattr(outputs, "_exchange", lambda first, second: False)
    rename, calls = os.rename, []

    def second_fails(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with refused("failed"):
        make(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out/content").read_text() == "old"
    assert names(tmp_path) == ["out"]


WATCHING = """
import os, sys
print("ready", flush=True)
missing = 0
while not os.path.exists(sys.argv[2]):
    missing += not os.path.isdir(sys.argv[1])
print(missing)
"""


def test_there_is_a_target_at_every_moment_of_a_replacement(tmp_path):
    make(tmp_path / "out", "old")
    make(tmp_path / "other")
    if not outputs._exchange(tmp_path / "out", tmp_path / "other"):
        pytest.skip("this file system cannot exchange names")
    arguments = [sys.executable, "-c", WATCHING, str(tmp_path / "out"), str(tmp_path / "stop")]
    watcher = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    try:
        assert watcher.stdout.readline() == b"ready\n"
        for number in range(25):
            make(tmp_path / "out", str(number), overwrite=True)
    finally:
        (tmp_path / "stop").touch()
    assert watcher.communicate()[0] == b"0\n"
    assert (tmp_path / "out/content").read_text() == "24"


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_empty_directory_counts_as_none(tmp_path, overwrite):
    (tmp_path / "out").mkdir()
    make(tmp_path / "out", overwrite=overwrite)
    assert names(tmp_path / "out") == ["content", "recpo.json"]


def foreign(path):
    path.mkdir()
    (path / "thesis.tex").write_text("mine")


def other_kind(path):
    make(path, kind="run")


def damaged_marker(path):
    foreign(path)
    (path / "recpo.json").write_text('{"kind": ')


def odd_marker(path):
    foreign(path)
    (path / "recpo.json").write_text('["prepared"]')


def file(path):
    path.write_text("mine")


def device(path):
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))


def pipe(path):
    os.mkfifo(path)


def link_to_foreign(path):
    foreign(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


MAKERS = [foreign, other_kind, damaged_marker, odd_marker, file, device, pipe, link_to_foreign]


def snapshot(directory):
    return {str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in sorted(directory.rglob("*"))}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("existing", MAKERS)
def test_what_recpo_did_not_write_is_never_replaced(tmp_path, existing, overwrite):
    if existing is device and os.geteuid() != 0:
        pytest.skip("only root makes device nodes")
    existing(tmp_path / "out")
    before = snapshot(tmp_path)
    with refused(("exists", "wrong_file"), ...):
        make(tmp_path / "out", overwrite=overwrite)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("existing", [foreign, device, pipe])
def test_a_file_replaces_only_a_file(tmp_path, existing):
    if existing is device and os.geteuid() != 0:
        pytest.skip("only root makes device nodes")
    existing(tmp_path / "out")
    before = snapshot(tmp_path)
    with refused("wrong_file"), output_file(tmp_path / "out"):
        pytest.fail("refused before anything is written")
    assert snapshot(tmp_path) == before


def test_a_directory_of_the_users_own_with_a_similar_name_stays(tmp_path):
    for name in ("out.partial", "out.recpo-unfinished-1-ab", "out.recpo-replaced-1-ab", "out.replaced"):
        foreign(tmp_path / name)
    make(tmp_path / "out")
    make(tmp_path / "out", overwrite=True)
    assert [path.read_text() for path in sorted(tmp_path.glob("*/thesis.tex"))] == ["mine"] * 4


@pytest.mark.parametrize(
    ("target", "given", "message"),
    [
        ("log", "log", "is an input and would be overwritten"),
        ("link", "log", "is an input and would be overwritten"),
        ("log", "link", "is an input and would be overwritten"),
        ("log", "log/content", "contains .* which is an input"),
        (".", "log", "contains .* which is an input"),
        ("log/out", "log", "is inside .* which is an input"),
        ("log/a/out", "link", "is inside .* which is an input"),
    ],
)
def test_inputs_are_never_replaced(tmp_path, target, given, message):
    make(tmp_path / "world/log")
    (tmp_path / "world/recpo.json").write_text('{"kind": "prepared"}')
    (tmp_path / "world/link").symlink_to("log")
    before = snapshot(tmp_path)
    with refused("conflicting_options"):
        make(tmp_path / "world" / target, overwrite=True, inputs=[None, tmp_path / "world" / given])
    assert snapshot(tmp_path) == before


def test_an_input_file_is_not_overwritten(tmp_path):
    (tmp_path / "in").write_text("mine")
    (tmp_path / "link").symlink_to("in")
    for target, given in (("in", "in"), ("link", "in"), ("in", "link"), ("new", ".")):
        with (
            refused("conflicting_options"),
            output_file(tmp_path / target, inputs=[str(tmp_path / given)]),
        ):
            pytest.fail("refused before anything is written")
    assert (tmp_path / "in").read_text() == "mine"
    assert names(tmp_path) == ["in", "link"]


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/prepared")
    (tmp_path / "file").symlink_to("disk/file")
    make(tmp_path / "out")
    make(tmp_path / "out", "newer", overwrite=True)
    write_json(tmp_path / "file", 1)
    assert (tmp_path / "disk/prepared/content").read_text() == "newer"
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk/file").read_text() == "1\n"
    assert (tmp_path / "file").is_symlink()


@pytest.mark.parametrize("overwrite", ["keep", "overwrite"])
def test_a_killed_process_leaves_the_old_and_what_it_left_is_removed(tmp_path, hanging, overwrite):
    if overwrite == "overwrite":
        make(tmp_path / "out", "old")
    process = hanging(tmp_path / "out", overwrite=overwrite)
    assert len(names(tmp_path)) == (2 if overwrite == "overwrite" else 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if overwrite == "overwrite":
        assert (tmp_path / "out/content").read_text() == "old"
    else:
        assert not (tmp_path / "out").exists()
    make(tmp_path / "out", overwrite=True)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out/content").read_text() == "new"


def test_a_killed_writer_of_a_file_leaves_the_old_one(tmp_path, hanging):
    write_json(tmp_path / "out", "old")
    process = hanging(tmp_path / "out", "file")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "out").read_text() == '"old"\n'
    assert len(names(tmp_path)) == 2
    write_json(tmp_path / "out", "new")
    assert (tmp_path / "out").read_text() == '"new"\n'
    assert names(tmp_path) == ["out"]


def test_the_second_writer_of_a_directory_is_told_at_the_start(tmp_path, hanging):
    hanging(tmp_path / "out")
    before = snapshot(tmp_path)
    with refused("in_use"):
        make(tmp_path / "out", overwrite=True)
    assert snapshot(tmp_path) == before
    make(tmp_path / "other")


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path, hanging):
    hanging(tmp_path / "out", "file")
    write_json(tmp_path / "out", "mine")
    assert (tmp_path / "out").read_text() == '"mine"\n'
    assert len(list(tmp_path.glob("out.recpo-unfinished-*"))) == 1  # the other one is still at work


def test_of_many_simultaneous_writers_one_wins_and_the_others_are_told(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom recpo.artifacts.outputs import output_directory\n"
        "from recpo.base.errors import RecpoError\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "try:\n"
        "    with output_directory(Path(sys.argv[1]), kind='prepared') as working:\n"
        "        [(working / f'{n}').write_text(sys.argv[2]) for n in range(50)]\n"
        "    print('won')\n"
        "except RecpoError as error: print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(artifacts.__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "out"), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(4)
    ]
    assert {process.stdout.readline() for process in processes} == {"ready\n"}
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate()[0].strip() for process in processes]
    assert said.count("won") == 1
    assert all("another process is writing" in text or "exists already" in text for text in said if text != "won")
    winner = str(said.index("won"))
    assert names(tmp_path) == ["out"]
    assert {(tmp_path / "out" / str(number)).read_text() for number in range(50)} == {winner}


def test_a_target_that_appears_meanwhile_stays_and_the_work_is_kept(tmp_path):
    def write():
        with output_directory(tmp_path / "out", kind="run") as working:
            (working / "content").write_text("work")
            foreign(tmp_path / "out")

    with refused("in_use") as caught:
        write()
    kept = next(tmp_path.glob("out.recpo-kept-*"))
    assert str(kept) in str(caught.value)
    assert (kept / "content").read_text() == "work"
    assert names(tmp_path / "out") == ["thesis.tex"]


def test_a_directory_that_another_process_writes_in_place_is_not_replaced(tmp_path):
    make(tmp_path / "run", kind="run")
    with (
        directory_in_place(tmp_path / "run", kind="run", start=None, check=lambda: None),
        refused("in_use"),
    ):
        make(tmp_path / "run", kind="run", overwrite=True)
    make(tmp_path / "run", kind="run", overwrite=True)


def test_a_directory_that_other_outputs_fill_has_one_writer(tmp_path):
    out = tmp_path / "demo"
    with directory_of_steps(out, kind="demo", overwrite=False):
        make(out / "run", kind="run")
        for overwrite in (False, True):
            with (
                refused("in_use"),
                directory_of_steps(out, kind="demo", overwrite=overwrite),
            ):
                pytest.fail("filled already")
        assert kind_of(out / "run") == "run"
    with refused("exists"), directory_of_steps(out, kind="demo", overwrite=False):
        pytest.fail("it exists")
    with directory_of_steps(out, kind="demo", overwrite=True):
        assert names(out) == ["recpo.json"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "permission denied"),
        (errno.EROFS, "read-only"),
        (errno.ENAMETOOLONG, "too long"),
        (errno.EIO, "device reports an error"),
    ],
)
@pytest.mark.parametrize("step", ["mkdir", "open", "fsync", "rename", "block"])
def test_what_the_system_refuses_is_one_message_and_nothing_stays(tmp_path, monkeypatch, step, number, message):
    def refuse(*_args, **_options):
        raise OSError(number, os.strerror(number))

    def write(output):
        with output as working:
            if step == "block":
                refuse()
            (working / "content" if working.is_dir() else working).touch()

    for output in (output_directory(tmp_path / "sub/out", kind="run"), output_file(tmp_path / "sub/out")):
        with monkeypatch.context() as patch:
            for function in {"block": [], "rename": ["rename", "replace"]}.get(step, [step]):
                patch.setattr(os, function, refuse)
            with refused("failed"):
                write(output)
        assert names(tmp_path) == []


def test_a_missing_input_is_not_blamed_on_the_output(tmp_path):
    with pytest.raises(FileNotFoundError), output_directory(tmp_path / "out", kind="run"):
        (tmp_path / "input").read_text()


def test_names_that_the_file_system_refuses(tmp_path):
    with refused("failed"):
        make(tmp_path / ("x" * 300))
    with refused("failed"):
        write_json(tmp_path / ("x" * 250), 1)
    (tmp_path / "file").write_text("mine")
    with refused("failed"):
        make(tmp_path / "file/out")
    with refused("failed"):
        write_json(tmp_path / "file/out", 1)
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"a": 1', b"\xff\xfe", b"[1]", b"null", b"3", b'"text"', b"[" * 100_000]
)
def test_damaged_json_is_named(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with refused("damaged", "manifest.json"):
        read_json(tmp_path / "manifest.json", "make it again")


def test_json_round_trip(tmp_path):
    write_json(tmp_path / "a.json", {"b": [1, None, "ü"]})
    assert read_json(tmp_path / "a.json", "") == {"b": [1, None, "ü"]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"b": float("nan")})
    assert read_json(tmp_path / "a.json", "") == {"b": [1, None, "ü"]}
    assert names(tmp_path) == ["a.json"]
    with refused("missing_file", "gone.json"):
        read_json(tmp_path / "gone.json", "make it")


def test_verify_names_every_file_that_differs(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    checksums = {name: sha256(tmp_path / name) for name in ("a", "b", "c")}
    verify(tmp_path, checksums, "copy it again")
    with (tmp_path / "a").open("rb") as handle:
        assert sha256(handle) == checksums["a"]
    (tmp_path / "a").write_text("A")
    (tmp_path / "b").unlink()
    with refused("damaged", "a, b"):
        verify(tmp_path, checksums, "copy it again")
    with refused("untrusted", "../a"):
        verify(tmp_path, {"../a": "0"}, "copy it again")


@pytest.fixture(params=[0o022, 0o027], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def permissions(root):
    return {str(file.relative_to(root)): file.stat().st_mode & 0o777 for file in root.rglob("*") if file.is_file()}


def test_the_umask_decides_who_reads_tensors(tmp_path, umask):
    write_tensors(tmp_path / "new.safetensors", {"x": torch.ones(3)})
    (tmp_path / "old.safetensors").touch(0o600)
    write_tensors(tmp_path / "old.safetensors", {"x": torch.ones(3)}, {"key": "value"})
    assert permissions(tmp_path) == {"new.safetensors": 0o666 & ~umask, "old.safetensors": 0o600}
    assert torch.equal(load_file(tmp_path / "old.safetensors")["x"], torch.ones(3))


def test_os_errors_name_path_and_remedy():
    assert describe_os_error(OSError(errno.ENOSPC, "x", "/a"), "/b") == (
        "/a: the disk is full: free space, or write elsewhere"
    )
    assert describe_os_error(OSError(errno.EROFS, "x"), "/b").startswith("/b: the file system is read-only")
    assert describe_os_error(OSError("Couldn't deserialize thrift\nmore")) == "Couldn't deserialize thrift"
    assert describe_os_error(OSError()) == "OSError"
