"""Search and sampling code by code, restricted to the trie of existing items.

The trie is flat tensors, which can move to a device and into an exported program. Nodes are numbered level by level in
sorted order. The root (the empty prefix) is 0, and the children of a node have consecutive numbers. Three arrays hold
the structure (the first child of each node, its parent, its code), and two more map leaves to items and back: 13.6 MB
for a million items with three codes out of 256, 22 MB with four.

Shapes: ``B`` contexts, ``W`` beams (or draws) per context, ``T`` codes per item, ``K_t`` codes in codebook t.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.errors import RecpoError
from recpo.base.types import Recommendations, SamplingOptions
from recpo.ops.surrogate import log1mexp
from recpo.policies.catalog_search import ties_to_smaller_id
from recpo.policies.sampling import gumbel_like, nucleus, validate_sampling

# A level also stores one bit per node and code if that takes at most this many bytes per child. For few nodes with
# many children, a mask from bits is several times as fast as one from the list of children. For many nodes with few
# children it is slower and would take most of the memory.
_BITMAP_BYTES_PER_CHILD = 4


class Trie(nn.Module):
    """The codes that may follow a prefix, and the item of each complete tuple.

    Args:
        codes: ``[V, T]`` int64; row i belongs to item i + 1, and rows are distinct (``Codes`` has checked them).
        codebook_sizes: ``K_t`` of every level.

    Raises:
        RecpoError: too many nodes.
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
                "larger codebooks",
                code="out_of_range",
                field="codes",
            )
        begins.append(torch.tensor([self.num_nodes]))
        self._register("_begin", torch.cat(begins), torch.int32)
        self._register("_parent", torch.cat(parents), torch.int32)
        self._register("_code", torch.cat(last_codes), _smallest_type(max(self.codebook_sizes)))
        # leaves to items and back; ``rank`` is the place of every item in the sorted order
        ids = torch.arange(1, self.num_items + 1)
        self._register("_item", torch.empty_like(ids).index_copy_(0, rank, ids), torch.int32)
        self._register("_leaf", F.pad(rank, (1, 0)) + self._first[-1], torch.int32)
        self._register("_powers", 2 ** torch.arange(8), torch.uint8)

    def _register(self, name: str, values: Tensor, dtype: torch.dtype) -> None:
        self.register_buffer(name, values.to(dtype), persistent=False)

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

    def find(self, level: int, nodes: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """The node on the next level that a code leads to; after the last level, a leaf.

        Args:
            level: index of the given code, 0 .. T - 1.
            nodes: ``[...]`` nodes of that level.
            codes: ``[...]`` int64.

        Returns:
            the nodes ``[...]`` and whether they exist; where not, the node is an arbitrary child.
        """
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


#: Log-probability of impossible choices. It is finite, so a row of them gives no nan in a softmax, and cannot overflow.
NEVER = torch.finfo(torch.float32).min / 4


class CodeSearch(ABC):
    """Search and sampling with a model that scores codes, for B contexts.

    A cache is the model's own: keys and values of the codes so far.

    Args:
        trie: the trie of the catalog.
        batch: B.
        normalizer: "trie": a softmax over the codes that lead to an item; "codebook": over all codes, so that a draw
            may not be an item.
    """

    def __init__(self, trie: Trie, batch: int, normalizer: Literal["trie", "codebook"]) -> None:
        self.trie, self.batch, self.normalizer = trie, batch, normalizer

    @abstractmethod
    def step(self, level: int, previous: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        """Scores the next code of every beam.

        Args:
            level: index of the code to predict, 0 .. T - 1.
            previous: ``[B, W]`` the previous code of every beam; None at level 0, where there is one beam.
            cache: the cache of the previous step, with its beams selected by ``reorder``; None at level 0.

        Returns:
            Logits ``[B, W, K_level]`` and the cache for the next step.
        """

    @abstractmethod
    def reorder(self, cache: Any, beams: Tensor) -> Any:
        """The cache of the beams ``[B, W']``. Each entry is the index 0 .. W - 1 of the beam that it continues."""

    def beam_search(self, k: int, width: int, exclude: Tensor | None = None) -> Recommendations:
        """The ``k`` most probable items that a beam of ``width`` prefixes finds, best first.

        The result is exact if the beam holds every prefix of the trie. A prefix whose items are all excluded is never a
        beam, so the list has k items whenever that many remain. Excluded items stay in the normalizer. Items of equal
        probability are ordered by id; which of them get the last beam is not defined.

        Args:
            k: list length.
            width: W, prefixes that are kept at every level; at least k are kept.
            exclude: ``[B, M]`` item ids that are not recommended, padded with 0.

        Returns:
            ids and natural-log probabilities ``[B, k]``; 0 and -inf if fewer items remain.
        """
        trie = self.trie
        nodes = torch.zeros(self.batch, 1, dtype=torch.int64, device=trie.device)
        scores = torch.zeros(self.batch, 1, device=trie.device)
        barred = None if exclude is None else _barred_leaves(trie, exclude)
        previous, cache = None, None
        for level, size in enumerate(trie.codebook_sizes):
            logits, cache = self.step(level, previous, cache)
            allowed, logits = trie.allowed(level, nodes), logits.float()
            logp = (logits.masked_fill(~allowed, NEVER) if self.normalizer == "trie" else logits).log_softmax(-1)
            alive = scores > NEVER / 2
            if barred is not None:
                allowed = allowed & ~_struck(trie, level, nodes.masked_fill(~alive, -1), *barred)
            total = torch.where(allowed & alive[..., None], scores[..., None] + logp, NEVER).flatten(1)
            scores, best = total.topk(min(max(width, k), trie.level_sizes[level + 1], total.shape[1]), 1)
            beams, previous = best // size, best % size
            nodes, _ = trie.find(level, nodes.gather(1, beams), previous)
            if level + 1 < trie.depth:
                cache = self.reorder(cache, beams)
        return _list_of(trie, nodes, scores, k)

    @torch.no_grad()
    def sample(self, group_size: int, options: SamplingOptions) -> tuple[Tensor, Tensor]:
        """Draws ``group_size`` items per context, code by code.

        With replacement, every draw consists of one draw per code (ancestral sampling). Without replacement, Gumbel
        top-k over the trie is used (stochastic beam search, Kool et al., arXiv 1903.06059). It is exact: the first item
        is a draw from the distribution, and each later one is a draw from the remaining items.

        Args:
            group_size: G.
            options: temperature and nucleus; both apply to every code, inside the trie.

        Returns:
            ids ``[B, G]``, 0 if a draw is not an item or if fewer than G tuples can be drawn, and the log-probabilities
            ``[B, G, T]`` of the drawn codes. These are finite even if the codes are not an item, and 0 if nothing could
            be drawn.

        Raises:
            RecpoError: see ``validate_sampling``.
        """
        validate_sampling(group_size, options)
        return self._drawn(group_size, options) if options.replacement else self._drawn_once(group_size, options)

    def _drawn(self, group_size: int, options: SamplingOptions) -> tuple[Tensor, Tensor]:
        trie = self.trie
        nodes = torch.zeros(self.batch, 1, dtype=torch.int64, device=trie.device)
        is_item = torch.ones(self.batch, group_size, dtype=torch.bool, device=trie.device)
        tokens, codes, cache = [], None, None
        for level in range(trie.depth):
            logits, cache = self.step(level, codes, cache)
            logp = self._distribution(logits, level, nodes, options)
            # one state for all draws at the root, and one per draw after it
            width = logp.shape[1]
            drawn = torch.multinomial(logp.flatten(0, 1).exp(), group_size // width, replacement=True)
            codes = drawn.view(self.batch, group_size)
            nodes, logp = nodes.expand(-1, group_size), logp.expand(-1, group_size, -1)
            if width < group_size and level + 1 < trie.depth:
                cache = self.reorder(cache, torch.zeros_like(codes))
            tokens.append(logp.gather(2, codes[..., None]))
            nodes, found = trie.find(level, nodes, codes)
            is_item = is_item & found
        return trie.items(nodes) * is_item, torch.cat(tokens, 2)

    def _drawn_once(self, group_size: int, options: SamplingOptions) -> tuple[Tensor, Tensor]:
        """Gumbel top-k over the tree: a prefix has the largest perturbed log-probability of the leaves below it."""
        trie = self.trie
        nodes = torch.zeros(self.batch, 1, dtype=torch.int64, device=trie.device)
        is_item = torch.ones_like(nodes, dtype=torch.bool)
        # float64: differences of perturbed values are small relative to the values
        totals = torch.zeros(self.batch, 1, dtype=torch.float64, device=trie.device)
        perturbed, tokens = totals, totals.float()[..., None][..., :0]
        codes, cache = None, None
        for level, size in enumerate(trie.codebook_sizes):
            logits, cache = self.step(level, codes, cache)
            logp = self._distribution(logits, level, nodes, options)
            below = totals[..., None] + logp
            candidates = _conditional_gumbel(below, perturbed[..., None]).flatten(1)
            perturbed, best = candidates.topk(min(group_size, candidates.shape[1]), 1)
            beams, codes = best // size, best % size
            totals = below.flatten(1).gather(1, best)
            token = logp.flatten(1).gather(1, best)
            tokens = torch.cat([tokens.gather(1, beams[..., None].expand(-1, -1, level)), token[..., None]], 2)
            nodes, found = trie.find(level, nodes.gather(1, beams), codes)
            is_item = is_item.gather(1, beams) & found
            if level + 1 < trie.depth:
                cache = self.reorder(cache, beams)
        alive = perturbed > -torch.inf
        missing = group_size - alive.shape[1]
        ids = F.pad(trie.items(nodes) * (is_item & alive), (0, missing))
        return ids, F.pad(tokens.masked_fill(~alive[..., None], 0), (0, 0, 0, missing))

    def _distribution(self, logits: Tensor, level: int, nodes: Tensor, options: SamplingOptions) -> Tensor:
        """Log-probabilities ``[B, W, K]`` of the next code under the options; -inf for codes that cannot be drawn."""
        scores = logits.float() / options.temperature
        if self.normalizer == "trie":
            scores = scores.masked_fill(~self.trie.allowed(level, nodes), -torch.inf)
        return nucleus(scores.log_softmax(-1), options.top_p)


def _list_of(trie: Trie, leaves: Tensor, scores: Tensor, k: int) -> Recommendations:
    """The first k beams ``[B, W]`` of the last level; equal scores are ordered by id."""
    dead = scores <= NEVER / 2
    ids = ties_to_smaller_id(scores, trie.items(leaves), trie.num_items + 1).masked_fill(dead, 0)[:, :k]
    scores = scores.masked_fill(dead, -torch.inf)[:, :k]
    missing = k - ids.shape[1]
    return Recommendations(F.pad(ids, (0, missing)), F.pad(scores, (0, missing), value=-torch.inf))


def _barred_leaves(trie: Trie, exclude: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The excluded items as leaves ``[B, M]``, and for every level the nodes ``[B, M]`` on the paths to them.

    The leaves are ascending and distinct. Padding and repeated items are at the end and are not leaves.
    """
    none = trie.num_nodes
    leaves = trie.leaves(exclude).masked_fill(exclude == 0, none).sort(1).values
    before = F.pad(leaves, (1, 0), value=-1)[:, :-1]
    leaves = leaves.masked_fill(leaves == before, none).sort(1).values
    return leaves, trie.path(leaves.clamp_max(none - 1))


def _struck(trie: Trie, level: int, nodes: Tensor, leaves: Tensor, path: list[Tensor]) -> Tensor:
    """The codes ``[B, W, K_level]`` after the beams ``nodes [B, W]`` below which every item is excluded.

    The leaves below a node have consecutive numbers. They are all excluded if the first one is excluded and the last
    one follows it in the sorted list at a distance equal to the number of leaves between them.
    """
    parents, children = path[level], path[level + 1]
    first, end = trie.leaf_ranges(level + 1, children)
    last_place = torch.arange(leaves.shape[1], device=leaves.device) + (end - first - 1)
    last_leaf = leaves.gather(1, last_place.clamp_max(leaves.shape[1] - 1))
    full = (leaves == first) & (last_leaf == end - 1) & (last_place < leaves.shape[1])
    same = nodes[:, :, None] == parents[:, None, :]
    # one column per beam and code, and a last one for entries that belong to no beam
    (batch, width), size = nodes.shape, trie.codebook_sizes[level]
    column = same.int().argmax(1) * size + trie.last_codes(children)
    column = torch.where(full & same.any(1), column, width * size)
    mask = torch.zeros(batch, width * size + 1, dtype=torch.bool, device=nodes.device)
    mask = mask.scatter(1, column, torch.ones_like(column, dtype=torch.bool))
    return mask[:, : width * size].view(batch, width, size)


def _conditional_gumbel(logp: Tensor, largest: Tensor) -> Tensor:
    """Gumbel variables of location ``logp [..., K]``, given that their maximum is ``largest [..., 1]``.

    Kool et al., appendix B.3: ``largest - max(v, 0) - log(1 + exp(-|v|))`` with ``v = largest - g + log(1 - exp(g - max
    g))`` for independent variables g. This neither overflows nor cancels. Impossible choices (-inf) stay at -inf.
    """
    free = logp + gumbel_like(logp)
    v = largest - free + log1mexp(free - free.amax(-1, keepdim=True))
    shifted = largest - v.clamp_min(0) - torch.log1p(torch.exp(-v.abs()))
    return torch.where(logp > -torch.inf, shifted, -torch.inf)
