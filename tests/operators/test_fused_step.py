"""Fused steps: a sampler's step of all groups, of calls that were packed."""

import math

import operator_tensors as tensors
import pytest
import torch

from torch_sgmcmc import _C
from torch_sgmcmc.core import ops as ops
from torch_sgmcmc.core.ops import OP_SPECS

STEPS = [op for op in OP_SPECS if op.endswith("step_")]
NUMBERS = {"decay": 0.9, "eps": 0.1, "momentum": 0.8, "noise_estimate": 0.05}


def common(op, **more):
    """Numbers that the operator's row does not list."""
    numbers = OP_SPECS[op]["common"]
    return {n["name"]: more.get(n["name"], n["default"]) for n in numbers}


def counter(step=tensors.STREAM["step"]):
    return torch.tensor(step)


def packed_call(op, means, lists, offsets, numbers, instead):
    """Returns a call as it is packed; ``instead`` has other parts of it."""
    called = {
        "row": [*OP_SPECS].index(op),
        "has_means": means is not None,
        "lengths": [*map(len, lists)],
        "offsets": offsets,
        "rows": [],
        "numbers": [*map(float, numbers)],
    }
    return (*(called | instead).values(),)


class Made:
    """A call of an operator, and the same as words."""

    def __init__(self, op, *, checks=True, **more):
        self.row = OP_SPECS[op]
        params = tensors.mixed_list(1)
        self.num_chains = more.get("num_chains", 0)
        if self.num_chains:
            params = [p for p in params if p.numel() % 3 == 0 and p.numel()]
            params = [p.reshape(3, -1) for p in params]
        own = {"params": params, "grads": [p * 0.5 for p in params]}
        own["curvatures"] = [p * 0.25 for p in params]
        own["masters"] = tensors.masters_of(params)
        turn = torch.linspace(0.2, 0.9, 4 * max(1, self.num_chains)).double()
        own["turns"] = [turn.view(-1, 4)] * len(params)
        self.lists = [
            own.get(each["name"], [t.abs() for t in tensors.states(params, i)])
            for i, each in enumerate(self.row["lists"])
        ]
        self.numbers = {
            each["name"]: 3 if each["is_integer"] else NUMBERS.get(each["name"], 0.3)
            for each in self.row["numbers"]
        }
        self.offsets = tensors.scattered_offsets(params)
        self.common = common(op, **more)
        self.means = tensors.states(params, 9) if more.get("means") else None
        self.checks = checks

    def call(self, **instead):
        numbers = (*self.numbers.values(), *self.common.values())
        lists = self.lists[2:]
        name = self.row["op"]
        return packed_call(name, self.means, lists, self.offsets, numbers, instead)

    def words(self, *more, **instead):
        seed = tensors.STREAM["seed"]
        step = {"checks": self.checks, "seed": seed, "num_chains": self.num_chains}
        of_step = {key: instead.pop(key) for key in [*step] if key in instead}
        calls = [self.call(**instead), *(each.call() for each in more)]
        memory = _C.packed_step(**step | of_step, calls=calls)
        return torch.frombuffer(memory, dtype=torch.int64)

    def by_name(self):
        lists = [*map(tensors.clones, self.lists)]
        more = {"num_chains": self.num_chains, "prior_means": self.means}
        settings = {**self.numbers, **tensors.STREAM, **self.common, **more}
        getattr(ops, self.row["op"])(*lists, offsets=self.offsets, **settings)
        return lists

    def packed(self, words=None):
        lists = [*map(tensors.clones, self.lists)]
        state = [t for each in (*lists[2:], self.means or []) for t in each]
        words = self.words() if words is None else words
        step = counter()
        made = ops.fused_step_(*lists[:2], state, words, step)
        assert int(step) == tensors.STREAM["step"] + made
        return made, lists


def assert_lists_same(a, b):
    for one, other in zip(a, b, strict=True):
        tensors.assert_all_same(one, other)


@pytest.mark.parametrize(
    "more",
    [{}, {"prior_mean": 0.4}, {"means": True}, {"num_chains": 3}],
    ids=lambda more: "".join(more) or "plain",
)
@pytest.mark.parametrize("op", STEPS)
def test_it_is_the_operator(op, more):
    call = Made(op, **more)
    expected = call.by_name()
    made, actual = call.packed()
    assert made
    assert_lists_same(actual, expected)
    assert not all(map(torch.equal, actual[0], call.lists[0]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("op", STEPS)
def test_gradients_that_are_not_finite_change_nothing(op, value):
    call = Made(op)
    call.lists[1][-1].view(-1)[-1] = value
    made, lists = call.packed()
    assert not made
    assert_lists_same(lists, call.lists)
    call.checks = False
    made, lists = call.packed()
    assert made
    assert_lists_same(lists[:1], call.by_name()[:1])


def both(name):
    """Two groups' calls, with their lists one after the other."""
    calls = [Made(name, prior_mean=0.4), Made("sgld_step_", means=True)]
    for each in calls[1].lists[0]:
        each.add_(1.0)
    joined = [[t for c in calls for t in tensors.clones(c.lists[i])] for i in (0, 1)]
    lists = [each for c in calls for each in (*c.lists[2:], c.means or [])]
    state = [t for each in lists for t in each]
    return calls, joined, [t.clone() for t in state]


@pytest.mark.parametrize("name", STEPS)
def test_several_groups_are_one_call(name):
    calls, (params, grads), state = both(name)
    step = counter()
    assert ops.fused_step_(params, grads, state, calls[0].words(calls[1]), step)
    expected = [call.by_name() for call in calls]
    tensors.assert_all_same(params, [t for lists in expected for t in lists[0]])
    assert int(step) == tensors.STREAM["step"] + 1


def test_all_groups_are_checked_before_the_first_update():
    calls, (params, grads), state = both("sghmc_step_")
    before = [*map(tensors.clones, (params, state))]
    grads[-1].view(-1)[-1] = math.inf
    words, step = calls[0].words(calls[1]), counter()
    assert not ops.fused_step_(params, grads, state, words, step)
    grads[-1] = grads[-1].double()
    with pytest.raises(RuntimeError, match="sgld_step_: grads"):
        ops.fused_step_(params, grads, state, words, step)
    assert_lists_same([params, state], before)
    assert int(step) == tensors.STREAM["step"]


@pytest.mark.parametrize("counts_there", [True, False])
@pytest.mark.parametrize("value", [None, math.nan])
def test_a_deferred_step_skips_nonfinite_gradients(value, counts_there):
    calls, (params, grads), state = both("sghmc_step_")
    before = [*map(tensors.clones, (params, state))]
    if value is not None:
        grads[-1].view(-1)[-1] = value
    step, skipped = counter(), torch.tensor(4)
    words, counted = calls[0].words(calls[1]), skipped if counts_there else None
    counts, gate = ops.deferred_step_(params, grads, state, words, step, counted)
    tensors.assert_all_same([counts], [ops.count_nonfinite(grads)])
    if value is None:
        expected = [call.by_name() for call in calls]
        tensors.assert_all_same(params, [t for lists in expected for t in lists[0]])
    else:
        assert_lists_same([params, state], before)
    is_made = value is None or not counts_there
    assert int(gate) == (tensors.STREAM["step"] if value is None else -1)
    assert int(step) == tensors.STREAM["step"] + is_made
    assert int(skipped) == 4 + (not is_made)


def test_a_deferred_step_takes_counts():
    """Such as those of all ranks."""
    calls, (params, grads), state = both("sghmc_step_")
    before = tensors.clones(params)
    counts = torch.zeros(len(params), 2, dtype=torch.int64)
    counts[0, 1] = 1
    words = calls[0].words(calls[1], checks=False)
    _, gate = ops.deferred_step_(params, grads, state, words, counter(), None, counts)
    assert int(gate) == -1
    tensors.assert_all_same(params, before)
    numbers = (words, counter(), None, counts.double())
    with pytest.raises(RuntimeError, match="counts must be contiguous and of int64"):
        ops.deferred_step_(params, grads, state, *numbers)


def wrong():
    yield "row", [*OP_SPECS].index("gradient_variance_"), "is (no call|not a call) of"
    yield "row", -1, "is not a call of a sampler's step"
    yield "row", 1000, "is not a call of a sampler's step"
    yield "numbers", [0.1], "packed is not a call of sgld_step_"
    yield "lengths", [], "packed is not a call of sgld_step_"
    yield "lengths", [10**6], "state has fewer tensors than packed says"
    yield "lengths", [-1], "state has fewer tensors than packed says"
    yield "lengths", [0], "state has more tensors than packed says"
    yield "has_means", True, "state has fewer tensors than packed says"
    yield "offsets", [0], "state has more tensors|params has more tensors"
    yield "num_chains", -1, "num_chains"


@pytest.mark.parametrize(("key", "value", "words"), [*wrong()])
def test_words_that_do_not_fit_change_nothing(key, value, words):
    call = Made("sgld_step_")
    lists = [*map(tensors.clones, call.lists)]
    with pytest.raises(RuntimeError, match=words):
        ops.fused_step_(*lists, call.words(**{key: value}), counter())
    assert_lists_same(lists, call.lists)


def test_numbers_out_of_range_change_nothing():
    call = Made("sgld_step_")
    with pytest.raises(RuntimeError, match="Invalid lr: -1"):
        call.packed(call.words(numbers=[-1.0, 7.0, 1.0, 1.0, *call.common.values()]))
    with pytest.raises(RuntimeError, match="Invalid step"):
        ops.fused_step_(*call.lists, call.words(), counter(-1))
    for step in (torch.tensor(3.0), torch.tensor([1, 2])):
        with pytest.raises(RuntimeError, match="step must be a single int64"):
            ops.fused_step_(*call.lists, call.words(), step)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (lambda w: w[:-1], "not the words of a packed step"),
        (lambda w: torch.cat((w, w[:1])), "not the words of a packed step"),
        (lambda w: w[:0], "not the words of a packed step"),
        (lambda w: w.index_fill(0, torch.tensor(3), 2**62), "not the words"),
        (lambda w: w.index_fill(0, torch.tensor(3), -1), "not the words"),
        (lambda w: w.double(), "packed must be contiguous, of int64"),
        (lambda w: w.repeat_interleave(2)[::2], "packed must be contiguous"),
    ],
)
def test_what_is_no_call_is_refused(cut, words):
    call = Made("sghmc_step_")
    with pytest.raises(RuntimeError, match=words):
        call.packed(cut(call.words()))


def test_opcheck():
    call = Made("sghmc_step_", means=True)
    state = [t for each in (*call.lists[2:], call.means or []) for t in each]
    arguments = (*call.lists[:2], state, call.words(), counter())
    # It answers the host, and so is no part of a graph: there is nothing to fake.
    with torch.no_grad():
        op = torch.ops.torch_sgmcmc.fused_step_.default
        tests = ("test_schema", "test_autograd_registration")
        result = torch.library.opcheck(op, arguments, test_utils=tests)
    assert set(result.values()) == {"SUCCESS"}


class Compared(Made):
    """EWSG's: two minibatches, and what they are compared by."""

    def __init__(self, op, **more):
        super().__init__(op, **more)
        params = self.lists[0]
        self.proposals = [p * 0.25 for p in params]
        with_momenta = op == "sghmc_step_"
        self.momenta = self.lists[2] if with_momenta else []
        self.weights = {**dict(lr=0.3, momentum=0.8 * with_momenta, num_data=7.0)}
        self.weights |= {"prior_precision": 1.9, "temperature": 0.7}
        self.weights |= {"momentum_scale": 1.25, "surrogate": 3}
        self.prior = common("ewsg_log_ratio", **more)

    def weight_words(self, **instead):
        numbers = (*self.weights.values(), 1.0, *self.prior.values())
        lists = (self.proposals, self.momenta)
        called = ("ewsg_log_ratio", self.means, lists, self.offsets, numbers, instead)
        calls = [packed_call(*called)]
        memory = _C.packed_step(checks=False, seed=0, num_chains=0, calls=calls)
        return torch.frombuffer(memory, dtype=torch.int64)

    def step(self, proposal, weights):
        lists = [*map(tensors.clones, self.lists)]
        state = [t for each in (*lists[2:], self.means or []) for t in each]
        numbers = (self.words(), weights, counter(), proposal)
        return ops.ewsg_step_(*lists[:2], self.proposals, state, *numbers), lists

    def log_ratio(self):
        lists = (*self.lists[:2], self.proposals, self.momenta)
        more = {**self.prior, "prior_means": self.means, "num_chains": 1}
        return float(ops.ewsg_log_ratio(*lists, **self.weights, **more))


@pytest.mark.parametrize(
    "more",
    [{}, {"prior_mean": 0.4}, {"means": True}],
    ids=lambda more: "".join(more) or "plain",
)
@pytest.mark.parametrize("op", ["sghmc_step_", "sgld_step_"])
def test_ewsg_decides_and_makes_the_update(op, more):
    call = Compared(op, **more)
    # A ratio of -1: some proposals are accepted.
    call.weights["temperature"] *= -call.log_ratio() if call.log_ratio() < 0 else 1.0
    if call.log_ratio() > 0:
        call.lists[1], call.proposals = call.proposals, call.lists[1]
        call.weights["temperature"] *= -call.log_ratio()
    assert call.log_ratio() == pytest.approx(-1.0)
    expected = []
    for grads in (call.lists[1], call.proposals):
        chosen = Compared(op, **more)
        chosen.lists[1] = grads
        expected.append(chosen.by_name())
    decisions = []
    stream = {key: tensors.STREAM[key] for key in ("seed", "step")}
    for proposal in range(40):
        wanted = _C.index_chain_accepts(call.log_ratio(), **stream, proposal=proposal)
        made, lists = call.step(proposal, call.weight_words())
        assert made == wanted
        for i in (0, *range(2, len(lists))):
            tensors.assert_all_same(lists[i], expected[wanted][i])
        decisions.append(wanted)
    assert 5 < sum(decisions) < 30


@pytest.mark.parametrize("which", ["grads", "proposals"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_ewsg_changes_nothing_if_not_finite(which, value):
    call = Compared("sghmc_step_")
    bad = call.lists[1] if which == "grads" else call.proposals
    bad[-1].view(-1)[0] = value
    made, lists = call.step(0, call.weight_words())
    assert made == -1
    assert_lists_same(lists, call.lists)
    call.checks = False
    assert call.step(0, call.weight_words())[0] >= 0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("row", 0, "weights is not a call of ewsg_log_ratio"),
        ("lengths", [], "weights is not a call of ewsg_log_ratio"),
        ("lengths", [1, 10**9], "weights is not a call|fewer tensors"),
        ("lengths", [1, -1], "weights is not a call of ewsg_log_ratio"),
        ("lengths", [10**6, 0], "state has fewer tensors than packed says"),
        ("numbers", [0.1], "packed is not a call of ewsg_log_ratio"),
        ("numbers", [0.1, 0.9, 7, 1.0, 0.7, 1, 9.0, 1.0, 0.0], "Invalid surrogate: 9"),
    ],
)
def test_ewsg_refuses_weights_that_do_not_fit(key, value, words):
    call = Compared("sgld_step_")
    before = tensors.clones(call.lists[0])
    with pytest.raises(RuntimeError, match=words):
        call.step(0, call.weight_words(**{key: value}))
    for proposal in (-1, 2**24):
        with pytest.raises(RuntimeError, match="proposal"):
            call.step(proposal, call.weight_words())
    tensors.assert_all_same(call.lists[0], before)
