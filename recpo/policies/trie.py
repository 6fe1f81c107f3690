"""The trie of a catalog's code tuples as flat tensors, which can move to a device and into an exported program.

Nodes are numbered level by level in sorted order. The root (the empty prefix) is 0, and the children of a node have
consecutive numbers. Three arrays hold the structure (the first child of each node, its parent, its code), and two more
map leaves to items and back: 13.6 MB for a million items with three codes out of 256, 22 MB with four.

Shapes: ``V`` items, ``T`` codes per item, ``K_t`` codes in codebook t.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.errors import RecpoError

# A level also stores one bit per node and code if that takes at most this many bytes per child. For few nodes with
# many children, a mask from bits is several times as fast as one from the list of children. For many nodes with few
# children it is slower and would take most of the memory.
_BITMAP_BYTES_PER_CHILD = 4


class Trie(nn.Module):
    """The codes that may follow a prefix, and the item of each complete tuple.

    Args:
        codes: ``[V, T]`` int64; row i belongs to item i + 1, and rows are distinct.
        codebook_sizes: ``K_t`` of every level.

    Raises:
        RecpoError: no items, a code out of range, or two items with the same codes.
    """

    _begin: Tensor
    _parent: Tensor
    _code: Tensor
    _item: Tensor
    _leaf: Tensor
    _powers: Tensor

    def __init__(self, codes: Tensor, codebook_sizes: Sequence[int]) -> None:
        super().__init__()
        self.codebook_sizes = tuple(int(size) for size in codebook_sizes)
        self.num_items, self.depth = len(codes), len(self.codebook_sizes)
        _check(codes, self.codebook_sizes)
        #: nodes per level, 0 (the root) .. T (the leaves)
        self.level_sizes = [1]
        self._first, self._most_children = [0], []
        begins, parents, last_codes = [], [torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)]
        rank = torch.zeros(self.num_items, dtype=torch.int64)
        for level, size in enumerate(self.codebook_sizes):
            keys, rank = torch.unique(rank * size + codes[:, level].cpu(), return_inverse=True)
            parent, code = keys // size, keys % size
            counts = torch.bincount(parent, minlength=self.level_sizes[-1])
            bitmap = _bitmap(parent, code, len(counts), size)
            self.register_buffer(f"_bitmap_{level}", bitmap, persistent=False)
            parents.append(parent + self._first[-1])
            last_codes.append(code)
            self._first.append(self._first[-1] + self.level_sizes[-1])
            begins.append(self._first[-1] + counts.cumsum(0) - counts)
            self.level_sizes.append(len(keys))
            self._most_children.append(int(counts.max()))
        if self.num_nodes > torch.iinfo(torch.int32).max:
            raise RecpoError(
                f"the trie of the codes has {self.num_nodes:,} nodes, more than 2^31: use fewer codes per item, or "
                "larger codebooks"
            )
        begins.append(torch.tensor([self.num_nodes]))
        self._register("_begin", torch.cat(begins), torch.int32)
        self._register("_parent", torch.cat(parents), torch.int32)
        self._register("_code", torch.cat(last_codes), _smallest_type(max(self.codebook_sizes)))
        self._register_leaves(rank)
        self._register("_powers", 2 ** torch.arange(8), torch.uint8)

    def _register(self, name: str, values: Tensor, dtype: torch.dtype) -> None:
        self.register_buffer(name, values.to(dtype), persistent=False)

    def _register_leaves(self, rank: Tensor) -> None:
        """Maps leaves to items, given the place of every item in the sorted order, ``[V]``."""
        if self.level_sizes[-1] != self.num_items:
            raise RecpoError(
                f"{self.num_items - self.level_sizes[-1]} items share their codes with another one: a tuple has to "
                "name one item; run `recpo tokenize` again"
            )
        ids = torch.arange(1, self.num_items + 1)
        self._register("_item", torch.empty_like(ids).index_copy_(0, rank, ids), torch.int32)
        self._register("_leaf", F.pad(rank, (1, 0)) + self._first[-1], torch.int32)

    @property
    def num_nodes(self) -> int:
        """Number of nodes on all levels; they are numbered from 0."""
        return sum(self.level_sizes)

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self._begin.device

    def allowed(self, level: int, nodes: Tensor) -> Tensor:
        """The codes that lead to an item.

        Args:
            level: index of the code to predict, 0 .. T - 1.
            nodes: ``[...]`` nodes of that level; at level 0 all are 0.

        Returns:
            ``[..., K_level]`` bool; at least one is True.
        """
        size = self.codebook_sizes[level]
        bitmap: Tensor | None = getattr(self, f"_bitmap_{level}")
        if bitmap is not None:
            eights = bitmap[nodes - self._first[level]]
            return (eights[..., None, :] & self._powers[:, None]).bool().flatten(-2)[..., :size]
        begin, end = self._begin[nodes].long(), self._begin[nodes + 1].long()
        children = begin[..., None] + torch.arange(self._most_children[level], device=nodes.device)
        codes = self._code[children.clamp_max(self.num_nodes - 1)].long()
        # entries beyond the last child go to an extra column, which is cut off
        codes = torch.where(children < end[..., None], codes, size)
        mask = torch.zeros(*nodes.shape, size + 1, dtype=torch.bool, device=nodes.device)
        return mask.scatter(-1, codes, torch.ones_like(codes, dtype=torch.bool))[..., :size]

    def child(self, level: int, nodes: Tensor, codes: Tensor) -> Tensor:
        """The node on the next level that a code leads to; after the last level, a leaf.

        Args:
            level: index of the given code, 0 .. T - 1.
            nodes: ``[...]`` nodes of that level.
            codes: ``[...]`` int64.

        Raises:
            RecpoError: no item has such a prefix (not raised in exported programs, whose callers use only allowed
                codes).
        """
        children, found = self.find(level, nodes, codes)
        if not torch.compiler.is_exporting() and not bool(found.all()):
            at = int((~found).reshape(-1).int().argmax())
            prefix = [*self._prefix(int(nodes.reshape(-1)[at])), int(codes.reshape(-1)[at])]
            raise RecpoError(
                f"no item's codes begin with {prefix} (the first of {int((~found).sum())} unknown prefixes): take the "
                "codes that `allowed` gives, or the codes directory that the policy was built with"
            )
        return children

    def find(self, level: int, nodes: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """``child`` without an error: also returns whether the node exists. If not, the node is an arbitrary child."""
        begin, end = self._begin[nodes].long(), self._begin[nodes + 1].long()
        place = begin
        # binary search for the first child whose code is not smaller, with the number of steps of the widest node
        for step in reversed([1 << bit for bit in range(self._most_children[level].bit_length())]):
            probe = place + (step - 1)
            smaller = (probe < end) & (self._code[probe.clamp_max(self.num_nodes - 1)] < codes)
            place = torch.add(place, smaller, alpha=step)
        children = torch.minimum(place, end - 1)
        return children, (place < end) & (self._code[children] == codes)

    def items(self, leaves: Tensor) -> Tensor:
        """Item ids ``[...]`` of leaves ``[...]``."""
        return self._item[leaves - self._first[-1]].long()

    def leaves(self, item_ids: Tensor) -> Tensor:
        """Leaves ``[...]`` of items ``[...]``; padding (0) gets the leaf of an arbitrary item."""
        return self._leaf[item_ids].long()

    def codes(self, item_ids: Tensor) -> Tensor:
        """Codes ``[..., T]`` of items ``[...]``; 0 for padding."""
        path = self.path(self.leaves(item_ids))
        return torch.stack([self.last_codes(node) for node in path[1:]], -1) * (item_ids > 0)[..., None]

    def paths(self, item_ids: Tensor) -> Tensor:
        """The node before each code, ``[..., T]``, for items ``[...]``; padding gets the nodes of an arbitrary item."""
        return torch.stack(self.path(self.leaves(item_ids))[:-1], -1)

    def path(self, leaves: Tensor) -> list[Tensor]:
        """The nodes ``[...]`` on the paths to ``leaves [...]``, one per level: T + 1 nodes, starting with the root."""
        path = [leaves]
        for _ in range(self.depth):
            path.append(self._parent[path[-1]].long())
        return path[::-1]

    def last_codes(self, nodes: Tensor) -> Tensor:
        """The last code ``[...]`` of the prefixes that ``nodes [...]`` represent."""
        return self._code[nodes].long()

    def leaf_ranges(self, level: int, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The first leaf below ``nodes [...]`` of a level, and the first leaf after them, both ``[...]``."""
        first, end = nodes, nodes + 1
        for _ in range(level, self.depth):
            first, end = self._begin[first].long(), self._begin[end].long()
        return first, end

    def extra_repr(self) -> str:
        """The text that ``repr`` shows."""
        return f"num_items={self.num_items}, codebook_sizes={self.codebook_sizes}"

    def _prefix(self, node: int) -> list[int]:
        codes: list[int] = []
        while node:
            codes.insert(0, int(self._code[node]))
            node = int(self._parent[node])
        return codes


def _check(codes: Tensor, sizes: tuple[int, ...]) -> None:
    if codes.ndim != 2 or codes.shape[1] != len(sizes) or not len(codes) or not sizes:
        raise RecpoError(
            f"codes have shape {list(codes.shape)}, expected [items, {len(sizes)} levels], at least one each"
        )
    outside = ((codes < 0) | (codes >= torch.tensor(sizes, device=codes.device))).any(1)
    if bool(outside.any()):
        at = int(outside.int().argmax())
        raise RecpoError(
            f"{int(outside.sum())} items have a code outside 0 .. codebook size - 1 (sizes {list(sizes)}), the first "
            f"is item {at + 1} with {codes[at].tolist()}: run `recpo tokenize` again"
        )


def _bitmap(parent: Tensor, code: Tensor, nodes: int, size: int) -> Tensor | None:
    """One bit per node and code, ``[nodes, W = ceil(size / 8)]`` uint8; None if the list of children is better.

    Code c is bit ``c // W`` of byte ``c % W``, so that unpacking works on complete rows of bytes.
    """
    width = (size + 7) // 8
    if nodes * width > _BITMAP_BYTES_PER_CHILD * max(len(code), size):
        return None
    bits = torch.zeros(nodes * width, dtype=torch.uint8)
    # every bit is added once, so a sum equals an or
    bits.scatter_add_(0, parent * width + code % width, (2 ** (code // width)).to(torch.uint8))
    return bits.view(nodes, width)


def _smallest_type(size: int) -> torch.dtype:
    return torch.uint8 if size <= 1 << 8 else torch.int16 if size <= 1 << 15 else torch.int32
