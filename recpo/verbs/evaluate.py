"""The verb ``evaluate``: full-catalog ranking and off-policy value of policies, bundles and baselines."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from recpo.artifacts.outputs import output_directory
from recpo.base.errors import RecpoError
from recpo.evaluation.candidates import table_of
from recpo.evaluation.contenders import (
    BASELINES,
    BASELINES_DIRECTORY,
    BaselineCache,
    BaselineOptions,
    Contender,
    Lists,
    default_baselines,
    oracle,
    validate_names,
)
from recpo.evaluation.document import evaluation_document
from recpo.evaluation.evaluation import Evaluation, VariantEvaluation
from recpo.evaluation.held_out_pass import HeldOutPass, RankingOptions
from recpo.evaluation.variants import variants_document
from recpo.lists.reranking import Reranker, RerankOptions
from recpo.log.prepared import Prepared
from recpo.verbs.contenders import ModelOptions, Named, contenders_of, directory_of, reranked_contenders
from recpo.verbs.verb import WritingVerb, compute_device, function_of

By = Literal["variant"]

_NO_GRADES = "There is no baseline factorization: the train or the validation period has no graded event."


@dataclass(frozen=True)
class Evaluate(RankingOptions, ModelOptions, WritingVerb[Evaluation]):
    """Evaluates policies, bundles and baselines on the same held-out users, with paired differences.

    Computes full-catalog ranking metrics, beyond-accuracy metrics, off-policy value and paired differences. With
    ``out`` it writes a directory with metrics.json (every number), report.html (one file, opens offline) and
    resolved.yaml (the options; ``recpo evaluate --config`` repeats the result).

    Raises:
        RecpoError: an entry is not a contender, is unfinished, or knows other items; options are out of range; ``out``
            exists.
    """

    first_day: ClassVar = ("prepared", "contenders", "out", "baselines", "ks", "truth", "repeats")

    prepared: Prepared | str | Path | None = None
    """prepared data, or its directory; null = a served ``log`` by variant"""
    contenders: Sequence[Named] | Named = ()
    """what to compare, on the same items: runs, bundles and factors (or their directories), lists of another system
    (NAME=FILE), and names of baselines. Lists are a Parquet file, a directory of such files, or a CSV file, with the
    columns user_id, item_id and rank (1 = best) or score (higher = better), in the ids of the log. Baselines:
    popularity (training events), personal_popularity (what the user chose most often), positives (training positives),
    item_rate (share of positives), recency and recent_rate (training events and share of positives, newer ones counting
    more), segment_popularity and segment_rate (of users with the same value of a category of the table of users),
    sequential_rules (what followed the positives of the history elsewhere), factorization (matrix factorization
    of graded feedback), implicit_als (alternating least squares on positives), allrank (alternating least squares on
    the grades of what was shown, and zeros elsewhere), ease (linear model of items by items, for catalogs up to 15,000
    items), random.
    A bundle ranks, but gives no probabilities of logged items. The logging policy is added if its value is known"""
    _: KW_ONLY
    log: Path | str | None = None
    """instead of ``prepared``: directory of a log of ``recpo serve --variant``, whose users saw the variants
    (docs/experiments.md)"""
    by: By | None = None
    """``variant``: value, dislikes and differences of the variants of ``log``, with intervals and confidence sequences;
    of the other options only ``control``, ``reward.dislike_cost``, ``out`` and ``overwrite`` count"""
    control: str | None = None
    """variant that the others are compared with; null = the one with most impressions"""
    out: Path | str | None = None
    """output directory; null = keep the evaluation in memory only"""
    baselines: bool = True
    """add popularity, recency, sequential_rules, random, factorization if the log has grades, and personal_popularity
    if lists may repeat items, unless ``contenders`` names a baseline"""
    baseline_options: BaselineOptions = BaselineOptions()  # noqa: RUF009  frozen
    """options of the baselines"""
    baseline_cache: Path | str | None = None
    """directory of fitted baselines, which evaluations of the same data can share; null = in ``out``, where a later
    evaluation that replaces this one reads them. Each baseline is fitted once per data and options"""
    rerank: Sequence[Reranker] | Reranker = ()
    """MaximalMarginalRelevance, Determinantal, AttributeCap or Calibration of ``lists.reranking``, or a list of them:
    every run, bundle and factor model is also evaluated with lists re-ranked by each method (slates of the first k), to
    measure the cost and the effect of diversity, caps and calibration (docs/exploration.md)"""
    rerank_options: RerankOptions = RerankOptions()  # noqa: RUF009  frozen
    """number of items to re-rank, and the file of their attributes"""

    def execute(self) -> Evaluation:
        """Opens and checks every contender, evaluates one after the other, and writes the directory at the end."""
        if self.log is not None or self.by is not None or self.prepared is None:
            return self._by_variant()
        data = Prepared.open(self.prepared)
        with self._output(data) as target:
            contenders, warnings = self._contenders(data, self._cache(target))
            shared = HeldOutPass.of(data, self, compute_device(self.device))
            if shared.truth is not None:
                contenders.append(oracle(shared.truth))
            validate_names(contenders)
            evaluated = [shared.evaluate(contender) for contender in contenders]
            document = evaluation_document(shared, evaluated, checkpoint=self.checkpoint, warnings=warnings)
            evaluation = Evaluation(document, self.recorded())
            if target is not None:
                evaluation.write_files(target)
        return evaluation if self.out is None else replace(evaluation, path=Path(self.out))

    def _by_variant(self) -> Evaluation:
        """The variants of a served log."""
        if self.log is None or self.by is None:
            name = "log" if self.by is not None else "by" if self.log is not None else "prepared"
            message = "evaluate: give prepared data (--prepared), or the log of a server (--log LOG --by variant)"
            raise RecpoError(message, code="missing_option", field=name)
        for name in ("prepared", "contenders"):
            if getattr(self, name) not in (None, (), []):
                message = f"evaluate: --{name} has no effect on variants of a served log: leave it out"
                raise RecpoError(message, code="conflicting_options", field=name)
        document = variants_document(self.log, control=self.control, dislike_cost=self.reward.dislike_cost)
        evaluation = VariantEvaluation(document, self.recorded())
        return evaluation if self.out is None else evaluation.write(self.out, overwrite=self.overwrite)

    def measured(self, result: Evaluation) -> Mapping[str, float | str]:
        """Every metric of every contender or variant, as CONTENDER/METRIC."""
        if isinstance(result, VariantEvaluation):
            rows = result.to_pandas()[["variant", "metric", "mean"]].dropna().itertuples(index=False)
            return {f"{variant}/{metric}": float(mean) for variant, metric, mean in rows}
        found: dict[str, float | str] = {}
        for contender in result.document["contenders"]:
            numbers = {name: value["mean"] for name, value in contender["metrics"].items()} | contender["totals"]
            found |= {f"{contender['name']}/{name}": mean for name, mean in numbers.items() if mean is not None}
        return found

    @property
    def _named(self) -> list[Named]:
        named = [self.contenders] if isinstance(self.contenders, Named) else list(self.contenders)
        return [
            Lists.parse(one) if isinstance(one, str) and "=" in one and not Path(one).exists() else one for one in named
        ]

    def _output(self, data: Prepared) -> AbstractContextManager[Path | None]:
        """The directory to write, which must not replace what is read; None = in memory only."""
        if self.out is None:
            return nullcontext()
        table, features = table_of(self.candidates), self.item_features
        read: list[object] = [data.root, self.truth, self.baseline_cache, self.rerank_options.attributes]
        read += [features and features.file, table and table.source]
        read += [one.source if isinstance(one, Lists) else directory_of(one) for one in self._named]
        return output_directory(self.out, kind="evaluation", overwrite=self.overwrite, inputs=read)

    def _contenders(self, data: Prepared, cache: BaselineCache) -> tuple[list[Contender], list[str]]:
        """The contenders, and a warning if a default baseline is left out."""
        named, warnings = self._named, []
        if self.baselines and not any(one in BASELINES for one in named if isinstance(one, str)):
            added = default_baselines(data)
            warnings = [] if "factorization" in added else [_NO_GRADES]
            named = [*added, *named]
        models = self.part(ModelOptions)
        found = contenders_of(named, data, self.ks, models, self.baseline_options, cache, self.progress)
        methods = [self.rerank] if isinstance(self.rerank, Reranker) else self.rerank
        found += reranked_contenders(found, methods, self.rerank_options, data, self.ks)
        validate_names(found)
        return found, warnings

    def _cache(self, target: Path | None) -> BaselineCache:
        """The default cache: baselines are read from the evaluation that is replaced, and written to the new one."""
        if self.baseline_cache is not None:
            return BaselineCache(Path(self.baseline_cache), Path(self.baseline_cache))
        if self.out is None or target is None:
            return BaselineCache()
        return BaselineCache(Path(self.out) / BASELINES_DIRECTORY, target / BASELINES_DIRECTORY)


evaluate = function_of(Evaluate)
