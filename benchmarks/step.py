"""Cost of one update, relative to the optimizer that it replaces.

    python benchmarks/step.py [--threads 1 2] [--device cpu cuda] [--quick]

Updates only, gradients in place, fp32: SGLD and SGHMC against ``torch.optim.SGD``
without and with momentum (foreach and fused) and against the eager sampler that people
write (``add_`` and ``randn_like``), pSGLD and SGNHT against what their bytes would cost
at SGHMC's speed, for (a) the MNIST network 784-100-10, (b) the tensors of ResNet-18,
(c) one tensor of 10^8 elements; the share of the memory bandwidth measured in the same
run; what a step of EWSG takes beyond its gradients, relative to one of SGHMC, as one
chain and as 10^4 chains in one tensor; the overhead of the Python ``step()`` over the
operator; a whole training step of the MNIST network; what it takes to look whether
gradients are finite, in a training step (of the MNIST network with minibatches of 500,
of ResNet-18 with 16) and in an update alone. Candidates take turns, round by round, and
the median over rounds is reported, so that a noisy machine disturbs all alike.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C
from torch_sgmcmc.core import ops

LR, NUM_DATA, MOMENTUM = 0.1, 50_000, 0.9
NOISE = (2 * LR / NUM_DATA) ** 0.5
# Moved for each element of a step. pSGLD without Γ: θ and V are read and written.
BYTES = {"SGLD": 12, "SGHMC": 20, "PSGLD": 20, "PSGLD frozen": 16, "SGNHT": 28}
Step = Callable[[], object]


def synchronize(device: torch.device) -> None:
    """Waits for the device, if there is something to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    steps: dict[str, Step], device: torch.device, rounds: int, seconds: float
) -> dict[str, float]:
    """Median time of each step in seconds; the steps take turns."""
    repeats = {}
    for name, step in steps.items():
        step()
        synchronize(device)
        started = time.perf_counter()
        step()
        synchronize(device)
        once = time.perf_counter() - started
        repeats[name] = max(1, int(seconds / max(once, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            synchronize(device)
            started = time.perf_counter()
            for _ in range(repeats[name]):
                step()
            synchronize(device)
            times[name].append((time.perf_counter() - started) / repeats[name])
    return {name: statistics.median(values) for name, values in times.items()}


def eager_sgld(params: list[Tensor]) -> Step:
    """SGLD as people write it."""

    @torch.no_grad()
    def step() -> None:
        for p in params:
            p.add_(p.grad, alpha=-LR).add_(torch.randn_like(p), alpha=NOISE)

    return step


def eager_sghmc(params: list[Tensor]) -> Step:
    """SGHMC as people write it."""
    scale = ((1 - MOMENTUM) ** 0.5) * NOISE
    momenta = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step() -> None:
        for p, v in zip(params, momenta, strict=True):
            v.mul_(MOMENTUM).add_(p.grad, alpha=-LR)
            v.add_(torch.randn_like(v), alpha=scale)
            p.add_(v)

    return step


def candidates(params: list[nn.Parameter]) -> dict[str, Step]:
    """All updates of one set of parameters."""
    sgd = torch.optim.SGD
    common = {"num_data": NUM_DATA, "prior_precision": 1.0}
    return {
        "SGD foreach": sgd(params, LR, foreach=True).step,
        "SGD fused": sgd(params, LR, fused=True).step,
        "SGDm foreach": sgd(params, LR, MOMENTUM, foreach=True).step,
        "SGDm fused": sgd(params, LR, MOMENTUM, fused=True).step,
        "eager SGLD": eager_sgld(params),
        "eager SGHMC": eager_sghmc(params),
        "SGLD": sg.SGLD(params, LR, **common).step,
        "SGHMC": sg.SGHMC(params, LR, MOMENTUM, **common).step,
        "PSGLD": sg.PSGLD(params, LR, gamma=False, **common).step,
        "PSGLD frozen": sg.PSGLD(params, LR, adapt=False, **common).step,
        "SGNHT": sg.SGNHT(params, LR, MOMENTUM, **common).step,
    }


def parameters(shapes: list[torch.Size], device: torch.device) -> list[nn.Parameter]:
    """Random parameters with random gradients."""
    params = [nn.Parameter(torch.randn(s, device=device) * 0.05) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    return params


def ewsg_step(
    params: list[nn.Parameter], num_chains: int | None, **settings: float
) -> Step:
    """A step of EWSG whose closure has its gradients ready."""
    # Two minibatches' gradients, at memory of their own, as backward() would leave.
    draws = itertools.cycle(
        [[torch.randn_like(p) * 1e-3 for p in params] for _ in "ab"]
    )

    def closure() -> None:
        for p, grad in zip(params, next(draws), strict=True):
            p.grad = grad

    sampler = sg.EWSG(
        params,
        LR,
        MOMENTUM,
        num_data=NUM_DATA,
        num_chains=num_chains,
        **settings,
    )

    def step() -> None:
        sampler.step(closure)

    return step


def report_ewsg(title: str, params: list[nn.Parameter], rounds: int) -> None:
    """EWSG's step with one proposal, gradients not counted, relative to SGHMC's."""
    common = {"num_data": NUM_DATA}
    chains = params[0].shape[0]
    batched = all(p.dim() > 1 and p.shape[0] == chains for p in params)
    times = measure(
        {
            "SGHMC": sg.SGHMC(params, LR, MOMENTUM, prior_precision=1.0, **common).step,
            "EWSG": ewsg_step(params, None, prior_precision=1.0),
            "EWSG, flat prior": ewsg_step(params, None),
            **({"EWSG, chains": ewsg_step(params, chains)} if batched else {}),
        },
        params[0].device,
        rounds,
        0.05,
    )
    print(f"\nEWSG beyond its gradients, {title}:")
    for name, seconds in times.items():
        ratio = seconds / times["SGHMC"]
        print(f"  {name:18s}{seconds * 1e6:14.1f} µs  {ratio:.2f} x SGHMC")


def mnist_network() -> nn.Sequential:
    """The network of the SGHMC paper."""
    return nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 10))


def shapes_of(case: str, elements: int) -> list[torch.Size]:
    """The tensors of a case."""
    if case == "a":
        return [p.shape for p in mnist_network().parameters()]
    if case == "b":
        from torchvision.models import resnet18

        return [p.shape for p in resnet18().parameters()]
    return [torch.Size([elements])]


def bandwidth(device: torch.device, elements: int, rounds: int) -> float:
    """Bytes a second: the best of a copy and an in-place add."""
    a = torch.ones(elements, device=device)
    b = torch.ones(elements, device=device)
    times = measure(
        {"copy": lambda: a.copy_(b), "add": lambda: a.add_(b)}, device, rounds, 0.1
    )
    return max(8 * elements / times["copy"], 12 * elements / times["add"])


def report_case(
    title: str, params: list[nn.Parameter], rounds: int, peak: float | None
) -> None:
    """Times and ratios of all candidates for one set of parameters."""
    device = params[0].device
    numel = sum(p.numel() for p in params)
    times = measure(candidates(params), device, rounds, 0.05)
    print(f"\n{title}: {len(params)} tensors, {numel:,} elements")
    for name, seconds in times.items():
        print(
            f"  {name:14s}{seconds * 1e6:14.1f} µs {seconds / numel * 1e9:8.3f} ns/elt"
        )
    for name, plain in (("SGLD", "SGD"), ("SGHMC", "SGDm")):
        t = times[name]
        share = ""
        if peak is not None:
            share = f"; {BYTES[name] * numel / t / peak:.0%} of the memory bandwidth"
        print(
            f"  {name}: {t / times[f'{plain} foreach']:.2f} x {plain} foreach, "
            f"{t / times[f'{plain} fused']:.2f} x {plain} fused, "
            f"{times[f'eager {name}'] / t:.2f} x faster than eager{share}"
        )

    for name in ("PSGLD", "PSGLD frozen", "SGNHT"):
        ratio, bytes_ratio = times[name] / times["SGHMC"], BYTES[name] / BYTES["SGHMC"]
        print(
            f"  {name}: {ratio:.2f} x SGHMC, {ratio / bytes_ratio:.2f} x what its "
            "bytes cost at its speed"
        )


def report_overhead(rounds: int) -> None:
    """Python's share of a step on the MNIST network."""
    params = parameters(shapes_of("a", 0), torch.device("cpu"))
    grads = [p.grad for p in params]
    common = {"num_data": NUM_DATA, "prior_precision": 1.0}
    sgld = sg.SGLD(params, LR, **common)
    sghmc = sg.SGHMC(params, LR, MOMENTUM, **common)
    sghmc.step()
    momenta = [sghmc.state[p]["momentum"] for p in params]
    shared = {
        "lr": LR,
        "num_data": NUM_DATA,
        "prior_precision": 1.0,
        "temperature": 1.0,
        "offsets": sgld.param_groups[0]["offsets"],
        "seed": 0,
        "step": 1,
    }
    extra = {
        "momentum": MOMENTUM,
        "noise_estimate": 0.0,
        "resample_momentum_every": 0,
    }

    def sgld_operator() -> None:
        with torch.no_grad():
            ops.sgld_step_(params, grads, [], **shared)

    def sghmc_operator() -> None:
        with torch.no_grad():
            ops.sghmc_step_(params, grads, momenta, [], [], **shared, **extra)

    times = measure(
        {
            "SGLD": sgld.step,
            "SGLD operator": sgld_operator,
            "SGHMC": sghmc.step,
            "SGHMC operator": sghmc_operator,
        },
        torch.device("cpu"),
        rounds,
        0.05,
    )
    print("\nOverhead of step() over the operator on (a):")
    for name in ("SGLD", "SGHMC"):
        over = times[name] - times[f"{name} operator"]
        print(f"  {name}: {over * 1e6:.1f} µs of {times[name] * 1e6:.1f} µs")


def training(
    network: Callable[[], nn.Module],
    x: Tensor,
    make: Callable[..., torch.optim.Optimizer],
) -> Step:
    """A training step on one minibatch of ten classes."""
    torch.manual_seed(0)
    model = network().to(x.device)
    y = torch.randint(10, (len(x),), device=x.device)
    optimizer = make(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def report_nonfinite(device: torch.device, rounds: int) -> None:
    """Steps that look at their gradients, relative to steps that do not.

    One sampler makes both in turns, so that whatever else the machine does falls on
    both alike.
    """
    from torchvision.models import resnet18

    print("\nnonfinite='raise', relative to 'ignore' (medians of steps in turns):")
    cases = {
        "MNIST network, batch 500": (mnist_network, torch.rand(500, 784), 20 * rounds),
        "ResNet-18, batch 16": (resnet18, torch.rand(16, 3, 224, 224), rounds),
    }
    for title, (network, x, pairs) in cases.items():
        for name in ("SGLD", "SGHMC"):
            torch.manual_seed(0)
            model, x = network().to(device), x.to(device)
            y = torch.randint(10, (len(x),), device=device)
            # Small: whatever is trained here stays finite.
            sampler = getattr(sg, name)(
                model.parameters(), LR / 1000, num_data=NUM_DATA
            )
            whole: dict[str, list[float]] = {"raise": [], "ignore": []}
            alone: dict[str, list[float]] = {"raise": [], "ignore": []}
            for pair in range(pairs + 2):
                for choice in sorted(whole, reverse=bool(pair % 2)):
                    sampler.param_groups[0]["nonfinite"] = choice
                    synchronize(device)
                    started = time.perf_counter()
                    sampler.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    synchronize(device)
                    updating = time.perf_counter()
                    sampler.step()
                    synchronize(device)
                    if pair >= 2:  # the first are warm-up
                        now = time.perf_counter()
                        whole[choice].append(now - started)
                        alone[choice].append(now - updating)
            for what, times in (("training step", whole), ("update in it", alone)):
                looking, plain = map(statistics.median, times.values())
                print(
                    f"  {title}, {name}, {what}: {looking * 1e6:.1f} µs, "
                    f"{looking / plain:.3f} x"
                )


def report_training(device: torch.device, rounds: int) -> None:
    """A whole training step of the MNIST network, minibatches of 500."""

    def of(make: Callable[..., torch.optim.Optimizer]) -> Step:
        return training(mnist_network, torch.rand(500, 784, device=device), make)

    times = measure(
        {
            "SGD with momentum": of(lambda p: torch.optim.SGD(p, LR, MOMENTUM)),
            "SGLD": of(lambda p: sg.SGLD(p, LR, num_data=NUM_DATA, seed=1)),
            "SGHMC": of(lambda p: sg.SGHMC(p, LR, MOMENTUM, num_data=NUM_DATA, seed=2)),
        },
        device,
        rounds,
        0.1,
    )
    plain = times["SGD with momentum"]
    print("\nTraining step of the MNIST network, batch 500:")
    for name, seconds in times.items():
        print(f"  {name:18s}{seconds * 1e6:10.1f} µs  {seconds / plain:.3f} x")


def main() -> None:
    """Prints one table for each device and number of threads."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", nargs="+", help="default: cpu, and cuda if present")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="10^7 elements in (c)")
    parser.add_argument("--nonfinite", action="store_true", help="only what looks take")
    args = parser.parse_args()
    elements = 10**7 if args.quick else 10**8
    devices = args.device or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    print(
        f"torch {torch.__version__}, torch_sgmcmc {sg.__version__}, Python "
        f"{platform.python_version()}, CPU loops: {_C.isa()}"
    )
    for name in devices:
        device = torch.device(name)
        for threads in args.threads if device.type == "cpu" else [1]:
            torch.set_num_threads(threads)
            if args.nonfinite:
                report_nonfinite(device, args.rounds)
                continue
            label = (
                torch.cuda.get_device_name(device)
                if device.type == "cuda"
                else f"CPU, {threads} thread(s)"
            )
            peak = bandwidth(device, elements, args.rounds)
            print(f"\n=== {label}; memory bandwidth {peak / 1e9:.1f} GB/s")
            for case, title in (
                ("a", "(a) MNIST network"),
                ("b", "(b) ResNet-18"),
                ("c", "(c) one tensor"),
            ):
                params = parameters(shapes_of(case, elements), device)
                report_case(title, params, args.rounds, peak if case == "c" else None)
                report_ewsg(title, params, args.rounds)
                del params
            chains = parameters([torch.Size([10_000, 2])], device)
            report_ewsg("10,000 chains of two", chains, args.rounds)
            if device.type == "cpu" and threads == 1:
                report_overhead(args.rounds)
            report_training(device, args.rounds)
            report_nonfinite(device, args.rounds)


if __name__ == "__main__":
    main()
