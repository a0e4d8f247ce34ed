"""The noise is one stream, however it is cut, rounded or computed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fingerprint import fingerprints
from reference import DTYPES, SIZES, same_bits

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import ops as ops

HERE = Path(__file__).parents[1]


def fill(numel, offset=0, *, dtype=torch.float32, std=1.0, seed=1, step=2, purpose=0):
    out = torch.full((numel,), torch.nan, dtype=dtype)
    ops.gaussian_(
        [out], std=std, offsets=[offset], seed=seed, step=step, purpose=purpose
    )
    return out


def test_any_piece_of_a_stream_is_the_same_noise():
    # Shards and single parameters draw their slice; 2^34 is where the low word of
    # the quad's number overflows.
    for start in (0, 2**34 - 3000):
        whole = fill(6000, start)
        for numel in SIZES:
            for skip in (0, 1, 2, 3, 7, 127, 128, 1001, 1871):
                piece = fill(numel, start + skip)
                assert same_bits(piece, whole[skip : skip + numel])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_gets_the_same_noise_rounded(dtype):
    z = fill(5000, 3)
    assert same_bits(fill(5000, 3, dtype=dtype), z.to(dtype))
    work = torch.float64 if dtype == torch.float64 else torch.float32
    scaled = z.to(work) * torch.tensor(0.3, dtype=work)
    assert same_bits(fill(5000, 3, dtype=dtype, std=0.3), scaled.to(dtype))
    assert same_bits(
        fill(5000, 3, dtype=dtype, std=0.0), torch.zeros(5000, dtype=dtype)
    )


def test_device_step_is_added_to_step():
    out = torch.empty(1000)
    for shape in ((), (1,), (1, 1)):
        stream = {"offsets": [5], "seed": 1, "step": 2, "purpose": 1}
        device_step = torch.full(shape, 2**33)
        ops.gaussian_([out], std=1.0, **stream, device_step=device_step)
        assert same_bits(out, fill(1000, 5, step=2**33 + 2, purpose=1))


def run(program, isa):
    environment = {**os.environ, "TORCH_SGMCMC_ISA": isa, "OMP_NUM_THREADS": "1"}
    command, pipes = [sys.executable, *program], {"capture_output": True, "text": True}
    return subprocess.run(
        command, cwd=HERE, env=environment, timeout=300, check=False, **pipes
    )


#: All that this processor has, the one that is in use excepted; from the best down.
ISAS = ["avx512", "avx2", "portable"]
OTHER_ISAS = ISAS[ISAS.index(_C.isa()) + 1 :] or ["portable"]


@pytest.mark.full
@pytest.mark.parametrize("isa", OTHER_ISAS)
def test_results_depend_neither_on_instruction_set_nor_on_process(isa):
    process = run([str(HERE / "fingerprint.py")], isa)
    assert process.returncode == 0, process.stderr
    theirs = json.loads(process.stdout)
    assert theirs["isa"] == isa
    assert theirs["fingerprints"] == fingerprints()


@pytest.mark.full
def test_unknown_instruction_set_is_an_error():
    program = """
import torch
import torch_sgmcmc._C as _C
from torch_sgmcmc.core import ops
out = torch.zeros(3)
draw = lambda: ops.gaussian_([out], std=1, offsets=[0], seed=0, step=0, purpose=0)
for call in (_C.isa, draw):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        print(str(error).splitlines()[0])
print(out.tolist())
"""
    process = run(["-c", program], "sse9")
    text = "Invalid TORCH_SGMCMC_ISA: 'sse9' (must be portable, avx2 or avx512)"
    assert process.stdout.splitlines() == [text, text, "[0.0, 0.0, 0.0]"], (
        process.stderr
    )
