"""The benchmarks run at tiny sizes, and print the numbers that the docs quote."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recpo.log.inspection import inspect_log
from recpo.verbs.prepare import prepare
from recpo.verbs.simulate import simulate
from recpo.worlds.truth import Truth
from tests.forks import script

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PACKAGE = Path(__file__).parents[1] / "recpo"

pytestmark = pytest.mark.slow


@pytest.fixture
def printed(monkeypatch, capfd):
    """A function that runs a script in this process, where everything is imported; what it and its children print.

    Scripts that it starts are forked from a process that has imported recpo.
    """
    threads, imported, start = torch.get_num_threads(), sys.path.copy(), subprocess.run

    def started(command, **options):
        ours = command[0] == sys.executable and Path(command[1]).parent == BENCHMARKS
        return (script if ours else start)(command, **options)

    def run(name: str, *flags: str) -> str:
        monkeypatch.setattr(subprocess, "run", started)
        monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / name), *flags])
        monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *imported])
        capfd.readouterr()
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            torch.set_num_threads(threads)
            torch.set_grad_enabled(True)
        return capfd.readouterr().out

    return run


@pytest.fixture
def lines_of(printed):
    """A function that runs a script at tiny sizes: the JSON lines that it prints."""

    def run(name: str, *flags: str) -> list[dict]:
        return [json.loads(line) for line in printed(name, "--quick", *flags).splitlines() if line.startswith("{")]

    return run


def test_pretrain_measures_recpo_and_the_yardstick_and_skips_absent_peers(lines_of):
    lines = {line["contender"]: line for line in lines_of("pretrain.py", "--contenders", "recpo", "replay", "rectools")}
    assert {name for name, line in lines.items() if "skipped" in line} == {"replay", "rectools"}
    measured = {name: line for name, line in lines.items() if "skipped" not in line}
    assert {"recpo", "yardstick"} <= set(measured)
    assert len({line["sha256"] for line in measured.values()}) == 1
    for line in measured.values():
        assert line["positions_per_s_min"] <= line["positions_per_s"] <= line["positions_per_s_max"]
        assert line["positions_per_cpu_s"] > 0
        assert line["trained_cpu_s"] >= 0.4
        assert 0 < line["ndcg@10"] <= line["hr@10"] <= 1
        assert list(line["after_cpu_s"]) == ["0.2", "0.4"]
        assert line["after_cpu_s"]["0.4"]["ndcg@10"] == line["ndcg@10"]
        assert line["versions"]["torch"]


def test_alignment_compares_a_method_with_what_it_started_from(lines_of, tmp_path):
    flags = ("--work", str(tmp_path), "--seeds", "0", "--methods", "GRPO")
    lines = [line for line in lines_of("alignment.py", *flags) if "policy" in line]
    assert [line["policy"] for line in lines] == ["pre-trained", "GRPO"]
    for line in lines:
        assert 0 < line["coverage"] <= 1
        assert -1 < line["true value"] < 1


def test_reward_models_compares_factorizations_averages_and_trees(lines_of, tmp_path):
    world = simulate(tmp_path / "world", world="living", users=80, items=100, events=3000, seed=0)
    data = prepare(world.log, tmp_path / "prepared", items=world.items, users=world.users, catalog="items")
    models = ["averages", "factorization, consumption and both tables"]
    lines = lines_of("reward_models.py", "--prepared", str(data.root), "--models", *models)
    assert [line["model"] for line in lines] == [*models, "boosted trees", "mean of trees and factorization"]
    for line in lines:
        assert 0.01 < line["squared error"] < 0.15
        assert 0.4 < line["AUC"] < 1


def test_priors_compares_factorizations_by_what_their_prior_means_come_from(lines_of, tmp_path):
    lines = {line["prior"]: line for line in lines_of("priors.py", "--work", str(tmp_path))}
    tables = ["item features", "both", "user features", "item and user features"]
    assert list(lines) == ["none", "consumption", *tables, "chosen"]
    smallest = min(line["squared_error"] for line in lines.values())
    assert lines["chosen"]["squared_error"] < lines["none"]["squared_error"] < 1.5 * smallest
    assert all(-1 < line["bound_value"] < 1 for line in lines.values())


def test_cold_start_values_new_items_for_policies_with_and_without_features(lines_of, tmp_path):
    (line,) = lines_of("cold_start.py", "--work", str(tmp_path))
    assert line["new_items"] >= 5
    assert line["exposures"] > 0
    named = [f"{name} {seen}" for name in ("ids", "features") for seen in ("never seen", "after a day")]
    for name in named:
        assert -1 < line[name] <= line["oracle "]
    assert line["share"] == pytest.approx(line["features never seen"] / line["features after a day"])


def test_published_recipes_run_on_the_files_of_a_user(lines_of, tmp_path):
    rng = np.random.default_rng(0)
    items = np.concatenate([rng.permutation(40)[:6] for _ in range(60)])
    log = {"user_id": np.arange(60).repeat(6), "pos": np.tile(np.arange(6), 60), "item_id": items}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    table = {"item_id": np.arange(40), "categories": [[n % 4, 9] for n in range(40)]}
    pq.write_table(pa.table(table), tmp_path / "items.parquet")
    files = ["--log", str(tmp_path / "log.parquet"), "--items", str(tmp_path / "items.parquet")]
    command = ["published.py", "--recipe", "semantic", *files, "--work", str(tmp_path / "work"), "--seeds", "3"]
    (line,) = lines_of(*command)
    assert line["seed"] == 3
    for past in ("without the past", "past kept"):
        for one in (line, line["tilted"]):
            assert 0 < one[f"NDCG@10, {past}"] <= one[f"Recall@10, {past}"] <= 1
    assert line["best epoch"] == line["epochs"] == 1
    assert 0 <= line["validation NDCG@10"] <= line["validation HitRate@10"] <= 1
    run = tmp_path / "work" / "semantic_3" / "run.json"
    written = run.stat().st_mtime_ns
    assert lines_of(*command)[0]["Recall@10, past kept"] == line["Recall@10, past kept"]
    assert run.stat().st_mtime_ns == written, "what is done is left out"
    (line,) = lines_of(
        "published.py", "--recipe", "catalog", *files, "--work", str(tmp_path / "work"), "--trials", "2", "--seeds", "3"
    )
    search = json.loads((tmp_path / "work" / "search_catalog.json").read_text())
    assert search["trials"] == len(search["rungs"][0]) == 2
    (chosen,) = search["rungs"][1]
    assert search["chosen"] == chosen == max(search["rungs"][0], key=search["rungs"][0].get)
    assert line["run"] == ("catalog_3" if chosen == "rules" else f"catalog_3_{chosen}")
    with pytest.raises(SystemExit) as refused:
        lines_of(*command, "--log", "another.parquet")
    assert "name another --work" in refused.value.code


VALUES = {"rules": 0.1, "deeper": 0.3, "wider": 0.2, "narrow": 0.25, "slower": 0.4}


class Trainings:
    """Trainings of ten seconds, whose values are known."""

    def __init__(self, most=100):
        self.calls, self.clock, self.most = [], 0.0, most

    def __call__(self, name, epochs):
        if len(self.calls) == self.most:
            raise KeyboardInterrupt
        self.calls.append((name, epochs))
        self.clock += 10.0
        return VALUES[name]


def test_a_search_for_sizes_halves_by_thirds_and_decides_once(tmp_path, monkeypatch):
    search, file, names = benchmark("published_search"), tmp_path / "search.json", list(VALUES)
    stopped = Trainings(most=2)
    with pytest.raises(KeyboardInterrupt):
        search.chosen_variant(file, names, 30, stopped, 4)
    resumed = Trainings()
    assert search.chosen_variant(file, names, 30, resumed, 4) == "deeper"
    first = [(name, 6) for name in names[:4]]
    assert stopped.calls + resumed.calls == [*first, ("deeper", 12), ("narrow", 12)]
    again = Trainings()
    monkeypatch.setattr(search.time, "process_time", lambda: again.clock)
    assert search.chosen_variant(file, names, 30, again, 5) == "deeper"
    assert search.chosen_variant(file, names, 30, again, 1e9) == "deeper"
    assert not again.calls


@pytest.mark.parametrize(("budget", "trials", "chosen"), [(5.0, 1, "rules"), (70.0, 4, "deeper"), (100.0, 5, "slower")])
def test_a_budget_decides_how_many_variants_are_tried(budget, trials, chosen, tmp_path, monkeypatch):
    search, trainings = benchmark("published_search"), Trainings()
    monkeypatch.setattr(search.time, "process_time", lambda: trainings.clock)
    found = search.chosen_variant(tmp_path / "search.json", list(VALUES), 30, trainings, budget)
    kept = json.loads((tmp_path / "search.json").read_text())
    assert (found, kept["trials"], kept["chosen"]) == (chosen, trials, chosen)
    assert kept["cpu_s"] == 10.0 * len(trainings.calls) <= max(budget, 20.0)


def test_semantic_codes_are_as_good_as_those_of_the_peers(lines_of):
    in_processes = lines_of("semantic_codes.py", "--contenders", "sklearn")
    found = {"sklearn": {line["data"]: line for line in in_processes}["clusters"]}
    for name in ("recpo", "recpo, unbalanced"):
        (found[name],) = lines_of("semantic_codes.py", "--contenders", name, "--items", "5000", "--data", "clusters")
    assert found["recpo"]["error_unique"] < 1.05 * found["recpo, unbalanced"]["error_unique"]
    assert found["recpo"]["error"] < 1.05 * found["sklearn"]["error"]
    assert found["recpo"]["moved"] >= found["recpo"]["collisions"] > 0


def test_catalog_head_gradients_agree_with_float64(lines_of):
    (in_a_process,) = lines_of("catalog_head.py", "--repeats=1", "--only", "softmax-dpo: recpo")
    names = list(benchmark("catalog_head").CONTENDERS)
    lines = [line for name in names for line in lines_of("catalog_head.py", "--repeats=1", "--contender", name)]
    assert [line["contender"] for line in lines] == names
    assert in_a_process["contender"] == names[-1] == "softmax-dpo: recpo"
    lines.append(in_a_process)
    for line in lines:
        errors = [value for key, value in line.items() if key.startswith("relative_error")]
        assert len(errors) == 2, line
        assert all(math.isfinite(error) and error < 1e-5 for error in errors), line


def test_softmax_over_ranks_has_the_loss_and_gradient_of_one_process(lines_of):
    one, two = lines_of("sharded_head.py", "--repeats=1")
    assert (one["ranks"], two["ranks"]) == (1, 2)
    for name in ("loss", "gradient_norm"):
        assert math.isclose(one[name], two[name], rel_tol=1e-5), name


def test_decoding_finds_the_same_lists_with_both_tries(lines_of):
    (in_a_process,) = lines_of("decoding.py", "--repeats=1", "--contenders", "recpo")
    names = benchmark("decoding").CONTENDERS
    recpo, dictionary, softmax = (lines_of("decoding.py", "--repeats=1", "--contender", name)[0] for name in names)
    assert (in_a_process["lists"], in_a_process["times_recpo"]) == (recpo["lists"], 1.0)
    assert recpo["lists"] == dictionary["lists"] != softmax["lists"]
    assert 0 < recpo["mask_cpu_ms"] + recpo["child_cpu_ms"] < recpo["cpu_ms"]
    assert recpo["output_mb"] < 1
    assert dictionary["cpu_ms"] > recpo["cpu_ms"]


def test_off_policy_value_agrees_with_the_dense_formulas(lines_of):
    dense, recpo, large = lines_of("off_policy.py")
    assert [line["contender"] for line in (dense, recpo, large)] == ["dense", "recpo", "recpo"]
    for name, value in dense["estimates"].items():
        assert math.isclose(recpo["estimates"][name], value, rel_tol=1e-9), name
    assert large["targets"] == 4


def test_evaluation_measures_passes_and_metrics_that_agree_and_skips_absent_peers(lines_of):
    lines = lines_of("evaluation.py", "--rows", "metrics, 1 ")  # in processes, those below in this one
    rows = [row for row in benchmark("evaluation").ROWS if not row.startswith("metrics")]
    lines += [line for row in rows for line in lines_of("evaluation.py", "--row", row)]
    skipped = {line["contender"] for line in lines if "skipped" in line}
    measured = [line for line in lines if "skipped" not in line]
    assert skipped == {"replay", "rectools"}
    assert {"metrics, 1 target", "small, policy, everything", "large, policy"} <= {line["row"] for line in measured}
    assert {"recpo", "numpy"} <= {line["contender"] for line in measured}
    for line in measured:
        assert 0 < line["seconds_min"] <= line["seconds"] <= line["seconds_max"], line
        assert line["peak_rss_mib"] > 0
        assert line["memory"]


def test_scaling_measures_steps_by_catalog_and_epochs_by_log(lines_of, prepared):
    (step,) = lines_of("scaling.py", "--step", "semantic", "--items", "500", "--repeats", "1")
    assert (step["policy"], step["items"]) == ("semantic", 500)
    assert step["cpu_ms"] > 0
    epoch = ("--epoch", str(prepared), "--ranks", "8", "--assign", "batches", "--repeats", "1")
    (line,) = lines_of("scaling.py", *epoch)
    assert (line["ranks"], line["assign"]) == (8, "batches")
    assert line["plan_ns_per_event"] > 0
    assert line["read_ns_per_event"] > 0


def test_catalog_programs_measures_a_form_of_the_program(lines_of):
    (line,) = lines_of("catalog_programs.py", "--forms", "int8", "--repeats", "1")
    assert line["form"] == "int8"
    assert min(line["cpu_ms_1"], line["cpu_ms_32"], line["read_cpu_ms"], line["file_mb"]) > 0
    assert line["overlap_10"] > 0.8


def test_serving_measures_every_contender_over_http_and_what_lies_below(lines_of):
    lines = lines_of("serving.py", "--contenders", "recpo, logging", "plain")
    below, *measured = lines
    assert below["read_ms"] > 0
    assert below["session_ms"] > 0
    assert below["table_pass_ms"] > 0
    assert {(line["contender"], line["clients"]) for line in measured} == {
        (contender, 2) for contender in ("recpo, logging", "plain")
    }
    for line in measured:
        assert line["failed"] == 0
        assert 0 < line["p50_ms"] <= line["p99_ms"]
        assert line["cpu_of_plain"] > 0


def benchmark(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    return module


def gpu_benchmark():
    return benchmark("gpu")


def test_gpu_benchmark_says_that_there_is_none(printed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        printed("gpu.py", "--quick")
    assert refused.value.code.startswith("benchmarks/gpu.py needs a CUDA device")  # a text: status 1, no traceback


def test_parts_of_the_gpu_benchmark_run_and_are_measured_by_formula():
    gpu = gpu_benchmark()
    made = gpu.peaks("cpu", 64, 1000) + gpu.catalog_parts("cpu", 500, 8, 32, 5)
    made += gpu.table_parts("cpu", 500, 8, 100) + gpu.decoding_parts("cpu", 500, 8, 4, 5)
    for part in made:
        part.run()
        assert part.moved > 0
    by_name = {part.name: part for part in made}
    assert by_name["copy"].moved == 8000
    assert by_name["product, bfloat16"].operations == 2 * 64**3
    assert by_name["softmax, top k"].operations == 2 * 32 * 500 * 8
    line = gpu.line_of(by_name["copy"], [1.0, 2.0, 4.0], {"copy": 8e6, "float32": 1e9}, gpu.Sheet(16e6, 1e9, 1e9))
    assert line["ms"] == 2.0
    assert (line["share_of_bandwidth"], line["share_of_sheet_bandwidth"]) == (0.5, 0.25)
    assert line["share_of_product"] == 0


@pytest.fixture
def one_thread():
    """Such small products only wait for each other on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_part_of_what_only_a_gpu_can_tell_runs_on_a_cpu(one_thread):
    parts = benchmark("gpu_parts")
    assert set(parts.BUDGETS) == {*parts.PARTS, "shares"}
    assert sum(parts.BUDGETS.values()) < 480
    lines = {name: {line["case"]: line for line in part("cpu", True)} for name, part in parts.PARTS.items()}
    assert not [line for found in lines.values() for line in found.values() if "failed" in line]
    assert [case for case, line in lines["correctness"].items() if not line["right"]] == []
    assert len(lines["correctness"]) > 10
    assert {line["steps_per_s"] > 0 for line in lines["training"].values()} == {True}
    assert {"recpo", "dense", "torch.linear_cross_entropy"} <= set(lines["softmax"])
    assert max(line["difference"] for line in lines["softmax"].values()) < 1e-5
    assert max(line["difference"] for line in lines["sharded"].values()) < 1e-5
    assert [line["rows"] for line in lines["rows"].values()] == [10_000] * 3
    assert {line.get("same_items", 1.0) for line in lines["serving"].values()} == {1.0}


def test_a_part_that_takes_too_long_leaves_its_lines_and_the_next_begins(tmp_path, monkeypatch, capfd, lines_of):
    gpu, parts = gpu_benchmark(), benchmark("gpu_parts")
    monkeypatch.setattr(parts, "BUDGETS", {"rows": 0.2, "shares": 100})  # shares imports least
    monkeypatch.setitem(sys.modules, "gpu_parts", parts)
    assert gpu.everything("cpu", small=True, seconds=100, out=tmp_path / "gpu.jsonl") == 1
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines if "status" in line] == ["out of time", "done"]
    assert {line["part"] for line in lines if line["of"] == "shares" and "part" in line} > {"copy", "adam"}
    assert capfd.readouterr().out.splitlines() == [json.dumps(line) for line in lines]
    assert gpu.everything("cpu", small=True, seconds=0, out=tmp_path / "gpu.jsonl") == 2
    assert capfd.readouterr().out.count("skipped") == 2
    softmax = lines_of("gpu.py", "--part", "softmax", "--device", "cpu", "--small")
    assert {line["case"] for line in softmax} > {"recpo", "dense"}


@pytest.mark.gpu
def test_gpu_benchmark_measures_shares_of_the_peaks(lines_of):
    lines = {line["part"]: line for line in lines_of("gpu.py", "--repeats=3")}
    assert {"copy", "product, float32", "softmax, forward and backward", "lookup", "adam"} <= set(lines)
    assert torch.cuda.get_device_name() == lines["copy"]["device"]
    for line in lines.values():
        assert 0 < line["ms_min"] <= line["ms"] <= line["ms_max"]
        assert 0 <= line.get("share_of_product", 0) < 1.5  # the copy comes before the first product


def test_value_compares_runs_with_baselines_and_the_oracle(lines_of, tmp_path):
    lines = lines_of("value.py", "--work", str(tmp_path), "--worlds", "confounded:3", "--seeds", "0")
    found = {line["contender"]: line for line in lines if "contender" in line}
    runs = {f"{name}-0" for name in ("pretrain", "gbpo", "mpo", "tilted")}
    baselines = {"popularity", "item_rate", "factorization", "implicit_als", "ease"}
    assert found.keys() == runs | baselines | {"allrank", "factors", "oracle", "logging policy"}
    assert max(found.values(), key=lambda line: line["true_reward@10"])["contender"] == "oracle"
    assert {(line["world"], line["seed"]) for line in found.values()} == {("confounded", 3)}
    assert [-1 <= line["kendall_tau"]["SNIPS"] <= 1 for line in lines if "kendall_tau" in line] == [True]


def test_real_truth_replays_the_ratings_of_a_file(lines_of, tmp_path):
    rng = np.random.default_rng(0)
    ratings = rng.uniform(-10, 10, (70, 30)).round(2)
    ratings[40:][rng.random((30, 30)) < 0.4] = 99.0
    rated = (ratings != 99.0).sum(1)
    np.savetxt(tmp_path / "ratings.csv", np.column_stack([rated, ratings]), delimiter=",")
    flags = ("--ratings", str(tmp_path / "ratings.csv"), "--work", str(tmp_path / "work"), "--events_per_user", "15")
    found = {line["contender"]: line for line in lines_of("real_truth.py", *flags) if "contender" in line}
    assert {
        "popularity",
        "item_rate",
        "implicit_als",
        "factors",
        "gbpo-0",
        "mpo-0",
        "tilted-0",
        "oracle",
    } <= found.keys()
    assert max(found.values(), key=lambda line: line["true_reward@10"])["contender"] == "oracle"
    for name in set(found) - {"oracle", "logging policy"}:
        assert 0 <= found[name]["bad"] <= 1
        assert 10 <= found[name]["distinct"] <= 30
    matrix = pq.read_table(tmp_path / "work" / "matrix.parquet").to_pandas()
    assert len(matrix) == rated.sum()
    first = matrix.set_index(["user_id", "item_id"])["reward"].loc[(1, 1)]
    assert math.isclose(first, (ratings[0, 0] + 10) / 20)
    texts = {"text": [f"word{number % 7} word{number % 5} other{number}" for number in range(30)]}
    pq.write_table(pa.table(texts), tmp_path / "texts.parquet")
    flags = (*flags[:2], "--work", str(tmp_path / "grades"), "--events_per_user", "12")
    flags += ("--grades", "--texts", str(tmp_path / "texts.parquet"), "--baselines", "item_rate", "--seeds")
    graded = {line["contender"]: line for line in lines_of("real_truth.py", *flags) if "contender" in line}
    assert graded.keys() == {"item_rate", "allrank", "factors", "oracle", "logging policy"}
    log = pq.read_table(tmp_path / "grades" / "replay-5" / "grades.parquet").to_pandas()
    both = log.merge(matrix, on=["user_id", "item_id"])
    assert len(both) == len(log)
    assert both["label"].equals(both["reward"])
    trained = log.groupby("user_id").size()
    assert (trained.loc[41:] == rated[40:]).all()  # every rating of those who did not rate everything
    known = log[log["timestamp"] < log["timestamp"].max() // 86_400_000 * 86_400_000].groupby("user_id").size()
    assert (known.loc[:40] == 12).all()
    assert (trained.loc[:40] > 12).all()


def test_decisions_judges_the_choice_by_the_truth(lines_of, tmp_path, pretrained_alone):
    flags = ("--work", str(tmp_path / "work"), "--seeds", "0", "--logs", "default:blind")
    lines = lines_of("decisions.py", *flags)
    assert [(line["log"], line["seed"]) for line in lines] == [("default:blind", 0)]
    for line in lines:
        values = line["values"]
        assert line["decided_value"] == values[line["choice"]] <= max(values.values()) == values[line["best"]]
        assert line["regret"] == pytest.approx(line["best_value"] - line["decided_value"])
        assert (line["regret_error"] == 0) == (line["best"] == line["choice"])
        assert line["baseline"] in {
            "popularity",
            "item_rate",
            "recent_rate",
            "segment_popularity",
            "segment_rate",
            "sequential_rules",
            "implicit_als",
            "ease",
            "factorization",
        }
        assert -1 < line["value_before"] < 1
        assert line["gain"] == pytest.approx(line["value"] - line["baseline_value"])
        assert line["left_out"] == []
        assert line["metric"] == "true_reward@10"
    written = (tmp_path / "work" / "decisions.jsonl").read_text(encoding="utf-8")
    assert lines_of("decisions.py", *flags) == lines
    assert (tmp_path / "work" / "decisions.jsonl").read_text(encoding="utf-8") == written, "rows are not made again"
    judged = benchmark("random_exposures").judged(tmp_path / "work" / "default-blind-fit-0")  # by its test period
    assert 0 < judged["AUC_other"] < 1
    assert judged["its"] > 0


def test_drawn_ratings_are_the_last_day_of_the_log(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])  # of what the script imports
    rng = np.random.default_rng(0)
    chosen, drawn = (rng.integers(1, 6, (40, 30)) * (rng.random((40, 30)) < 0.4) for _ in range(2))
    log = benchmark("random_exposures").log_of(chosen, drawn, 0)
    day = pd.to_datetime(log["timestamp"], unit="s").dt.date
    assert day.nunique() == 11
    for ratings, rows in ((chosen, log[day < day.max()]), (drawn, log[day == day.max()])):
        assert (ratings[rows["user_id"], rows["item_id"]] == rows["rating"]).all()
        assert len(rows) == np.count_nonzero(ratings)


def test_a_log_of_positives_has_what_was_liked_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])  # of what the script imports
    decisions = benchmark("decisions")
    options = SimpleNamespace(work=tmp_path, world_seed=0, quick=True, matrix=None)
    (simulation, _), ((file, *_), _) = (
        decisions.simulated(decisions.Log.parse(log), options) for log in ("default", "default:positives")
    )
    events = simulation.to_pandas()
    liked = events[(events["watch_time"] >= 0.8 * events["duration"]) & ~events["dislike"]]
    expected = liked[["user_id", "item_id", "timestamp"]].to_numpy().tolist()
    assert pq.read_table(file).to_pandas().to_numpy().tolist() == expected
    assert 0 < len(expected) < len(events)


LABELS_OF_OTHERS = {
    "banners": "BinaryColumn",
    "books": "NumericColumn",
    "clips": "WatchQuantiles",
    "carts": "NumericColumn",
    "market": "NumericColumn",
    "news": "BinaryColumn",
    "shop": "EveryEvent",
    "songs": "WatchRatio",
    "thumbs": "BinaryColumn",
}


@pytest.mark.parametrize("name", LABELS_OF_OTHERS)
def test_logs_of_other_makers_are_read_as_they_are_meant_and_judged_by_their_own_truth(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])  # of what the script imports
    decisions, options = benchmark("decisions"), SimpleNamespace(work=tmp_path, world_seed=3, quick=True)
    given, world = decisions.simulated(decisions.Log.parse(name), options)
    found = inspect_log(given)
    assert (found.label.class_name, found.questions) == (LABELS_OF_OTHERS[name], ())
    log, truth, tables = benchmark("generators").GENERATORS[name](np.random.default_rng(3), users=120, items=60)
    assert found.counts.events == len(log)
    assert not log.duplicated(["user_id", "item_id", "timestamp"]).any()
    assert sorted(found.tables) == [side.removesuffix("s") for side in tables]
    users, day = np.arange(120), 0.5
    known = Truth.load(world).expected_reward(users, np.tile(np.arange(60), (120, 1)), day)
    np.testing.assert_allclose(known, truth, atol=1e-6)
    positive = {"books": "rating", "clips": "watch_ms", "news": "click", "songs": "ms_played", "thumbs": "like"}.get(
        name
    )
    if positive is not None:
        value = log[positive] / log.get("duration_ms", 1)
        assert np.corrcoef(value, truth[log["user_id"], log["item_id"]])[0, 1] > 0.2


def test_values_of_explored_logs_have_intervals_that_can_be_counted(lines_of):
    lines = lines_of("coverage.py")
    assert len({line["logging"] for line in lines}) * 4 == len(lines) == 16
    for line in lines:
        assert abs(line["mean error"]) < 5 * line["half width"]
        assert 0 <= line["covered"] <= 1


def test_kuairand_compares_policies_and_baselines_on_a_log_of_its_columns(lines_of, tmp_path):
    events = simulate(tmp_path / "world", users=60, items=60, events=2500, days=8).to_pandas()
    log = pa.table(
        {
            "user_id": events["user_id"],
            "video_id": events["item_id"],
            "time_ms": events["timestamp"],
            "play_time_ms": (events["watch_time"] * 1000).astype("int64"),
            "duration_ms": (events["duration"] * 1000).astype("int64"),
            "is_hate": events["dislike"].astype("int8"),
            "long_view": (events["watch_time"] >= 10).astype("int8"),
            "is_rand": events["dislike"].astype("int8") * 0,
        }
    )
    pq.write_table(log, tmp_path / "log.parquet")
    flags = ("--log", str(tmp_path / "log.parquet"), "--work", str(tmp_path / "work"), "--seeds", "1")
    lines = [line for line in lines_of("kuairand.py", *flags) if "contender" in line]
    trained = {"pre-trained", "GBPO", "value-aligned", "value-aligned and likelihood", "value-aligned, tilted"}
    fixed = {"popularity", "item rate", "factorization", "implicit_als", "ease"}
    seeds = {(name, 1) for name in trained | {"boosted trees"}}
    assert {(line["contender"], line["seed"]) for line in lines} == seeds | {(name, None) for name in fixed}
    for line in lines:
        assert 0 < line["AUC_other"] <= 1, line
        assert 0 < line["Recall@10"] <= 1, line
        assert 0 < line["coverage@10"] <= 1, line


def test_filters_and_refresh_print_what_they_cost(printed):
    for name, flags, expected in (
        ("filters.py", ["--items", "2000", "--calls", "2"], "32 users, allows a hundredth"),
        ("refresh.py", ["--items", "2000", "--new", "20"], "1,000 retire, 20 come"),
    ):
        assert expected in printed(name, *flags)


def test_the_parts_of_a_profile_name_code_that_exists(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])  # of what the script imports
    files = [*PACKAGE.rglob("*.py")]
    code = {
        f"{path}:{node.name}" for path in files for node in ast.walk(ast.parse(path.read_text())) if is_function(node)
    }
    of_libraries = ("<frozen", "utils/data/", "scipy/", "autograd/", "torch/", "lightning/", "jinja2/", "jsonargparse/")
    words = [word for _, *words in benchmark("shares").PARTS for word in words if not word.startswith(of_libraries)]
    assert [word for word in words if not any(word in place for place in code)] == []


def is_function(node):
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def test_shares_names_the_largest_parts_of_every_step(lines_of, tmp_path):
    machine, *lines = lines_of("shares.py", "--work", str(tmp_path), "--only", "prepare")  # both in processes
    lines += lines_of("shares.py", "--work", str(tmp_path), "--step", "pretrain", "--steps", "3", "--batch", "8")
    assert min(machine["machine"].values()) > 0
    by_step = {line["step"]: line for line in lines}
    assert list(by_step) == ["prepare", "pretrain"]
    assert set(by_step) < set(benchmark("shares").STEPS)
    for step, line in by_step.items():
        assert line["cpu_seconds"] > 0
        assert 0 < sum(line["shares"].values()) <= 1.01
        assert ("products" in line) == (step == "pretrain")
    parts = {name for name, *_ in benchmark("shares").PARTS} | {"other"}
    assert {name for line in lines for name in line["shares"]} <= parts
    assert sum(name.startswith("log: ") for name in by_step["prepare"]["shares"]) >= 2  # load decides which
    products, passes = by_step["pretrain"]["products"], by_step["pretrain"]["passes"]
    assert products["share"] + passes["share"] == pytest.approx(1, abs=0.01)
    assert products["gflops"] > 0
