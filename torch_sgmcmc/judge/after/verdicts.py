"""From numbers to what is to be thought of them."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch_sgmcmc.judge.after.agreement import Agreement
from torch_sgmcmc.posterior.ran import Ran

__all__ = ["KINDS", "Verdict", "verdicts_of"]

#: All kinds, the worst first.
KINDS = (
    "still",
    "biased gradient",
    "not in equilibrium",
    "chains differ",
    "not arrived",
    "hot",
    "cold",
    "rejected",
    "left out",
    "few draws",
)

# The rate of false alarms of each comparison of outputs; R-hat of a quantity that has
# converged (Vehtari et al. 2021); effective draws that nine tenths of quantities must
# have, and should.
_RATE_OF_CHAINS, _RATE_OF_HALVES = 0.005, 0.001
_RHAT = 1.01
_DRAWS, _ENOUGH = 50, 100
# The acceptance below which most of HMC's work is lost.
_ACCEPTANCE = 0.4
# Samplers that gauges do not observe.
_WITHOUT = ("HMC", "HMCECS", "SBPS")
# Of T, that an interval may be wide.
_WIDE = 0.2


class Verdict(NamedTuple):
    """Something that speaks against a run."""

    #: Such as "hot", "chains differ", "few draws".
    kind: str
    #: What it is, and what to do.
    words: str


def verdicts_of(
    agreement: Agreement | None,
    runs: dict[int, Ran | None],
    *,
    is_thinned: bool = False,
) -> tuple[list[Verdict], list[str]]:
    """What speaks against a run, the worst first; and what is not known.

    By what outputs say, of all draws or some, and by what ran beside the chains.
    """
    found = [*_of_temperatures(runs), *_of_steps(runs)]
    unknown = _unknown_of(runs)
    if agreement is not None:
        few = _few_draws(agreement)
        of_outputs = _of_outputs(agreement)
        if few and is_thinned:
            unknown.append(
                "how many draws they are worth (a part of them was looked at: "
                "sg.report(model, store, inputs))"
            )
        elif few and not of_outputs:
            of_outputs = [few]
        found += of_outputs
        if math.isnan(agreement.of_halves) and not few and not agreement.is_still:
            unknown.append(
                "whether chains agree (there are but "
                f"{agreement.convergence.num_draws} draws of each)"
            )
        elif agreement.convergence.num_chains == 1:
            unknown.append(
                "whether there are other modes (there is one chain: run some more, "
                "begun at different places)"
            )
    found.sort(key=lambda v: KINDS.index(v.kind))
    return found, unknown


def _of_outputs(agreement: Agreement) -> list[Verdict]:
    if agreement.is_still:
        return [
            Verdict("still", "All draws put out the same: the chain has not moved.")
        ]
    found = []
    common, worst = agreement.convergence.quantiles(0.9, 1.0)["rhat"].tolist()
    if worst > _RHAT:
        told = f"R-hat {worst:.3g} in the worst output, {common:.3g} in the worst tenth"
        if agreement.of_halves < _RATE_OF_HALVES:
            found.append(
                Verdict(
                    "not arrived",
                    f"Second halves of the chains differ from the first ones ({told}): "
                    "they are on their way. Run longer, with a longer burn-in.",
                )
            )
        if agreement.of_chains < _RATE_OF_CHAINS:
            found.append(
                Verdict(
                    "chains differ",
                    f"Chains differ by more than their errors ({told}): each has a "
                    "part of the posterior. Together they are a mean over the modes "
                    "that were found; more chains or longer ones find more.",
                )
            )
    return found


def _few_draws(agreement: Agreement) -> Verdict | None:
    """That draws are worth too few, if they are."""
    if agreement.is_still:
        return None
    found = agreement.convergence
    worth = float(found.quantiles(0.9)["ess"])
    draws = found.num_chains * found.num_draws
    # Where that is a bound, which is seen to be less than all draws.
    is_bound = _is_bound(agreement) and worth < draws / 2
    if worth >= (_ENOUGH if is_bound else _DRAWS):
        return None
    most = "at most " if _is_bound(agreement) else ""
    return Verdict(
        "few draws",
        f"{draws} draws are worth {most}{worth:.2g} independent ones for the worst "
        "tenth of outputs, since they come slowly to be others: a run "
        f"{max(2.0, _ENOUGH / worth):.2g} times as long.",
    )


def _is_bound(agreement: Agreement) -> bool:
    """Whether a tenth of the outputs has fewer effective draws than can be counted."""
    varying = ~agreement.convergence.constant
    return float(agreement.convergence.at_most[varying].double().mean()) > 0.1


def _of_temperatures(runs: dict[int, Ran | None]) -> list[Verdict]:
    """Of each fault one, with the tensors that have it most."""
    sizes: dict[str, dict[str, float]] = {}
    for ran in runs.values():
        for name, fault, size in ran.findings if ran else ():
            of_fault = sizes.setdefault(fault, {})
            of_fault[name] = max(of_fault.get(name, 0.0), size)
    found = []
    for fault, tensors in sizes.items():
        worst = sorted(tensors, key=lambda name: -tensors[name])
        some = ", ".join(f"{name} {_size(fault, tensors[name])}" for name in worst[:3])
        more = f" and {len(worst) - 3} more" if len(worst) > 3 else ""
        words = f"{_WORDS[fault].format(some + more)} {_WAYS[fault]}"
        found.append(Verdict(fault, words))
    return found


def _size(fault: str, size: float) -> str:
    return f"{1 + size:.3g} T" if fault == "hot" else f"by {size:.2g} T"


_WORDS = {
    "hot": "Sampled too hot: {}. Spreads are too wide.",
    "cold": "Sampled too cold: {}. Spreads are too narrow.",
    "not in equilibrium": "Not in equilibrium, T_conf is not T_kin: {}.",
    "biased gradient": "Gradients are not the loss's: {}.",
}
_WAYS = {
    "hot": (
        "Heat falls with lr / (1 - momentum), and that of minibatches with their size."
    ),
    "cold": (
        "Is noise taken off twice (noise_estimate), or lr changed by something else?"
    ),
    "not in equilibrium": (
        "The chain is on its way, or flat directions take longer than the run: a "
        "longer burn-in. (Outputs may have converged where weights have not: R-hat "
        "tells.)"
    ),
    "biased gradient": "Are they clipped, or summed, or stale?",
}


def _of_steps(runs: dict[int, Ran | None]) -> list[Verdict]:
    found = []
    known = [ran for ran in runs.values() if ran is not None]
    skipped = sum(ran.num_skipped for ran in known)
    if skipped:
        found.append(
            Verdict(
                "left out",
                f"{skipped} of {skipped + sum(r.steps for r in known)} steps were left "
                "out, as gradients were not finite: the target is another one there. A "
                "smaller lr, or look at the data.",
            )
        )
    rates = [ran.acceptance for ran in known if ran.acceptance is not None]
    if rates and min(rates) < _ACCEPTANCE:
        found.append(
            Verdict(
                "rejected",
                f"{min(rates):.2g} of the trajectories were accepted: a smaller "
                "step_size, or warmup().",
            )
        )
    return found


def _unknown_of(runs: dict[int, Ran | None]) -> list[str]:
    unknown = []
    unseen = [
        chain
        for chain, ran in runs.items()
        if ran is None or not (ran.tensors or ran.sampler in _WITHOUT)
    ]
    if unseen:
        unknown.append(
            f"temperatures of chain{'s' * (len(unseen) > 1)} "
            f"{', '.join(map(str, unseen[:6]))} (no gauges have observed them)"
        )
    wide: dict[str, tuple[float, float]] = {}
    for ran in runs.values():
        for name, read in (ran.tensors if ran else {}).items():
            excess = read.excess
            is_wide = not excess.half_width <= _WIDE * ran.temperature  # type: ignore[union-attr]
            if is_wide and excess.half_width > wide.get(name, (0.0, 0.0))[1]:
                wide[name] = excess
    if wide:
        worst = max(wide, key=lambda name: wide[name][1])
        mean, width = wide[worst]
        unknown.append(
            f"whether {len(wide)} tensors are in equilibrium: T_conf less T_kin of "
            f"{worst} is {mean:.2g} ± {width:.2g} (a longer run, or "
            "Gauges(center=...) at a mode)"
        )
    return unknown
