"""save and load: what one of them writes the other one reads, or nothing is written."""

import collections
import os
import pathlib
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from children import start
from torch import nn

import torch_sgmcmc as sg

REFUSED = [
    (np.random.get_state(), "content['a'][0][1] is a numpy.ndarray"),
    (np.zeros(2), "content['a'][0] is a numpy.ndarray"),
    (np.longdouble(1), "content['a'][0] is a numpy.longdouble"),  # has no Python twin
    (pathlib.PurePosixPath("x"), "content['a'][0] is a pathlib.PurePosixPath"),
    ({"b": {Path("x"): 1}}, "content['a'][0]['b']'s key is a pathlib.PosixPath"),
    (collections.defaultdict(int), "content['a'][0] is a collections.defaultdict"),
    (lambda: 0, "content['a'][0] is a builtins.function"),
    (nn.Linear(1, 1), "content['a'][0] is a torch.nn.modules.linear.Linear"),
]


@pytest.mark.parametrize(("part", "words"), REFUSED, ids=lambda x: type(x).__name__)
def test_what_could_not_be_read_is_not_written(part, words, tmp_path):
    path = tmp_path / "run.pt"
    sg.save({"step": 1}, path)
    with pytest.raises(TypeError, match=f"^Invalid content: {re.escape(words)}, which"):
        sg.save({"step": 2, "a": [part]}, path)
    assert sg.load(path) == {"step": 1}
    assert [*tmp_path.iterdir()] == [path]


def test_nested_types_survive(tmp_path):
    """Attributes of a module's OrderedDict, sharing, and a list that has itself."""
    module = nn.BatchNorm1d(3).state_dict()
    module["lr"] = np.float64(2)
    shared = [np.float64(1)]
    ring = [1]
    ring.append(ring)
    content = {"module": module, "one": shared, "other": shared, "ring": ring}
    sg.save(content, tmp_path / "run.pt")
    read = sg.load(tmp_path / "run.pt")
    assert type(read["module"]) is collections.OrderedDict
    assert read["module"]._metadata == module._metadata
    assert read["one"] is read["other"] and read["ring"][1] is read["ring"]


def test_the_reason_of_torch(tmp_path):
    path = tmp_path / "run.pt"
    torch.save({"path": Path("x")}, path)
    with pytest.raises(
        RuntimeError, match=r"Cannot read .*run.pt: Unsupported .* pathlib.PosixPath"
    ):
        sg.load(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RuntimeError, match=r"Cannot read .*run.pt: File is not a zip"):
        sg.load(path)


def test_threads_and_processes_save_to_one_name(tmp_path):
    """Each look finds a checkpoint that one of them has written, whole."""
    path = tmp_path / "run.pt"
    whole = {i: {"w": torch.full((20_000,), float(i)), "i": i} for i in range(4)}
    sg.save(whole[0], path)

    def save(i):
        for _ in range(40):
            sg.save(whole[i], path)

    threads = [threading.Thread(target=save, args=(i,)) for i in (0, 1)]
    children = [start(lambda i=i: save(i)) for i in (2, 3)]
    for thread in threads:
        thread.start()
    looks = 0
    while looks < 40 or any(thread.is_alive() for thread in threads):
        found = sg.load(path)
        assert torch.equal(found["w"], whole[found["i"]]["w"])
        looks += 1
    for thread in threads:
        thread.join()
    for child, reader in children:
        with os.fdopen(reader) as said:
            assert said.read() == ""
        os.waitpid(child, 0)
    assert [*tmp_path.iterdir()] == [path]


def test_links_and_modes_stay(tmp_path):
    """The file that a link names is replaced, with its mode."""
    path, link = tmp_path / "run.pt", tmp_path / "latest.pt"
    sg.save({"step": 1}, path)
    path.chmod(0o600)
    link.symlink_to("run.pt")
    sg.save({"step": 2}, link)
    assert link.is_symlink() and sg.load(path) == {"step": 2}
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "new.pt").symlink_to(tmp_path / "later.pt")  # whose target is missing
    sg.save({"step": 3}, tmp_path / "new.pt")
    assert sg.load(tmp_path / "later.pt") == {"step": 3}


def test_other_kinds_of_files_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "folder", "/dev/null"):
        path, kind = tmp_path / name, os.stat(tmp_path / name).st_mode
        words = f"^Cannot write {path}: it is not a regular file$"
        with pytest.raises(RuntimeError, match=words):
            sg.save({"step": 1}, path)
        assert os.stat(path).st_mode == kind
    assert len([*tmp_path.iterdir()]) == 2
