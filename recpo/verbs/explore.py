"""The verb ``explore``: pages over prepared data and the lists of policies, on this machine or in one file."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from recpo.artifacts.checksums import kind_of
from recpo.artifacts.outputs import output_file
from recpo.artifacts.semantic_codes import Codes
from recpo.base.errors import NonNegativeInt, PositiveInt, RecpoError
from recpo.evaluation.candidates import HeldOut
from recpo.evaluation.contenders import BASELINES_DIRECTORY, BaselineCache
from recpo.explorer.pages import Pages, PageServer
from recpo.explorer.people_and_items import Catalog, ItemColumns, People
from recpo.explorer.survey import Survey, traffic
from recpo.log.prepared import Prepared
from recpo.rewards.factors import Factors
from recpo.training.learned_reward import Checkpoint
from recpo.training.recipes import FACTORS
from recpo.training.run import Run
from recpo.verbs.contenders import ModelOptions, Named, contenders_of, validate_factors
from recpo.verbs.fit import Decision
from recpo.verbs.fit_steps import place_of
from recpo.verbs.verb import PYTHON_ONLY, WritingVerb, function_of

_STATIC_USERS: Final = 50


@dataclass(frozen=True)
class Explore(ItemColumns, WritingVerb["Path | None"]):
    """Shows the lists of policies side by side: users, items, what a change moves, and what a server logged.

    Listens on this machine until Ctrl-C, or writes one HTML file with ``static``. It changes nothing, its pages run no
    script, and it needs no network. The contenders list items for the same sample of held-out users; any other user is
    looked up when a page asks.

    Raises:
        RecpoError: the source is neither prepared data nor a decision; a contender knows other items; the table of
            items lacks a column; the log of a server has nothing; the address is taken; ``static`` exists.
    """

    first_day: ClassVar = ("source", "contenders", "static", "item_table", "server_log", "users", "port")
    is_tracked: ClassVar = False

    source: Prepared | Decision | str | Path
    """prepared data, or the directory of ``recpo fit``, with its reward model and what it decided"""
    contenders: Sequence[Named] | Named = ()
    """what to show side by side, the one that serves now first: runs, bundles, factors, or names of baselines. Empty =
    of a decision, the strongest baseline and what ships; of prepared data, popularity"""
    _: KW_ONLY
    static: Path | str | None = None
    """write one HTML file with 50 users that are worth a look, to attach to a review, instead of listening"""
    grades: Factors | str | Path | None = None
    """factors that predict a grade, with its standard error, for every listed item; null = those of the decision"""
    codes: str | Path | None = None
    """directory of ``recpo tokenize``: the codes of the items, and their place in the trie"""
    server_log: Path | str | None = None
    """directory that ``recpo serve --log`` writes"""
    checkpoint: Checkpoint = "best"
    """which checkpoint of the runs; they are loaded on the CPU, which is enough for one user at a time"""
    trust: Sequence[str] = ()
    """packages, in addition to recpo, whose classes the configurations of the runs may name"""
    split: HeldOut = "test"
    """held-out period"""
    k: PositiveInt = 10
    """length of the lists"""
    users: PositiveInt = 1000
    """number of held-out users, evenly spaced, for whom the contenders are compared"""
    host: str = "127.0.0.1"
    """address to listen on; 127.0.0.1 = only this machine. Whoever reaches the address sees what users did"""
    port: NonNegativeInt = 8010
    """port to listen on; 0 = any free one"""

    on_ready: Callable[[str], None] = field(default=lambda url: None, metadata=PYTHON_ONLY)
    """called with the address of the first page once the server listens"""

    def execute(self) -> Path | None:
        """Asks the contenders, then writes the file or listens."""
        if self.static is not None and Path(self.static).exists() and not self.overwrite:
            message = f"{self.static} exists: choose another file, or give overwrite"
            raise RecpoError(message, code="exists", field="static")
        pages = self._pages()
        if self.static is not None:
            with output_file(Path(self.static)) as working:
                working.write_text(pages.one_file(_STATIC_USERS), encoding="utf-8")
            return Path(self.static)
        with PageServer(pages, self.host, self.port) as server:
            self.on_ready(server.url)
            server.serve_forever()
        return None

    def _pages(self) -> Pages:
        source = self.source
        if isinstance(source, str | Path):
            source = Decision.open(source) if kind_of(source) == "decision" else Prepared.open(source)
        decision = source if isinstance(source, Decision) else None
        data = source if isinstance(source, Prepared) else source.prepared
        catalog = Catalog(data, self)
        codes = None if self.codes is None else Codes.open(self.codes)
        if codes is not None and codes.catalog_checksum != data.catalog_checksum:
            message = f"{self.codes} has the codes of other items than {data.root}: tokenize these prepared data"
            raise RecpoError(message, code="mismatch", field="codes")
        log = None if self.server_log is None else partial(traffic, Path(self.server_log), data)
        if log is not None:
            log()  # what is wrong with it is said before the contenders are asked
        survey = self._survey(data, decision)
        return Pages(
            survey,
            catalog,
            People(data, self.split, survey.reads),
            None if decision is None else decision.facts,
            log,
            codes,
            str(source.root),
        )

    def _survey(self, data: Prepared, decision: Decision | None) -> Survey:
        given = [self.contenders] if isinstance(self.contenders, Named) else list(self.contenders)
        cache = BaselineCache()
        if decision is not None:
            cache = BaselineCache(decision.root / BASELINES_DIRECTORY, None)
            given = given or _of_decision(decision)
        options = ModelOptions(checkpoint=self.checkpoint, device="cpu", trust=self.trust)
        named = given or ["popularity"]
        found = contenders_of(named, data, [self.k], options, cache=cache, progress=self.progress)
        return Survey.of(
            data,
            found,
            split=self.split,
            k=min(self.k, data.num_items),
            users=self.users,
            grades=self._grades(data, decision),
            advice={one.name: Run.open(one.facts["path"], self.trust).advice for one in found if one.kind == "run"},
            progress=self.progress,
        )

    def _grades(self, data: Prepared, decision: Decision | None) -> Factors | None:
        given = self.grades
        if given is None and decision is not None and (decision.root / FACTORS).is_dir():
            given = decision.root / FACTORS
        if given is None:
            return None
        model = Factors.open(given)
        validate_factors(model, data)
        return model


def _of_decision(decision: Decision) -> list[Named]:
    """The strongest baseline and what ships; where the baseline ships, the best policy beside it."""
    facts = decision.facts
    names = dict.fromkeys([facts["strongest_baseline"], facts["chosen"], facts["policy"]])
    return [place_of(decision.root, name) for name in names if name is not None]


explore = function_of(Explore)
