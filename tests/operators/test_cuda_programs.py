"""Whole programs with parameters on a GPU: samplers with closures, driver, compiler.

As in ``test_cuda.py`` the CPU takes the GPU's place where there is none. Gradients are
torch's own here, whose sums another device rounds differently: chains are compared
while rounding in float64 has not yet grown.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness.inductor import NEEDS_COMPILER
from short_chains import assert_same, make, make_params, set_grads, take_step
from test_cuda import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

N, WIDTH = 200, 5


class Regression:
    """A logistic regression in float64 with data on a device."""

    def __init__(self, device):
        g = torch.Generator().manual_seed(1)
        x = torch.randn(N, WIDTH, generator=g, dtype=torch.float64)
        truth = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
        y = (torch.rand(N, generator=g) < torch.sigmoid(x @ truth)).double()
        self.x, self.y = x.to(device), y.to(device)
        self.theta = nn.Parameter(truth.to(device, copy=True))
        self.generator = torch.Generator().manual_seed(2)

    def losses(self, indices):
        eta = self.x[indices] @ self.theta
        return F.softplus(eta) - self.y[indices] * eta

    def log_likelihoods(self, indices):
        return -self.losses(indices)

    def minibatch(self, size=20):
        drawn = torch.randperm(N, generator=self.generator)[:size]
        return self.losses(drawn.to(self.x.device))

    def mean_loss(self):
        self.theta.grad = None
        loss = self.minibatch().mean()
        loss.backward()
        return loss


def bouncy(data, **settings):
    options = {"num_data": N, "prior_precision": 1.0, "refresh_rate": 1.0, "seed": 3}
    return sg.SBPS([data.theta], **options, **settings), data.minibatch


def subsampled(data, **settings):
    sampler = sg.HMCECS(
        [data.theta], num_data=N, prior_precision=1.0, step_size=0.3, seed=3, **settings
    )
    return sampler, data.log_likelihoods


def whole(data):
    """HMC, whose closure is of all data."""

    def closure():
        data.theta.grad = None
        loss = data.losses(torch.arange(N, device=data.x.device)).mean()
        loss.backward()
        return loss

    sampler = sg.HMC([data.theta], step_size=0.2, num_steps=5, num_data=N, seed=3)
    sampler.set_mass([torch.linspace(1, 2, WIDTH)])
    return sampler, closure


def weighted(data):
    sampler = sg.EWSG([data.theta], lr=0.05, num_data=N, index_chain_length=3, seed=3)
    return sampler, data.mean_loss


PROGRAMS = {
    "SBPS": bouncy,
    "pSBPS": partial(bouncy, preconditioned=True, eps=0.1),
    "HMCECS": partial(subsampled, subsample_size=20, num_blocks=5),
    "HMCECS signed": partial(
        subsampled, subsample_size=5, estimator="signed", num_factors=10, num_blocks=5
    ),
    "HMC": whole,
    "EWSG": weighted,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_samplers_with_closures_make_the_chain_of_the_cpu(name):
    chains = []
    for device in ("cpu", DEVICE):
        data = Regression(device)
        start = data.theta.detach().clone()
        sampler, closure = PROGRAMS[name](data)
        places = []
        for _ in range(12):
            sampler.step(closure)
            places.append(data.theta.detach().cpu().clone())
        assert data.theta.device.type == device
        assert not torch.equal(data.theta.detach(), start)
        chains.append(torch.stack(places))
    torch.testing.assert_close(chains[1], chains[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["SBPS", "HMCECS", "HMC", "EWSG"])
def test_closures_resume(name, tmp_path):
    data, other = Regression(DEVICE), Regression(DEVICE)
    sampler, closure = PROGRAMS[name](data)
    twin, closure_of_twin = PROGRAMS[name](other)
    for _ in range(4):
        sampler.step(closure)
    torch.save(sampler.state_dict(), tmp_path / "state.pt")
    other.theta.data.copy_(data.theta.data)
    other.generator.set_state(data.generator.get_state())
    twin.load_state_dict(torch.load(tmp_path / "state.pt", map_location="cpu"))
    for _ in range(4):
        sampler.step(closure)
        twin.step(closure_of_twin)
        assert_same([other.theta], [data.theta])


def test_svrg():
    chains = []
    for device in ("cpu", DEVICE):
        data = Regression(device)
        indices = torch.arange(N, device=device)
        sampler = sg.SGLD([data.theta], lr=0.05, num_data=N, seed=1)
        variates = sg.SVRG(
            sampler, lambda i, data=data: data.losses(i).mean(), indices.split(50),
            refresh_every=5, batch_size=len, progress=False
        )  # fmt: skip
        for step in range(12):
            variates.backward(indices.split(50)[step % 4])
            sampler.step()
        chains.append(data.theta.detach().cpu())
    torch.testing.assert_close(chains[1], chains[0], rtol=1e-9, atol=1e-9)


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 2))
    return net.to(DEVICE)


def batches():
    data = Regression("cpu")
    return list(zip(data.x.float().split(50), data.y.long().split(50), strict=True))


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize(
    "sampler",
    [
        partial(sg.SGHMC, lr=0.01, momentum=0.9, num_data=N, prior_precision=1.0),
        partial(sg.PSGLD, lr=1e-4, num_data=N, prior_precision=1.0),
    ],
    ids=["SGHMC", "PSGLD"],
)
def test_a_run_is_resumed_and_predicts(sampler, tmp_path):
    stores = []
    for folder, parts in (("whole", [40]), ("parts", [17, 40])):
        for steps in parts:
            store = sg.sample(
                network, sampler, batches(), cross_entropy, tmp_path / folder,
                steps=steps, burn_in=10, every=5, chains=2, seed=4, progress=False
            )  # fmt: skip
        stores.append(store)
    draws = [list(store) for store in stores]
    assert len(draws[0]) == len(draws[1]) == 12
    for a, b in zip(*draws, strict=True):
        assert_same(*([t for _, t in sorted(d.items())] for d in (a, b)))
    x = torch.cat([x for x, _ in batches()]).to(DEVICE)
    prediction = sg.predict(network(), stores[0], x)
    mean = torch.zeros(N, 2, dtype=torch.float64)
    for draw in draws[0]:
        out = torch.func.functional_call(network().cpu(), dict(draw), x.cpu())
        mean += out.double().softmax(1) / len(draws[0])
    found = prediction.mean.double().cpu()
    torch.testing.assert_close(found, mean, rtol=1e-4, atol=1e-5)


def test_temperatures_equal_those_on_the_cpu():
    summaries = []
    for device in ("cpu", DEVICE):
        params = [nn.Parameter(p.detach().to(device)) for p in make_params()]
        sampler = make("SGHMC", params)
        gauges = sg.TemperatureMonitor(sampler)
        for step in range(30):
            take_step(sampler, params, step)
        summaries.append(str(gauges.summary()))
    assert summaries[0] == summaries[1]


@NEEDS_COMPILER
def test_compiled_steps_are_the_chain():
    params = [nn.Parameter(p.detach().to(DEVICE)) for p in make_params()]
    others = [nn.Parameter(p.detach().to(DEVICE)) for p in make_params()]
    sampler, eager = make("SGHMC capturable", params), make("SGHMC capturable", others)
    torch._dynamo.reset()
    compiled = torch.compile(sampler.step)
    for step in range(4):
        set_grads(params, step)
        set_grads(others, step)
        compiled()
        eager.step()
        assert_same(params, others)
    torch._dynamo.reset()


def test_chains_side_by_side_are_the_chains():
    chains = 3
    g = torch.Generator().manual_seed(0)
    start = [torch.randn(chains, *s, generator=g).to(DEVICE) for s in ((4, 3), (7,))]
    together = [nn.Parameter(t.clone()) for t in start]
    sampler = sg.SGHMC(together, lr=0.1, num_data=N, num_chains=chains, seed=8)
    for k in range(chains):
        alone = [nn.Parameter(t[k].clone()) for t in start]
        one = sg.SGHMC(alone, lr=0.1, num_data=N, seed=sg.fold_in(8, k))
        if k == 0:
            for _ in range(5):
                for p in together:
                    p.grad = p.detach().clone()
                sampler.step()
        for _ in range(5):
            for p in alone:
                p.grad = p.detach().clone()
            one.step()
        assert_same(alone, [p[k] for p in together])


@pytest.mark.parametrize("kind", ["SGLD", "SGHMC online", "PSGLD capturable", "SGNHT"])
def test_sharded_parameters_make_the_chain(kind, tmp_path):
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh(DEVICE, (1,))
        shape = (12, 7)
        start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        plain = [nn.Parameter(start.to(DEVICE, copy=True)) for _ in range(3)]
        placements = [[Shard(0)], [Shard(1)], [Replicate()]]
        whole = start.to(DEVICE, copy=True)
        sharded = [
            nn.Parameter(distribute_tensor(whole, mesh, placement))
            for placement in placements
        ]
        sampler, twin = make(kind, plain), make(kind, sharded)
        for _ in range(4):
            for p, q in zip(plain, sharded, strict=True):
                p.grad = p.detach().sin()
                q.grad = q.detach().sin()
            sampler.step()
            twin.step()
        assert all(isinstance(q, DTensor) for q in sharded)
        assert_same([q.full_tensor() for q in sharded], plain)
    finally:
        dist.destroy_process_group()
