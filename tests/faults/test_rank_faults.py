"""The long forms of `tests/test_rank_runs.py`: many moments, every signal, and two hosts that lose each other."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jcl.commands.run import Run
from jcl.runs.checkpoint import list_checkpoints, search_checkpoints
from launch_tools import JCL, LONG_VALUES, TORCHRUN, Launch, forked_ranks, gone, settings_options, wait_until
from run_tools import assert_same
from small_runs import write_image_folder
from two_hosts import Host, TwoHosts, two_hosts

pytestmark = pytest.mark.faults
KILLS = 50
STARTS_OF_A_LAUNCH = 4
VALUES = LONG_VALUES | {"record.keep": 3, "train.rank_timeout": 20}


def pretraining(npz: Path, run: Path, epochs: int = 40, **changes: object) -> list[str]:
    values = VALUES | {"train.epochs": epochs} | {name.replace("__", "."): value for name, value in changes.items()}
    return ["pretrain", str(npz), "--out", str(run), *settings_options(values)]


def unbroken(npz: Path, run: Path, epochs: int = 40, **changes: object) -> Run:
    (ended,) = forked_ranks([{"ranks": 2, "arguments": pretraining(npz, run, epochs, **changes)}])
    assert ended["codes"] == [0, 0], ended["said"]
    return Run(run)


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint, and that none is damaged; 0 as long as there is none."""
    newest, damaged = search_checkpoints(run / "checkpoints")
    assert damaged == []
    return int(newest.stem.removeprefix("step-")) if newest else 0


def test_ranks_killed_at_fifty_moments(npz, tmp_path):
    """Whichever rank and whenever, from its first imports on; every other kill hits the first one as it saves."""
    run, epochs, chance = tmp_path / "run", 2000, random.Random(0)
    arguments, kills, saved, partial = pretraining(npz, run, epochs), 0, 0, 0
    while kills < KILLS:
        with Launch([*JCL, *arguments, "--devices", "2"], tmp_path / "said") as launch:
            for _ in range(STARTS_OF_A_LAUNCH):
                if kills % 2:
                    ranks, victim = launch.training_ranks(run), 0
                    for _ in range(chance.randrange(1, 4)):
                        wait_until(lambda: not list((run / "checkpoints").glob(".*")))
                        wait_until(lambda: list((run / "checkpoints").glob(".*")))
                else:
                    ranks, victim = wait_until(launch.both_ranks), chance.randrange(2)
                    time.sleep(chance.uniform(0.0, 12.0))
                os.kill(ranks[victim], signal.SIGKILL)
                kills += 1
                wait_until(lambda lives=ranks: all(map(gone, lives.values())))
                partial += bool(list((run / "checkpoints").glob(".*")))
                assert newest_step(run) >= saved
                saved = newest_step(run)
            assert launch.wait() == 137, launch.said
        assert launch.said.count("Restarting all ranks") == 3 and launch.said.count("Error: ") == 1, launch.said
        assert "Traceback" not in launch.said and "4 starts" in launch.said
        if (run / "settings.yaml").exists():
            arguments = ["resume", str(run)]
    assert 0 < saved < 2 * epochs and partial > 3
    with Launch([*JCL, "resume", str(run), "--devices", "2"], tmp_path / "said") as launch:
        assert launch.wait(600) == 0, launch.said
    assert_same(Run(run), unbroken(npz, tmp_path / "unbroken", epochs))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launch_asked_to_stop_at_any_moment(tmp_path, number):
    """With processes that decode: a signal reaches them too, and they must serve their rank to the end of its step."""
    run, chance = tmp_path / "run", random.Random(int(number))
    photos = write_image_folder(tmp_path / "photos", 480)  # in the first 30 steps of a life they are not in memory yet
    changes = {"data__workers": 1, "record__checkpoint_minutes": 1e-9}
    arguments = pretraining(photos, run, 4, **changes)
    for _ in range(4):
        with Launch([*JCL, *arguments, "--devices", "2"], tmp_path / "said") as launch:
            launch.training_ranks(run)
            before = newest_step(run)
            wait_until(lambda: newest_step(run) > before)  # noqa: B023
            time.sleep(chance.uniform(0.0, 0.3))
            launch.process.send_signal(number)
            assert launch.wait() == 75, launch.said
        assert launch.said.count(f"{number.name} received: stopped after") == 1 and "Error" not in launch.said
        assert "Traceback" not in launch.said and "torch/" not in launch.said and newest_step(run) > before
        arguments = ["resume", str(run)]
    with Launch([*JCL, "resume", str(run), "--devices", "2"], tmp_path / "said") as launch:
        assert launch.wait() == 0, launch.said
    assert_same(Run(run), unbroken(photos, tmp_path / "unbroken", 4, **changes))


def test_a_launch_asked_to_stop_before_it_trains(npz, tmp_path):
    with Launch([*JCL, *pretraining(npz, tmp_path / "run"), "--devices", "2"], tmp_path / "said") as launch:
        wait_until(lambda: len(launch.ranks()) == 2)
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait(60) == 75
    assert launch.said.count("\n") == 1 and "SIGTERM received: the ranks ended before they could save" in launch.said


def test_a_launch_replaces_a_rank_that_has_fallen_silent(npz, tmp_path):
    run = tmp_path / "run"
    changes = {"train__rank_timeout": 8}
    with Launch([*JCL, *pretraining(npz, run, 100, **changes), "--devices", "2"], tmp_path / "said") as launch:
        ranks = launch.training_ranks(run)
        wait_until(lambda: newest_step(run))
        os.kill(ranks[1], signal.SIGSTOP)
        halted = time.monotonic()
        wait_until(lambda: gone(ranks[0]), 30)
        wait_until(lambda: gone(ranks[1]), 60)
        assert time.monotonic() - halted < 75
        assert launch.wait() == 0, launch.said
    assert launch.said.count("from rank 1 (on ") == 1 and "Restarting all ranks" in launch.said
    assert_same(Run(run), unbroken(npz, tmp_path / "unbroken", 100, **changes))


def test_torchrun_measures_as_one_process_does(npz, tmp_path):
    run = unbroken(npz, tmp_path / "run")
    knn = ["-m", "jcl", "knn", str(run.path), "-k", "3", "-k", "7", "--device", "cpu", "--json"]
    figures = []
    for number, launcher in enumerate((JCL[:1], TORCHRUN)):
        file = tmp_path / f"{number}.json"
        subprocess.run([*launcher, *knn, str(file)], check=True, timeout=120)
        figures.append(json.loads(file.read_text()))
    assert figures[0] == figures[1]


class TestTwoHosts:
    def started(self, hosts: TwoHosts, host: Host, arguments: list[str], said: Path) -> Launch:
        return Launch(host.torchrun(hosts.first, arguments), said, **host.environment)

    def test_one_is_lost_with_all_it_ran_and_comes_back(self, npz, tmp_path):
        run, changes = tmp_path / "run", {"train__rank_timeout": 20}
        arguments = pretraining(npz, run, 100, **changes)
        with two_hosts() as hosts, contextlib.ExitStack() as launches:
            first = launches.enter_context(self.started(hosts, hosts.first, arguments, tmp_path / "first"))
            with self.started(hosts, hosts.second, arguments, tmp_path / "second") as second:
                wait_until(lambda: newest_step(run))
                assert len(first.ranks()) == len(second.ranks()) == 1
            again = launches.enter_context(self.started(hosts, hosts.second, arguments, tmp_path / "again"))
            assert first.wait(300) == 0, first.said
            assert again.wait(60) == 0, again.said
        assert (first.said + again.said).count("Resuming from") == 1
        assert_same(Run(run), unbroken(npz, tmp_path / "unbroken", 100, **changes))

    @pytest.mark.parametrize("seconds", [3, 30])
    def test_the_cable_between_them_is_pulled_for_a_while(self, npz, tmp_path, seconds):
        """Shorter than ranks wait for each other, and longer."""
        run, changes = tmp_path / "run", {"train__rank_timeout": 10}
        arguments = pretraining(npz, run, 200, **changes)
        with two_hosts() as hosts, contextlib.ExitStack() as launches:
            first = launches.enter_context(self.started(hosts, hosts.first, arguments, tmp_path / "first"))
            second = launches.enter_context(self.started(hosts, hosts.second, arguments, tmp_path / "second"))
            wait_until(lambda: newest_step(run))
            hosts.cut()
            time.sleep(seconds)
            hosts.mend()
            assert first.wait(300) == 0, first.said + second.said
            assert second.wait(60) == 0, second.said
        assert ("Resuming from" in first.said + second.said) == (seconds > 10), first.said + second.said
        assert list_checkpoints(run / "checkpoints")
        assert_same(Run(run), unbroken(npz, tmp_path / "unbroken", 200, **changes))
