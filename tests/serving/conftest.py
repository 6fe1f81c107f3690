from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from recpo.artifacts.semantic_codes import Codes
from recpo.base.feedback import FeedbackDefinition
from recpo.log.id_map import IdMap
from recpo.policies.blocks import HSTUBlock, SASRecBlock
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle
from recpo.serving.recommending import milliseconds, recommend_lists
from tests.cutoffs import quarters

NUM_ITEMS, MAX_HISTORY, K = 120, 12, 20
CODEBOOKS = (8, 6, 5)
#: Of items of 8 to 16 seconds; ``watch_of`` realizes every level with a duration of 10 s.
FEEDBACK = FeedbackDefinition(cutoffs={3: quarters(2.0, 4.0, 6.0)})
ORIGIN = {"run": "run-0", "checkpoint": "best", "weights": "0" * 64}


def make_policy(kind, root=None, codebooks=CODEBOOKS):
    """The policy and the options that it was built with."""
    torch.manual_seed(3)
    options = {"dim": 16, "max_history": MAX_HISTORY, "layers": 1}  # every layer is long to trace
    if kind == "semantic":
        tuples = np.random.default_rng(0).permutation(np.prod(codebooks))[:NUM_ITEMS]
        codes = Codes(np.stack(np.unravel_index(tuples, codebooks), 1), codebooks, "checksum")
        codes.save(root, pa.array(range(NUM_ITEMS)), {})
        options |= {"codes": str(root), "beam_width": NUM_ITEMS, "decoder_layers": 1}
        policy = SemanticIdPolicy(NUM_ITEMS, **options).eval()
    else:
        options["block"] = {"sasrec": SASRecBlock, "hstu": HSTUBlock}[kind]
        policy = CatalogSoftmaxPolicy(NUM_ITEMS, **options).eval()
    with torch.no_grad():  # far from uniform, so that a wrong input cannot go unnoticed
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return policy, options


def item_ids():
    return IdMap(pa.array([f"item-{number}" for number in range(NUM_ITEMS, 0, -1)]))


@pytest.fixture(scope="session")
def parts():
    """What an export takes, for policies that a test makes itself."""
    return SimpleNamespace(policy=make_policy, items=item_ids(), feedback=FEEDBACK)


@pytest.fixture(scope="session")
def export_once(tmp_path_factory):
    """A policy and its bundle, by kind of policy."""

    @cache
    def exported(kind):
        policy, options = make_policy(kind, tmp_path_factory.mktemp("codes"))
        out = tmp_path_factory.mktemp("serving") / kind
        export_bundle(
            policy, item_ids(), PolicyFacts(FEEDBACK, options=options, origin=ORIGIN), out, BundleOptions(k=K)
        )
        return policy, out

    return exported


@pytest.fixture(scope="module", autouse=True)
def nothing_is_decomposed(request):
    """ONNX has every operation of recpo's own policies: decomposing a program traces it twice more."""
    with pytest.MonkeyPatch.context() as patched:
        if request.path.name not in {"test_export.py", "test_compiled.py"}:  # policies from outside, other compilers
            patched.setattr(torch.export.ExportedProgram, "run_decompositions", None)
        yield


@pytest.fixture(scope="session", params=["sasrec", "hstu", pytest.param("semantic", marks=pytest.mark.slow)])
def exported(request, export_once):
    return export_once(request.param)


@pytest.fixture(scope="session")
def bundle_path(export_once):
    """A bundle of a policy that does not read timestamps."""
    return export_once("sasrec")[1]


def served_by(bundle, histories, **options):
    """What ``Bundle.recommend`` makes a frame of: an Arrow table, and typed counts."""
    reading = {name: options.pop(name) for name in ("exclude", "users", "user_features", "context") if name in options}
    read = bundle.reader.read(histories, at=milliseconds(options.pop("at", None)), **reading)
    return recommend_lists(bundle.runtime, bundle.items, read, **{"k": bundle.k} | options)
