"""The files of examples/deployment name what the server has (metrics, labels, addresses, options), and linters pass."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from recpo.verbs.serve import Serve
from tests.server.conftest import answers, request

PLACE = Path(__file__).parents[2] / "examples" / "deployment"
DOCKERFILE = (PLACE / "Dockerfile").read_text(encoding="utf-8")
RULES = "line-length: {max: 130}, document-start: disable, comments: {min-spaces-from-content: 1}"
COMPOSE = [yaml.safe_load((PLACE / name).read_text(encoding="utf-8")) for name in ("compose.yaml", "compose.swap.yaml")]
MANIFESTS = list(yaml.safe_load_all((PLACE / "kubernetes.yaml").read_text(encoding="utf-8")))
DEPLOYMENT = next(one for one in MANIFESTS if one["kind"] == "Deployment")
POD = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


@pytest.fixture(scope="module")
def scraped(bundles, tmp_path_factory):
    """Every sample of ``/metrics``: name -> its label sets; after a request and its outcome."""

    async def calls(server):
        shown = (await server.client.post("/v1/recommend", json=request(items=(3, 7, 10**6)))).json()
        outcomes = [{"item_id": shown["items"][0]["item_id"], "watch_time": 6.0, "duration": 9.0}]
        feedback = {"request_id": shown["request_id"], "outcomes": outcomes}
        assert (await server.client.post("/v1/feedback", json=feedback)).status_code == 200
        return (await server.client.get("/metrics")).text

    text = answers(bundles[0], calls, log=tmp_path_factory.mktemp("board") / "log")
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_the_board_reads_metrics_and_labels_of_the_server(scraped):
    board = json.loads((PLACE / "grafana" / "board.json").read_text(encoding="utf-8"))
    (source,) = yaml.safe_load((PLACE / "grafana" / "provisioning" / "datasources.yaml").read_text())["datasources"]
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    shown = set()
    for target in targets:
        assert target["datasource"]["uid"] == source["uid"]
        names = re.findall(r"\brecpo_\w+", target["expr"])
        assert names, target
        shown |= {re.sub("_(bucket|sum|count)$", "", name) for name in names}
        known = set().union(*(labels for name in names for labels in scraped[name]), {"le"})
        used = re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", target["expr"])
        used += [label for listed in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in listed.split(", ")]
        used += re.findall(r"{{(\w+)}}", target["legendFormat"])
        assert set(used) <= known, target
        for label, value in re.findall(r"(\w+)=\"([^\"]*)\"", target["expr"]):
            assert value in {labels.get(label) for name in names for labels in scraped[name]}, target
    exported = {re.sub("_(bucket|sum|count|created)$", "", name) for name in scraped}
    counters = {name.removesuffix("_total") for name in exported if name.endswith("_total")}
    assert shown == exported - counters, "every metric is on the board"


def test_probes_and_prometheus_ask_addresses_that_exist(bundles):
    paths = [CONTAINER[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")]
    paths.append(POD["metadata"]["annotations"]["prometheus.io/path"])
    paths += [job["metrics_path"] for job in yaml.safe_load((PLACE / "prometheus.yaml").read_text())["scrape_configs"]]
    paths += re.findall(r"http://127.0.0.1:8000(/[^']*)", DOCKERFILE.partition("HEALTHCHECK")[2])
    assert len(paths) == 6

    async def calls(server):
        return {path: (await server.client.get(path)).status_code for path in paths}

    assert set(answers(bundles[0], calls).values()) == {200}


def test_commands_have_options_of_serve_and_directories_that_are_mounted():
    (entry,), (default,) = (
        re.findall(rf"^{word} (\[.*\])$", DOCKERFILE, re.MULTILINE) for word in ("ENTRYPOINT", "CMD")
    )
    services = [file["services"]["server"] for file in COMPOSE]
    commands = [json.loads(entry), json.loads(default), CONTAINER["args"], *(one["command"] for one in services)]
    options = {f"--{field.name}" for field in fields(Serve)}
    for command in commands:
        assert {word for word in command if word.startswith("--")} <= options
    mounted = {one["mountPath"]: one.get("readOnly", False) for one in CONTAINER["volumeMounts"]}
    assert mounted == {"/bundles": True, "/impressions": False, "/tmp": False}
    assert services[0]["volumes"][0]["read_only"]
    assert shlex.split(DOCKERFILE)[shlex.split(DOCKERFILE).index("VOLUME") + 1 :][0] == "[/impressions]"


def test_a_stop_may_take_as_long_as_the_server_needs():
    def seconds(command):
        words = [str(word) for word in command]
        drain = words[words.index("--drain_s") + 1] if "--drain_s" in words else Serve.drain_s
        return float(drain) + Serve.timeout_s + 10  # as in recpo.server.processes

    assert POD["spec"]["terminationGracePeriodSeconds"] >= seconds(CONTAINER["args"])
    server = COMPOSE[0]["services"]["server"]
    assert int(server["stop_grace_period"].removesuffix("s")) >= seconds(server["command"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "hadolint Dockerfile",
        "check-jsonschema --builtin-schema vendor.compose-spec compose.yaml compose.swap.yaml",
        "kubernetes-validate --strict kubernetes.yaml",
        f"yamllint --strict -d '{{extends: default, rules: {{{RULES}}}}}' .",
    ],
    ids=lambda command: command.split()[0],
)
def test_linters_pass(command):
    name, *arguments = shlex.split(command)
    program = shutil.which(name, path=Path(sys.executable).parent)
    if program is None:
        pytest.skip(f"{name} is not installed (pip install recpo[dev])")
    done = subprocess.run([program, *arguments], cwd=PLACE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
