"""Every method that is compared, run on a problem, with what its draws have cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reproduce.kept import kept_arrays
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm, trange

import torch_sgmcmc as sg

from .problem import Laplace, Problem
from .second_order import SecondOrder

#: The paper's trajectory length and step size, in posterior standard deviations.
LENGTH, STEP_SIZE = 1.2, 0.2
NUM_STEPS = round(LENGTH / STEP_SIZE)
_HMC_CHAINS, _HMC_BURN_IN, _HMC_PIECE = 8, 20, 25


@dataclass(frozen=True)
class Size:
    """The lengths of the runs.

    Args:
        seeds: of each method; full HMC has one.
        draws: R, of every method but full HMC.
        reference: draws of full HMC.
        warmup: steps of HMC-ECS before.
        subsample: m of perturbed HMC-ECS, SGLD and SGHMC.
    """

    seeds: int
    draws: int
    reference: int
    warmup: int
    subsample: int


@dataclass(frozen=True)
class Run:
    """The result of a method.

    Args:
        draws: [chains, R, d].
        signs: [chains, R], 1 or -1.
        evaluations: of single data's likelihood and gradient, in all.
        details: α and the like, by the name of a table's row.
    """

    draws: np.ndarray
    signs: np.ndarray
    evaluations: float
    details: dict[str, float]

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray]) -> Run:
        """Restores a result from the arrays of :func:`kept_arrays`."""
        rest = {k: float(v) for k, v in arrays.items() if k not in ("draws", "signs")}
        return cls(arrays["draws"], arrays["signs"], rest.pop("evaluations"), rest)

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        """All draws [n, d] and their signs [n]."""
        draws = torch.from_numpy(self.draws).flatten(0, 1)
        return draws, torch.from_numpy(self.signs).flatten()


# ---- Full HMC --------------------------------------------------------------------


def hmc(problem: Problem, laplace: Laplace, draws: int, seed: int, cache: Path) -> Run:
    """Chains of HMC with all data, in coordinates in which the posterior is round.

    They start at draws of the Laplace approximation. Pieces of a run are kept, each
    with its own seed: a run that is killed goes on from the last.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (_HMC_CHAINS, problem.dimension)
    white = torch.randn(shape, generator=generator, dtype=torch.float64).numpy()
    wanted = max(1, -(-draws // _HMC_CHAINS))
    lengths = [_HMC_BURN_IN] + [_HMC_PIECE] * (wanted // _HMC_PIECE)
    lengths += [wanted % _HMC_PIECE] if wanted % _HMC_PIECE else []
    pieces, calls, accepted = [], 0, 0.0
    for i, length in enumerate(tqdm(lengths, desc="HMC", leave=False)):
        settings = [problem.identity, seed, lengths[: i + 1], STEP_SIZE, LENGTH]

        def make(start: np.ndarray = white, length: int = length, i: int = i) -> Any:
            return _hmc_piece(problem, laplace, start, length, 1000 * seed + i)

        piece = kept_arrays(cache, f"{problem.name}-hmc-{i}", settings, make)
        white = piece["white"][:, -1]
        calls += int(piece["calls"])
        if i > 0:
            pieces.append(piece["white"])
            accepted += float(piece["acceptance"]) * length / wanted
    inner = torch.from_numpy(np.concatenate(pieces, axis=1))
    theta = (inner @ laplace.root.T + laplace.mode).numpy()
    evaluations = (calls * _HMC_CHAINS + laplace.passes) * len(problem.x)
    details = {"acceptance": accepted, "step_size": STEP_SIZE, "num_steps": NUM_STEPS}
    return Run(theta, np.ones(theta.shape[:2]), evaluations, details)


def _hmc_piece(
    problem: Problem, laplace: Laplace, start: np.ndarray, length: int, seed: int
) -> dict[str, np.ndarray]:
    white = torch.from_numpy(start.copy()).requires_grad_()
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        with torch.no_grad():
            theta = white @ laplace.root.T + laplace.mode
            energies, slopes = problem.potential(theta)
            white.grad = slopes @ laplace.root
        return energies

    sampler = sg.HMC(
        [white],
        STEP_SIZE,
        trajectory_length=LENGTH,
        num_data=1,
        num_chains=len(start),
        seed=seed,
    )
    kept = []
    for _ in trange(length, desc="a piece", leave=False):
        sampler.step(closure)
        kept.append(white.detach().numpy().copy())
    return {
        "white": np.stack(kept, axis=1),
        "calls": calls,
        "acceptance": sampler.acceptance_rate,
    }


def starting_point(problem: Problem, cache: Path, *, share: float = 0.01) -> Tensor:
    """The posterior mean given one per cent of the data, by HMC, as in the paper."""
    count = min(len(problem.x), max(500, round(share * len(problem.x))))
    part = problem.part(count, seed=0)
    zero = torch.zeros(problem.dimension, dtype=torch.float64)
    run = hmc(part, part.laplace(zero), 800, 0, cache)
    return run.flat[0].mean(0)


# ---- HMC-ECS ---------------------------------------------------------------------


def hmc_ecs(
    problem: Problem,
    start: Tensor,
    size: Size,
    seed: int,
    cache: Path,
    *,
    step_size: float | None = STEP_SIZE,
    warmup: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """A run of HMC-ECS with its warm-up.

    Args:
        problem: the data.
        start: [d], where it begins.
        size: of the run.
        seed: of the run.
        cache: folder for the finished run.
        step_size: ε after the warm-up; None leaves it as it was adapted.
        warmup: further arguments of :meth:`HMCECS.warmup`.
        settings: further arguments of :class:`HMCECS`.
    """
    common = {"subsample_size": size.subsample, "trajectory_length": LENGTH, **settings}
    key = [problem.identity, start.tolist(), size.draws, size.warmup, seed, step_size]

    def make() -> dict[str, Any]:
        theta = start.clone().requires_grad_()
        closure = problem.log_likelihoods(theta)
        sampler = sg.HMCECS(
            [theta],
            num_data=len(problem.x),
            prior_precision=problem.prior_precision,
            seed=seed,
            **common,
        )
        sampler.warmup(closure, size.warmup, **(warmup or {}))
        if step_size is not None:
            sampler.param_groups[0]["step_size"] = step_size
        draws, signs = [], []
        for _ in trange(size.draws, desc="HMC-ECS", leave=False):
            sampler.step(closure)
            draws.append(theta.detach().clone())
            signs.append(sampler.sign)
        report = sg.ECSEfficiency.of(sampler, torch.stack(draws), signs)
        numbers = {k: v for k, v in asdict(report).items() if not isinstance(v, tuple)}
        return {
            "draws": torch.stack(draws).numpy()[None],
            "signs": np.array(signs)[None],
            "subsample_size": sampler.param_groups[0]["subsample_size"],
            "num_factors": sampler.param_groups[0]["num_factors"],
            **numbers,
        }

    estimator = common.get("estimator", "perturbed")
    name = f"{problem.name}-{estimator}-{seed}"
    return Run.of(kept_arrays(cache, name, [*key, common, warmup], make))


# ---- SGLD and SGHMC --------------------------------------------------------------


def gradient_method(
    problem: Problem,
    laplace: Laplace,
    kind: str,
    order: int,
    step: float,
    draws: int,
    subsample: int,
    seed: int,
    cache: Path,
    num_steps: int | None = None,
) -> Run:
    r"""A run of SGLD or SGHMC from the mode on, of which the first tenth is left out.

    SGLD moves θ itself by :math:`-\tfrac\epsilon2\nabla\hat U + N(0, \epsilon I)`
    with ε = ``step`` over the largest eigenvalue of the Hessian at the mode; a draw is
    every sixth iterate, so that it costs as many minibatches as one of HMC-ECS. SGHMC
    moves in the coordinates in which the posterior is round, which is M = Hessian,
    with ε = ``step`` and a fresh momentum for each draw's 1.2/ε iterations. The
    paper's friction C = I is C M⁻¹ there, the posterior's covariance: nearly none (its
    mean eigenvalue is taken for all).

    Args:
        problem: the data.
        laplace: where it starts, and where control variates have their anchor.
        kind: "SGLD" or "SGHMC".
        order: of the control variates; 0 is without.
        step: see above.
        draws: R, after the first tenth.
        subsample: m, data of a minibatch, drawn with replacement.
        seed: of noise and minibatches.
        cache: folder for the finished run.
        num_steps: SGHMC's iterations for a draw; None is 1.2/ε.
    """
    settings = [problem.identity, kind, order, step, draws, subsample, seed]
    settings += [num_steps] * (num_steps is not None)
    run = partial(_gradient_run, problem, laplace, *settings[1:])
    name = f"{problem.name}-{kind}-{order}-{seed}"
    return Run.of(kept_arrays(cache, name, settings, run))


def _gradient_run(
    problem: Problem,
    laplace: Laplace,
    kind: str,
    order: int,
    step: float,
    draws: int,
    subsample: int,
    seed: int,
    num_steps: int | None = None,
) -> dict[str, Any]:
    n, d = problem.x.shape
    if kind == "SGLD":
        root = torch.eye(d, dtype=torch.float64)
        epsilon = step / float(torch.linalg.eigvalsh(laplace.hessian)[-1])
        inner, steps = _inner(laplace, root), NUM_STEPS
        sampler: sg.Sampler = sg.SGLD(
            [inner], lr=epsilon * n / 2, num_data=n, seed=seed
        )
    else:
        root, epsilon = laplace.root, step
        friction = float(root.square().sum()) / d
        inner, steps = _inner(laplace, root), num_steps or max(1, round(LENGTH / step))
        sampler = sg.SGHMC(
            [inner],
            lr=step**2 * n,
            momentum=1 - friction * step,
            num_data=n,
            resample_momentum_every=steps,
            seed=seed,
        )

    def loss_at(at: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        theta = laplace.mode + at @ root.T
        eta = x @ theta
        prior = 0.5 * problem.prior_precision / n * theta.square().sum()
        return (F.softplus(eta) - y * eta).mean() + prior

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_at(inner, batch)

    estimate: Callable[[tuple[Tensor, Tensor]], Any]
    parts = zip(problem.x.split(8192), problem.y.split(8192), strict=True)
    batches = ((x.double(), y.double()) for x, y in parts)
    if order == 2:
        second = SecondOrder(inner, loss_at)
        second.set_anchor((batch, len(batch[0])) for batch in batches)
        estimate = second.backward
    elif order == 1:
        first = sg.ControlVariates(sampler, loss_fn, progress=False)
        first.set_anchor(batches)
        estimate = first.backward
    else:
        estimate = lambda batch: loss_fn(batch).backward()  # noqa: E731
    generator = torch.Generator().manual_seed(seed)
    burn_in, kept = -(-draws // 10), []
    for i in trange(burn_in + draws, desc=kind, leave=False):
        for _ in range(steps):
            index = torch.randint(n, (subsample,), generator=generator)
            sampler.zero_grad()
            estimate((problem.x[index].double(), problem.y[index].double()))
            sampler.step()
        if i >= burn_in:
            kept.append((laplace.mode + inner.detach() @ root.T).numpy())
    a_step = subsample * (2 if order > 0 else 1)
    return {
        "draws": np.stack(kept)[None],
        "signs": np.ones((1, draws)),
        "evaluations": draws * steps * a_step,  # after burn-in, as the paper
        "step": step,
        "step_size": epsilon,
        "num_steps": steps,
        "data_used": 100 * subsample / n,
    }


def _inner(laplace: Laplace, root: Tensor) -> Tensor:
    """The moving parameters, at the mode: θ = mode + root · inner."""
    return torch.zeros(len(root), dtype=torch.float64, requires_grad=True)
