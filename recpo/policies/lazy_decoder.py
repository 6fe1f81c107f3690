"""The lazy decoder: generates the codes of an item from the states of a history (OneRec-V2, arXiv 2508.20900).

It is lazy because it only attends to the context and does not transform it: keys and values are computed once from the
history's states, the cross-attention itself has no projection, and decoder layers and groups of query heads share keys
and values.

Difference from the paper: the decoder starts from the last state and not from a constant that must find it by
attention. On Amazon Beauty this reduced three epochs to two.

Shapes: ``B`` contexts, ``H + 1`` states, ``S`` items (slate positions or beams) per context, ``N`` items in total,
``T`` codes per item, ``G`` key-value groups, ``c = d / heads``.
"""

# Annotations are not postponed: the command line reads the types of options from the fields of dataclasses.

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.errors import PositiveInt, RecpoError, validate_range
from recpo.policies.blocks import ByteDropout, Linear
from recpo.policies.encoder import EncoderOptions

#: Keys and values ``[N, heads, t, c]`` of the codes so far, for each layer.
Cache = list[tuple[Tensor, Tensor]]


class Context(NamedTuple):
    """The part of a context that its items may attend to.

    Attributes:
        keys: ``[B, G, H + 1, c]`` for each key-value layer.
        values: ``[B, G, H + 1, c]`` for each key-value layer.
        states: the states ``[B, H + 1, d]``.
    """

    keys: list[Tensor]
    values: list[Tensor]
    states: Tensor


class Placement(NamedTuple):
    """Assigns the N items to contexts.

    Attributes:
        visible: ``[B, S]``, the last state that the item at that place may attend to.
        places: ``[N]``, the places of the items in the flattened ``[B, S]``; None = every place has an item, N = B x S.
    """

    visible: Tensor
    places: Tensor | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class DecoderOptions(EncoderOptions):
    """The options of a lazy decoder, beside those of the encoder whose states it reads."""

    decoder_layers: PositiveInt = 2
    """number of layers of the decoder"""
    kv_groups: PositiveInt = 1
    """groups of query heads that share keys and values in the decoder's cross-attention; divides ``heads``"""
    kv_layers: int = 1
    """number of sets of keys and values that the decoder's layers share"""


class LazyDecoder(nn.Module):
    """Causal decoder over the T codes of an item with one output head per position.

    Layer l uses the set of keys and values ``l kv_layers // decoder_layers``.

    Args:
        codebook_sizes: ``K_t`` of every code.
        options: the options of the policy that it belongs to; width, heads and dropout are those of the encoder.
    """

    def __init__(self, codebook_sizes: tuple[int, ...], options: DecoderOptions) -> None:
        super().__init__()
        dim, heads, layers = options.dim, options.heads, options.decoder_layers
        kv_groups, kv_layers = options.kv_groups, options.kv_layers
        if dim % heads or heads % kv_groups:
            raise RecpoError(
                f"heads must divide dim and kv_groups must divide heads, got dim {dim}, heads {heads}, "
                f"kv_groups {kv_groups}",
                code="mismatch",
                field="heads",
            )
        rule = f"must be between 1 and the {layers} decoder layers"
        validate_range(1 <= kv_layers <= layers, "kv_layers", rule, kv_layers)
        self.groups, self.kv_layers, width = kv_groups, kv_layers, dim // heads
        self.context = Linear(dim, 2 * kv_layers * kv_groups * width, bias=False)
        self.key_norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(kv_layers))
        self.value_norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(kv_layers))
        self.start = nn.Parameter(torch.empty(dim))
        self.position = nn.Parameter(torch.empty(len(codebook_sizes), dim))
        nn.init.normal_(self.start, std=0.02)
        nn.init.normal_(self.position, std=0.02)
        self.dropout = ByteDropout(options.dropout)
        blocks = (LazyDecoderBlock(dim, heads, kv_groups, options.dropout) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim)
        self.code_heads = nn.ModuleList(Linear(dim, size) for size in codebook_sizes)

    def read(self, states: Tensor) -> Context:
        """Keys and values of the states ``[B, H + 1, d]``, computed once for all layers and items."""
        batch, length, _ = states.shape
        split = self.context(states).view(batch, length, self.kv_layers, 2, self.groups, -1)
        keys, values = split.permute(2, 3, 0, 4, 1, 5).unbind(1)
        return Context(
            [_normalized(part, norm) for norm, part in zip(self.key_norms, keys, strict=True)],
            [_normalized(part, norm) for norm, part in zip(self.value_norms, values, strict=True)],
            states,
        )

    def forward(self, codes: Tensor, context: Context, placement: Placement) -> Tensor:
        """Teacher forcing: all T positions of all items in one pass.

        Args:
            codes: ``[N, T - 1, d]`` vectors of the items' codes, without the last one.
            context: see ``read``.
            placement: the contexts of the N items.

        Returns:
            ``[N, T, d]``: row t is the input of head t, which predicts code t.
        """
        start = self._started(context, placement)[:, None]
        hidden, _ = self._run(torch.cat([start, codes], 1) + self.position, context, placement, None)
        return hidden

    def step(
        self, level: int, codes: Tensor | None, context: Context, placement: Placement, cache: Cache | None
    ) -> tuple[Tensor, Cache]:
        """Decodes one more code for every item.

        Args:
            level: index of the code to predict, 0 .. T - 1.
            codes: ``[N, d]`` vectors of the previous code; None at level 0.
            context: see ``read``.
            placement: the contexts of the N items.
            cache: the cache of the previous step; None at level 0.

        Returns:
            Logits ``[N, K_level]`` over the codebook, and the cache for the next step.
        """
        rows = self._started(context, placement) if codes is None else codes
        hidden, cache = self._run((rows + self.position[level])[:, None], context, placement, cache)
        return self.logits(level, hidden[:, 0]), cache

    def _started(self, context: Context, placement: Placement) -> Tensor:
        """``[N, d]``, the input before the first code: the last state that the item may attend to."""
        width = context.states.shape[2]
        last = context.states.gather(1, placement.visible[..., None].expand(-1, -1, width)).reshape(-1, width)
        return self.start + (last if placement.places is None else last[placement.places])

    def logits(self, level: int, hidden: Tensor) -> Tensor:
        """Logits ``[..., K_level]`` (float32) of ``hidden [..., d]``."""
        scores: Tensor = self.code_heads[level](hidden)
        return scores.float()

    def _run(self, hidden: Tensor, context: Context, placement: Placement, cache: Cache | None) -> tuple[Tensor, Cache]:
        hidden = self.dropout(hidden)
        is_visible = torch.arange(context.keys[0].shape[2], device=hidden.device) <= placement.visible[..., None]
        grown: Cache = []
        for layer, block in enumerate(self.blocks):
            shared = layer * self.kv_layers // len(self.blocks)
            past = None if cache is None else cache[layer]
            hidden, kept = block(
                hidden, context.keys[shared], context.values[shared], is_visible, placement.places, past
            )
            grown.append(kept)
        return self.norm(hidden), grown


def _normalized(values: Tensor, norm: nn.Module) -> Tensor:
    # under autocast they are narrower than the weight, for which torch has no fused kernel
    assert isinstance(norm.weight, Tensor)
    normalized: Tensor = norm(values.to(norm.weight.dtype))
    return normalized


class LazyDecoderBlock(nn.Module):
    """Cross-attention to the context, causal self-attention over the codes, feed-forward; each pre-norm, residual.

    Args:
        dim: d, divisible by ``heads``.
        heads: query heads, divisible by ``groups``.
        groups: G.
        dropout: probability on the output of each sub-layer.
    """

    def __init__(self, dim: int, heads: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.groups, self.width = heads, groups, dim // heads
        self.cross_norm = nn.LayerNorm(dim)
        self.query = Linear(dim, dim)
        self.cross_output = Linear(dim, dim)
        self.self_norm = nn.LayerNorm(dim)
        self.query_key_value = Linear(dim, 3 * dim)
        self.self_output = Linear(dim, dim)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.expand = Linear(dim, 4 * dim)
        self.contract = Linear(4 * dim, dim)
        self.dropout = ByteDropout(dropout)

    def forward(
        self,
        hidden: Tensor,
        keys: Tensor,
        values: Tensor,
        is_visible: Tensor,
        places: Tensor | None,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Maps ``hidden [N, t, d]``.

        Args:
            hidden: ``[N, t, d]``.
            keys: ``[B, G, H + 1, c]`` of the context.
            values: ``[B, G, H + 1, c]`` of the context.
            is_visible: ``[B, S, H + 1]`` bool, the states that the item at that place may attend to.
            places: see ``Placement``.
            past: keys and values of earlier codes; then t = 1.

        Returns:
            ``[N, t, d]`` and the keys and values of all codes so far.
        """
        attended = self._cross(self.query(self.cross_norm(hidden)), keys, values, is_visible, places)
        hidden = hidden + self.dropout(self.cross_output(attended))
        attended, kept = self._causal(self.query_key_value(self.self_norm(hidden)), past)
        hidden = hidden + self.dropout(self.self_output(attended))
        fed = self.contract(F.gelu(self.expand(self.feed_forward_norm(hidden))))
        return hidden + self.dropout(fed), kept

    def _cross(
        self, queries: Tensor, keys: Tensor, values: Tensor, is_visible: Tensor, places: Tensor | None
    ) -> Tensor:
        """Treats every item and every query head of a group as one more query to the same keys, without copies."""
        items, tokens, dim = queries.shape
        batch, positions, length = is_visible.shape
        flat = queries.reshape(items, tokens * dim)
        if places is not None:
            flat = flat.new_zeros(batch * positions, tokens * dim).index_copy(0, places, flat)
        folded = flat.view(batch, positions, tokens, self.groups, self.num_heads // self.groups, self.width)
        folded = folded.permute(0, 3, 1, 2, 4, 5).flatten(2, 4)
        repeats = tokens * self.num_heads // self.groups
        mask = is_visible[:, None, :, None].expand(batch, 1, positions, repeats, length).flatten(2, 3)
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        attended = attended.view(batch, self.groups, positions, tokens, self.num_heads // self.groups, self.width)
        flat = attended.permute(0, 2, 3, 1, 4, 5).reshape(batch * positions, tokens * dim)
        return (flat if places is None else flat[places]).view(items, tokens, dim)

    def _causal(
        self, query_key_value: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        items, tokens, width = query_key_value.shape
        split = query_key_value.view(items, tokens, 3, self.num_heads, self.width).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=past is None and tokens > 1)
        return attended.transpose(1, 2).reshape(items, tokens, width // 3), (key, value)
