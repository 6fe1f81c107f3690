"""Factors and baselines as runtimes that rank for frames of histories, with the ids and feedback of prepared data."""

from __future__ import annotations

from functools import partial
from os import PathLike

import numpy as np
import torch

from recpo.base.errors import RecpoError
from recpo.base.types import Histories
from recpo.evaluation.contenders import BaselineOptions, baseline
from recpo.log.prepared import Prepared
from recpo.rewards.factors import Factors
from recpo.serving.histories import EncodedHistories, HistoryReader
from recpo.serving.program_inputs import ProgramReads
from recpo.serving.runtimes import Runtime, excluded
from recpo.verbs.contenders import contenders_of


class ContenderRuntime(Runtime):
    """A contender of an evaluation that reads items and feedback. Its scores need not be log-probabilities.

    Args:
        contender: factors, their directory, or the name of a baseline, which is fitted on the training events.
        data: the prepared data with its items.

    Raises:
        RecpoError: the contender is none of these, or was fitted on other items.
    """

    def __init__(self, contender: Factors | str | PathLike[str], data: Prepared) -> None:
        make_baseline = partial(baseline, data=data, options=BaselineOptions())
        named = contender if isinstance(contender, Factors | str) else str(contender)
        (found,) = contenders_of([named], data, [1], "best", torch.device("cpu"), (), make_baseline)
        if found.kind not in ("factors", "baseline"):
            raise RecpoError(f"{contender} is a {found.kind}: recommend from it without prepared")
        loaded = found.load()
        assert loaded.recommender.recommend is not None
        self._lists = loaded.recommender.recommend
        self.num_items, self.max_history, self.k = data.num_items, loaded.max_history, data.num_items
        self.reads = ProgramReads()
        self.reader = HistoryReader(data.item_ids(), data.feedback, self.max_history)

    def _recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]:
        ids, feedback = torch.from_numpy(inputs.item_ids), torch.from_numpy(inputs.feedback)
        histories = Histories(ids, (ids != 0).sum(1), feedback)
        with torch.inference_mode():
            lists = self._lists(histories, k, torch.from_numpy(excluded(inputs, self.reads.repeats)))
        return lists.item_ids.numpy(), lists.scores.numpy()
