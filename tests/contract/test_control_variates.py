"""Control variates and SVRG: the formula, the anchor, what composes with them."""

import copy
import pickle
import warnings

import pytest
import torch
from control_variate_problems import Problem, assert_close, assert_same
from reference import DTYPES
from stored_files import through_file
from torch import nn
from torch.utils.data import DataLoader

import torch_sgmcmc as sg


def test_the_formula():
    problem = Problem()
    anchor = problem.values()
    mean_loss = float(problem.loss_fn(problem.batch(range(7))).detach())
    estimator = sg.ControlVariates(problem.sampler, problem.loss_fn)
    assert estimator.set_anchor(problem.loader()) == pytest.approx(mean_loss, rel=1e-13)
    problem.move()
    theta = problem.values()
    addresses = [p.data_ptr() for p in problem.params]
    loss = estimator.backward(problem.batch([1, 4]))
    few, all_data = problem.gradient([1, 4], anchor), problem.gradient(range(7), anchor)
    parts = zip(problem.gradient([1, 4]), few, all_data, strict=True)
    assert_close(problem.grads(), [g - a + f for g, a, f in parts])
    minibatch = problem.batch([1, 4])
    assert float(loss.detach()) == float(problem.loss_fn(minibatch).detach())
    assert_same(problem.values(), theta)
    assert [p.data_ptr() for p in problem.params] == addresses


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_variance_at_the_anchor(dtype):
    problem = Problem(dtype=dtype)
    estimator = problem.estimator()
    seen = problem.estimates(estimator)
    for grads in seen:
        assert_same(grads, seen[0])
        assert [g.dtype for g in grads] == [dtype] * 3
    want = [g.double() for g in Problem(dtype=dtype).gradient(range(7))]
    eps = 8 * torch.finfo(dtype).eps
    for g, w in zip(seen[0], want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=eps, atol=eps)


def test_unequal_batches_weigh_by_their_size():
    problem = Problem()
    want = problem.gradient(range(7))
    for size in (1, 2, 3, 7):
        estimator = sg.ControlVariates(problem.sampler, problem.loss_fn)
        estimator.set_anchor(problem.loader(size))
        assert_close(estimator.state_dict()["full_grads"], want)


def test_batch_sizes_of_nested_batches():
    problem = Problem()
    nested = [{"name": "a", "in": [{"x": x}], "y": y} for x, y in problem.loader()]
    for loader, batch_of, how in (
        (nested, lambda batch: (batch["in"][0]["x"], batch["y"]), {}),
        ([[0, 1, 2, 3], [4, 5, 6]], problem.batch, {"batch_size": len}),
    ):
        loss_fn = lambda batch, of=batch_of: problem.loss_fn(of(batch))  # noqa: E731
        estimator = sg.ControlVariates(problem.sampler, loss_fn, **how)
        estimator.set_anchor(loader)
        full = estimator.state_dict()["full_grads"]
        assert_close(full, problem.gradient(range(7)))


def test_the_full_gradient_is_kept_in_the_type_of_arithmetic():
    for dtype in DTYPES:
        state = Problem(dtype=dtype).estimator().state_dict()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert [f.dtype for f in state["full_grads"]] == [wide] * 3
        assert [a.dtype for a in state["anchor"]] == [dtype] * 3


def test_gradients_add_up():
    problem = Problem()
    estimator = problem.estimator()
    problem.move()
    estimator.backward(problem.batch([1, 4]))
    once = problem.grads()
    estimator.backward(problem.batch([1, 4]))
    assert_close(problem.grads(), [2 * g for g in once])
    # Parts of a minibatch, each with its share.
    problem.sampler.zero_grad(set_to_none=False)
    estimator.backward(problem.batch([1]), weight=0.5)
    estimator.backward(problem.batch([4]), weight=0.5)
    assert_close(problem.grads(), once)
    # A pass through the data leaves gradients alone.
    estimator.set_anchor(problem.loader())
    assert_close(problem.grads(), once)


def test_frozen_and_unused_parameters():
    problem = Problem()
    problem.params[1].requires_grad_(False)
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    problem.sampler.add_param_group({"params": [unused]})
    estimator = problem.estimator()
    problem.move()
    estimator.backward(problem.batch([2]))
    assert problem.params[1].grad is None and unused.grad is None
    assert problem.params[0].grad is not None
    state = estimator.state_dict()
    assert len(state["anchor"]) == 3 and state["full_grads"][2] is None
    estimator.load_state_dict(copy.deepcopy(state))


def test_a_parameter_that_some_minibatches_do_not_reach():
    a, b = (nn.Parameter(torch.full((2,), v, dtype=torch.float64)) for v in (1.0, 2.0))
    sampler = sg.SGLD([a, b], 0.1, num_data=4)

    def loss_fn(batch):
        loss = (a.square().sum() * batch).mean()
        return loss + b.square().sum() if bool((batch > 2).any()) else loss

    data = [torch.tensor([v], dtype=torch.float64) for v in (1.0, 2.0, 3.0, 4.0)]
    estimator = sg.ControlVariates(sampler, loss_fn)
    estimator.set_anchor(data)
    with torch.no_grad():
        a += 1
        b += 1
    # b is reached by half of the data: its full gradient at the anchor is 2 b / 2 = 2.
    for batch, b_grad in ((data[0], 2.0), (data[3], 6.0 - 4.0 + 2.0)):
        sampler.zero_grad()
        estimator.backward(batch)
        assert b.grad is not None and b.grad.tolist() == [b_grad] * 2


@pytest.mark.parametrize("trains", [True, False])
def test_random_numbers_of_the_loss(trains):
    """The full gradient would keep dropout's masks."""
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))
    model.train(trains)
    sampler = sg.SGLD(model.parameters(), lr=0.1, num_data=8)
    estimator = sg.ControlVariates(
        sampler, lambda x: model(x).square().mean(), progress=False
    )
    loader = DataLoader(torch.randn(8, 3), batch_size=4, shuffle=True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            estimator.set_anchor(loader)
    assert ["draws random numbers" in str(w.message) for w in found] == [True] * trains


def test_hooks_see_both_gradients():
    problem = Problem()
    estimator = problem.estimator()
    problem.move()
    estimator.backward(problem.batch([3]))
    want = [-g for g in problem.grads()]
    problem.sampler.zero_grad()
    for p in problem.params:
        p.register_hook(lambda grad: -grad)
    negated = problem.estimator()
    estimator.backward(problem.batch([3]))
    full = estimator.state_dict()["full_grads"]
    # f was made without the hooks: -(g - a) + f.
    assert_close(problem.grads(), [w + 2 * f for w, f in zip(want, full, strict=True)])
    twin = Problem()
    for p, q in zip(twin.params, problem.params, strict=True):
        p.data.copy_(q.data)
    want = [-g for g in twin.gradient(range(7))]
    assert_close(negated.state_dict()["full_grads"], want)


def test_buffers_see_every_evaluation():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    sampler = sg.SGLD(net.parameters(), 0.1, num_data=8)
    data = torch.randn(8, 3)
    estimator = sg.ControlVariates(sampler, lambda batch: net(batch).square().mean())
    estimator.set_anchor([data[:4], data[4:]])
    count = net[1].num_batches_tracked
    assert int(count) == 2
    estimator.backward(data[:4])
    assert int(count) == 4  # as documented: θ and the anchor
    net.eval()
    estimator.set_anchor([data])
    estimator.backward(data[:4])
    assert int(count) == 4


def minibatches(problem, seed=5):
    batches = sg.IndependentBatchSampler(len(problem.x), 2, seed=seed)
    while True:
        for indices in batches:
            yield problem.batch(indices)


SAMPLERS = [
    (sg.SGHMC, {"momentum": 0.9}),
    (sg.PSGLD, {}),
    (sg.EWSG, {"momentum": 0.9, "index_chain_length": 2}),
]


def advance(problem, estimator, batches, n):
    sampler = problem.sampler
    graph = isinstance(sampler, sg.PSGLD) and sampler.param_groups[0]["gamma"]
    for _ in range(n):
        if isinstance(sampler, sg.EWSG):
            sampler.step(lambda: estimator.backward(next(batches)))
        else:
            sampler.zero_grad()
            estimator.backward(next(batches), create_graph=graph)
            sampler.step()


class WrittenOut:
    """The estimate by separate evaluations, in place of an estimator."""

    def __init__(self, problem):
        self.problem, self.anchor = problem, problem.values()

    def at_anchor(self, batch):
        problem, own = self.problem, self.problem.params
        problem.params = [nn.Parameter(a) for a in self.anchor]
        grads = torch.autograd.grad(problem.loss_fn(batch), problem.params)
        problem.params = own
        return list(grads)

    def backward(self, batch, create_graph=False):
        problem = self.problem
        everything = (problem.x, problem.y)
        pairs = zip(self.at_anchor(batch), self.at_anchor(everything), strict=True)
        loss = problem.loss_fn(batch)
        grads = torch.autograd.grad(loss, problem.params, create_graph=create_graph)
        for p, g, (a, f) in zip(problem.params, grads, pairs, strict=True):
            p.grad = g - a + f
        return loss


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(("kind", "options"), SAMPLERS)
def test_every_sampler(kind, options):
    ours, theirs = (Problem(kind, **options) for _ in range(2))
    advance(ours, ours.estimator(), minibatches(ours), 6)
    advance(theirs, WrittenOut(theirs), minibatches(theirs), 6)
    for p, q in zip(ours.params, theirs.params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)


def test_the_refresh_schedule():
    problem = Problem()
    estimator = problem.svrg(refresh_every=3)
    batches, refreshed = minibatches(problem), []
    for step in range(8):
        calls = problem.calls
        before = problem.values()
        advance(problem, estimator, batches, 1)
        full_pass = problem.calls - calls > 2
        assert problem.calls - calls == (3 + 2 if full_pass else 2)
        if full_pass:
            refreshed.append(step)
            assert_same(estimator.state_dict()["anchor"], before)
            assert estimator.state_dict()["anchor_step"] == step
            twin = Problem()
            want = twin.gradient(range(7), before)
            assert_close(estimator.state_dict()["full_grads"], want)
    assert refreshed == [0, 3, 6]


def test_several_gradients_a_step_share_their_anchor():
    problem = Problem(sg.EWSG, index_chain_length=2)
    estimator = problem.svrg(refresh_every=2)
    batches, calls = minibatches(problem), []
    for _ in range(5):
        before = problem.calls
        advance(problem, estimator, batches, 1)
        calls.append(problem.calls - before)
    # Three gradients of two evaluations a step, and three batches every other step.
    assert calls == [9, 6, 9, 6, 9]


def test_an_anchor_before_its_time_and_a_count_that_goes_back():
    problem = Problem()
    estimator = problem.svrg(refresh_every=4)
    batches = minibatches(problem)
    advance(problem, estimator, batches, 2)
    estimator.set_anchor()
    assert estimator.state_dict()["anchor_step"] == 2
    start = problem.sampler.state_dict()
    advance(problem, estimator, batches, 3)
    assert estimator.state_dict()["anchor_step"] == 2
    advance(problem, estimator, batches, 1)
    advance(problem, estimator, batches, 1)
    assert estimator.state_dict()["anchor_step"] == 6
    problem.sampler.load_state_dict(start)
    advance(problem, estimator, batches, 1)
    assert estimator.state_dict()["anchor_step"] == 2
    # Of some of the data, if the user will have it.
    estimator.set_anchor(problem.loader()[:1])
    want = problem.gradient(range(3))
    assert_close(estimator.state_dict()["full_grads"], want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [sg.SGHMC, sg.EWSG])
@pytest.mark.parametrize("make", [Problem.svrg, Problem.estimator])
def test_resumes_in_the_middle_of_an_epoch(make, kind, dtype):
    problem = Problem(kind, dtype)
    estimator = make(problem)
    batches = sg.IndependentBatchSampler(7, 2, seed=5)

    def run(problem, estimator, batches, steps):
        stream = iter(lambda: problem.batch(batches.draw(1)[0]), None)
        advance(problem, estimator, stream, steps)

    run(problem, estimator, batches, 4)
    parts = (problem.sampler, estimator, batches)
    saved = [problem.params, *(part.state_dict() for part in parts)]
    params, *states = through_file(saved)
    run(problem, estimator, batches, 5)
    other = Problem(kind, dtype, seed=77)
    for p, q in zip(other.params, params, strict=True):
        p.data.copy_(q)
    options = {"refresh_every": 100} if make is Problem.svrg else {}
    resumed = make(other, **options)
    fresh = sg.IndependentBatchSampler(7, 2, seed=0)
    for part, state in zip((other.sampler, resumed, fresh), states, strict=True):
        part.load_state_dict(state)
    calls = other.calls
    run(other, resumed, fresh, 5)
    assert_same(other.values(), problem.values())
    per_step = 4 if kind is sg.EWSG else 2
    # SVRG made one pass, at step 6.
    assert other.calls - calls == 5 * per_step + (3 if make is Problem.svrg else 0)


def test_a_state_dict_is_a_snapshot():
    problem = Problem()
    estimator = problem.estimator()
    state = estimator.state_dict()
    assert state.keys() == {"anchor", "full_grads"}
    kept = copy.deepcopy(state)
    problem.move()
    estimator.set_anchor(problem.loader())
    assert_same(state["anchor"], kept["anchor"])
    assert_same(state["full_grads"], kept["full_grads"])
    estimator.load_state_dict(kept)
    assert_same(estimator.state_dict()["anchor"], kept["anchor"])
    empty = sg.ControlVariates(problem.sampler, problem.loss_fn)
    estimator.load_state_dict(empty.state_dict())
    with pytest.raises(RuntimeError, match="no anchor yet"):
        estimator.backward(problem.batch([0]))


def test_progress(capsys):
    problem = Problem()
    problem.estimator(progress=False)
    assert capsys.readouterr().err == ""
    problem.estimator()
    assert "full gradient" in capsys.readouterr().err
    problem.estimator().backward(problem.batch([1]))
    assert len(problem.grads()) == 3


def test_parameters_of_other_samplers_keep_their_gradients():
    """Nested samplers: each is given the gradients of its own parameters."""
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(()))
    x = torch.linspace(-1, 1, 30).view(10, 3)
    loss = lambda rows: (x[rows] @ a + b).square().mean()  # noqa: E731
    sampler = sg.SGLD([a], 1e-3, num_data=10, seed=1)
    estimator = sg.SVRG(
        sampler, loss, torch.arange(10).split(4), refresh_every=9, progress=False
    )
    b.grad = torch.tensor(7.0)
    estimator.backward(torch.arange(5))
    assert a.grad is not None and b.grad == 7.0


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


class Loss(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


@pytest.mark.parametrize("again", [copy.deepcopy, through_pickle])
def test_copies_have_the_anchor(again):
    model, x = Loss(2, 1), torch.randn(8, 2)
    sampler = sg.SGLD(model.parameters(), 1e-3, num_data=8, seed=1)
    estimator = sg.ControlVariates(sampler, model, progress=False)
    estimator.set_anchor(x.split(4))
    copied = again(estimator)
    assert torch.equal(copied.backward(x[:4]), estimator.backward(x[:4]))
