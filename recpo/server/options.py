"""Options of the server."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recpo.artifacts.documents import describe_os_error
from recpo.base.errors import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RecpoError,
    validate_range,
    validate_ranges,
)
from recpo.lists.exploration import Exploration
from recpo.lists.interleaving import Interleaving
from recpo.lists.reranking import Reranker, RerankOptions
from recpo.server.bundles import Reranking
from recpo.server.impressions import IdType
from recpo.server.variants import Guard, Variant, parse_variants
from recpo.serving.runtimes import CPU_PROVIDER

_SHORTEST_KEY = 16
_LAST_PORT = 65_535


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the server."""

    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 = all addresses of this machine"""
    port: NonNegativeInt = 8000
    """port to listen on; 0 = any free port, which the process log names"""
    workers: PositiveInt = 1
    """number of processes; each loads the bundle and writes its own log files"""
    variant: Sequence[str] = ()
    """policies that serve at once, each as NAME=BUNDLE:SHARE, instead of ``bundle``; the first one is the control, and
    shares sum to 1. A user has the same variant in every worker and after every restart"""
    experiment: str = "1"
    """name of the experiment, which the hash of the user contains: another name assigns all users again"""
    interleave: Interleaving | None = None
    """mix the lists of two variants of equal shares in every answer: team_draft, or probabilistic; null = every user
    has one variant"""
    guard: Guard | None = None
    """bounds of the variants (``recpo.Guard``: dislikes, value, alpha): a variant that violates one beyond doubt ends,
    and its users get the control; null = no variant ends"""
    name: str | None = None
    """name of the model in answers and addresses; null = the name of the bundle's directory"""
    log: Path | None = None
    """directory of the impression log: new, empty, or a log of earlier servers; null = nothing is logged, and
    feedback is rejected"""
    user_ids: IdType | None = None
    """type of the user ids in requests and log: integer or string; null = the type in the data that the bundle's
    policy was trained on, and integer if the bundle does not state it"""
    api_keys: Path | None = None
    """file of keys, one per line; a request needs one of them. null = requests need no key"""
    admin_keys: Path | None = None
    """file of keys for swap and rollback; null = both are disabled"""
    rerank: Reranker | None = None
    """how complete slates are chosen before any is drawn: MaximalMarginalRelevance, Determinantal, AttributeCap or
    Calibration of ``recpo.lists.reranking``; null = in the policy's order"""
    rerank_options: RerankOptions = RerankOptions()  # noqa: RUF009  frozen
    """number of re-ranked items, and the file of their attributes"""
    exploration: Exploration | None = None
    """how slates are drawn (``recpo.Exploration``: temperature, epsilon, shortlist, uniform_over); null =
    the best items in order"""
    max_batch: PositiveInt = 32
    """maximum number of requests in a batch"""
    max_wait_ms: NonNegativeFloat = 0.0
    """how long a request waits for others; 0 = only until the previous batch ends"""
    max_queue: PositiveInt = 1024
    """how many requests may wait in a worker; further requests get status 429"""
    timeout_s: PositiveFloat = 2.0
    """seconds after which a waiting request gets status 504"""
    max_events: PositiveInt = 2000
    """maximum events in the history of a request; a longer one gets status 422"""
    max_exclude: NonNegativeInt = 10_000
    """maximum number of items to exclude in a request"""
    max_body_kb: PositiveInt = 1024
    """maximum body size of a request in KiB; a larger one gets status 413"""
    outcome_window_s: NonNegativeFloat = 1800.0
    """seconds for which outcomes of an impression are accepted; then its rows are published"""
    rotate_s: PositiveFloat = 300.0
    """a new log file starts when the current one reaches this age in seconds"""
    rotate_mb: PositiveFloat = 64.0
    """a new log file also starts at this size in MiB"""
    sync: bool = True
    """an answer waits until its impression is on disk. false = it waits only for the operating system; the impression
    then survives the end of the process, but not of the machine"""
    publish_on_stop: bool = False
    """when the server stops, publish everything that is complete, without waiting for more outcomes"""
    drain_s: NonNegativeFloat = 0.0
    """when the server stops, seconds between reporting "not ready" and closing the socket"""
    threads: NonNegativeInt = 0
    """threads of ONNX Runtime in a worker; 0 = one for a program below 64 MiB, otherwise one per core"""
    provider: str = CPU_PROVIDER
    """execution provider of ONNX Runtime; it must be in ``onnxruntime.get_available_providers()``"""

    def __post_init__(self) -> None:
        for name in ("log", "api_keys", "admin_keys"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        validate_ranges(self)
        self._validate_variants()
        validate_range(self.port <= _LAST_PORT, "port", f"must be at most {_LAST_PORT}", self.port)

    def _validate_variants(self) -> None:
        if isinstance(self.variant, str):
            object.__setattr__(self, "variant", (self.variant,))
        variants = self.variants
        if self.guard is not None and (not variants or self.log is None):
            message = "guard ends variants because of their log: give --variant and --log"
            raise RecpoError(message, code="missing_option", field="log" if variants else "variant")
        if self.interleave is None:
            return
        if not variants:
            message = "interleave mixes two variants: give them with --variant"
            raise RecpoError(message, code="missing_option", field="variant")
        if len(variants) != 2 or variants[0].share != variants[1].share:
            message = "interleave mixes two variants of equal shares in every answer: give two, without shares"
            raise RecpoError(message, code="conflicting_options", field="interleave")
        if self.guard is not None:
            message = "guard compares users of different variants, interleave shows both to all: leave one of them out"
            raise RecpoError(message, code="conflicting_options", field="guard")
        if self.exploration is not None:
            message = "interleave draws the lists, so --exploration cannot: leave one of them out"
            raise RecpoError(message, code="conflicting_options", field="exploration")

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants; () = there are none."""
        return parse_variants(self.variant)

    @property
    def reranking(self) -> Reranking | None:
        """How complete slates are chosen; None = in the policy's order."""
        return None if self.rerank is None else Reranking(self.rerank, self.rerank_options)

    @property
    def shortlist(self) -> int:
        """Minimum list length of a bundle, for exploration and re-ranking."""
        explored = 0 if self.exploration is None else self.exploration.shortlist
        return max(explored, 0 if self.rerank is None else self.rerank_options.shortlist)


class Keys:
    """Keys of a file, as digests, so that comparisons take constant time.

    Args:
        path: one key per line; empty lines and lines that start with # are ignored.

    Raises:
        RecpoError: the file cannot be read, has no key, or has a key that is too short to be safe.
    """

    def __init__(self, path: Path) -> None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except OSError as error:
            raise RecpoError(describe_os_error(error, path), code="failed", field=str(path)) from error
        except UnicodeDecodeError as error:
            message = f"{path} is not text: expected one key per line"
            raise RecpoError(message, code="wrong_file", field=str(path)) from error
        keys = [line for line in lines if line and line[0] != "#"]
        if not keys:
            raise RecpoError(f"{path} has no keys: write one per line", code="empty", field=str(path))
        if short := [number for number, key in enumerate(keys, 1) if len(key) < _SHORTEST_KEY]:
            message = (
                f"{path}: key {short[0]} is shorter than {_SHORTEST_KEY} characters: make one with "
                "`openssl rand -hex 24`"
            )
            raise RecpoError(message, code="bad_value", field=str(path))
        self._digests = {_digest(key) for key in keys}

    def __contains__(self, key: str) -> bool:
        return _digest(key) in self._digests


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
