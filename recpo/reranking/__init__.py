"""Re-ranking: lists chosen jointly from a shortlist of relevant items, to be diverse, capped or calibrated."""

from recpo.reranking.attributes import ItemAttributes as ItemAttributes
from recpo.reranking.attributes import RerankOptions as RerankOptions
from recpo.reranking.attributes import Tags as Tags
from recpo.reranking.calibration import Calibration as Calibration
from recpo.reranking.caps import AttributeCap as AttributeCap
from recpo.reranking.determinantal import Determinantal as Determinantal
from recpo.reranking.marginal_relevance import MaximalMarginalRelevance as MaximalMarginalRelevance
from recpo.reranking.reranker import Reranker as Reranker
from recpo.reranking.reranker import rerank as rerank
from recpo.reranking.reranker import reranked_places as reranked_places

__all__ = [
    "AttributeCap",
    "Calibration",
    "Determinantal",
    "ItemAttributes",
    "MaximalMarginalRelevance",
    "RerankOptions",
    "Reranker",
    "Tags",
    "rerank",
    "reranked_places",
]
