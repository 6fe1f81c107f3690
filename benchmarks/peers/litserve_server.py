"""LitServe around the function that ``recpo serve`` runs: the same batches and session, LitServe's own transport.

python benchmarks/peers/litserve_server.py BUNDLE PORT MAX_BATCH
"""

from __future__ import annotations

import sys
from pathlib import Path

import litserve

from recpo.server.bundles import LoadedBundle
from recpo.server.ranking import Query, Ranker


class Recommender(litserve.LitAPI):
    """At module level, because LitServe starts its workers as new processes."""

    def setup(self, device):
        """Loads the bundle in the worker."""
        self.loaded, self.ranker = LoadedBundle.load(Path(sys.argv[1]), "bundle"), Ranker()

    def decode_request(self, request):
        """The query."""
        return Query(request["history"], (), request["k"])

    def batch(self, inputs):
        """As it is."""
        return inputs

    def predict(self, inputs):
        """What ``recpo serve`` runs."""
        return self.ranker.rank(self.loaded, inputs)

    def unbatch(self, output):
        """As it is."""
        return output

    def encode_response(self, output):
        """Items and scores."""
        listed = zip(output.items, output.scores, strict=True)
        return {"items": [{"item_id": item, "score": score} for item, score in listed]}


def main() -> None:
    api = Recommender(max_batch_size=int(sys.argv[3]), batch_timeout=0.001, api_path="/v1/recommend")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, healthcheck_path="/v2/health/ready")
    server.run(port=int(sys.argv[2]), generate_client_file=False, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
