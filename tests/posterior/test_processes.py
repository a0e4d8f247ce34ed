"""Chains in processes: how they end, all of them, whatever ends them."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from driver_problem import (
    KilledAt,
    forked,  # noqa: F401
    loader,
    loss,
    model,
    run,
    sghmc,
)
from stored_files import contents

import torch_sgmcmc as sg
from torch_sgmcmc.run import sample as driver

pytestmark = pytest.mark.full

FOREVER = 10**7


class Odd(Exception):
    """A loader that cannot be pickled."""

    def __init__(self, one, other):
        super().__init__(one)


class Fails:
    """A callback that raises in chain 0, once chain 1 has made steps too."""

    def __init__(self, folder, error, *args):
        self.path, self.error, self.args = folder / "went-1", error, args

    def __call__(self, state):
        if state.chain == 1 and state.step == 5:
            self.path.touch()
        if state.chain == 0 and self.path.exists():
            raise self.error(*self.args)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("raised", "error", "words"),
    [
        ((FileNotFoundError, "gone"), FileNotFoundError, "^gone$"),
        ((Odd, "one", "other"), RuntimeError, "^Odd: one$"),
    ],
)
def test_the_first_error_ends_all(raised, error, words, tmp_path):
    """Others are saved, and what waited does not begin."""
    callback = Fails(tmp_path, *raised)
    options = {"steps": FOREVER, "checkpoint_every": None, "callbacks": callback}
    with pytest.raises(error, match=words) as caught:
        run(tmp_path / "run", chains=3, processes=2, **options)
    assert "Traceback" in str(caught.value.__cause__)
    assert sg.load(tmp_path / "run" / "checkpoint-1.pt")["step"] >= 5
    assert not (tmp_path / "run" / "checkpoint-2.pt").exists()
    assert sg.load(tmp_path / "run" / "checkpoint-0.pt")["step"] == 0


@pytest.mark.usefixtures("forked")
def test_a_process_that_is_killed(tmp_path):
    with pytest.raises(RuntimeError, match="process of chain 0 has ended") as caught:
        run(tmp_path / "run", chains=2, processes=2, callbacks=KilledAt(tmp_path, 0, 5))
    assert "SIGKILL" in str(caught.value.__cause__)
    assert len(run(tmp_path / "run", chains=2, processes=2)) > 0


class Tells:
    """A callback that writes the process's number for each chain, at its fifth step."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, state):
        if state.step == 5:
            path = self.folder / f"pid-{state.chain}.partial"
            path.write_text(str(os.getpid()))
            path.rename(path.with_suffix(""))


def program(folder, start, ignores):
    """Three chains that never end, two at a time, in a session of their own."""
    interrupt = signal.SIG_IGN if ignores else signal.SIG_DFL
    code = (
        "import sys; from pathlib import Path; import test_processes\n"
        "test_processes.never_ends(Path(sys.argv[1]), sys.argv[2])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder), start],
        cwd=folder,  # not that of the sources, which have no binaries
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt),
    )


def never_ends(folder, start):
    begin = partial(driver.start_processes, start_method=start)
    driver.start_processes = begin
    options = {"steps": FOREVER, "checkpoint_every": None}
    run(folder / "run", chains=3, processes=2, callbacks=Tells(folder), **options)


def wait_for(condition, process=None):
    end = time.monotonic() + 120
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


# Once by the start that they have for users, which imports torch in each.
@pytest.mark.parametrize(
    ("how", "start", "ignores"),
    [
        pytest.param("Ctrl-C", "spawn", False, marks=pytest.mark.nightly),
        ("SIGKILL", "fork", False),
        pytest.param("SIGTERM", "fork", False, marks=pytest.mark.nightly),
        # As of a program that a script has begun in the background.
        pytest.param("SIGTERM", "fork", True, marks=pytest.mark.nightly),
    ],
)
def test_what_ends_the_parent_ends_all(how, start, ignores, tmp_path):
    """Chains are saved, none begins, and the store is free."""
    process = program(tmp_path, start, ignores)
    paths = [tmp_path / "pid-0", tmp_path / "pid-1"]
    wait_for(lambda: all(path.exists() for path in paths), process)
    children = [int(path.read_text()) for path in paths]
    if how == "Ctrl-C":  # goes to all of a terminal
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.Signals[how])
    said = process.communicate()[1]
    assert process.returncode != 0
    wait_for(lambda: not any(map(is_alive, children)))
    if how == "Ctrl-C":
        assert said.rstrip().endswith("KeyboardInterrupt")
    assert not (tmp_path / "run" / "checkpoint-2.pt").exists()
    for chain in range(2):
        assert sg.load(tmp_path / "run" / f"checkpoint-{chain}.pt")["step"] >= 5
    run(tmp_path / "run", steps=5, restart=True)


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from driver_problem import loader, model, sghmc
import torch_sgmcmc as sg

def loss(model, batch):
    import driver_problem
    return driver_problem.loss(model, batch)

{call}
"""
CALL = """sg.sample(model, sghmc, loader(), {loss}, {folder!r}, steps=5, chains=2,
          processes=2, progress=False, check=False, seed=1{more})
"""


def script(call):
    return SCRIPT.format(path=[p for p in sys.path if p], call=call)


def test_what_has_no_file(tmp_path):
    """A notebook's functions are like these on standard input."""
    run(tmp_path, steps=5)
    before = contents(tmp_path)
    more = ", restart=True"
    code = script(CALL.format(loss="loss", folder=str(tmp_path), more=more))
    options = {"cwd": tmp_path, "input": code, "capture_output": True, "text": True}
    ended = subprocess.run([sys.executable, "-"], **options)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith(
        "TypeError: Invalid processes: 2, and they cannot import definitions of a "
        "notebook or of standard input (put the functions into a file and import "
        "them, or processes=1)"
    )
    assert contents(tmp_path) == before  # nothing was deleted


def test_a_script_without_a_guard(tmp_path):
    run(tmp_path / "run", steps=5)
    before = contents(tmp_path / "run")
    call = CALL.format(loss="loss", folder=str(tmp_path / "run"), more="")
    (tmp_path / "bare.py").write_text(script(call))
    command = [sys.executable, str(tmp_path / "bare.py")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "that reads this script: functions belong into a file" in ended.stderr
    assert 'under if __name__ == "__main__":' in ended.stderr.splitlines()[-1]
    assert contents(tmp_path / "run") == before


def test_a_guarded_script(tmp_path):
    call = CALL.format(loss="loss", folder=str(tmp_path / "run"), more="")
    guarded = script(f'if __name__ == "__main__":\n  {call}')
    (tmp_path / "guarded.py").write_text(guarded)
    subprocess.run([sys.executable, str(tmp_path / "guarded.py")], check=True)
    assert sg.SampleStore(tmp_path / "run").chains == [0, 1]


@pytest.mark.usefixtures("forked")
def test_more_chains_than_processes(tmp_path):
    options = {"steps": 3, "chains": 3, "processes": 2, "seed": 1, "progress": False}
    store = sg.sample(model, sghmc, loader(), loss, tmp_path, **options)
    assert [len(store.chain(i)) for i in range(3)] == [3, 3, 3]
