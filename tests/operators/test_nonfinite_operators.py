"""Counts of numbers that are not finite, and the steps they stop."""

import pytest
import torch
from operator_tensors import TARGET
from reference import DTYPES
from short_chains import assert_same
from test_layouts import LAYOUTS

from torch_sgmcmc.core import ops as ops


def expected_counts(tensors):
    return [[int(t.isnan().sum()), int(t.isinf().sum())] for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_position_is_checked(dtype):
    largest = torch.finfo(dtype).max
    tiny = torch.finfo(dtype).smallest_normal / 4
    for numel in (1, 7, 8, 31, 33, 4095, 4097, 3 * 4096 + 1):
        # Finite numbers of every kind, which must not be taken for others.
        kinds = [largest, -largest, 0.0, -0.0, tiny, -tiny, 1.0]
        t = torch.tensor(kinds, dtype=dtype)
        t = t.repeat(numel // 7 + 1)[:numel]
        assert ops.count_nonfinite([t]).tolist() == [[0, 0]]
        assert ops.any_nonfinite([t, t]) is False
        for at in {0, numel // 2, numel - 1}:
            nan, inf = [1, 0], [0, 1]
            values = (torch.nan, -torch.nan, torch.inf, -torch.inf)
            for value, count in zip(values, (nan, nan, inf, inf), strict=True):
                bad = t.clone()
                bad[at] = value
                assert ops.any_nonfinite([t, bad, t]) is True
                counted = ops.count_nonfinite([t, bad, t]).tolist()
                assert counted == [[0, 0], count, [0, 0]]


@pytest.mark.parametrize(
    ("dtype", "integers"),
    [
        (torch.float32, torch.int32),
        (torch.float64, torch.int64),
        (torch.bfloat16, torch.int16),
        (torch.float16, torch.int16),
    ],
)
def test_all_bits_of_a_number(dtype, integers):
    # Every pattern of 16 bits, and as many at random of the longer ones, half of them
    # with the exponent of what is not finite.
    if integers == torch.int16:
        bits = torch.arange(-(2**15), 2**15).to(integers)
    else:
        low, high = torch.iinfo(integers).min, torch.iinfo(integers).max
        g = torch.Generator().manual_seed(0)
        bits = torch.randint(low, high, (2**16,), dtype=integers, generator=g)
        bits[::2] |= torch.tensor(torch.inf, dtype=dtype).view(integers)
    t = bits.view(dtype)
    assert 100 < int(t.isnan().sum())
    assert ops.count_nonfinite([t]).tolist() == expected_counts([t])
    one = torch.tensor(torch.inf, dtype=dtype).view(integers) + 1  # a signalling NaN
    assert ops.count_nonfinite([one.view(dtype)]).tolist() == [[1, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout(dtype):
    g = torch.Generator().manual_seed(1)
    t = torch.randn(5, 4, 6, 7, generator=g).to(dtype)
    t[torch.rand(t.shape, generator=g) < 0.1] = torch.nan
    t[torch.rand(t.shape, generator=g) < 0.1] = -torch.inf
    t[4, 3, 5, 6] = torch.inf
    others = [
        torch.empty(0, 3, dtype=dtype),
        t[0, 0, 0, 0],
        t[:1, :1].expand(3, 2, 6, 7),
    ]
    tensors = [*(layout(t) for layout in LAYOUTS.values()), *others]
    untouched = [s.clone() for s in tensors]
    assert ops.count_nonfinite(tensors).tolist() == expected_counts(tensors)
    assert [ops.any_nonfinite([s]) for s in tensors] == [
        sum(counts) > 0 for counts in expected_counts(tensors)
    ]
    assert_same(tensors, untouched)


def test_dtypes_together_and_any_number_of_threads(set_threads):
    tensors = []
    for i in range(300):
        t = torch.ones(i % 7 * 4099 + i % 3).to(DTYPES[i % 4])
        if t.numel() > 0 and i % 5 == 0:
            t[-(i % 7)] = torch.nan
            t[i % t.numel()] = torch.inf
        tensors.append(t)
    expected = expected_counts(tensors)
    for threads in (1, 2, 5):
        set_threads(threads)
        assert ops.count_nonfinite(tensors).tolist() == expected
        assert ops.any_nonfinite(tensors)
        assert not ops.any_nonfinite([t.nan_to_num(0, 0, 0) for t in tensors])


def test_the_step_of_a_device():
    good, bad = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2).long()
    bad[2, 1] = 1
    seven = torch.tensor(7)
    assert ops.step_or_nothing(good, step=5).item() == 5
    assert ops.step_or_nothing(good, step=5, device_step=seven).item() == 12
    assert ops.step_or_nothing(bad, step=5).item() == -1
    assert ops.step_or_nothing(bad, step=5, device_step=seven).item() == -1
    for message, arguments in (
        ("counts must be contiguous and of int64", (good.float(),)),
        ("counts must be contiguous and of int64", (good.t(),)),
        (r"Invalid step: -1 \(must be in \[0, 2\^48\)\)", (good, -1)),
    ):
        step = arguments[1] if len(arguments) > 1 else 0
        with pytest.raises(RuntimeError, match=message):
            ops.step_or_nothing(arguments[0], step=step)
    for more in (2**48 - 5, 2**63 - 1):
        message = r"step \+ device_step must be in \[0, 2\^48\)"
        with pytest.raises(RuntimeError, match=message):
            ops.step_or_nothing(good, step=5, device_step=torch.tensor(more))
    with pytest.raises(RuntimeError, match="device_step must hold a single int64"):
        ops.step_or_nothing(good, step=0, device_step=torch.zeros(2).long())
    with pytest.raises(RuntimeError, match=r"tensors\[1\] has int64, expected float32"):
        ops.count_nonfinite([torch.zeros(1), good])


def test_the_step_of_a_device_at_once():
    """One operator counts and decides the step."""
    seven, some = torch.tensor(7), [torch.ones(5), torch.ones(3).double()]
    assert ops.step_if_finite(some, step=5).item() == 5
    assert ops.step_if_finite(some, step=5, device_step=seven).item() == 12
    for bad in (torch.nan, -torch.inf):
        some[1][2] = bad
        assert ops.step_if_finite(some, step=5, device_step=seven).item() == -1
    # What was found of other tensors stays.
    left = torch.tensor(-1)
    assert ops.step_if_finite(some[:1], step=0, device_step=left).item() == -1
    with pytest.raises(RuntimeError, match=r"step_if_finite: step \+ device_step must"):
        ops.step_if_finite(some[:1], step=5, device_step=torch.tensor(2**48 - 5))
    with pytest.raises(RuntimeError, match=r"step_if_finite: Invalid step: -1 \("):
        ops.step_if_finite(some[:1], step=-1)


@pytest.mark.parametrize("layout", ["contiguous", "cut out"])
def test_a_negative_device_step_changes_nothing(layout):
    lists = [[LAYOUTS[layout](torch.rand(2, 3, 4, 5))] for _ in range(5)]
    p, g, v, w, h = lists
    before = [t.clone() for (t,) in lists]
    stream = {"offsets": [0], "seed": 1, "step": 9, "device_step": torch.tensor(-1)}
    common = {**TARGET, **stream}
    adapting = {"decay": 0.9, "eps": 0.1}
    friction = {"momentum": 0.8, "noise_estimate": 0.0}
    ops.sgld_step_(p, g, [], **common)
    for every in (0, 1, 2):
        ops.sghmc_step_(
            p, g, v, w, [], **common, **friction, resample_momentum_every=every
        )
    ops.psgld_step_(p, g, v, [], [], [], **common, **adapting)
    ops.psgld_step_(p, g, v, w, h, [], **common, **adapting)
    ops.psgld_frozen_step_(p, g, v, [], **common)
    ops.sgnht_step_(p, g, v, w, [], **common, momentum=0.8, thermostat_rate=0.1)
    ops.gaussian_(p, std=0.5, purpose=1, **stream)
    assert_same([t for (t,) in lists], before)
