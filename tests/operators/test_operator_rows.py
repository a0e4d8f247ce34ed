"""What the operators are, said once more: their schemas, and where numbers may be."""

from __future__ import annotations

from pathlib import Path

import torch

from torch_sgmcmc.chain.operators import ROWS

#: Kernels, checks, handles and the tables of other tests are made of the same rows, and
#: would all follow one that is wrong.
WRITTEN = (Path(__file__).parent / "operators.txt").read_text().splitlines()


def as_they_are() -> list[str]:
    lines = []
    for op, row in sorted(ROWS.items()):
        schema = str(getattr(torch.ops.torch_sgmcmc, op).default._schema)
        lines.append(schema.removeprefix("torch_sgmcmc::"))
        lines += [f"  {name} {domain}" for name, domain in row["numbers"]]
    return lines


def test_rows_are_what_is_written() -> None:
    assert as_they_are() == WRITTEN
