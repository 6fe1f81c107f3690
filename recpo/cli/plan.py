"""``recpo plan``: computes the memory, communication and table placement of training before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from recpo.artifacts import write_json
from recpo.cli.config import save_resolved
from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, after_plan
from recpo.sharding.costs import Exchange, Links, Sharding, TableOptimizerName
from recpo.sharding.policy_costs import Blocks
from recpo.sharding.workload import PolicyKind, Workload
from recpo.workflows.plan import catalog_of, item_features_of
from recpo.workflows.plan import plan as planned


def plan(
    num_items: int | None = None,
    prepared: str | Path | None = None,
    events: int | None = None,
    ranks: int = 1,
    ranks_per_node: int | None = None,
    memory_gib: float | None = None,
    device: Literal["cpu", "cuda"] = "cuda",
    batch_size: int = 128,
    history_length: int = 50,
    slate: int | None = None,
    policy: PolicyKind = "softmax",
    dim: int = 64,
    blocks: Blocks = "sasrec",
    layers: int = 2,
    heads: int = 2,
    feedback_levels: int = 6,
    tie_weights: bool = True,
    normalizer: Literal["full", "sampled"] = "full",
    num_negatives: int = 1024,
    codebooks: list[int] = [256, 256, 256, 256],  # noqa: B006  never changed
    decoder_layers: int = 2,
    kv_groups: int = 1,
    kv_layers: int = 1,
    item_vectors: bool = True,
    item_features: int = 0,
    copies: int = 0,
    sharding: Sharding | dict[str, Sharding] = "auto",
    table_optimizer: TableOptimizerName = "rowwise_adagrad",
    precision: Literal["32-true", "16-mixed", "bf16-mixed"] = "32-true",
    within_node_gb: float = 600.0,
    between_nodes_gb: float = 12.5,
    out: Path | None = None,
) -> VerbResult:
    """Computes what a run needs: memory per rank, bytes sent and operations per step, and the placement of tables.

    Everything is computed and nothing is run; docs/scaling.md has the formulas and their accuracy. The exit status is 1
    if the run does not fit.

    Args:
        num_items: catalog size; give either this or prepared.
        prepared: directory written by ``recpo prepare``; gives the catalog size and the training events of an epoch.
        events: training events of an epoch, for the number of steps; prepared overrides it.
        ranks: number of processes, one per device.
        ranks_per_node: ranks of one machine; null = all.
        memory_gib: memory of a rank in GiB; null = no limit.
        device: device of every rank.
        batch_size: contexts per rank and step.
        history_length: events per context.
        slate: number of items scored after the full history (an impression, a list, a group); null = pre-training,
            which scores every event of the history.
        policy: kind of policy: a softmax over the catalog, or semantic ids.
        dim: width of vectors and states.
        blocks: kind of blocks of the history encoder.
        layers: number of layers of the history encoder.
        heads: number of attention heads.
        feedback_levels: number of feedback levels that the encoder reads.
        tie_weights: catalog softmax: one table for input and output.
        normalizer: catalog softmax: normalize over all items, or over sampled ones.
        num_negatives: number of sampled items per step.
        codebooks: semantic ids: the number of codes of every level.
        decoder_layers: semantic ids: number of decoder layers.
        kv_groups: semantic ids: groups of query heads that share keys and values.
        kv_layers: semantic ids: number of distinct sets of keys and values over the decoder layers.
        item_vectors: semantic ids: the encoder also reads a vector per item.
        item_features: hidden width of the encoder of prepared's item features (policy.init_args.item_features.hidden);
            0 = ids only.
        copies: number of frozen copies of the policy: 1 for an old policy (snapshot), 1 for a frozen reference.
        sharding: sharding of all tables, or by name (policy.item_table, policy.output_table, policy.code_table).
        table_optimizer: optimizer of the tables; Adam updates all other parameters.
        precision: mixed precision makes activations smaller, but not weights, optimizer states or messages.
        within_node_gb: bandwidth from a rank to the others of its node, GB per second.
        between_nodes_gb: bandwidth from a rank to other nodes, GB per second.
        out: JSON file for all results.
    """
    catalog, in_log = catalog_of(num_items, prepared, events)
    workload = Workload(
        num_items=catalog,
        ranks=ranks,
        batch=batch_size,
        history=history_length,
        slate=slate,
        policy=policy,
        dim=dim,
        blocks=blocks,
        layers=layers,
        heads=heads,
        feedback_levels=feedback_levels,
        tie_weights=tie_weights,
        normalizer=normalizer,
        num_negatives=num_negatives,
        codebooks=tuple(codebooks),
        decoder_layers=decoder_layers,
        kv_groups=kv_groups,
        kv_layers=kv_layers,
        item_vectors=item_vectors,
        copies=copies,
        optimizer=table_optimizer,
        mixed=precision != "32-true",
        device=device,
        **item_features_of(prepared, item_features),
    )
    made = planned(
        workload,
        sharding=sharding,
        ranks_per_node=ranks_per_node,
        memory_gib=memory_gib,
        links=Links(within_node_gb * 1e9, between_nodes_gb * 1e9),
        events=in_log,
    )
    _print(made.document)
    if out is not None:
        write_json(out, made.document)
        save_resolved(out)
    if made.fault is not None:
        raise made.fault
    return after_plan(out, made.document)


def _print(document: dict[str, Any]) -> None:
    terminal, ranks = console(), document["workload"]["ranks"]
    for rows in (_table_rows, _memory_rows, _exchange_rows, _operation_rows):
        title, headings, lines = rows(document)
        print(f"\n{title}")
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=any(headings))
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        terminal.print(table)
    seconds = document["exchange_seconds"]
    print()
    if ranks > 1:
        print(f"exchange: {seconds * 1000:,.2f} ms per step at the bandwidths given, if nothing hides it")
    if document["steps_per_epoch"] is not None:
        print(f"steps per epoch: {document['steps_per_epoch']:,}")


_Rows = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def _table_rows(document: dict[str, Any]) -> _Rows:
    lines: list[tuple[str, ...]] = []
    for name, table in document["tables"].items():
        if table["copy_of"] is None:
            blocks = [block for block in table["blocks"] if block["num_rows"]]
            first, last = blocks[0], blocks[-1]["rank"]
            on = f"{first['rank']}" if len(blocks) == 1 else f"{first['rank']}-{last}"
            held = f"{first['num_rows']:,} x {first['num_columns']}"
            lines.append((name, f"{table['rows']:,} x {table['dim']}", table["sharding"], on, held))
    copies = document["workload"]["copies"]
    title = "tables" + (f"; their {copies} frozen copies are placed the same way" if copies else "")
    return title, ("", "size", "sharding", "on ranks", "block"), lines


def _memory_rows(document: dict[str, Any]) -> _Rows:
    lines = [(name, _bytes(size)) for name, size in document["memory_bytes"].items() if size]
    return "memory of the fullest rank", ("", ""), [*lines, ("sum", _bytes(document["memory_total"]))]


def _exchange_rows(document: dict[str, Any]) -> _Rows:
    parts = {name: Exchange(**part) for name, part in document["exchange_bytes"].items()}
    lines = [(name, *map(_bytes, part), _bytes(part.total)) for name, part in parts.items()]
    total = Exchange(*(sum(kind) for kind in zip(*parts.values(), strict=True)))
    headings = ("", "ids", "forward", "backward", "sum")
    return "sent by a rank per step", headings, [*lines, ("sum", *map(_bytes, total), _bytes(total.total))]


def _operation_rows(document: dict[str, Any]) -> _Rows:
    lines = [(name, f"{count:.2e}") for name, count in document["operations"].items()]
    total = ("sum", f"{document['operations_total']:.2e}")
    return "floating-point operations of a rank per step", ("", ""), [*lines, total]


def _bytes(size: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"
