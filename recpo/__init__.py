"""recpo: preference optimization for recommender systems, from an interaction log to served recommendations.

Functions take typed objects, paths, or frames (pandas, polars, pyarrow) and return objects; they print nothing. Names
are imported when they are first used, so ``import recpo`` itself loads neither torch nor pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recpo.objectives.advantages import (
        GAEAdvantage as GAEAdvantage,
        GatedAdvantage as GatedAdvantage,
        GradedAdvantage as GradedAdvantage,
        GroupNormalizedAdvantage as GroupNormalizedAdvantage,
        LeaveOneOutAdvantage as LeaveOneOutAdvantage,
        PrefixGroupAdvantage as PrefixGroupAdvantage,
        TernaryAdvantage as TernaryAdvantage,
    )
    from recpo.log.feature_columns import FeatureColumns as FeatureColumns
    from recpo.log.csv_files import CsvFormat as CsvFormat
    from recpo.batches.preference_lists import PreferenceListLayout as PreferenceListLayout
    from recpo.log.prepared import Prepared as Prepared
    from recpo.log.schema import Columns as Columns
    from recpo.log.schema import FlagColumn as FlagColumn
    from recpo.log.shaping import (
        BinaryColumn as BinaryColumn,
        D2Q as D2Q,
        EveryEvent as EveryEvent,
        NumericColumn as NumericColumn,
        WatchQuantiles as WatchQuantiles,
        WatchRatio as WatchRatio,
        WatchTimeGain as WatchTimeGain,
    )
    from recpo.batches.slates import ImpressionLayout as ImpressionLayout, SequenceLayout as SequenceLayout
    from recpo.log.splits import LeaveLastOut as LeaveLastOut, TemporalSplit as TemporalSplit
    from recpo.base.errors import RecpoError as RecpoError
    from recpo.evaluation.candidates import CandidateTable as CandidateTable
    from recpo.evaluation.evaluation import Evaluation as Evaluation
    from recpo.rewards.factors import Factors as Factors
    from recpo.evaluation.contenders import Lists as Lists
    from recpo.evaluation.measures import Measure as Measure, Observed as Observed
    from recpo.lists.exploration import Exploration as Exploration, Pool as Pool
    from recpo.base.features import (
        Categories as Categories,
        Category as Category,
        FeatureSchema as FeatureSchema,
        Number as Number,
        Vector as Vector,
    )
    from recpo.base.feedback import FeedbackDefinition as FeedbackDefinition, FeedbackRule as FeedbackRule
    from recpo.objectives import (
        ASPO as ASPO,
        CISPO as CISPO,
        DAPO as DAPO,
        DPO as DPO,
        ECPO as ECPO,
        GBPO as GBPO,
        GRPO as GRPO,
        GSPO as GSPO,
        KTO as KTO,
        MPO as MPO,
        PPO as PPO,
        CatalogPolicyGradient as CatalogPolicyGradient,
        DrGRPO as DrGRPO,
        Likelihood as Likelihood,
        MarginListwiseDPO as MarginListwiseDPO,
        PairwiseReward as PairwiseReward,
        PointwiseReward as PointwiseReward,
        QLearning as QLearning,
        Reinforce as Reinforce,
        SoftmaxDPO as SoftmaxDPO,
        WeightedLikelihood as WeightedLikelihood,
    )
    from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy as CatalogSoftmaxPolicy
    from recpo.policies.encoder import Block as Block, HSTUBlock as HSTUBlock, SASRecBlock as SASRecBlock
    from recpo.policies.item_features import ItemFeatureOptions as ItemFeatureOptions
    from recpo.policies.semantic_id import SemanticIdPolicy as SemanticIdPolicy
    from recpo.policies.tilted import RerankedPolicy as RerankedPolicy, TiltedPolicy as TiltedPolicy
    from recpo.lists.reranking import (
        AttributeCap as AttributeCap,
        Calibration as Calibration,
        Determinantal as Determinantal,
        ItemAttributes as ItemAttributes,
        MaximalMarginalRelevance as MaximalMarginalRelevance,
        RerankOptions as RerankOptions,
    )
    from recpo.rewards.rewards import (
        EnsembleReward as EnsembleReward,
        FactorReward as FactorReward,
        HitReward as HitReward,
        LoggedReward as LoggedReward,
        RankAwareReward as RankAwareReward,
        ValidityReward as ValidityReward,
        WeightedSum as WeightedSum,
    )
    from recpo.serving.bundle import Bundle as Bundle
    from recpo.serving.item_index import IndexOptions as IndexOptions
    from recpo.serving.of_runs import score as score
    from recpo.worlds.log import Simulation as Simulation
    from recpo.items.sources import VectorsFromCooccurrence as VectorsFromCooccurrence
    from recpo.items.sources import VectorsFromFeatures as VectorsFromFeatures
    from recpo.items.sources import (
        CodesFromFile as CodesFromFile,
        VectorsFromFrame as VectorsFromFrame,
        VectorsFromParquet as VectorsFromParquet,
    )
    from recpo.items.tokenization import Codes as Codes
    from recpo.verbs.calibrate import calibrate as calibrate
    from recpo.evaluation.comparison import Comparison as Comparison
    from recpo.verbs.compare import compare as compare
    from recpo.verbs.evaluate import evaluate as evaluate
    from recpo.verbs.export import export as export
    from recpo.verbs.factorize import factorize as factorize
    from recpo.log.inspection import Inspection as Inspection
    from recpo.verbs.init import init as init
    from recpo.verbs.load import load as load
    from recpo.verbs.loop import LoopResult as LoopResult, loop as loop
    from recpo.verbs.prepare import prepare as prepare
    from recpo.verbs.serve import serve as serve
    from recpo.verbs.simulate import simulate as simulate
    from recpo.verbs.recommend import recommend as recommend
    from recpo.training.module import PreferenceModule as PreferenceModule
    from recpo.training.optimizers import LinearDecay as LinearDecay
    from recpo.training.run import Run as Run
    from recpo.verbs.tokenize import VectorsFromRun as VectorsFromRun, tokenize as tokenize
    from recpo.training.tilting import TiltResult as TiltResult
    from recpo.verbs.tilt import tilt as tilt
    from recpo.verbs.train import train as train

__version__ = "0.1.0"

#: Module -> the names that it gives to ``recpo``; the imports above say the same to type checkers and editors.
_EXPORTS: dict[str, tuple[str, ...]] = {
    "recpo.objectives.advantages": (
        "GAEAdvantage",
        "GatedAdvantage",
        "GradedAdvantage",
        "GroupNormalizedAdvantage",
        "LeaveOneOutAdvantage",
        "PrefixGroupAdvantage",
        "TernaryAdvantage",
    ),
    "recpo.log.feature_columns": ("FeatureColumns",),
    "recpo.log.csv_files": ("CsvFormat",),
    "recpo.batches.preference_lists": ("PreferenceListLayout",),
    "recpo.log.prepared": ("Prepared",),
    "recpo.log.schema": ("Columns", "FlagColumn"),
    "recpo.log.shaping": (
        "BinaryColumn",
        "D2Q",
        "EveryEvent",
        "NumericColumn",
        "WatchQuantiles",
        "WatchRatio",
        "WatchTimeGain",
    ),
    "recpo.batches.slates": ("ImpressionLayout", "SequenceLayout"),
    "recpo.log.splits": ("LeaveLastOut", "TemporalSplit"),
    "recpo.base.errors": ("RecpoError",),
    "recpo.evaluation.candidates": ("CandidateTable",),
    "recpo.evaluation.evaluation": ("Evaluation",),
    "recpo.rewards.factors": ("Factors",),
    "recpo.evaluation.contenders": ("Lists",),
    "recpo.evaluation.measures": ("Measure", "Observed"),
    "recpo.lists.exploration": ("Exploration", "Pool"),
    "recpo.base.features": ("Categories", "Category", "FeatureSchema", "Number", "Vector"),
    "recpo.base.feedback": ("FeedbackDefinition", "FeedbackRule"),
    "recpo.objectives": (
        "ASPO",
        "CISPO",
        "DAPO",
        "DPO",
        "ECPO",
        "GBPO",
        "GRPO",
        "GSPO",
        "KTO",
        "MPO",
        "PPO",
        "CatalogPolicyGradient",
        "DrGRPO",
        "Likelihood",
        "MarginListwiseDPO",
        "PairwiseReward",
        "PointwiseReward",
        "QLearning",
        "Reinforce",
        "SoftmaxDPO",
        "WeightedLikelihood",
    ),
    "recpo.policies.catalog_softmax": ("CatalogSoftmaxPolicy",),
    "recpo.policies.encoder": ("Block", "HSTUBlock", "SASRecBlock"),
    "recpo.policies.item_features": ("ItemFeatureOptions",),
    "recpo.policies.semantic_id": ("SemanticIdPolicy",),
    "recpo.policies.tilted": ("RerankedPolicy", "TiltedPolicy"),
    "recpo.lists.reranking": (
        "AttributeCap",
        "Calibration",
        "Determinantal",
        "ItemAttributes",
        "MaximalMarginalRelevance",
        "RerankOptions",
    ),
    "recpo.rewards.rewards": (
        "EnsembleReward",
        "FactorReward",
        "HitReward",
        "LoggedReward",
        "RankAwareReward",
        "ValidityReward",
        "WeightedSum",
    ),
    "recpo.serving.bundle": ("Bundle",),
    "recpo.serving.item_index": ("IndexOptions",),
    "recpo.serving.of_runs": ("score",),
    "recpo.worlds.log": ("Simulation",),
    "recpo.items.sources": (
        "VectorsFromCooccurrence",
        "VectorsFromFeatures",
        "CodesFromFile",
        "VectorsFromFrame",
        "VectorsFromParquet",
    ),
    "recpo.items.tokenization": ("Codes",),
    "recpo.verbs.calibrate": ("calibrate",),
    "recpo.evaluation.comparison": ("Comparison",),
    "recpo.verbs.compare": ("compare",),
    "recpo.verbs.evaluate": ("evaluate",),
    "recpo.verbs.export": ("export",),
    "recpo.verbs.factorize": ("factorize",),
    "recpo.log.inspection": ("Inspection",),
    "recpo.verbs.init": ("init",),
    "recpo.verbs.load": ("load",),
    "recpo.verbs.loop": ("LoopResult", "loop"),
    "recpo.verbs.prepare": ("prepare",),
    "recpo.verbs.serve": ("serve",),
    "recpo.verbs.simulate": ("simulate",),
    "recpo.verbs.recommend": ("recommend",),
    "recpo.training.module": ("PreferenceModule",),
    "recpo.training.optimizers": ("LinearDecay",),
    "recpo.training.run": ("Run",),
    "recpo.training.tilting": ("TiltResult",),
    "recpo.verbs.tilt": ("tilt",),
    "recpo.verbs.train": ("train",),
    "recpo.verbs.tokenize": ("VectorsFromRun", "tokenize"),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(["__version__", *_MODULE_OF])


def __getattr__(name: str) -> Any:
    """Imports an exported name when it is first used (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'recpo' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
