"""Checkpoints of sharded tables: any number of ranks in any layout reads them, completely or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from recpo.base.errors import Code
from recpo.policies.item_table import ItemTable, tables_on_meta
from recpo.training.checkpoints import META, SHAPES, LazyRows, saved_tensors
from recpo.training.optimizers import build_optimizer
from recpo.training.run import load_weights
from tests.refusals import refused
from tests.sharding.ranks import Ranks
from tests.sharding.tables import shard

pytestmark = pytest.mark.slow

ROWS, DIM = 23, 8


class Net(nn.Module):
    """A table that is looked up, one that a softmax runs over, one that is read whole, a frozen one, and no table."""

    def __init__(self, seed: int = 0, rows: int = ROWS) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.looked_up = ItemTable(rows - 1, DIM)
        self.scored = ItemTable(rows - 1, DIM, use="softmax")
        self.frozen = ItemTable(rows - 1, DIM).requires_grad_(False)
        self.read = ItemTable(rows - 1, DIM, use="whole")  # of the shape of a table that is cut into rows
        self.dense = nn.Linear(DIM, DIM)
        self.register_buffer("count", torch.tensor(7))

    def loss(self, ids: Tensor) -> Tensor:
        states = self.dense(self.looked_up(ids) + self.frozen(ids) + self.read(ids))
        return -self.scored.log_prob(states, ids).sum()


def sharded(kind: str, seed: int = 0, optimizer: Any = "adagrad", rows: int = ROWS) -> tuple[Any, Any]:
    from recpo.sharding.lookup_tables import TableOptions

    kinds = {"looked_up": kind, "frozen": kind, "scored": "row_wise"}
    net = shard(Net(seed, rows), kinds, TableOptions(optimizer, 0.1))
    return net, build_optimizer(net, lambda p: torch.optim.Adam(p, lr=0.1), torch.optim.SparseAdam)


def train(net: Any, optimizer: Any, steps: int) -> None:
    """The same on any number of ranks."""
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(1, ROWS, (4, 6), generator=generator).flatten()
        net.loss(ids).backward()
        for parameter in [*net.dense.parameters(), net.read.weight]:  # as DistributedDataParallel does
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        for table in (net.looked_up, net.frozen):
            if hasattr(table, "collect_gradients"):
                table.collect_gradients()
        optimizer.step()


def whole(value: Any) -> Any:
    """Numbers and whole tensors, wherever their blocks are."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor

    if isinstance(value, ShardedTensor):
        full = torch.zeros(value.size())
        for part in value.local_shards():
            places = zip(part.metadata.shard_offsets, part.metadata.shard_sizes, strict=True)
            full[tuple(slice(o, o + s) for o, s in places)] = part.tensor
        dist.all_reduce(full)
        return full
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    return [whole(part) for part in value] if isinstance(value, (list, tuple)) else value


def save_run(path: Path, kind: str, optimizer: str) -> tuple[Any, Any, Any]:
    """A checkpoint, what it holds, and what two further steps make of it."""
    from recpo.sharding import strategy

    net, own = sharded(kind, optimizer=optimizer)
    train(net, own, 2)
    states = own.state_dict()
    strategy.write_checkpoint(
        net.state_dict(), {"optimizer_states": [states], "epoch": 3, "nested": {"a": [1, (2.5, "b")]}}, path
    )
    held = whole(dict(net.state_dict())), whole(states)
    train(net, own, 2)
    return *held, whole(dict(net.state_dict()))


def load_run(path: Path, kind: str, optimizer: str, expected: tuple[Any, Any, Any]) -> None:
    from recpo.sharding import strategy

    net, own = sharded(kind, seed=1, optimizer=optimizer)
    if kind != "data_parallel":
        net.looked_up.row_shard(learns=False)  # what was made of other weights is not kept
    rest = strategy.read_checkpoint(net.state_dict(), [own], path)
    net.count.fill_(7)
    own.load_state_dict(rest["optimizer_states"][0])
    assert (rest["epoch"], rest["nested"]) == (3, {"a": [1, (2.5, "b")]})
    torch.testing.assert_close(whole(dict(net.state_dict())), expected[0], rtol=0, atol=0)
    torch.testing.assert_close(whole(own.state_dict()), expected[1], rtol=0, atol=0)
    train(net, own, 2)
    torch.testing.assert_close(whole(dict(net.state_dict())), expected[2], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def saved(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Of two ranks, row-wise with Adagrad."""
    path = tmp_path_factory.mktemp("saved") / "last.ckpt"
    return path, two.run(save_run, path, "row_wise", "adagrad")[0]


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "data_parallel"])
def test_two_ranks_continue_in_any_layout(two: Ranks, saved: Any, kind: str) -> None:
    path, expected = saved
    two.run(load_run, path, kind, "adagrad", expected)


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_one_rank_continues(alone: None, saved: Any, kind: str) -> None:
    path, expected = saved
    load_run(path, kind, "adagrad", expected)


def test_the_names_are_those_of_the_module_that_is_not_sharded(saved: Any) -> None:
    path, (weights, *_) = saved
    found = saved_tensors(path)
    assert found.keys() == Net().state_dict().keys()
    assert len(list(path.glob("*.safetensors"))) == 2
    for name, tensor in found.items():
        assert isinstance(tensor, LazyRows)
        assert torch.equal(tensor.whole(), weights[name])


def test_load_weights_reads_it_on_one_process(saved: Any) -> None:
    path, (weights, *_) = saved
    net = Net(seed=5)
    load_weights(net, path, "")
    torch.testing.assert_close(net.state_dict(), weights, rtol=0, atol=0)


def read_blocks(path: Path, kind: str) -> None:
    """Tables without memory read the rows of their own block, and nothing else."""
    ranges = []
    read = LazyRows.__getitem__

    def recorded(self: LazyRows, rows: slice) -> Tensor:
        if self.shape == (ROWS, DIM):
            ranges.append((rows.start, rows.stop))
        return read(self, rows)

    with tables_on_meta():
        net = Net(seed=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazyRows, "__getitem__", recorded)
        load_weights(net, path, "")
        assert ranges == [(None, None)]  # the table that is read whole
        shard(net, kind)
    rows = ROWS if kind == "table_wise" else -(-ROWS // 2)
    assert len(ranges) > 1
    assert all(stop - start <= rows for start, stop in ranges[1:])
    expected = {name: tensor.whole() for name, tensor in saved_tensors(path).items()}  # type: ignore[union-attr]
    torch.testing.assert_close(whole(dict(net.state_dict())), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_ranks_read_their_own_rows_only(two: Ranks, saved: Any, kind: str) -> None:
    two.run(read_blocks, saved[0], kind)


def fail_on_a_full_disk(path: Path, failing: int) -> list[str]:
    """A rank that cannot write; what lies there afterwards."""
    from recpo.sharding import strategy

    net, own = sharded("row_wise", seed=9)
    rest = {"optimizer_states": [own.state_dict()]}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == failing:
            patch.setattr(strategy, "write_tensors", full)
        with refused("failed", str(path)) as caught:
            strategy.write_checkpoint(net.state_dict(), rest, path)
        assert f"rank {failing}: [Errno 28]" in str(caught.value)
    dist.barrier()
    return sorted(entry.name for entry in path.parent.iterdir())


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_leaves_the_last_checkpoint_as_it_was(two: Ranks, saved: Any, failing: int) -> None:
    path, (weights, *_) = saved
    assert two.run(fail_on_a_full_disk, path, failing) == [[path.name]] * 2
    assert torch.equal(saved_tensors(path)["dense.weight"].whole(), weights["dense.weight"])
    empty = path.parent / "empty" / "first.ckpt"
    empty.parent.mkdir(exist_ok=True)
    assert two.run(fail_on_a_full_disk, empty, failing) == [[], []]
    empty.parent.rmdir()


def test_the_last_checkpoint_stays_until_the_next_one_is_whole(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recpo.sharding import strategy

    path = tmp_path / "last.ckpt"
    net, own = sharded("row_wise")
    rest = {"optimizer_states": [own.state_dict()]}
    strategy.write_checkpoint(net.state_dict(), rest, path)
    before = net.dense.weight.detach().clone()
    train(net, own, 1)
    write, seen = strategy._write, []

    def watched(tensors: Any, working: Path) -> None:
        write(tensors, working)
        seen.append(saved_tensors(path)["dense.weight"].whole())  # type: ignore[union-attr]
        shutil.copytree(working, tmp_path / "last.ckpt.recpo-unfinished-0-dead")  # as a killed process leaves it
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(strategy, "_write", watched)
        with pytest.raises(KeyboardInterrupt):
            strategy.write_checkpoint(net.state_dict(), rest, path)
    assert torch.equal(seen[0], before)
    assert torch.equal(saved_tensors(path)["dense.weight"].whole(), before)  # type: ignore[union-attr]
    strategy.write_checkpoint(net.state_dict(), rest, path)
    assert torch.equal(saved_tensors(path)["dense.weight"].whole(), net.dense.weight)  # type: ignore[union-attr]
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def refuse(path: Path, rows: int, code: Code) -> None:
    from recpo.sharding import strategy

    net, own = sharded("row_wise", rows=rows)
    with refused(code, str(path)):
        strategy.read_checkpoint(net.state_dict(), [own], path)


def copy(path: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for file in path.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_checkpoint_of_another_model_is_refused_with_names(alone: None, saved: Any, tmp_path: Path) -> None:
    path, _ = saved
    refuse(path, ROWS + 1, "mismatch")
    with refused("mismatch", "last.ckpt") as caught:
        load_weights(Net(rows=ROWS + 1), path, "")
    assert "looked_up.weight: (23, 8) in the checkpoint, (24, 8)" in str(caught.value)
    (tmp_path / "file.ckpt").touch()
    refuse(tmp_path / "file.ckpt", ROWS, "wrong_file")
    refuse(tmp_path / "none.ckpt", ROWS, "wrong_file")


def test_a_checkpoint_that_lost_a_file_is_refused(alone: None, saved: Any, tmp_path: Path) -> None:
    from recpo.sharding import strategy

    net, own = sharded("row_wise")
    names = [file.name for file in saved[0].glob("*.safetensors")]
    assert len(names) > 1
    for name in names:
        path = copy(saved[0], tmp_path / name / "lost.ckpt")
        (path / name).unlink()
        with refused("damaged", "lost.ckpt"):
            strategy.read_checkpoint(net.state_dict(), [own], path)
        with refused("damaged", "lost.ckpt"):
            saved_tensors(path)


class Attack:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_nothing_is_unpickled(alone: None, saved: Any, tmp_path: Path) -> None:
    from recpo.sharding import strategy

    path = copy(saved[0], tmp_path / "malicious.ckpt")
    torch.save({"optimizer_states": Attack(tmp_path / "harm")}, path / META)
    net, own = sharded("row_wise")
    with refused("damaged", "meta.pt"):
        strategy.read_checkpoint(net.state_dict(), [own], path)
    with refused("damaged", "meta.pt"):
        load_weights(Net(), path, "")
    assert not (tmp_path / "harm").exists()


@st.composite
def blocked(draw: Any) -> tuple[tuple[int, ...], list[int], list[int]]:
    """A shape, and where its rows and columns are cut."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3))
    cuts = [sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3))) for size in [*shape, 1, 1][:2]]
    return tuple(shape), *(
        [cut for cut in part if cut < size] for part, size in zip(cuts, [*shape, 1, 1], strict=False)
    )


@given(blocked(), st.integers(-9, 9), st.integers(-9, 9))
def test_slices_are_those_of_the_whole_tensor(
    tmp_path_factory: pytest.TempPathFactory, layout: Any, start: int, stop: int
) -> None:
    shape, *cuts = layout
    folder = tmp_path_factory.mktemp("blocks")
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).view(shape)
    spans = [list(zip([0, *cut], [*cut, size], strict=True)) for cut, size in zip(cuts, shape, strict=False)]
    spans += [[(0, size)] for size in shape[2:]]
    places: list[list[tuple[int, int]]] = [[]]
    for of_dim in spans:
        places = [[*place, span] for place in places for span in of_dim]
    for number, place in enumerate(places):
        block = tensor[tuple(slice(*span) for span in place)].contiguous()
        info = {"x": {"saved_offsets": [begin for begin, _ in place]}}
        save_file({"x": block}, folder / f"{number}.safetensors", {"DCP_SHARDING_INFO": json.dumps(info)})
    torch.save({SHAPES: {"x": list(shape)}}, folder / META)
    found = saved_tensors(folder)["x"]
    assert isinstance(found, LazyRows)
    assert found.shape == shape
    assert torch.equal(found.whole(), tensor)
    if shape:
        for rows in (slice(start, stop), slice(start, None), slice(stop)):
            assert torch.equal(found[rows].long(), tensor[rows])
            assert found[rows].shape == tensor[rows].shape
