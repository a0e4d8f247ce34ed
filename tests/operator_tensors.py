"""Lists of tensors and hyperparameters that the tests of operators share."""

import torch
from reference import DTYPES, SIZES, arithmetic, assert_rounded, same_bits

from torch_sgmcmc.core.ops import OP_SPECS

# Large steps, so that no term of an update hides behind another.
TARGET = {"lr": 0.3, "num_data": 7.0, "prior_precision": 1.9, "temperature": 0.7}
FRICTION = {"momentum": 0.9, "noise_estimate": 0.05}
STREAM = {"seed": 0x0123456789ABCDEF, "step": 2**33 + 5}


def mixed_list(seed):
    """Tensors of every size and dtype in one list, shuffled together."""
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, generator=g, dtype=torch.float64).to(dtype)
        for n in SIZES
        for dtype in DTYPES
    ]


def states(like, seed):
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(t.shape, generator=g, dtype=torch.float64).to(arithmetic(t.dtype))
        for t in like
    ]


def masters_of(params):
    """A master of each parameter in bf16 and fp16: rounds to it, but is another number.

    Off by up to a fifth of a unit in the last place.
    """
    g = torch.Generator().manual_seed(6)
    low = [p.detach() for p in params if p.dtype.itemsize == 2]
    masters = [
        p.float() * (1 + torch.finfo(p.dtype).eps / 5 * (2 * rand - 1))
        for p, rand in ((p, torch.rand(p.shape, generator=g)) for p in low)
    ]
    for p, master in zip(low, masters, strict=True):
        assert same_bits(p, master.to(p.dtype))
    # In the layout of the parameter, as samplers make them.
    return [
        torch.empty_like(p, dtype=torch.float32).copy_(m)
        for p, m in zip(low, masters, strict=True)
    ]


def values_of(params, masters):
    """Returns the tensors that an update starts from: masters where they exist."""
    rest = iter(masters)
    return [next(rest) if p.dtype.itemsize == 2 else p for p in params]


def assert_updated(params, masters, expected, **roundings):
    """Asserts masters as exact as the arithmetic, and parameters that they round to."""
    values = values_of(params, masters)
    for p, value, e in zip(params, values, expected, strict=True):
        assert_rounded(value, e, **roundings)
        assert same_bits(p, value.to(p.dtype))


def scattered_offsets(tensors):
    """Offsets of every alignment, near 0 and beyond 32 bits."""
    return [
        (2**40 if i % 3 == 0 else 0) + 10_007 * i + i % 7 for i in range(len(tensors))
    ]


def clones(tensors):
    return [t.clone() for t in tensors]


def assert_all_same(a, b):
    assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def registered():
    """Names of all operators that torch knows of ours."""
    return {
        name.removeprefix("torch_sgmcmc::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("torch_sgmcmc::")
    }


def by_gradients():
    """Operators like SGLD's, that go by gradients and TARGET, and their lists.

    Those with momenta take FRICTION as well.
    """
    found = {}
    for op, row in OP_SPECS.items():
        numbers = {each["name"] for each in row["numbers"]} - {"momentum_scale"}
        lists = [each["name"] for each in row["lists"]]
        more = lists[2:-1]
        known = [[], ["momenta"], ["momenta", "preconditioners"]]
        wanted = {*TARGET, *FRICTION} if more else {*TARGET}
        is_alike = lists == ["params", "grads", *more, "masters"]
        if is_alike and more in known and numbers == wanted:
            found[op] = lists
    return found


def arguments_of(op, p, g, v, masters):
    """Lists and numbers of one of those."""
    scales = [0.5 + t.square() for t in v]
    given = {"params": p, "grads": g, "momenta": v, "preconditioners": scales}
    lists = tuple({**given, "masters": masters}[name] for name in by_gradients()[op])
    return lists, {**TARGET, **(FRICTION if "momenta" in by_gradients()[op] else {})}
