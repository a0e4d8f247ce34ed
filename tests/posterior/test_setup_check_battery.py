"""Set-ups that are wrong and set-ups that are right, each point's own."""

import math
from functools import partial

import pytest
import torch
from test_setup_check import (
    BATCH,
    SBPS,
    SGHMC,
    N,
    Pair,
    classes,
    each,
    independent,
    loader_of,
    mean,
    mlp,
    numbers,
    scaled,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import torch_sgmcmc as sg

MANY = 3000


# ---- Data, models and losses --------------------------------------------------
def ten_classes():
    x = torch.randn(MANY, 20)
    return TensorDataset(x, (x @ torch.randn(20, 10)).argmax(1))


def ten(*last):
    return nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10), *last)


def large(data):
    return loader_of(data, batch_size=500)


TEN = {
    "model": ten,
    "data": ten_classes,
    "loader": large,
    "sampler": partial(SGHMC, lr=0.03, num_data=MANY),
}


def softmax_ten():
    return ten(nn.Softmax(1))


def wide():
    return nn.Sequential(
        nn.Linear(784, 400),
        nn.ReLU(),
        nn.Linear(400, 400),
        nn.ReLU(),
        nn.Linear(400, 10),
    )


def bright():
    return TensorDataset(torch.rand(N, 784), torch.randint(10, (N,)))


MANY_KINKS = {"model": wide, "data": bright, "sampler": partial(SGHMC, lr=0.03)}


def zero_ten():
    model = ten()
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    return model


def focal(model, batch):
    logs = model(batch[0]).log_softmax(1).gather(1, batch[1][:, None])
    return -((1 - logs.exp()) ** 2 * logs).mean()


def tokens():
    ids = torch.randint(1, 11, (N, 6))
    ids[:, 4:] = torch.where(torch.rand(N, 2) < 0.5, 0, ids[:, 4:])
    return TensorDataset(ids, (ids[:, 0] > 5).long() + (ids[:, 1] > 5).long())


class Bag(nn.Module):
    """A text classifier that takes the mean of embeddings."""

    def __init__(self, masked=False, **options):
        super().__init__()
        self.embed = nn.Embedding(11, 8, **options)
        self.head = nn.Linear(8, 3)
        self.masked = masked

    def forward(self, ids):
        words = self.embed(ids)
        if self.masked:
            words = words * (ids != 0)[..., None]
        return self.head(words.mean(1))


def bag(**options):
    return {"model": partial(Bag, **options), "data": tokens}


class Through(torch.autograd.Function):
    """A function forward, and another gradient."""

    @staticmethod
    def forward(ctx, x, kind):
        ctx.kind = kind
        return x.sign() if kind == "sign" else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return {"sign": grad, "reversed": -grad, "clipped": grad.clamp(-1e-5, 1e-5)}[
            ctx.kind
        ], None


class Altered(nn.Module):
    """A network whose hidden layer has an altered gradient."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(8, 20), nn.Linear(20, 3), kind

    def forward(self, x):
        return self.last(Through.apply(torch.tanh(self.first(x)), self.kind))


class Detached(nn.Module):
    def __init__(self, unused=False):
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(8, 20), nn.Linear(20, 3), unused
        self.other = nn.Linear(8, 20)

    def forward(self, x):
        hidden = self.first(x)
        if not self.unused:
            hidden = hidden + self.other(x).detach()
        return self.last(torch.relu(hidden))


def hooked(function, name="0.weight"):
    model = mlp()
    model.get_parameter(name).register_hook(function)
    return model


def penalised(model, batch, by=1e-3, loss=mean):
    return loss(model, batch) + by * sum(p.square().sum() for p in model.parameters())


def penalised_each(model, batch):
    return each(model, batch) + 1e-3 * model[0].weight.square().sum()


def weighted(data):
    weights = torch.where(data.tensors[1] == 0, 10.0, 1.0)
    return DataLoader(data, BATCH, sampler=WeightedRandomSampler(weights, N))


def in_order(data, **options):
    return DataLoader(data, **{"batch_size": BATCH, **options})


def sorted_classes():
    x, y = classes().tensors
    order = y.argsort(stable=True)
    return TensorDataset(x[order], y[order])


def sorted_numbers():
    x = torch.linspace(-1, 1, N)[:, None].expand(N, 8).contiguous()
    return TensorDataset(x, x[:, :1].sin())


class Tokens(nn.Module):
    """A language model: logits of the next tokens."""

    def __init__(self, size=11):
        super().__init__()
        self.embed, self.head = nn.Embedding(size, 16), nn.Linear(16, size)

    def forward(self, ids):
        return self.head(self.embed(ids))


def texts():
    return TensorDataset(torch.randint(11, (N, 7)))


def next_token(model, batch, **options):
    logits = model(batch[0][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten(), **options)


def next_token_sum(model, batch):
    return next_token(model, batch, reduction="sum") / len(batch[0])


LM = {"model": Tokens, "data": texts, "loss": next_token}


def images():
    x = torch.rand(N, 1, 8, 8).round()
    return TensorDataset(x, (F.avg_pool2d(x, 3, 1, 1) * 3).long().clamp(max=2)[:, 0])


def segmenter():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)
    )


def autoencoder():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.ReLU(),
        nn.Linear(12, 64),
        nn.Unflatten(1, (1, 8, 8)),
    )


def offset():
    x = torch.randn(N, 8)
    return TensorDataset(x, 30 + x[:, :1] + torch.randn(N, 1))


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.value.expand(len(x), 1)


def zero_regression():
    x = torch.randn(N, 8)
    return TensorDataset(x, torch.zeros(N, 1))


def zero_mlp():
    model = mlp(1)
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    return model


def scripted():
    return torch.jit.script(mlp())


class Noisy(nn.Module):
    """A regression whose σ is sampled too."""

    def __init__(self):
        super().__init__()
        self.net, self.log_noise = mlp(1), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.net(x)


def poisson():
    x = torch.randn(N, 8)
    return TensorDataset(x, torch.poisson(x[:, :1].exp()))


def attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 8)), layer, nn.Flatten(), nn.Linear(8, 3))


def in_half(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch[0]).float(), batch[1])


def named(data):
    return [Pair(*batch) for batch in loader_of(data)]


def with_lr(lr, **options):
    return partial(SGHMC, lr=lr, **options)


ONE = {"model": lambda: mlp(1), "data": numbers}
SEG = {"model": segmenter, "data": images, "sampler": with_lr(0.003)}
AUTO = {"model": autoencoder, "data": images, "sampler": with_lr(0.003)}
HMC = partial(sg.HMC, step_size=1e-3, num_steps=3, num_data=N, prior_precision=1.0)

# Point, name, set-up, kind of the worst issue (None of a right one).
SETUPS = [
    # 1: the loss's value.
    (1, "a softmax, ten classes", TEN | {"model": softmax_ten}, "probabilities"),
    (1, "probabilities into nll_loss",
     TEN | {"model": softmax_ten, "loss": partial(scaled, loss=F.nll_loss)},
     "probabilities"),
    (1, "ten times", TEN | {"loss": partial(scaled, by=10.0)}, "scaled loss"),
    (1, "ten classes", TEN, None),
    (1, "focal", TEN | {"loss": focal, "model": zero_ten}, None),
    (1, "a loss of 0",
     ONE | {"model": zero_mlp, "data": zero_regression,
            "loss": sg.losses.gaussian(noise=1.0)}, None),
    (1, "a σ that is sampled",
     {"model": Noisy, "data": numbers, "loss": sg.losses.gaussian("log_noise")}, None),
    # 2: the gradient.
    (2, "scale_grad_by_freq", bag(scale_grad_by_freq=True), "gradient"),
    (2, "signs, straight through", {"model": partial(Altered, "sign")}, "gradient"),
    (2, "a hook that clips",
     {"model": lambda: hooked(lambda g: g.clamp(-1e-3, 1e-3))}, "gradient"),
    (2, "SBPS with a hook that reverses",
     {"model": lambda: hooked(lambda g: -g), "sampler": SBPS, "loss": each,
      "loader": independent}, "gradient"),
    (2, "many kinks", MANY_KINKS, None),
    (2, "a transformer", {"model": attention}, None),
    (2, "autocast", {"loss": in_half}, None),
    (2, "embeddings", bag(), None),
    # 3: elements without a gradient.
    (3, "padding_idx", bag(padding_idx=0), "no gradient"),
    (3, "a hook that masks all",
     {"model": lambda: hooked(torch.zeros_like)}, "no gradient"),
    (3, "a detached layer", {"model": Detached}, "no gradient"),
    (3, "a mask in forward", bag(masked=True), None),
    # 4: penalties.
    (4, "a penalty", {"loss": penalised}, "penalty"),
    (4, "a penalty, SBPS",
     {"loss": penalised_each, "sampler": SBPS, "loader": independent}, "penalty"),
    (4, "a penalty alone",
     {"loss": penalised, "sampler": partial(SGHMC, prior_precision=0.0)}, None),
    # 5: the loader.
    (5, "weighted data", {"loader": weighted}, "weighted data"),
    (5, "num_samples as num_data",
     {"loader": lambda d: DataLoader(
         d, BATCH, sampler=WeightedRandomSampler(torch.ones(N), 200)),
      "sampler": partial(SGHMC, num_data=200)}, "num_data"),
    (5, "drop_last in order",
     {"loader": partial(in_order, batch_size=70, drop_last=True)}, "data order"),
    (5, "sorted classes", {"data": sorted_classes, "loader": in_order}, "data order"),
    (5, "sorted numbers",
     {"model": lambda: mlp(1), "data": sorted_numbers, "loader": in_order,
      "loss": partial(scaled, loss=F.mse_loss, by=0.5)}, "data order"),
    (5, "HMC with minibatches",
     {"sampler": HMC}, "dependent minibatches"),
    (5, "HMC", {"sampler": HMC, "loader": partial(in_order, batch_size=N)}, None),
    (5, "in order", {"loader": in_order}, None),
    (5, "all data at once, sorted",
     {"data": sorted_numbers, "model": lambda: mlp(1),
      "loader": partial(in_order, batch_size=N),
      "loss": partial(scaled, loss=F.mse_loss, by=0.5)}, None),
    # 6: tokens.
    (6, "a mean over tokens, N", LM, "scaled loss"),
    (6, "a sum over tokens, all counted",
     LM | {"loss": next_token_sum, "sampler": partial(SGHMC, num_data=6 * N)},
     "num_data"),
    (6, "tokens", LM | {"sampler": partial(SGHMC, num_data=6 * N)}, None),
    # 7: heat.
    (7, "a mean that stays hot",
     {"model": Mean, "data": offset, "loss": sg.losses.gaussian(noise=1.0),
      "sampler": with_lr(0.06, momentum=0.96)}, "above T"),
    (7, "a bias at T_kin = 11.8",
     {"model": Mean, "data": offset, "loss": sg.losses.gaussian(noise=0.2),
      "sampler": with_lr(0.0108, momentum=0.85)}, "above T"),
    (7, "hot with any noise", {"sampler": with_lr(3.0, momentum=0.99)}, "above T"),
    # 8: no trace.
    (8, "max_norm", bag(max_norm=0.5), "gradient"),
    (8, "a ScriptModule", {"model": scripted}, None),
    # 9: right set-ups at a fresh start.
    (9, "an autoencoder, Gaussian",
     AUTO | {"sampler": with_lr(0.001),
             "loss": lambda m, b: sg.losses.gaussian(0.3).of(m(b[0]), b[0], m)}, None),
    (9, "a segmenter, larger lr",
     SEG | {"loss": sg.losses.categorical(), "sampler": with_lr(0.01)}, None),
]  # fmt: skip
#: The set-up of each point that the default level has, besides all of point 7.
DEFAULT = {
    "a softmax, ten classes",
    "ten times",
    "ten classes",
    "scale_grad_by_freq",
    "padding_idx",
    "a penalty",
    "weighted data",
    "a mean over tokens, N",
    "tokens",
    "a bias at T_kin = 11.8",
    "a ScriptModule",
    "a segmenter, larger lr",
}


def made(seed, model=mlp, loss=mean, data=classes, loader=loader_of, sampler=SGHMC):
    """The arguments of ``check``."""
    torch.manual_seed(seed)
    model = model()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return model, loss, loader(data()), sampler(named, seed=0)


def cases():
    for point, name, options, kind in SETUPS:
        for seed in range(3):
            level = "default" if name in DEFAULT and seed == 0 else "full"
            marks = getattr(pytest.mark, level)
            words = f"{point}-{name}-{seed}"
            yield pytest.param(options, kind, seed, id=words, marks=marks)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(("options", "kind", "seed"), [*cases()])
def test_finds_the_fault_alone(options, kind, seed):
    found = sg.check_setup(*made(seed, **options))
    kinds = [issue.kind for issue in found.issues]
    assert (kind in kinds) if kind else not kinds, found
    assert found.gradients <= 80 and math.isfinite(found.loss)
