"""The error of time averages without chains: exact moments of linear recursions.

On a Gaussian target SGHMC is linear, whatever its minibatches: x' = A x + w for
x = (θ - mean, v), with innovations w independent of x. The moments of x up to the
fourth, and their products with the running sum of φ(θ) = ‖θ - mean‖², therefore
follow recursions in closed form.

Note [EWSG to first order]
EWSG's choice of the minibatch depends on x, so that its moments do not close; but its
mean gradient to first order in h does. With G = n∇V_I, I uniform, Σ = Cov(G) and
T = 1, the weights' exponent is
  W = |√h γ r / σ + √h G / σ|² / 2 = const + h r·G / 2 + h |G|² / (4 γ),
and both the exact weights and one step of the index chain (M = 1) give a datum the
probability (1 + W - E W) / n up to terms of second order in W: for M = 1 since
min(1, e^x) - min(1, e^-x) = x + O(x²), x the difference of two W. The mean
gradient is then ∇V + Cov(G, W),
  Cov(G, W) = h Σ r / 2 + h (2 n Σ (θ - mean) - n³ κ) / (4 γ),
κ = Cov(c, |c - mean|²). The first term is the friction that balances the minibatches'
noise h Σ: what EWSG is for. The second is an error: the surrogate r' = r leaves out
that r' follows the mean gradient, so large gradients are favoured for no reason. The
force becomes stiffer by 1 + h Σ / (2 γ), the variance smaller by that, to first order
as much as SGHMC's is larger; and the mean moves by h n² κ / (4 γ).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from .target import Gaussian

Array = NDArray[np.float64]


def linear_errors(
    target: Gaussian,
    step: float,
    friction: float,
    times: Iterable[float],
    kind: str,
) -> tuple[dict[float, float], float]:
    """Errors of a linear chain that starts from the target's law, momenta included.

    Args:
        target: the target, d <= 2.
        step: h.
        friction: γ.
        times: at which T = K h the mean squared error of (1/K) Σ φ(θ_k), k = 1..K,
            is wanted.
        kind: "full gradient"; "SGHMC", a minibatch of one; or "linearised", with the
            same minibatches, but the mean gradient of Note [EWSG to first order]
            (without the shift of the mean, which enters φ in second order).

    Returns:
        The mean squared error by time, and the bias E φ - d / n of the stationary law.
    """
    n, d, h = target.num_data, target.dim, step
    alpha, eta = friction * h, h * h
    # In units of the target's standard deviation n^-1/2; φ n is Σ z².
    pull, keep = eta * n * np.eye(d), (1 - alpha) * np.eye(d)
    if kind == "linearised":
        sigma = target.gradient_covariance.numpy()
        pull = pull @ (np.eye(d) + h / (2 * friction) * sigma)
        keep = keep - h * h / 2 * sigma
    transition = np.block([[np.eye(d) - pull, keep], [-pull, keep]])
    column = np.kron(np.ones((2, 1)), np.eye(d))  # w enters v and the new θ alike
    noise = 2 * alpha * eta * n * np.eye(d)
    centred = (target.data - target.mean).numpy() * n**0.5 * eta * n
    if kind == "full gradient":
        centred = np.zeros((1, d))
    second, fourth = _innovation_moments(centred, noise)
    w2 = column @ second @ column.T
    c2 = np.kron(column, column)
    w4 = (np.kron(c2, c2) @ fourth.reshape(-1)).reshape((2 * d,) * 4)

    size = 2 * d
    start = np.diag([1.0] * d + [eta * n] * d)  # v ~ N(0, h²)
    x2 = start
    x4 = _pairings(start)
    pick = np.diag([1.0] * d + [0.0] * d).reshape(-1)  # φ n = pick · x⊗x
    power = np.kron(transition, transition)
    flat4 = np.kron(power, power)
    w2_flat, w4_flat = w2.reshape(-1), w4.reshape(-1)
    sum1, sum2, sum_x2 = 0.0, 0.0, np.zeros(size * size)
    wanted = {round(time / h): time for time in times}
    result = {}
    flat_x2, flat_x4 = x2.reshape(-1), x4.reshape(-1)
    mixing = _mixing_operator(w2)
    for k in range(1, max(wanted) + 1):
        moved = power @ flat_x2
        flat_x4 = flat4 @ flat_x4 + mixing @ moved + w4_flat
        flat_x2 = moved + w2_flat
        carried = power @ sum_x2 + sum1 * w2_flat  # E[S x'⊗x'], S before this step
        now = flat_x4.reshape(size * size, size * size) @ pick  # E[φ x'⊗x']
        sum2 += 2 * pick @ carried + pick @ now
        sum_x2 = carried + now
        sum1 += pick @ flat_x2
        if k in wanted:
            mean, square = sum1 / k, sum2 / k**2
            result[wanted[k]] = float(square - 2 * d * mean + d * d) / n**2
    stationary = np.linalg.solve(np.eye(size * size) - power, w2_flat)
    return result, float(pick @ stationary - d) / n


def continuous_mse(target: Gaussian, friction: float, time: float) -> float:
    """The mean squared error of the time average over [0, T] as h -> 0.

    Of stationary underdamped Langevin: with ρ the autocorrelation of a coordinate, φ
    has the autocovariance 2 d ρ² / n², and Var = (2/T²) ∫ (T - t) 2 d ρ(t)² / n² dt.
    """
    n, d = target.num_data, target.dim
    root = np.sqrt(complex(friction**2 - 4 * n))
    fast, slow = (friction + root) / 2, (friction - root) / 2
    # ρ = (fast e^{-slow t} - slow e^{-fast t}) / (fast - slow), squared.
    terms = [
        (fast**2, 2 * slow),
        (-2 * fast * slow, fast + slow),
        (slow**2, 2 * fast),
    ]
    integral = sum(
        weight * (time / rate - (1 - np.exp(-rate * time)) / rate**2)
        for weight, rate in terms
    )
    integral = (integral / (fast - slow) ** 2).real
    return float(4 * d / (n * time) ** 2 * integral)


def _innovation_moments(centred: Array, noise: Array) -> tuple[Array, Array]:
    """E w⊗w and E w⊗w⊗w⊗w of w = a uniform row of ``centred`` + N(0, noise)."""
    count = len(centred)
    spread = centred.T @ centred / count
    fourth = np.einsum("ni,nj,nk,nl->ijkl", *[centred] * 4) / count
    fourth = fourth + _pairings(noise)
    fourth = fourth + _mixed(spread, noise)
    return spread + noise, fourth


def _pairings(c: Array) -> Array:
    """E x⊗x⊗x⊗x of x ~ N(0, c)."""
    letters = ("ij,kl->ijkl", "ik,jl->ijkl", "il,jk->ijkl")
    return sum(np.einsum(word, c, c) for word in letters)


_SPLITS = (
    "ij,kl->ijkl",
    "ik,jl->ijkl",
    "il,jk->ijkl",
    "jk,il->ijkl",
    "jl,ik->ijkl",
    "kl,ij->ijkl",
)


def _mixed(a: Array, b: Array) -> Array:
    """The terms of E (x + w)⊗⁴ with two of each, for independent x and w."""
    return sum(np.einsum(word, a, b) for word in _SPLITS)


def _mixing_operator(w2: Array) -> Array:
    """``_mixed(·, w2)`` as a matrix."""
    size = len(w2)
    eye = np.eye(size * size).reshape(size * size, size, size)
    columns = [_mixed(unit, w2).reshape(-1) for unit in eye]
    return np.stack(columns, axis=1)
