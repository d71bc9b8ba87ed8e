"""Processes from the fork server begin and end as a fresh interpreter's."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.launch import SETTINGS, Launched, execute, kill_group, launch

pytestmark = pytest.mark.ranks

SURROUNDINGS = """
import multiprocessing, os, random, signal, sys, numpy, torch
print(sys.argv, __name__, sorted(os.environ.items()), os.getcwd(), os.getsid(0) == os.getpid())
print([signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)], signal.set_wakeup_fd(-1))
print(torch.get_num_threads(), torch.distributed.is_initialized())
print(multiprocessing.get_start_method(), multiprocessing.active_children())
print(random.random(), numpy.random.rand(), torch.rand(()).item(), file=sys.stderr)
"""


def begun(folder: Path, *arguments: str) -> Launched:
    return launch([sys.executable, *arguments], folder / "printed.txt")


def test_it_finds_what_a_fresh_interpreter_finds_and_draws_numbers_of_its_own(tmp_path):
    """The real thing beside two forked ones."""
    script, printed = tmp_path / "script.py", tmp_path / "printed.txt"
    script.write_text(SURROUNDINGS)
    found, drawn = [], set[str]()
    for start in (execute, launch, launch):
        process = start([sys.executable, str(script), "a b", "--c"], printed, {**SETTINGS, "COLOUR": "red"})
        assert process.wait(60) == 0
        lines = sorted(printed.read_text().splitlines(), key=lambda line: line.startswith("0."))
        found.append(lines[:-1])
        drawn |= set(lines[-1].split())
    assert found[0] == found[1] == found[2]
    assert "'COLOUR', 'red'" in found[0][0]
    assert len(drawn) == 9


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("print(__name__)", 0, "__main__\n"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('so it ends')", 1, "so it ends\n"),
        ("import atexit; atexit.register(print, 'at exit'); print('before')", 0, "before\nat exit\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_it_ends_as_told(tmp_path, code, exit_code, said):
    assert begun(tmp_path, "-c", code).communicate(60) == (said, None)


def test_a_module_is_run_and_what_it_raises_is_printed(tmp_path):
    process = begun(tmp_path, "-m", "loopscale", "--version")
    assert process.communicate(60) == ("0.1.0\n", None) and process.returncode == 0
    process = begun(tmp_path, "-c", "def f(): raise ValueError('no')\nf()")
    assert "Traceback (most recent call last)" in process.communicate(60)[0] and process.returncode == 1


def test_its_children_end_with_its_group(tmp_path):
    process = begun(tmp_path, "-c", "import subprocess; subprocess.run(['sleep', '600'])")
    while not (children := psutil.Process(process.pid).children()):
        assert process.poll() is None
    kill_group(process)
    assert process.returncode == -signal.SIGKILL
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_the_server_has_one_thread_whatever_was_started(tmp_path):
    """Others would not be there in what it forks, and what they hold would be held for ever."""
    process = begun(tmp_path, "-c", "import time; time.sleep(600)")
    assert psutil.Process(psutil.Process(process.pid).ppid()).num_threads() == 1
    kill_group(process)
