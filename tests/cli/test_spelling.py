"""Names of options, keys and classes: right ones pass, wrong ones get a suggestion, and torch is not imported."""

import random
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jsonargparse import ArgumentError

from recpo.cli.main import VERBS, main, parser_of, verb_class
from recpo.cli.spelling import INDEX, check_spelling, index, nearest
from tests.forks import forked

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *CONFIGS]


def verb_of(config):
    (verb,) = {
        *re.findall(
            r"recpo (\w+) (?:--config \S+ )?--config configs/" + config.name, config.read_text(encoding="utf-8")
        )
    }
    return verb


def actions(verb):
    parser = parser_of(verb_class(verb))
    return {action.dest for action in parser._actions} - {"help", "config", "print_config", "print_shtab"}


def refused(verb, *words):
    with pytest.raises(ArgumentError) as caught:
        check_spelling(verb, words)
    return str(caught.value)


def options_of(verb):
    return index()["verbs"][verb]["options"]


def made_index():
    return runpy.run_path(str(ROOT / "docs" / "option_index.py"))["option_index"]()


@pytest.mark.slow
def test_the_index_is_the_one_of_these_sources():
    made = forked(made_index)  # classes of other tests are not in it
    assert made == INDEX.read_text("utf-8"), "python docs/option_index.py writes it again"


@pytest.mark.parametrize("verb", VERBS)
def test_the_index_names_the_options_of_the_parser(verb):
    assert set(options_of(verb)) - {"config"} == {name.split(".")[0] for name in actions(verb)}
    for name in actions(verb):
        check_spelling(verb, [f"--{name}", "{}"])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_configurations_are_right(config):
    check_spelling(verb_of(config), ["--config", str(config)])


def test_the_commands_of_the_documents_are_right(monkeypatch):
    monkeypatch.chdir(ROOT)
    checked = 0
    for document in DOCUMENTS:
        text = re.sub(r" \\\n[#$ ]*", " ", document.read_text(encoding="utf-8"))
        lines = re.findall(r"^[#$ ]*(recpo [a-z]+ -.*)$", text, re.MULTILINE)
        for command in [*lines, *re.findall(r"`(recpo [a-z]+ -[^`\n]*)`", text)]:
            if "<" not in command:
                _, verb, *words = shlex.split(command, comments=True)
                check_spelling(verb, words)
                checked += 1
    assert checked > 100


RIGHT = {
    "train": [
        "--policy my_package.MyPolicy --policy.init_args.anything 3",
        "--policy.init_args.codes demo/codes --init_from runs/semantic",  # the class is that of the run
        "--policy.codes demo/codes",
        "--policy.anything 3 --init_from runs/own --trust [my_package]",
        "--optimizer AdamW --optimizer.init_args.fused true",
        "--optimizer torch.optim.SGD --optimizer.momentum 0.9",
        "--objective {class_path: GRPO, init_args: {kl_coef: 0.5}}",
        "--objective=recpo.objectives.GRPO",
        "--objective.help GRPO --nonsense 3",
        "--trainer.callbacks+ EarlyStopping --trainer.max_epochs 3",
        "--trainer.callbacks [{class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: x}}]",
        "--trainer.callbacks [{class_path: lightning.pytorch.callbacks.WeightAveraging, init_args: {device: cpu}}]",
        "--trainer {max_epochs: 2, init_args: {max_steps: 3}}",
        "--reward null --rollout null --lr_scheduler null",
        "--data.layout ImpressionLayout --data.layout.slate_length 3",
        "--seed -1 --print_config",
    ],
    "evaluate": [
        "--candidates items.parquet --rerank AttributeCap --ks 3 --contenders a --off_policy null",
        "--candidates {items: items.parquet} --rerank [{class_path: AttributeCap}] --ks [3,4] --run [a,b]",
    ],
    "prepare": [
        "log.csv --out x",
        "--label NumericColumn --label.low 1 --split LeaveLastOut",
        "--behaviors {anything: column}",
        "--retire [99999999999999999999] --log 99999999999999999999 --max_watch_time 1e30",
    ],
    "plan": ["--sharding {policy.item_table: row_wise}", "--sharding auto"],
}


@pytest.mark.parametrize(("verb", "words"), [(verb, words) for verb, all_ in RIGHT.items() for words in all_])
def test_what_the_index_does_not_decide_is_left_to_the_parser(verb, words):
    check_spelling(verb, re.findall(r"[{\[].*[}\]](?= |$)|\S+", words))


def changed(word, choose):
    """The word with a letter left out, doubled, or swapped with the next one."""
    place = choose.randrange(len(word))
    first, letter, rest = word[:place], word[place], word[place + 1 :]
    return choose.choice([first + rest, first + 2 * letter + rest, first + rest[:1] + letter + rest[1:]])


@pytest.mark.slow
def test_typing_errors_get_the_right_suggestion(tmp_path):
    choose, file, tried = random.Random(0), tmp_path / "options.yaml", 0
    verbs = {config: verb_of(config) for config in CONFIGS}
    options = {verb: sorted(options_of(verb)) for verb in VERBS if verb != "doctor"}
    right = {name for names in options.values() for name in names} | {"Adam", "GRPO"}
    while tried < 40:
        config = choose.choice(CONFIGS)
        lines = config.read_text(encoding="utf-8").splitlines()
        pattern = [r"( *)(\w+)(:.*)", r"( *class_path: )([\w.]+)(.*)"][tried % 2]
        numbers = [number for number, line in enumerate(lines) if re.fullmatch(pattern, line)]
        if not numbers:
            continue
        number = choose.choice(numbers)
        before, name, after = re.fullmatch(pattern, lines[number]).groups()
        *parents, last = name.split(".")
        wrong = changed(last, choose)
        if wrong not in right and wrong != last:
            lines[number] = f"{before}{'.'.join([*parents, wrong])}{after}"
            file.write_text("\n".join(lines), encoding="utf-8")
            said = refused(verbs[config], "--config", str(file))
            assert said.startswith(f"{file}, line {number + 1}: ")
            assert name in re.findall(r"[\w.]+", said.partition("did you mean")[2]), said
            tried += 1
        verb = choose.choice([*options])
        name = choose.choice(options[verb])
        wrong = changed(name, choose)
        if wrong and wrong not in right:
            assert f"--{name}" in refused(verb, f"--{wrong}", "1").partition("did you mean")[2]


WRONG = {
    "train --data.prepard x": "--data.prepard: unknown option; did you mean --data.prepared?",
    "train --dta.prepared x": "--dta: unknown option; did you mean --data?",
    "train --batch_size 3": "--batch_size: unknown option; did you mean --data.batch_size?",
    "train --quite": "--quite: unknown option; did you mean --quiet?",
    "train --objective GRPPO": "--objective: there is no class GRPPO; did you mean GRPO?",
    "train --objective NoObjective": "--objective: there is no class NoObjective",
    "train --objective grpo": "did you mean GRPO?",
    "train --objective GRPO --objective.kl_coeff 1": "did you mean --objective.kl_coef?",
    "train --optimizer torch.optim.AdamWW": "did you mean torch.optim.AdamW?",
    "train --optimizer.init_args.lrr 1": "did you mean --optimizer.init_args.lr?",
    "train --policy.dimm 3": "did you mean --policy.dim?",
    "train --trainer.max_epoch 3": "did you mean --trainer.max_epochs?",
    "train --rollout.colapse.max_kl 3": "did you mean --rollout.collapse?",
    "evaluate --rerank [{class_path:_AttributCap}]": "did you mean AttributeCap?",
    "evaluate --rerank_options 3": "3 is no mapping; expected one with the keys attributes",
    "evaluate --baseline_options 3": "--baseline_options: 3 is no mapping",
    "prepare --columns 3": "--columns: 3 is no mapping; expected one with the keys",
    "prepare --columns user_id": "--columns: user_id is no mapping",
    "prepare --features [a]": "--features: a list is no mapping",
    "prepare --features []": "--features: a list is no mapping",
    "prepare --feedback true": "--feedback: true is no mapping",
    "train --data.batch_size 99999999999999999999": "99999999999999999999 is too large",
    "train --seed -99999999999999999999": "--seed: -99999999999999999999 is too large",
    "evaluate --ks [10,99999999999999999999]": "--ks: 99999999999999999999 is too large",
    "prepare --max_watch_time null": "--max_watch_time: null is no value",
    "prepare --columns null": "--columns: null is no value",
    "evaluate --baselines null": "--baselines: null is no value",
    "train --rollout [1]": "--rollout: a list is no mapping",
    "train --reward {class_path:_WeightedSum,rewards:[{class_path:_FactorRewrd}]}": "did you mean FactorReward?",
    "simulate --user 3": "did you mean --users?",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_is_named(line):
    verb, *words = line.split()
    assert WRONG[line] in refused(verb, *(word.replace(":_", ": ") for word in words))


def test_the_message_about_a_file_names_the_line(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("seed: 1\noptimizer:\n  class_path: torch.optim.AdamW\n  init_args:\n    weight_dcay: 0.1\n")
    said = refused("train", "--config", str(file))
    assert said == f"{file}, line 5: key 'weight_dcay' of optimizer is unknown; did you mean weight_decay?"
    file.write_text("base: &base {group_size: 3}\nrollout:\n  <<: *base\n")
    assert "line 1: key 'base' is unknown" in refused("train", "--config", str(file))
    file.write_text("rollout:\n  <<: {groupsize: 3}\n")
    assert "line 2: key 'groupsize' of rollout is unknown; did you mean group_size?" in refused(
        "train", "--config", str(file)
    )


def test_a_misspelled_option_ends_before_torch_is_imported(tmp_path):
    code = "import sys; from recpo.cli.main import main; main(['train', '--data.prepard', 'x']); "
    code += "print(sorted({'torch', 'lightning', 'pandas', 'ibis', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr.splitlines()[0] == "error: --data.prepard: unknown option; did you mean --data.prepared?"


def test_the_status_of_a_misspelled_option_is_2(capsys):
    assert main(["train", "--sed", "3"]) == 2
    assert capsys.readouterr().err == ("error: --sed: unknown option; did you mean --seed?\nsee: recpo train --help\n")


def test_nearest_counts_swapped_letters_once_and_shows_every_name_that_is_as_near():
    assert nearest("APO", ["ASPO", "DAPO", "GRPO"]) == ["ASPO", "DAPO"]
    assert nearest("ks", ["sk"]) == ["sk"]
    assert nearest("learning-rate", ["learning_rate", "learning"]) == ["learning_rate"]
    assert nearest("nothing", ["seed"]) == []
    assert nearest("x", []) == []
