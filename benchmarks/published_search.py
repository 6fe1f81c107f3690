"""The search of ``published.py``: variants of the options that follow from the size of the log, judged by validation.

Successive halving by thirds (arXiv 1603.06560): every variant is trained for a fifth of the epochs, the best third of
them for two fifths, and the best of these is what ``published.py`` trains to the end. Training continues from rung to
rung, so the chosen run is the same as one that was trained at once. All variants have the same seed and are compared by
their best NDCG@10 of the validation events so far.

How many variants are tried depends on a budget of processor time, once: the number, every value and the choice are in
``search_<recipe>.json``, from where an interrupted search continues. ``--trials`` repeats it on another machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recpo.training.recipes import Sizes

RULES = "rules"
KEPT = 3  # one variant of so many stays
RUNGS = (0.2, 0.4)  # shares of the epochs
MARGIN = 1.2  # a variant may take this much longer than those before


@dataclass
class Search:
    """What a search has found and decided.

    Attributes:
        trials: number of variants; None = not decided yet.
        cpu_s: seconds of processor time of the finished trainings.
        rungs: for every rung, the best validation NDCG@10 of its variants by name.
        chosen: name of the variant that is trained to the end; None = not decided yet.
    """

    trials: int | None = None
    cpu_s: float = 0.0
    rungs: list[dict[str, float]] = field(default_factory=lambda: [{} for _ in RUNGS])
    chosen: str | None = None

    @classmethod
    def open(cls, file: Path) -> Search:
        """The search that was begun, or a new one."""
        return cls(**json.loads(file.read_text())) if file.is_file() else cls()

    def write(self, file: Path) -> None:
        """Writes the file."""
        file.write_text(json.dumps(asdict(self), indent=1))


def variants(recipe: str, sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Options that differ from those of the rules, by the name of the variant; the most promising first.

    Args:
        recipe: of ``published.py``.
        sizes: by the rules (``recpo.training.recipes.sizes_of``).
    """
    policy = "policy.init_args"
    less, more = round(max(sizes.dropout - 0.1, 0.05), 2), round(min(sizes.dropout + 0.1, 0.7), 2)
    slower = {"optimizer.init_args.lr": 0.001}
    deeper, wider = {f"{policy}.layers": sizes.layers + 1}, {f"{policy}.dim": 2 * sizes.dim}
    if recipe == "semantic":
        return {
            RULES: {},
            "more_dropout": {f"{policy}.dropout": more},
            "deeper": deeper,
            "two_decoders": {f"{policy}.decoder_layers": 2},
            "slower": slower,
            "less_dropout": {f"{policy}.dropout": less},
            "wider": wider,
        }
    return {
        RULES: {},
        "deeper": deeper,
        "less_dropout": {f"{policy}.dropout": less},
        "more_dropout": {f"{policy}.dropout": more},
        "narrow": {f"{policy}.dim": sizes.dim // 2},
        "hstu": {f"{policy}.block": "HSTUBlock"},
        "wider": wider,
        "slower": slower,
        "cosine": {f"{policy}.similarity": "cosine", f"{policy}.temperature": 0.07},
        "deepest": {f"{policy}.layers": sizes.layers + 2, **slower},
    }


def chosen_variant(
    file: Path, names: list[str], epochs: int, train: Callable[[str, int], float], limit: float | int
) -> str:
    """The variant to train to the end.

    Args:
        file: what was found so far, written after every training.
        names: of the variants, the most promising first.
        epochs: of a complete training.
        train: trains a variant up to so many epochs, and returns its best validation NDCG@10.
        limit: a budget of processor time in seconds (float), or a number of variants (int).
    """
    search = Search.open(file)
    if isinstance(limit, int) and search.trials is None:
        search.trials = min(limit, len(names))
    for rung, share in enumerate(RUNGS):
        for number, name in enumerate(_candidates(search, rung, names)):
            if rung == 0 and _is_over(search, number, limit):
                break
            if name not in search.rungs[rung]:
                began = time.process_time()
                search.rungs[rung][name] = train(name, max(1, round(share * epochs)))
                search.cpu_s = round(search.cpu_s + time.process_time() - began, 1)
                search.write(file)
        search.trials = len(search.rungs[0])
    last = search.rungs[-1]
    search.chosen = max(last, key=last.__getitem__)
    search.write(file)
    return search.chosen


def _candidates(search: Search, rung: int, names: list[str]) -> list[str]:
    """All variants, or the best third of those of the rung before."""
    if rung == 0:
        return names
    before = search.rungs[rung - 1]
    return sorted(before, key=before.__getitem__, reverse=True)[: -(-len(before) // KEPT)]


def _is_over(search: Search, number: int, limit: float | int) -> bool:
    """Whether no further variant is begun: their number is decided, or the rest of the budget is for the next rung."""
    if search.trials is not None or number == 0:
        return number == search.trials
    trainings = 1 + -(-(number + 1) // KEPT)
    return search.cpu_s * (1 + MARGIN * trainings / number) > limit
