"""The verb ``tokenize``: gives every item a tuple of codes, so that a policy can generate items code by code."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tqdm import tqdm

from recpo.artifacts.outputs import output_directory
from recpo.artifacts.semantic_codes import Codes
from recpo.base.errors import RecpoError, Seed
from recpo.base.frames import ArrowStream, Frame
from recpo.items import sources
from recpo.items.residual_kmeans import ResidualKMeans
from recpo.items.tokenization import Collisions, make_codes, report_of
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared
from recpo.training.run import Run
from recpo.verbs.verb import WritingVerb, compute_device, function_of


@dataclass(frozen=True)
class VectorsFromRun(sources.VectorSource):
    """The item vectors of a trained policy, including the part from item features if it reads them.

    Attributes:
        run: run directory written by ``recpo train`` on the same prepared data.
        checkpoint: which checkpoint of the run.
        trust: packages, in addition to recpo, whose classes the configuration of that run may name.
    """

    run: Path
    checkpoint: Literal["best", "last"] = "best"
    trust: tuple[str, ...] = ()

    def read(
        self, data: Prepared, items: IdMap, seed: int, earlier: sources.EarlierCodes | None = None
    ) -> sources.ItemVectors:
        """See ``VectorSource``.

        Raises:
            RecpoError: the run has other items, its policy has no item table, or ``earlier`` is given, because the
                vectors of every run have their own space.
        """
        if earlier is not None:
            raise RecpoError(
                "extends: the earlier codebooks cannot encode the vectors of another run, because the vectors of every "
                "run have their own space: use VectorsFromFeatures, VectorsFromParquet or VectorsFromCooccurrence for "
                "new items, or make all codes again without extends",
                code="conflicting_options",
                field="extends",
            )
        run = Run.open(self.run, self.trust)
        run.validate_items(data)
        table = getattr(run.policy(self.checkpoint), "item_table", None)
        if table is None:
            raise RecpoError(
                f"{self.run}: its policy has no item table (only policies with one vector per item do)",
                code="unsupported",
                field="vectors.run",
            )
        return sources.ItemVectors(table.vectors().detach()[1:].float().numpy(), {})


@dataclass(frozen=True)
class Tokenize(ResidualKMeans, WritingVerb[Codes]):
    """Gives every item of a catalog a unique tuple of codes: residual k-means, then a pass that resolves collisions.

    Writes codes.parquet, manifest.json with a report, and codebooks.safetensors. Equal items, options and seed give
    equal bytes.

    Raises:
        RecpoError: ``out`` exists, options contradict each other, or items have no vectors.
    """

    first_day: ClassVar = ("prepared", "out", "vectors", "levels", "codebook_size", "extends")

    prepared: Prepared | str | Path
    """prepared data, or its directory"""
    out: Path | str
    """output directory"""
    _: KW_ONLY
    vectors: sources.VectorSource | sources.CodesFromFile | Frame = sources.VectorsFromCooccurrence()  # noqa: RUF009  frozen
    """source of the codes: VectorsFromCooccurrence, VectorsFromFeatures, VectorsFromParquet, VectorsFromRun, a frame
    with the columns ``item_id`` and ``vector`` (or VectorsFromFrame), or CodesFromFile for existing codes"""
    extends: Path | str | None = None
    """codes of an earlier catalog. Its items keep their codes, and new items get free tuples of its codebooks"""
    collisions: Collisions | None = None
    """how items with the same tuple are distinguished: nearest (the last code becomes the nearest free one under the
    same prefix; items of a full prefix move to the nearest prefix with free codes), extra (every item gets one more
    code, 0 if its tuple is unique), or first_free (the smallest free last code, for codes without vectors); null =
    nearest if there are vectors, else extra"""
    device: str = "cpu"
    """where k-means runs: cpu, auto (a GPU if there is one), cuda, cuda:1 and so on"""
    seed: Seed = 0
    """seed of all random numbers"""

    def execute(self) -> Codes:
        """Makes the codes, then writes the directory."""
        kmeans, out = self.part(ResidualKMeans), Path(self.out)
        data = Prepared.open(self.prepared)
        items = data.item_ids()
        source = self.vectors
        if isinstance(source, ArrowStream | Mapping):
            source = sources.VectorsFromFrame(source)
        inputs = [data, self.extends, getattr(source, "file", None), getattr(source, "run", None)]
        with (
            output_directory(out, kind="codes", overwrite=self.overwrite, inputs=inputs) as partial,
            tqdm(
                total=kmeans.levels + 3, desc="tokenize", unit="stage", disable=None if self.progress else True
            ) as bar,
        ):
            tokenization = make_codes(
                source,
                data,
                items,
                kmeans,
                collisions=self.collisions,
                earlier=None if self.extends is None else Path(self.extends),
                device=compute_device(self.device),
                seed=self.seed,
                on_stage=bar.update,
            )
            if tokenization.codebooks is not None:
                tokenization.codebooks.save(partial)
            codes = Codes(tokenization.codes.cpu().numpy(), tokenization.codebook_sizes, data.catalog_checksum)
            facts = {"source": type(source).__name__, "seed": self.seed, **tokenization.facts}
            facts["report"] = report_of(tokenization)
            codes.save(partial, items.to_external(range(1, len(items) + 1)), facts)
            self.write_resolved(partial / "resolved.yaml")
            bar.update(bar.total - bar.n)
        return Codes.open(out)


tokenize = function_of(Tokenize)
