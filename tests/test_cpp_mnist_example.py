"""The MNIST example as a LibTorch program.

The data are made up where they need not be MNIST: idx files of MNIST's size with ten
patterns under heavy noise, easy enough to be learnt in an epoch.
"""

import os
import re
import subprocess

import numpy as np
import pytest

pytestmark = pytest.mark.full


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder with files like MNIST's."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 256, (10, 784), dtype=np.uint8)
    for part, n in (("train", 60_000), ("t10k", 10_000)):
        labels = generator.integers(0, 10, n, dtype=np.uint8)
        dice = generator.integers(0, 16, (n, 784), dtype=np.uint8)
        pixels = np.where(dice < 3, patterns[labels], 0)
        noise = generator.integers(0, 256, (n, 784), dtype=np.uint8)
        pixels = np.where(dice > 13, noise, pixels)
        header = np.array([2051, n, 28, 28], dtype=">i4").tobytes()
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        header = np.array([2049, n], dtype=">i4").tobytes()
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    return folder


def run(program, *arguments):
    options = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "capture_output": True}
    return subprocess.run([program, *map(str, arguments)], text=True, **options)


def test_it_learns(consumer_program, images, tmp_path):
    program = consumer_program("mnist_bnn")
    done = run(program, images, 3)
    assert done.returncode == 0, done.stderr
    *lines, both, differ = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"chain {chain}, epoch {epoch} of 3" for chain in (0, 1) for epoch in (1, 2, 3)
    ]
    for line, draws in ((lines[2], 2), (lines[5], 2), (both, 4)):
        found = re.search(rf"posterior (\S+) %, NLL (\S+) \({draws} draws\)$", line)
        assert found
        # Nine errors in ten would be chance, and an NLL of 2.3.
        assert float(found[1]) < 30 and float(found[2]) < 1.5
    pattern = r"NLL of a draw: .* which differ by \S+ standard errors"
    assert re.fullmatch(pattern, differ)
    assert run(program, images, 3).stdout == done.stdout

    for arguments, message in (
        ((), "usage: mnist_bnn FOLDER [EPOCHS]"),
        ((images, 0), "mnist_bnn: EPOCHS must be >= 1"),
        ((tmp_path,), "mnist_bnn: Error opening images file"),
    ):
        wrong = run(program, *arguments)
        assert wrong.returncode == 1
        assert wrong.stderr.startswith(message)
