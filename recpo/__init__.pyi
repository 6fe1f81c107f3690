"""The public names of recpo, imported when they are first used; type checkers and editors read them here."""

from .artifacts.artifact import load as load
from .artifacts.semantic_codes import Codes as Codes
from .base.errors import RecpoError as RecpoError
from .base.features import (
    Categories as Categories,
    Category as Category,
    FeatureSchema as FeatureSchema,
    Number as Number,
    Vector as Vector,
)
from .base.feedback import FeedbackDefinition as FeedbackDefinition, FeedbackRule as FeedbackRule
from .batches.preference_lists import PreferenceListLayout as PreferenceListLayout
from .batches.slates import ImpressionLayout as ImpressionLayout, SequenceLayout as SequenceLayout
from .evaluation import off_policy as off_policy
from .evaluation.candidates import CandidateTable as CandidateTable
from .evaluation.comparison import Comparison as Comparison
from .evaluation.contenders import Lists as Lists
from .evaluation.evaluation import Evaluation as Evaluation, VariantEvaluation as VariantEvaluation
from .evaluation.measures import Measure as Measure, Observed as Observed
from .items.sources import (
    CodesFromFile as CodesFromFile,
    VectorsFromCooccurrence as VectorsFromCooccurrence,
    VectorsFromFeatures as VectorsFromFeatures,
    VectorsFromFrame as VectorsFromFrame,
    VectorsFromParquet as VectorsFromParquet,
)
from .lists.exploration import Exploration as Exploration, Pool as Pool
from .lists.reranking import (
    AttributeCap as AttributeCap,
    Calibration as Calibration,
    Determinantal as Determinantal,
    ItemAttributes as ItemAttributes,
    MaximalMarginalRelevance as MaximalMarginalRelevance,
    RerankOptions as RerankOptions,
)
from .log.csv_files import CsvFormat as CsvFormat
from .log.feature_columns import FeatureColumns as FeatureColumns
from .log.inspection import Inspection as Inspection
from .log.prepared import Prepared as Prepared
from .log.schema import Columns as Columns, FlagColumn as FlagColumn
from .log.shaping import (
    D2Q as D2Q,
    BinaryColumn as BinaryColumn,
    EveryEvent as EveryEvent,
    NumericColumn as NumericColumn,
    WatchQuantiles as WatchQuantiles,
    WatchRatio as WatchRatio,
    WatchTimeGain as WatchTimeGain,
)
from .log.splits import LeaveLastOut as LeaveLastOut, TemporalSplit as TemporalSplit
from .objectives.advantages import (
    GatedAdvantage as GatedAdvantage,
    GradedAdvantage as GradedAdvantage,
    GroupNormalizedAdvantage as GroupNormalizedAdvantage,
    LeaveOneOutAdvantage as LeaveOneOutAdvantage,
    PrefixGroupAdvantage as PrefixGroupAdvantage,
    TernaryAdvantage as TernaryAdvantage,
)
from .objectives.gae import GAEAdvantage as GAEAdvantage
from .objectives.grpo import (
    ASPO as ASPO,
    CISPO as CISPO,
    DAPO as DAPO,
    ECPO as ECPO,
    GBPO as GBPO,
    GRPO as GRPO,
    GSPO as GSPO,
    DrGRPO as DrGRPO,
)
from .objectives.likelihood import Likelihood as Likelihood, WeightedLikelihood as WeightedLikelihood
from .objectives.listwise_dpo import MarginListwiseDPO as MarginListwiseDPO, SoftmaxDPO as SoftmaxDPO
from .objectives.mpo import MPO as MPO
from .objectives.policy_gradient import (
    PPO as PPO,
    CatalogPolicyGradient as CatalogPolicyGradient,
    Reinforce as Reinforce,
)
from .objectives.preference import DPO as DPO, KTO as KTO
from .objectives.q_learning import QLearning as QLearning
from .objectives.reward_model import PairwiseReward as PairwiseReward, PointwiseReward as PointwiseReward
from .policies.blocks import Block as Block, HSTUBlock as HSTUBlock, SASRecBlock as SASRecBlock
from .policies.catalog_softmax import CatalogSoftmaxPolicy as CatalogSoftmaxPolicy
from .policies.item_features import ItemFeatureOptions as ItemFeatureOptions
from .policies.semantic_id import SemanticIdPolicy as SemanticIdPolicy
from .policies.tilted import RerankedPolicy as RerankedPolicy, TiltedPolicy as TiltedPolicy
from .rewards.factors import Factors as Factors
from .rewards.rewards import (
    EnsembleReward as EnsembleReward,
    FactorReward as FactorReward,
    HitReward as HitReward,
    LoggedReward as LoggedReward,
    RankAwareReward as RankAwareReward,
    ValidityReward as ValidityReward,
    WeightedSum as WeightedSum,
)
from .server.variants import Guard as Guard
from .serving.bundle import Bundle as Bundle
from .serving.recommending import score as score
from .serving.runtimes import IndexOptions as IndexOptions
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
from .verbs.fit import Decision as Decision, fit as fit
from .verbs.init import init as init
from .verbs.loop import LoopResult as LoopResult, loop as loop
from .verbs.prepare import prepare as prepare
from .verbs.recommend import recommend as recommend
from .verbs.serve import serve as serve
from .verbs.simulate import simulate as simulate
from .verbs.tilt import tilt as tilt
from .verbs.tokenize import VectorsFromRun as VectorsFromRun, tokenize as tokenize
from .verbs.tracking import tracked as tracked
from .verbs.train import train as train
from .worlds.log import Simulation as Simulation

__version__: str
__all__: list[str]
