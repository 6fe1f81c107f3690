from __future__ import annotations

import shutil

import pyarrow.parquet as pq
import pytest

from recpo.cli.main import main
from recpo.worlds.log import Simulation
from tests.refusals import refused


@pytest.mark.slow
def test_simulate_writes_a_log_and_says_what_it_is_worth(tmp_path, capsys):
    assert main(["simulate", f"--out={tmp_path / 'out'}", "--users=50", "--items=40", "--events=600"]) == 0
    printed = capsys.readouterr().out
    assert "600 events of 50 users" in printed
    assert "true expected reward" in printed
    assert pq.read_table(tmp_path / "out" / "log").num_rows == 600


@pytest.mark.slow
def test_an_impossible_argument_is_one_line_without_a_traceback(tmp_path, capsys):
    assert main(["simulate", f"--out={tmp_path / 'out'}", "--random_share=1.5"]) == 2
    said = capsys.readouterr().err
    assert "random_share" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_from_python_a_simulation_is_an_object_and_says_nothing(tmp_path, capfd):
    import recpo as library

    world = library.simulate(tmp_path / "[x]", users=50, items=40, events=600)
    assert capfd.readouterr() == ("", "")
    assert len(world.to_pandas()) == 600
    again = Simulation.open(tmp_path / "[x]")
    assert again.log == world.log
    assert again.values(k=5) == world.values(k=5)
    assert world.values()["uniform"] < world.values()["best 10 items"]
    with refused("wrong_file", "truth/truth.json"):
        Simulation.open(tmp_path)
    shutil.rmtree(world.log)
    with refused("damaged", "log"):
        Simulation.open(world.root)


def test_an_option_beside_a_world_overrides_it_even_with_the_default_of_another_world(tmp_path, capsys):
    options = {"users": 60, "events": 500, "items": 1000, "random_share": 0.1}  # the last two are the general defaults
    flags = [f"--{name}={value}" for name, value in options.items()]
    assert main(["simulate", f"--out={tmp_path / 'a'}", "--world=small", *flags]) == 0
    assert "500 events of 60 users and 1,000 items" in capsys.readouterr().out
    (tmp_path / "world.yaml").write_text("world: small\nusers: 70\nevents: 400\n")
    assert main(["simulate", f"--config={tmp_path / 'world.yaml'}", f"--out={tmp_path / 'b'}", "--events=300"]) == 0
    assert "300 events of 70 users and 5,000 items" in capsys.readouterr().out


@pytest.mark.parametrize("world", ["confounded", "skewed"])
def test_command_line_and_python_make_the_same_world(tmp_path, world):
    import recpo as library

    small = {"users": 50, "items": 40, "events": 600}
    flags = [f"--{name}={value}" for name, value in small.items()]
    assert main(["simulate", f"--out={tmp_path / 'a'}", f"--world={world}", *flags]) == 0
    made = library.simulate(tmp_path / "b", world=world, **small)
    files = sorted(file.relative_to(tmp_path / "a") for file in (tmp_path / "a").rglob("*.*"))
    assert files
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)
    assert made.truth.world == Simulation.open(tmp_path / "a").truth.world == world


def test_an_unknown_world_is_refused(tmp_path, capsys):
    import recpo as library

    assert main(["simulate", f"--out={tmp_path / 'a'}", "--world=strange"]) == 2
    assert "'confounded', 'skewed', 'small'" in capsys.readouterr().err
    with refused("unknown_name", "world"):
        library.simulate(tmp_path / "a", world="strange")
    assert not (tmp_path / "a").exists()
