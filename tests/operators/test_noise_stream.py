"""The noise is the documented function of seed, step, purpose and element.

Note [Counter layout] in csrc/core/counter.h, checked in plain Python. How good the
noise is as a random number is another test's business.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fingerprint import fingerprints
from reference import DTYPES, SIZES, same_bits

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain import operators as ops

HERE = Path(__file__).parents[1]
WORD = 2**32


def fill(
    numel: int,
    offset: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    std: float = 1.0,
    seed: int = 1,
    step: int = 2,
    purpose: int = 0,
) -> torch.Tensor:
    out = torch.full((numel,), torch.nan, dtype=dtype)
    ops.gaussian_(
        [out], std=std, offsets=[offset], seed=seed, step=step, purpose=purpose
    )
    return out


# Known-answer vectors of Philox4x32-10, published with Random123 (kat_vectors).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: str, key: str, answer: str
) -> None:
    words = [[int(w, 16) for w in text.split()] for text in (counter, key, answer)]
    assert list(_C.philox4x32(words[0], words[1])) == words[2]


def normal_of(element: int, seed: int, step: int, purpose: int) -> float:
    """One element of the noise in float64: counter layout and Box-Muller."""
    quad = element // 4
    words = _C.philox4x32(
        [quad % WORD, quad // WORD, step % WORD, step // WORD | purpose << 16],
        [seed % WORD, seed // WORD % WORD],
    )
    pair = element % 4 // 2
    radius_bits, angle_bits = words[2 * pair], words[2 * pair + 1]
    # The uniform is a float32: that is the resolution of the radius near 0.
    u = float(np.float32(float(np.float32(radius_bits // 2)) * 2.0**-31 + 2.0**-32))
    signed = angle_bits - WORD if angle_bits >= WORD // 2 else angle_bits
    angle = math.pi / 4 * signed * 2.0**-31
    r = math.sqrt(-2 * math.log(u))
    cosine = math.cos(angle) * (-1 if angle_bits & 1 else 1)
    first, second = cosine, math.sin(angle)
    if angle_bits & 2:
        first, second = second, first
    return r * (second if element % 2 else first)


@pytest.mark.parametrize("offset", [0, 1, 126, 4093, 2**34 - 130, 2**45 + 7])
@pytest.mark.parametrize(
    ("seed", "step", "purpose"),
    [
        (0, 0, 0),
        (1, 0, 1),
        (2**63 - 1, 7, 2),
        (-1, 2**32 - 1, 0),
        (-(2**63), 2**48 - 1, 2**16 - 1),
        (0x0123456789ABCDEF, 2**32 + 17, 1),
    ],
)
def test_counter_layout(offset: int, seed: int, step: int, purpose: int) -> None:
    z = fill(300, offset, seed=seed, step=step, purpose=purpose)
    exact = [normal_of(offset + i, seed, step, purpose) for i in range(300)]
    # Polynomials good to 1.7e-7 and a dozen operations in float32.
    torch.testing.assert_close(
        z.double(), torch.tensor(exact, dtype=torch.float64), rtol=5e-7, atol=0
    )


def test_any_piece_of_a_stream_is_the_same_noise() -> None:
    # Shards and single parameters draw their slice; 2^34 is where the low word of
    # the quad's number overflows.
    for start in (0, 2**34 - 3000):
        whole = fill(6000, start)
        for numel in SIZES:
            for skip in (0, 1, 2, 3, 7, 127, 128, 1001, 1871):
                piece = fill(numel, start + skip)
                assert same_bits(piece, whole[skip : skip + numel])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_gets_the_same_noise_rounded(dtype: torch.dtype) -> None:
    z = fill(5000, 3)
    assert same_bits(fill(5000, 3, dtype=dtype), z.to(dtype))
    work = torch.float64 if dtype == torch.float64 else torch.float32
    scaled = z.to(work) * torch.tensor(0.3, dtype=work)
    assert same_bits(fill(5000, 3, dtype=dtype, std=0.3), scaled.to(dtype))
    assert same_bits(
        fill(5000, 3, dtype=dtype, std=0.0), torch.zeros(5000, dtype=dtype)
    )


def test_streams_differ() -> None:
    # Another seed, step or purpose, in any bit, is another stream.
    z = fill(1000)
    others = [fill(1000, seed=1 ^ 1 << b) for b in range(63)]
    others += [fill(1000, step=2 ^ 1 << b) for b in range(48)]
    others += [fill(1000, purpose=1 << b) for b in range(16)]
    others += [fill(1000, seed=1 - 2**63), fill(1000, 1)]
    for other in others:
        # No more equal elements than chance allows: float32 normals of one
        # binade coincide with probability of some 2^-23.
        assert int((other == z).sum()) <= 1


def test_device_step_is_added_to_step() -> None:
    out = torch.empty(1000)
    for shape in ((), (1,), (1, 1)):
        ops.gaussian_(
            [out],
            std=1.0,
            offsets=[5],
            seed=1,
            step=2,
            purpose=1,
            device_step=torch.full(shape, 2**33),
        )
        assert same_bits(out, fill(1000, 5, step=2**33 + 2, purpose=1))


# ---- Other instruction sets, other processes -------------------------------------


def run(program: list[str], isa: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCH_SGMCMC_ISA": isa, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *program],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


#: All that this processor has, the one that is in use excepted; from the best down.
ISAS = ["avx512", "avx2", "portable"]
OTHER_ISAS = ISAS[ISAS.index(_C.isa()) + 1 :] or ["portable"]


@pytest.mark.parametrize("isa", OTHER_ISAS)
def test_results_depend_neither_on_instruction_set_nor_on_process(isa: str) -> None:
    process = run([str(HERE / "fingerprint.py")], isa)
    assert process.returncode == 0, process.stderr
    theirs = json.loads(process.stdout)
    assert theirs["isa"] == isa
    assert theirs["fingerprints"] == fingerprints()


def test_unknown_instruction_set_is_an_error() -> None:
    program = """
import torch
import torch_sgmcmc._C as _C
from torch_sgmcmc.chain import operators
out = torch.zeros(3)
draw = lambda: operators.gaussian_([out], std=1, offsets=[0], seed=0, step=0, purpose=0)
for call in (_C.isa, draw):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        print(str(error).splitlines()[0])
print(out.tolist())
"""
    process = run(["-c", program], "sse9")
    text = "Invalid TORCH_SGMCMC_ISA: 'sse9' (must be portable, avx2 or avx512)"
    assert process.stdout.splitlines() == [
        text,
        text,
        "[0.0, 0.0, 0.0]",
    ], process.stderr
