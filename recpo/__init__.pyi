"""The public names of recpo, imported when they are first used; type checkers and editors read them here."""

from .base.errors import RecpoError as RecpoError
from .base.features import (
    Categories as Categories,
)
from .base.features import (
    Category as Category,
)
from .base.features import (
    FeatureSchema as FeatureSchema,
)
from .base.features import (
    Number as Number,
)
from .base.features import (
    Vector as Vector,
)
from .base.feedback import FeedbackDefinition as FeedbackDefinition
from .base.feedback import FeedbackRule as FeedbackRule
from .batches.preference_lists import PreferenceListLayout as PreferenceListLayout
from .batches.slates import ImpressionLayout as ImpressionLayout
from .batches.slates import SequenceLayout as SequenceLayout
from .evaluation import off_policy as off_policy
from .evaluation.candidates import CandidateTable as CandidateTable
from .evaluation.comparison import Comparison as Comparison
from .evaluation.contenders import Lists as Lists
from .evaluation.evaluation import Evaluation as Evaluation
from .evaluation.evaluation import VariantEvaluation as VariantEvaluation
from .evaluation.measures import Measure as Measure
from .evaluation.measures import Observed as Observed
from .items.sources import (
    CodesFromFile as CodesFromFile,
)
from .items.sources import (
    VectorsFromCooccurrence as VectorsFromCooccurrence,
)
from .items.sources import (
    VectorsFromFeatures as VectorsFromFeatures,
)
from .items.sources import (
    VectorsFromFrame as VectorsFromFrame,
)
from .items.sources import (
    VectorsFromParquet as VectorsFromParquet,
)
from .items.tokenization import Codes as Codes
from .lists.exploration import Exploration as Exploration
from .lists.exploration import Pool as Pool
from .lists.reranking import (
    AttributeCap as AttributeCap,
)
from .lists.reranking import (
    Calibration as Calibration,
)
from .lists.reranking import (
    Determinantal as Determinantal,
)
from .lists.reranking import (
    ItemAttributes as ItemAttributes,
)
from .lists.reranking import (
    MaximalMarginalRelevance as MaximalMarginalRelevance,
)
from .lists.reranking import (
    RerankOptions as RerankOptions,
)
from .log.csv_files import CsvFormat as CsvFormat
from .log.feature_columns import FeatureColumns as FeatureColumns
from .log.inspection import Inspection as Inspection
from .log.prepared import Prepared as Prepared
from .log.schema import Columns as Columns
from .log.schema import FlagColumn as FlagColumn
from .log.shaping import (
    D2Q as D2Q,
)
from .log.shaping import (
    BinaryColumn as BinaryColumn,
)
from .log.shaping import (
    EveryEvent as EveryEvent,
)
from .log.shaping import (
    NumericColumn as NumericColumn,
)
from .log.shaping import (
    WatchQuantiles as WatchQuantiles,
)
from .log.shaping import (
    WatchRatio as WatchRatio,
)
from .log.shaping import (
    WatchTimeGain as WatchTimeGain,
)
from .log.splits import LeaveLastOut as LeaveLastOut
from .log.splits import TemporalSplit as TemporalSplit
from .objectives.advantages import (
    GatedAdvantage as GatedAdvantage,
)
from .objectives.advantages import (
    GradedAdvantage as GradedAdvantage,
)
from .objectives.advantages import (
    GroupNormalizedAdvantage as GroupNormalizedAdvantage,
)
from .objectives.advantages import (
    LeaveOneOutAdvantage as LeaveOneOutAdvantage,
)
from .objectives.advantages import (
    PrefixGroupAdvantage as PrefixGroupAdvantage,
)
from .objectives.advantages import (
    TernaryAdvantage as TernaryAdvantage,
)
from .objectives.catalog_policy_gradient import CatalogPolicyGradient as CatalogPolicyGradient
from .objectives.gae import GAEAdvantage as GAEAdvantage
from .objectives.grpo import (
    ASPO as ASPO,
)
from .objectives.grpo import (
    CISPO as CISPO,
)
from .objectives.grpo import (
    DAPO as DAPO,
)
from .objectives.grpo import (
    ECPO as ECPO,
)
from .objectives.grpo import (
    GBPO as GBPO,
)
from .objectives.grpo import (
    GRPO as GRPO,
)
from .objectives.grpo import (
    GSPO as GSPO,
)
from .objectives.grpo import (
    DrGRPO as DrGRPO,
)
from .objectives.likelihood import Likelihood as Likelihood
from .objectives.likelihood import WeightedLikelihood as WeightedLikelihood
from .objectives.listwise_dpo import MarginListwiseDPO as MarginListwiseDPO
from .objectives.listwise_dpo import SoftmaxDPO as SoftmaxDPO
from .objectives.mpo import MPO as MPO
from .objectives.policy_gradient import PPO as PPO
from .objectives.policy_gradient import Reinforce as Reinforce
from .objectives.preference import DPO as DPO
from .objectives.preference import KTO as KTO
from .objectives.q_learning import QLearning as QLearning
from .objectives.reward_model import PairwiseReward as PairwiseReward
from .objectives.reward_model import PointwiseReward as PointwiseReward
from .policies.blocks import Block as Block
from .policies.blocks import HSTUBlock as HSTUBlock
from .policies.blocks import SASRecBlock as SASRecBlock
from .policies.catalog_softmax import CatalogSoftmaxPolicy as CatalogSoftmaxPolicy
from .policies.item_features import ItemFeatureOptions as ItemFeatureOptions
from .policies.semantic_id import SemanticIdPolicy as SemanticIdPolicy
from .policies.tilted import RerankedPolicy as RerankedPolicy
from .policies.tilted import TiltedPolicy as TiltedPolicy
from .rewards.factors import Factors as Factors
from .rewards.rewards import (
    EnsembleReward as EnsembleReward,
)
from .rewards.rewards import (
    FactorReward as FactorReward,
)
from .rewards.rewards import (
    HitReward as HitReward,
)
from .rewards.rewards import (
    LoggedReward as LoggedReward,
)
from .rewards.rewards import (
    RankAwareReward as RankAwareReward,
)
from .rewards.rewards import (
    ValidityReward as ValidityReward,
)
from .rewards.rewards import (
    WeightedSum as WeightedSum,
)
from .server.variants import Guard as Guard
from .serving.bundle import Bundle as Bundle
from .serving.item_index import IndexOptions as IndexOptions
from .serving.of_runs import score as score
from .training.module import PreferenceModule as PreferenceModule
from .training.optimizers import LinearDecay as LinearDecay
from .training.run import Run as Run
from .training.tilting import TiltResult as TiltResult
from .verbs.calibrate import calibrate as calibrate
from .verbs.compare import compare as compare
from .verbs.evaluate import evaluate as evaluate
from .verbs.explore import explore as explore
from .verbs.export import export as export
from .verbs.factorize import factorize as factorize
from .verbs.fit import Decision as Decision
from .verbs.fit import fit as fit
from .verbs.init import init as init
from .verbs.load import load as load
from .verbs.loop import LoopResult as LoopResult
from .verbs.loop import loop as loop
from .verbs.prepare import prepare as prepare
from .verbs.recommend import recommend as recommend
from .verbs.serve import serve as serve
from .verbs.simulate import simulate as simulate
from .verbs.tilt import tilt as tilt
from .verbs.tokenize import VectorsFromRun as VectorsFromRun
from .verbs.tokenize import tokenize as tokenize
from .verbs.tracking import tracked as tracked
from .verbs.train import train as train
from .worlds.log import Simulation as Simulation

__version__: str
__all__: list[str]
