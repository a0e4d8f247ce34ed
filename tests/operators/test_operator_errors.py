"""Every error of the operators: its exact text, and that nothing has changed."""

import math
from itertools import product

import pytest
import torch
from operator_tensors import masters_of, registered
from reference import same_bits

from torch_sgmcmc.core import ops as ops
from torch_sgmcmc.core.ops import OP_SPECS

#: Good values of numbers; all others are 0.1.
GOOD = {
    "num_data": 5.0,
    "prior_precision": 1.0,
    "temperature": 1.0,
    "momentum": 0.9,
    "noise_estimate": 0.05,
    "resample_momentum_every": 0,
    "decay": 0.9,
    "surrogate": 0,
    "num_chains": 1,
    "kind": 3,
}


def good_numbers(row):
    numbers = {each["name"]: GOOD.get(each["name"], 0.1) for each in row["numbers"]}
    if row["has_noise"]:
        numbers |= {"offsets": [0, 128], "seed": 0, "step": 3}
    return numbers | ({"purpose": 0} if row["op"] == "gaussian_" else {})


# Of the rows, and two more that are like them.
COUNTS = ("any_nonfinite", "count_nonfinite")
HYPER = {op: good_numbers(s) for op, s in OP_SPECS.items()}
HYPER |= {op: {} for op in COUNTS}
LISTS = {
    op: {each["name"]: each for each in row["lists"] if not each["is_master"]}
    for op, row in OP_SPECS.items()
}
LISTS |= dict.fromkeys(COUNTS, LISTS["sum_of_squares"])
#: Chains' numbers fit chains, and not parameters.
ARGUMENTS = {
    op: [name for name in lists if name != "turns"] for op, lists in LISTS.items()
}
# Operators whose arguments are no lists of equal lengths have tests of their own.
OTHERS = {
    "ecs_density",
    "ecs_estimate",
    "ecs_leapfrog_",
    "metropolis_decide",
    "select_chains_",
    "mclmc_turn",
    "fused_step_",
    "deferred_step_",
    "ewsg_step_",
    "noise_steps_",
    "chain_product",
    "chain_turn",
    "step_if_finite",
    "step_or_nothing",
}


def is_state(op, name):
    return LISTS[op][name]["is_in_arithmetic_type"]


def ranged(op, *, integers):
    """Returns the numbers of an operator that its row has a range for."""
    return [
        each
        for each in OP_SPECS[op]["numbers"]
        if each["is_integer"] == integers and (each["low"] > -math.inf or not integers)
    ]


# What comes last in their arguments, for parameters in bfloat16 or float16 alone.
WITH_MASTERS = [
    op for op, s in OP_SPECS.items() if any(each["is_master"] for each in s["lists"])
]
UPDATES = [op for op in WITH_MASTERS if OP_SPECS[op]["has_noise"]]
WITH_STREAM = [op for op, row in OP_SPECS.items() if row["has_noise"]]
each_argument = pytest.mark.parametrize("op", ARGUMENTS)
FLOATS = "expected float32, float64, bfloat16 or float16"


def make_lists(op, dtype=torch.float32):
    def one(name):
        kind = torch.float32 if is_state(op, name) else dtype
        return [torch.full((2, 3), 0.5, dtype=kind), torch.ones(4, dtype=kind)]

    lists = {name: one(name) for name in LISTS[op]}
    if "turns" in lists:
        lists["turns"] = [torch.full((1, 4), 0.1, dtype=torch.float64)] * 2
    if op in WITH_MASTERS:
        lists["masters"] = masters_of(lists["params"])
    return lists


def check(op, lists, message, **hyper):
    """Calls the operator and expects this error and no effect at all."""
    given = [t for ts in lists.values() for t in ts if t.layout is torch.strided]
    before = [t.clone() for t in given]
    versions = [t._version for t in given]
    with pytest.raises(RuntimeError) as error:
        getattr(ops, op)(*lists.values(), **{**HYPER[op], **hyper})
    assert str(error.value).splitlines()[0] == f"torch_sgmcmc::{op}: {message}"
    assert all(same_bits(a, b) for a, b in zip(given, before, strict=True))
    assert [t._version for t in given] == versions


@pytest.mark.parametrize("op", ARGUMENTS)
def test_the_arguments_without_a_mistake_are_right(op):
    for dtype in (torch.float32, torch.bfloat16):
        getattr(ops, op)(*make_lists(op, dtype).values(), **HYPER[op])


def test_no_operator_is_skipped():
    assert registered() == ARGUMENTS.keys() | OTHERS


@each_argument
def test_list_lengths(op):
    first, *others = ARGUMENTS[op]
    for name in others:
        lists = make_lists(op)
        lists[name] = lists[name][:1]
        check(op, lists, f"{name} has 1 tensors, expected 2 (as many as {first})")
        lists = make_lists(op)
        lists[name].append(torch.ones(1))
        check(op, lists, f"{name} has 3 tensors, expected 2 (as many as {first})")


def test_no_tensors_at_all():
    # Nothing says which device is meant, so torch itself refuses.
    with pytest.raises(NotImplementedError, match="sum_of_squares"):
        ops.sum_of_squares([])


@each_argument
def test_shapes(op):
    first, *others = ARGUMENTS[op]
    for name, shape in product(others, ((3, 2), (6,), (2, 3, 1), ())):
        lists = make_lists(op)
        lists[name][0] = torch.full(shape, 0.5)
        check(
            op,
            lists,
            f"{name}[0] has shape {list(shape)}, expected [2, 3] (that of {first}[0])",
        )


DTYPES = {
    **dict.fromkeys((torch.int32, torch.complex64), "an unsupported dtype"),
    torch.int64: "int64",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@each_argument
def test_dtypes(op):
    first = ARGUMENTS[op][0]
    for name, (dtype, shown) in product(ARGUMENTS[op], DTYPES.items()):
        lists = make_lists(op)
        lists[name][1] = lists[name][1].to(dtype)
        if name == first and op in WITH_MASTERS:
            lists["masters"] = masters_of(lists[first])
        if name != first:
            want = f"expected float32 (for {first}[1] in float32)"
            check(op, lists, f"{name}[1] has {shown}, {want}")
        elif not dtype.is_floating_point:
            check(op, lists, f"{name}[1] has {shown}, {FLOATS}")
        elif len(ARGUMENTS[op]) > 1:
            # The next argument no longer fits, but for state that stays in float32.
            other = ARGUMENTS[op][1]
            if not is_state(op, other) or dtype == torch.float64:
                want = f"expected {shown} (for {first}[1] in {shown})"
                check(op, lists, f"{other}[1] has float32, {want}")


@each_argument
def test_state_is_in_the_type_of_arithmetic(op):
    first, *others = ARGUMENTS[op]
    if is_state(op, first):
        return
    for name in (each for each in others if is_state(op, each)):
        for dtype, state, shown in (
            (torch.bfloat16, "float32", "bfloat16"),
            (torch.float16, "float32", "float16"),
            (torch.float64, "float64", "float64"),
        ):
            lists = make_lists(op, dtype)
            for other in (each for each in ARGUMENTS[op] if is_state(op, each)):
                lists[other] = [t.to(getattr(torch, state)) for t in lists[other]]
            wrong = torch.float32 if dtype == torch.float64 else dtype
            lists[name] = [t.to(wrong) for t in lists[name]]
            got = str(wrong).removeprefix("torch.")
            of = f"(for {ARGUMENTS[op][0]}[0] in {shown})"
            check(op, lists, f"{name}[0] has {got}, expected {state} {of}")


@pytest.mark.parametrize("op", WITH_MASTERS)
def test_masters(op):
    low = "(one for each of params in bfloat16 or float16)"
    lists = make_lists(op)
    lists["masters"] = [torch.ones(2, 3)]
    check(op, lists, f"masters has 1 tensors, expected 0 {low}")
    lists = make_lists(op, torch.bfloat16)
    lists["masters"] = []
    check(op, lists, f"masters has 0 tensors, expected 2 {low}")
    # Of the second parameter alone: the first one has none.
    lists = make_lists(op)
    for name in (each for each in ARGUMENTS[op] if not is_state(op, each)):
        lists[name][1] = lists[name][1].half()
    half = torch.ones(4, dtype=torch.float16)
    for bad, message in (
        (torch.ones(3), "shape [3], expected [4] (that of params[1])"),
        (half, "float16, expected float32 (for params[1] in float16)"),
    ):
        lists["masters"] = [bad]
        check(op, lists, f"masters[0] has {message}")
    lists["masters"] = [torch.ones(1).expand(4)]
    shared = "an expanded tensor (several elements share memory) and cannot be written"
    check(op, lists, f"masters[0] is {shared}")
    lists["masters"] = masters_of(lists["params"])
    getattr(ops, op)(*lists.values(), **HYPER[op])


@each_argument
def test_expanded_tensors_cannot_be_written(op):
    for name in ARGUMENTS[op]:
        lists = make_lists(op)
        lists[name][0] = torch.full((3,), 0.5).expand(2, 3)
        if LISTS[op][name]["is_written"]:
            why = "is an expanded tensor (several elements share memory)"
            check(op, lists, f"{name}[0] {why} and cannot be written")
        else:  # reading them is fine
            other = make_lists(op)
            results = [
                getattr(ops, op)(*ts.values(), **HYPER[op]) for ts in (lists, other)
            ]
            for a, b in zip(lists.values(), other.values(), strict=True):
                assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))
            assert results == [None, None] or torch.equal(
                *map(torch.as_tensor, results)
            )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@each_argument
def test_sparse_tensors(op):
    layouts = (torch.sparse_coo, torch.sparse_csr)
    for i, name in enumerate(ARGUMENTS[op]):
        layout = layouts[i % 2]
        lists = make_lists(op)
        lists[name][0] = lists[name][0].to_sparse(layout=layout)
        # The dispatcher is the first to notice: there is no kernel for such tensors.
        with pytest.raises(NotImplementedError) as error:
            getattr(ops, op)(*lists.values(), **HYPER[op])
        assert str(error.value).startswith(
            f"Could not run 'torch_sgmcmc::{op}' with arguments from the 'Sparse"
        )
        fresh = make_lists(op)
        for key, tensors in lists.items():
            assert all(map(same_bits, tensors[1:], fresh[key][1:]))


def wanted(number):
    low, high, is_open = (number[key] for key in ("low", "high", "low_open"))
    if high < math.inf:
        return f"in {'(' if is_open else '['}{low:g}, {high:g})"
    if low == -math.inf:
        return "finite"
    return f"finite and {'>' if is_open else '>='} {low:g}"


@pytest.mark.parametrize("op", OP_SPECS)
def test_numbers(op):
    for number in ranged(op, integers=False):
        check_number(op, number)


def check_number(op, number):
    name, low, high = (number[key] for key in ("name", "low", "high"))
    bad = {math.nan, high, -math.inf, low - 0.5, low if number["low_open"] else -0.1}
    bad |= {math.inf, high + 1.5}
    for value in bad:
        message = f"Invalid {name}: {value:g} (must be {wanted(number)})"
        check(op, make_lists(op), message, **{name: value})
    good = {0.0} if name in ("decay", "momentum") or low == 0 else {0.0, -0.5}
    for value in good - bad:
        getattr(ops, op)(*make_lists(op).values(), **{**HYPER[op], name: value})


WITH_PRIOR = [op for op, row in OP_SPECS.items() if row["has_prior_mean"]]


@pytest.mark.parametrize("op", WITH_PRIOR)
def test_means_of_priors(op):
    for mean in (torch.nan, torch.inf, -torch.inf):
        message = f"Invalid prior_mean: {mean} (must be finite)"
        check(op, make_lists(op), message, prior_mean=mean)
    lists = make_lists(op)
    first = next(iter(lists))
    good = [torch.zeros(2, 3), torch.zeros(4)]
    one, other = good
    for bad, message in (
        ([one], f" has 1 tensors, expected 2 (as many as {first})"),
        ([one, one], f"[1] has shape [2, 3], expected [4] (that of {first}[1])"),
        (
            [one, other.double()],
            f"[1] has float64, expected float32 (for {first}[1] in float32)",
        ),
    ):
        check(op, lists, f"prior_means{message}", prior_means=bad)
    # As many numbers, a number, and nothing.
    results = []
    for mean in ({"prior_means": good}, {"prior_mean": 0.0}, {"prior_means": []}, {}):
        lists = make_lists(op)
        result = getattr(ops, op)(*lists.values(), **HYPER[op], **mean)
        results.append([t for ts in lists.values() for t in ts])
        results[-1] += [] if result is None else [result]
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


def test_gamma_needs_both_of_its_lists_or_none():
    for missing in ("sensitivities", "curvatures"):
        lists = make_lists("psgld_step_")
        lists[missing] = []
        message = f"{missing} has 0 tensors, expected 2 (as many as params)"
        check("psgld_step_", lists, message)
    lists = make_lists("psgld_step_")
    lists["sensitivities"] = lists["curvatures"] = []
    ops.psgld_step_(*lists.values(), **HYPER["psgld_step_"])


@pytest.mark.parametrize("op", OP_SPECS)
def test_counts(op):
    for number in ranged(op, integers=True):
        name, least = number["name"], int(number["low"])
        message = f"Invalid {name}: {least - 1} (must be >= {least})"
        check(op, make_lists(op), message, **{name: least - 1})


FRICTION = "(must not exceed the friction 1 - momentum = 0.250000)"
OF_ONE = [
    ("sghmc_step_", {"noise_estimate": 0.3, "momentum": 0.75},
     f"noise_estimate: 0.300000 {FRICTION}"),
    *((op, {name: value}, f"{name}: {value} (must be {wanted})")
     for op, name, values, wanted in (
         ("temperature_sums", "kind", (-1, 7), "in [0, 6]"),
         ("ewsg_log_ratio", "surrogate", (-1, 4), "0, 1, 2 or 3"),
         ("ewsg_log_ratio", "num_chains", (-1, 0), ">= 1"),
         ("hmc_energy", "num_chains", (-1, 0), ">= 1"))
     for value in values),
    *(("temperature_sums", {"decay": x}, f"decay: {x:.6f} (must be in [0, 1])")
     for x in (-0.5, 1.5)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "numbers", "message"), OF_ONE)
def test_numbers_of_one_operator(op, numbers, message):
    check(op, make_lists(op), f"Invalid {message}", **numbers)


@pytest.mark.parametrize("op", ["ewsg_log_ratio", "hmc_energy"])
def test_num_chains(op):
    for value, index, shape in ((2, 1, "[4]"), (4, 0, "[2, 3]")):
        message = (
            f"params[{index}] has shape {shape}, expected a leading dimension of "
            f"{value} chains"
        )
        check(op, make_lists(op), message, num_chains=value)
    lists = {name: [torch.ones(())] for name in make_lists(op)}
    message = "params[0] has shape [], expected a leading dimension of 2 chains"
    check(op, lists, message, num_chains=2)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *((op, "masses") for op in ("hmc_momenta_", "hmc_leapfrog_", "hmc_energy")),
        *((f"sbps_reflect{k}", "preconditioners") for k in ("_", "ion_sums")),
        ("sghmc_step_", "grad_variances"),
        ("ewsg_log_ratio", "momenta"),
    ],
)
def test_lists_that_may_be_skipped_but_not_in_part(op, name):
    lists = make_lists(op)
    lists[name] = []
    getattr(ops, op)(*lists.values(), **HYPER[op])


@pytest.mark.parametrize(
    ("turn", "has"),
    [
        (torch.zeros(1, 4), "float32 and shape [1, 4]"),
        (torch.zeros(2, 4).double(), "float64 and shape [2, 4]"),
        (torch.zeros(4).double(), "float64 and shape [4]"),
        (torch.zeros(1, 8).double()[:, ::2], None),
        (torch.zeros(1, 3).double(), "float64 and shape [1, 3]"),
    ],
)
def test_numbers_of_chains(turn, has):
    lists = make_lists("mclmc_step_")
    lists["turns"] = [turn, turn]
    wanted = "expected contiguous float64 of shape [1, 4]"
    has = has or "float64 and shape [1, 4]"
    check("mclmc_step_", lists, f"turns[0] has {has}, {wanted}")


def test_turn():
    sums, energy = torch.ones(3, 6, 2).double(), torch.zeros(2, 4).double()
    good = {"step_size": 0.1, "momentum": 0.9, "dimension": 5, "scale": 2.0}
    fails(
        lambda: ops.mclmc_turn(sums, energy[:1], **good),
        "mclmc_turn: sums and energy must be contiguous float64 of shapes [P, 6, K] "
        "and [K, 4], on one device",
    )
    for name, value, wanted in (
        ("step_size", -0.1, "finite and >= 0"),
        ("momentum", 1.0, "in [0, 1)"),
        ("dimension", 1, ">= 2"),
        ("scale", 0.0, "finite and > 0"),
    ):
        fails(
            lambda name=name, value=value: ops.mclmc_turn(
                sums, energy, **{**good, name: value}
            ),
            f"mclmc_turn: Invalid {name}: {value:g} (must be {wanted})",
        )


def fails(call, message):
    with pytest.raises(RuntimeError) as error:
        call()
    assert str(error.value).splitlines()[0] == f"torch_sgmcmc::{message}"


def test_decisions():
    ratios = torch.zeros(3, dtype=torch.float64)
    good = {"proposal": 0, "purpose": 3, "seed": 0, "step": 0}
    for proposal in (-1, 2**24):
        fails(
            lambda proposal=proposal: ops.metropolis_decide(
                ratios, **{**good, "proposal": proposal}
            ),
            f"metropolis_decide: Invalid proposal: {proposal} (must be in [0, 2^24))",
        )
    fails(
        lambda: ops.metropolis_decide(ratios, **{**good, "step": 2**48}),
        f"metropolis_decide: Invalid step: {2**48} (must be in [0, 2^48))",
    )
    fails(
        lambda: ops.metropolis_decide(ratios, **{**good, "purpose": 2**16}),
        f"metropolis_decide: Invalid purpose: {2**16} (must be in [0, 2^16))",
    )
    for wrong in (ratios.float(), ratios.view(3, 1), torch.zeros(6).double()[::2]):
        fails(
            lambda wrong=wrong: ops.metropolis_decide(wrong, **good),
            "metropolis_decide: log_ratios must be one contiguous row of float64",
        )


def test_selection():
    yes = torch.ones(2, dtype=torch.bool)

    def call(shape=(2, 3), chosen=yes, tensor=None):
        tensors = [torch.zeros(2, 3) if tensor is None else tensor]
        ops.select_chains_(tensors, [torch.ones(shape)], chosen)
        assert not tensors[0].any()

    for wrong in (yes.byte(), yes.view(2, 1), torch.ones(0, dtype=torch.bool)):
        fails(
            lambda wrong=wrong: call(chosen=wrong),
            "select_chains_: chosen must be one contiguous row of bool",
        )
    fails(
        lambda: call((3, 2)),
        "select_chains_: others[0] has shape [3, 2], expected [2, 3] (that of "
        "tensors[0])",
    )
    fails(
        lambda: call(chosen=torch.ones(3, dtype=torch.bool)),
        "select_chains_: tensors[0] has shape [2, 3], expected a leading dimension of "
        "3 chains",
    )
    fails(
        lambda: call(tensor=torch.zeros(1, 3).expand(2, 3)),
        "select_chains_: tensors[0] is an expanded tensor (several elements share "
        "memory) and cannot be written",
    )


def bad_counters(op):
    """Yields bad values of counters, and their errors."""
    first = ARGUMENTS[op][0]
    numel = make_lists(op)[first][1].numel()
    for step in (-1, 2**48):
        yield "step", step, f"Invalid step: {step} (must be in [0, 2^48))"
    for offsets in ([], [0], [0, 128, 256]):
        wanted = f"expected 2 (one for each tensor of {first})"
        yield "offsets", offsets, f"offsets has {len(offsets)} entries, {wanted}"
    yield "offsets", [0, -4], "Invalid offsets[1]: -4 (must be >= 0)"
    if op == "gaussian_":
        for purpose in (-1, 2**16):
            range_ = "(must be in [0, 2^16))"
            yield "purpose", purpose, f"Invalid purpose: {purpose} {range_}"
    elif op not in UPDATES:
        return
    for rows in ([], [0, 0], [0, 0, 0, 0, 0, 0]):
        wanted = f"expected 4 (two for each tensor of {first})"
        yield "rows", rows, f"rows has {len(rows)} entries, {wanted}"
    for row in ((0, 1), (-1, 2), (numel, numel - 1), (numel + 1, 99), (1, 2**41)):
        wanted = "(must be (0, 0), or a length that divides their number, and a pitch"
        message = f"Invalid rows[1]: {row} for {numel} elements {wanted} from it to"
        yield "rows", [0, 0, *row], f"{message} 2^40)"
    for value, shown in (
        (torch.tensor([1, 2]), "2 elements of int64"),
        (torch.empty(0, dtype=torch.int64), "0 elements of int64"),
        (torch.tensor(1.0), "1 elements of float32"),
        (torch.tensor(1, dtype=torch.int32), "1 elements of an unsupported dtype"),
    ):
        message = f"device_step must hold a single int64, got {shown}"
        yield "device_step", value, message


@pytest.mark.parametrize("op", WITH_STREAM)
def test_counters(op):
    for name, value, message in bad_counters(op):
        check(op, make_lists(op), message, **{name: value})
