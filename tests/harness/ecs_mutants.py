"""HMC-ECS for many chains at once, and its known bugs (see ``harness.mutants``).

:class:`ReferenceECS` shares no code with the sampler; its forces are written out. With
``mutation=None`` it must pass every check of ``harness.ecs``.
"""

import numpy as np

from harness.ecs import MOST, Experiment, Observed, State
from harness.statistics import Array

# Bugs that change what is sampled: they show in moments. One of each class that
# ``harness.ecs_broken`` does not put into the sampler itself.
MUTATIONS = (
    *("energy of the old u where a trajectory starts", "every trajectory accepted"),
    *("momentum kept, and not turned round", "N missing in the estimate"),
    "correction without its half",
)
SIGNED_MUTATIONS = (
    "sign of the first factor alone",
    "negative estimates rejected",
    "a of the present minibatches",
)

# Bugs that show in acceptance alone: see Note [What shows a bug of HMC-ECS].
FORCE_MUTATIONS = ("correction without its gradient", "fresh u in the forces")
SIGNED_FORCE_MUTATIONS = ("forces of the absolute factors",)

# Bugs that keep the law, but never reach it from elsewhere.
MIXING_MUTATIONS = ("always the same block",)
SIGNED_MIXING_MUTATIONS = ("counts not drawn anew",)


class ReferenceECS:
    """Many chains of an experiment's sampler, perturbed or signed."""

    def __init__(
        self,
        experiment: Experiment,
        state: State,
        *,
        seed: int = 0,
        mutation: str | None = None,
    ) -> None:
        self.experiment, self.model = experiment, experiment.model
        self.state, self.mutation = state, mutation
        self.rng = np.random.default_rng(seed)
        self.momenta = self.rng.standard_normal(len(state.theta))
        self.renewed = self.accepted = np.zeros(len(state.theta), dtype=bool)
        self.log_ratios = np.zeros_like(state.theta)

    # ---- The estimate ----------------------------------------------------------

    def estimate(self, state: State) -> tuple[Array, Array, Array]:
        """log |L̂| + log prior, its derivative, and the sign."""
        log, slope = self.model.smooth(state.theta)
        if self.experiment.num_factors == 0:
            left, pull, sign = self._perturbed(state)
        else:
            left, pull, sign = self._signed(state)
        return log + left, slope + pull, sign

    def _scale(self) -> float:
        missing = self.mutation == "N missing in the estimate"
        return (1 if missing else self.model.n) / self.model.m

    def _perturbed(self, state: State) -> tuple[Array, Array, Array]:
        bug, scale = self.mutation, self._scale()
        d, slopes = self.model.differences(state.theta[:, None], state.u)
        centred = d - d.mean(axis=1, keepdims=True)
        variance = scale**2 * (centred**2).sum(axis=1)
        half, steep = 0.5, 1.0
        if bug == "correction without its half":
            half, steep = 1.0, 2.0
        if bug == "correction without its gradient":
            steep = 0.0
        log = scale * d.sum(axis=1) - half * variance
        pull = ((scale - steep * scale**2 * centred) * slopes).sum(axis=1)
        return log, pull, np.ones_like(log)

    def _signed(self, state: State) -> tuple[Array, Array, Array]:
        bug, scale = self.mutation, self._scale()
        a, products = self.experiment.lower_bound, self.experiment.num_factors
        d, slopes = self.model.differences(state.theta[:, None, None, None], state.u)
        there = np.arange(MOST) < state.counts[:, :, None]
        estimates, drifts = scale * d.sum(axis=-1), scale * slopes.sum(axis=-1)
        exponent = np.full(len(d), a)
        if bug == "a of the present minibatches":
            total = np.where(there, estimates, 0).sum(axis=(1, 2))
            exponent = total / np.maximum(there.sum(axis=(1, 2)), 1) - products
            a = exponent[:, None, None]
        excess = estimates - a
        logs = np.where(there, np.log(np.abs(excess / products)), 0)
        divisor = np.abs(excess) if bug == "forces of the absolute factors" else excess
        pull = np.where(there, drifts / divisor, 0).sum(axis=(1, 2))
        negative = there & (excess < 0)
        log, count = exponent + logs.sum(axis=(1, 2)), negative.sum(axis=(1, 2))
        if bug == "sign of the first factor alone":
            count = negative[:, 0].sum(axis=1)
        sign = 1.0 - 2 * (count % 2)
        if bug == "negative estimates rejected":
            log = np.where(sign > 0, log, -1e9)  # no NaN as a difference
        return log, pull, sign

    # ---- A step ----------------------------------------------------------------

    def step(self) -> None:
        """One step of all chains."""
        before = self.estimate(self.state)[0]
        self.update_u()
        if self.mutation != "energy of the old u where a trajectory starts":
            before = self.estimate(self.state)[0]
        self.update_theta(before)

    def seen(self) -> tuple[Array, Array, Array, Array, Array]:
        """Returns a step's :class:`Observed`; the size by the right formula."""
        sign = self.estimate(self.state)[2]
        size = self.experiment.log_density(self.state)[2]
        return self.state.theta, sign, size, self.accepted, self.renewed

    def update_u(self) -> None:
        old = self.state
        if self.mutation == "always the same block":
            fresh = self.experiment.fresh(self.rng, old.theta)
            new = old._replace(u=old.u.copy(), counts=old.counts.copy())
            new.u[:, 0], new.counts[:, 0] = fresh.u[:, 0], fresh.counts[:, 0]
        else:
            new = self.experiment.propose(self.rng, old)
        if self.mutation == "counts not drawn anew":
            new = new._replace(counts=old.counts)
        rise = self.estimate(new)[0] - self.estimate(old)[0]
        self.renewed = np.log(self.rng.random(len(rise))) < rise
        wide = self.renewed.reshape(-1, *(1,) * (old.u.ndim - 1))
        self.state = State(
            old.theta,
            np.where(wide, new.u, old.u),
            np.where(self.renewed[:, None], new.counts, old.counts),
        )

    def update_theta(self, before: Array) -> None:
        """A trajectory; ``before`` is the log density where it starts."""
        eps, old = self.experiment.step_size, self.state
        kept = self.mutation == "momentum kept, and not turned round"
        start = self.momenta if kept else self.rng.standard_normal(len(old.theta))
        r, state = start, old
        r = r + eps / 2 * self.force(state)
        for i in range(self.experiment.num_steps):
            state = state._replace(theta=state.theta + eps * r)
            last = i == self.experiment.num_steps - 1
            r = r + (eps / 2 if last else eps) * self.force(state)
        end = self.estimate(state)[0]
        self.log_ratios = end - r**2 / 2 - (before - start**2 / 2)
        self.accepted = np.log(self.rng.random(len(r))) < self.log_ratios
        if self.mutation == "every trajectory accepted":
            self.accepted = np.ones_like(self.accepted)
        self.momenta = np.where(self.accepted, r, start)
        self.state = old._replace(theta=np.where(self.accepted, state.theta, old.theta))

    def force(self, state: State) -> Array:
        if self.mutation == "fresh u in the forces":
            state = self.experiment.fresh(self.rng, state.theta)
        return self.estimate(state)[1]


def run_reference(
    experiment: Experiment,
    mutation: str | None,
    *,
    chains: int,
    steps: int,
    seed: int = 3,
    far: int = 0,
) -> Observed:
    """Chains that start in their law, or ``far`` steps earlier from one bad place.

    That is θ = θ* and u all zero, without any minibatches if signed.
    """
    state = experiment.draw(np.random.default_rng(seed), chains)
    if far > 0:
        still = experiment.num_factors == 0
        state = State(
            np.full(chains, experiment.model.anchor),
            np.zeros_like(state.u),
            np.full_like(state.counts, int(still)),
        )
    sampler = ReferenceECS(experiment, state, seed=seed + 1, mutation=mutation)
    for _ in range(far):
        sampler.step()
    kept = []
    for _ in range(steps):
        sampler.step()
        kept.append(sampler.seen())
    return Observed(*(np.stack(rows, axis=1) for rows in zip(*kept, strict=True)))
