"""Issues of a run, found in its draws and in the records of its chains."""

from __future__ import annotations

import copy
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.diagnostics.convergence import (
    Convergence,
    differences,
    identical_chains,
    is_still,
    shared_noise,
    short_burn_in,
)
from torch_sgmcmc.diagnostics.setup_issues import Issue, some_of
from torch_sgmcmc.posterior.predict import predict
from torch_sgmcmc.posterior.run_record import RunRecord
from torch_sgmcmc.posterior.store import Draw

__all__ = ["by_chain"]

# About the number of kept elements of a draw, at least one of each tensor.
_COORDINATES = 256
_NONE = torch.zeros(0, dtype=torch.float64, device="cpu")


@dataclass(eq=False)
class Series:
    """The kept numbers of a chain's draws, in their order."""

    #: [draws, tensors]: the norm, or the value of a tensor with one element.
    norms: list[Tensor] = field(default_factory=list)
    #: [draws, some elements].
    elements: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    steps: list[int | None] = field(default_factory=list)
    #: By name the values, by step or by number of the draw.
    settings: dict[str, dict[int, Any]] = field(default_factory=dict)
    weights: set[float] = field(default_factory=set)

    def add(self, draw: Any) -> None:
        """Adds a draw."""
        if isinstance(draw, nn.Module):
            draw = {**dict(draw.named_parameters()), **dict(draw.named_buffers())}
        tensors = {k: t.detach() for k in draw if isinstance(t := draw[k], Tensor)}
        tensors = {k: t.flatten() for k, t in tensors.items() if t.is_floating_point()}
        self.names = self.names or [k for k, t in tensors.items() if t.numel()]
        each = max(1, _COORDINATES // max(1, len(self.names)))
        norms, elements = [_NONE], [_NONE]
        for t in map(tensors.__getitem__, self.names):
            norm = t if t.numel() == 1 else t.norm(dtype=torch.float64)[None]
            norms.append(norm.double().cpu())
            elements.append(t[:: max(1, t.numel() // each)][:each].double().cpu())
        self.norms.append(torch.cat(norms))
        self.elements.append(torch.cat(elements))
        step = getattr(draw, "step", None)
        self.steps.append(step)
        self.weights.add(getattr(draw, "weight", 1.0))
        for name in ("temperature", "prior_precision", "lr"):
            value = getattr(draw, name, None)
            if value not in (None, ()) and value == value:
                place = len(self.steps) if step is None else step
                self.settings.setdefault(name, {})[place] = value


def by_chain(draws: Iterable[Any]) -> dict[int, list[Any]]:
    """Groups draws by their chain's number, 0 if they have none."""
    chains: dict[int, list[Any]] = {}
    for draw in draws:
        chains.setdefault(getattr(draw, "chain", 0), []).append(draw)
    return dict(sorted(chains.items()))


def read(
    chains: Mapping[int, list[Any]],
    model: nn.Module | None,
    inputs: Any,
    *,
    max_draws: int | None = None,
    **options: Any,
) -> tuple[dict[int, Series], Tensor | None]:
    """Returns series of all draws, and outputs [chains, draws, inputs, ...].

    Outputs are of the last draws, as many of each chain as the shortest has.
    ``max_draws`` reads evenly spaced draws only.
    """
    length = min(map(len, chains.values()))
    every = 1 if max_draws is None else -(-length // max_draws)
    series, outputs = {}, []
    for number, chain in chains.items():
        first, found = len(chain) - length, Series()
        if max_draws is not None:
            first, chain = 0, chain[first:][every - 1 :: every]
        series[number], some = found, _read(chain, found, first)
        if model is None:
            deque(some, 0)
        else:
            predicted = predict(model, some, inputs, keep_draws=True, **options)
            outputs.append(predicted.draws)
    return series, torch.stack(outputs) if outputs else None  # type: ignore[arg-type]


def _read(chain: list[Any], series: Series, first: int) -> Iterator[Any]:
    for i, draw in enumerate(chain):
        if isinstance(draw, Draw):
            draw = copy.copy(draw)
        series.add(draw)
        if i >= first:
            yield draw


# Rates of false alarms of comparisons; R-hat of a converged quantity, and the effective
# sample size of each chain that it needs (Vehtari et al. 2021).
_RATES = {"chains": 0.002, "halves": 0.0005}
_RHAT, _EACH = 1.01, 100
# Number of quantities, with the largest R-hat, whose chains are compared.
_COMPARED = 100
# Fewest effective draws: in the median quantity, and in the worst tenth.
_MEDIAN, _WORST = 50, 25
# Fewest draws of a chain for which R-hat is defined.
_DEFINED = 4
# The acceptance below which most of HMC's work is lost.
_ACCEPTANCE = 0.4
# Samplers without a monitor, and samplers whose warm-up sets each chain's step.
_WITHOUT, _TUNED = ("HMC", "HMCECS", "SBPS"), ("HMC", "HMCECS")
# T_kin at first over T_kin later that shows a burn-in that is too short.
_FALLEN = 1.5


# By kind, the worst first: what happened, why it matters, what to do.
_TEXTS = {
    "not finite": "Draws of {chains} are not finite, in chain {first} from {where} on: "
    "the chain has diverged. Lower lr, and sample again.",
    "not moving": "{chains} are the same: the chain has not moved. Is lr 0, is every "
    "proposal rejected, or has the model no gradients?",
    "identical": "{chains} are identical, number for number at the end: they count as "
    "one chain, and R-hat says nothing. Give each its own seed "
    "(torch_sgmcmc.fold_in(seed, chain)).",
    "shared noise": "{chains} share their noise, step by step: they are not "
    "independent, and R-hat is too small. Give each its own seed "
    "(torch_sgmcmc.fold_in(seed, chain)).",
    "settings differ": "Chains differ in {settings}: they sample different laws, and "
    "together are not a sample of any. Report each alone, store.chain(i), or run all "
    "with one setting.",
    "biased gradient": "Gradients are not the loss's, T_conf is off: {}. Are they "
    "clipped, or summed, or stale?",
    "burn-in too short": "{what}: means and standard deviations include the approach "
    "to the posterior. Use a longer burn_in{advice}.",
    "not in equilibrium": "Not in equilibrium, T_conf is not T_kin: {}. The chain has "
    "not converged, or flat directions take longer than the run: use a longer burn_in. "
    "(Outputs may have converged before weights: see R-hat.)",
    "chains differ": "Chains differ{spreads} by more than their errors: chain {chain} "
    "most, in {quantity} (R-hat {rhat:.3g}). Each samples a part of the posterior, or "
    "they have different faults. Compare their settings; more and longer chains find "
    "more.",
    "not converged": "Second halves of the chains differ from the first ones{spreads}: "
    "most in chain {chain}, {quantity} (R-hat {rhat:.3g}). They have not converged. "
    "Run longer, with a longer burn_in.",
    "above T": "Sampled above T, T_kin is {}: spreads are too wide. Lower "
    "lr / (1 - momentum), or use larger minibatches.",
    "below T": "Sampled below T, T_kin is {}: spreads are too narrow. Is noise "
    "subtracted twice (noise_estimate), or lr changed by something else?",
    "rejected": "{rate:.2g} of the trajectories were accepted in {chains}: most of the "
    "work is lost. Use a smaller step_size, or warmup().",
    "skipped steps": "{count} of {steps} steps of {chains} were skipped, since "
    "gradients were not finite: the chain samples another target there. Lower lr, or "
    "inspect the data.",
    "few draws": "{draws} draws of {chains} {what}",
}
KINDS = tuple(_TEXTS)


def _issue(kind: str, *args: Any, **names: Any) -> Issue:
    return Issue(kind, _TEXTS[kind].format(*args, **names))


def sorted_by_kind(issues: Iterable[Issue]) -> tuple[Issue, ...]:
    """Sorts issues, the worst first, each kind once."""
    first: dict[str, Issue] = {}
    for issue in issues:
        first.setdefault(issue.kind, issue)
    return tuple(sorted(first.values(), key=lambda v: KINDS.index(v.kind)))


def _chains(numbers: Iterable[int]) -> str:
    several = sorted(numbers)
    return f"chain{'s' * (len(several) > 1)} {', '.join(map(str, several))}"


def compare_chains(
    series: Mapping[int, Series], runs: Mapping[int, RunRecord | None]
) -> list[Issue]:
    """Finds chains that are equal, stand still, share noise or differ in settings."""
    elements = {i: torch.stack(each.elements) for i, each in series.items()}
    broken = [i for i, e in elements.items() if not bool(e.isfinite().all())]
    if broken:
        first = broken[0]
        draw = int((~elements[first].isfinite().all(1)).nonzero()[0])
        step = series[first].steps[draw]
        where = f"draw {draw}" if step is None else f"step {step}"
        chains = _chains(broken)
        return [_issue("not finite", chains=chains, first=first, where=where)]
    still = [i for i, e in elements.items() if is_still(e)]
    moving = {i: e for i, e in elements.items() if i not in still}
    alike = {i for pair in identical_chains(moving) for i in pair}
    shared = set() if alike else _sharing(series, runs, moving)
    found = {
        "not moving": "All draws" if not moving else f"Draws of {_chains(still)}",
        "identical": _chains(alike).capitalize(),
        "shared noise": _chains(shared).capitalize(),
    }
    sets = zip(found.items(), (still, alike, shared), strict=True)
    issues = [_issue(kind, chains=who) for (kind, who), some in sets if some]
    settings = _different_settings(series, runs)
    if settings:
        issues.append(_issue("settings differ", settings=", ".join(settings)))
    return issues


def _sharing(
    series: Mapping[int, Series],
    runs: Mapping[int, RunRecord | None],
    moving: Mapping[int, Tensor],
) -> set[int]:
    """Finds chains with one seed at the same steps, or with correlated increments."""
    found = {i for pair in shared_noise(moving) for i in pair}
    for i, j in combinations(moving, 2):
        one, other = runs.get(i), runs.get(j)
        if one is None or other is None or one is other:
            continue
        a, b = series[i].steps, series[j].steps
        is_known = a[0] is not None and b[0] is not None
        has_several_devices = is_known and (a[-1] < b[0] or b[-1] < a[0])  # type: ignore[operator]
        if one.seed is not None and one.seed == other.seed and not has_several_devices:
            found |= {i, j}
    return found


def _different_settings(
    series: Mapping[int, Series], runs: Mapping[int, RunRecord | None]
) -> list[str]:
    found = []
    is_tuned = any(ran and ran.sampler in _TUNED for ran in runs.values())
    for name in ("temperature", "prior_precision", "num_data", "lr"):
        if name == "lr" and is_tuned:
            continue
        groups: dict[Any, list[int]] = {}
        for chain, value in _settings(name, series, runs).items():
            groups.setdefault(value, []).append(chain)
        if len(groups) > 1:
            each = (f"{_plain(v)} in {_chains(some)}" for v, some in groups.items())
            found.append(f"{name} ({'; '.join(each)})")
    return found


def _plain(value: Any) -> str:
    values = value if isinstance(value, tuple) else (value,)
    return ", ".join(f"{v:.6g}" for v in dict.fromkeys(values))


def _settings(
    name: str, series: Mapping[int, Series], runs: Mapping[int, RunRecord | None]
) -> dict[int, Any]:
    """Returns each chain's value of a setting, if they can be compared."""
    stored = {i: s.settings[name] for i, s in series.items() if name in s.settings}
    if len(stored) == len(series):
        varies = any(len({*values.values()}) > 1 for values in stored.values())
        common = set.intersection(*map(set, stored.values()))
        # Precisions may be drawn with the parameters; schedules need common steps.
        if varies and (name == "prior_precision" or not common):
            return {}
        last = {i: max(common if varies else values) for i, values in stored.items()}
        return {i: stored[i][place] for i, place in last.items()}
    known = {i: ran for i, ran in runs.items() if ran is not None and ran.settings}
    if name == "lr" and len({ran.steps for ran in known.values()}) > 1:
        return {}
    keys = ("lr", "step_size") if name == "lr" else (name,)
    return {
        i: tuple(group[key] for group in ran.settings for key in keys if key in group)
        for i, ran in known.items()
    }


def compare_values(
    values: Tensor,
    convergence: Convergence,
    chains: Sequence[int],
    name: Callable[[int], str],
) -> list[Issue]:
    """Compares chains and halves of [chains, draws, quantities], by R-hat and ESS."""
    if bool(convergence.constant.all()):
        return []
    found = []
    short = short_burn_in(values)
    if short is not None:
        what = (
            f"The first draws of chain {chains[short.chain]} are far outside of the "
            f"later ones, and widen {name(short.quantity)} {short.factor:.2g} times"
        )
        advice = ", or drop the first draws"
        found.append(_issue("burn-in too short", what=what, advice=advice))
    rhat = convergence.rhat.flatten().nan_to_num(nan=0.0, posinf=torch.inf)
    order = rhat.argsort(descending=True)[:_COMPARED]
    order = order[rhat[order] > _RHAT]
    for each in differences(values[:, :, order], int((rhat > 0).sum())):
        if each.probability < _RATES[each.between]:
            place = int(order[each.quantity])
            kind = "not converged" if each.between == "halves" else "chains differ"
            spreads = " in their spread" if each.what == "scale" else ""
            names = {"quantity": name(place), "rhat": float(rhat[place])}
            where = {"spreads": spreads, "chain": chains[each.chain]}
            found.append(_issue(kind, **where, **names))
    return found


def few_draws(convergence: Convergence | None, draws: int, chains: int) -> list[Issue]:
    """Finds too small an effective sample size of outputs, or too few draws."""
    wanted = _EACH * chains
    if convergence is None or convergence.num_draws < _DEFINED:
        if draws >= _MEDIAN:
            return []
        what = (
            "are few: errors of their predictions are unknown, and large. "
            f"{wanted} are a start: make more steps, or use a smaller every."
        )
    elif bool(convergence.constant.all()):
        return []
    else:
        median, worst = convergence.quantiles(0.5, 0.9)["ess"].tolist()
        if median >= _MEDIAN and worst >= _WORST:
            return []
        # Estimates this small are hardly above their minimum.
        least = "at least " if worst < 10 * chains else ""
        what = (
            f"have an effective sample size of {worst:.2g} in the worst tenth of "
            f"outputs ({median:.2g} in the median): run {least}"
            f"{max(2.0, wanted / worst):.2g} times as long, to {_EACH} of each chain."
        )
    several = f"{chains} chain{'s' * (chains > 1)}"
    return [_issue("few draws", draws=draws, chains=several, what=what)]


def check_runs(runs: Mapping[int, RunRecord | None]) -> tuple[list[Issue], list[str]]:
    """Finds issues of temperatures, skipped steps and acceptance, and unknowns."""
    known = {i: ran for i, ran in runs.items() if ran is not None}
    found = [*_burn_in_issues(known), *_temperature_issues(known)]
    skipped = {i: ran for i, ran in known.items() if ran.num_skipped}
    if skipped:
        count = sum(ran.num_skipped for ran in skipped.values())
        steps = count + sum(ran.steps for ran in skipped.values())
        chains = _chains(skipped)
        found.append(_issue("skipped steps", count=count, steps=steps, chains=chains))
    rates = {i: r.acceptance for i, r in known.items() if r.acceptance is not None}
    low = {i: rate for i, rate in rates.items() if rate < _ACCEPTANCE}
    if low:
        lowest = min(low.values())
        found.append(_issue("rejected", rate=lowest, chains=_chains(low)))
    observed = {i for i, r in known.items() if r.tensors or r.sampler in _WITHOUT}
    chains = _chains([i for i in runs if i not in observed][:6])
    some = f"temperatures of {chains} (no monitor has observed them)"
    return found, [some] if len(observed) < len(runs) else []


def _burn_in_issues(runs: Mapping[int, RunRecord]) -> list[Issue]:
    for i, ran in runs.items():
        count = len(ran.kinetic)
        if count < 8:
            continue
        last = ran.kinetic[count // 2 :]
        later, spread = statistics.fmean(last), statistics.stdev(last)
        first, mean = ran.kinetic[0], statistics.fmean(ran.kinetic)
        is_far = first > later + 8 * spread and first > _FALLEN * max(last)
        if later > 0 and is_far and mean > 1.1 * later:
            what = (
                f"T_kin of chain {i} fell from {first / ran.temperature:.3g} T to "
                f"{later / ran.temperature:.3g} T while it was observed"
            )
            advice = ", or monitor.reset() after it"
            return [_issue("burn-in too short", what=what, advice=advice)]
    return []


def _temperature_issues(runs: Mapping[int, RunRecord]) -> list[Issue]:
    """Returns an issue for each fault, with the worst tensors in units of T."""
    sizes: dict[str, dict[str, dict[int, float]]] = {}
    for i, ran in runs.items():
        for name, fault, size in ran.issues:
            sizes.setdefault(fault, {}).setdefault(name, {})[i] = size
    found = []
    for fault, tensors in sizes.items():
        parts = []
        for name in sorted(tensors, key=lambda name: -max(tensors[name].values())):
            size, chains = max(tensors[name].values()), tensors[name]
            number = {"above T": f"{1 + size:.3g}", "below T": f"{1 - size:.3g}"}
            where = "" if len(chains) == len(runs) else f" ({_chains(chains)})"
            parts.append(f"{number.get(fault, f'by {size:.3g}')} T in {name}{where}")
        found.append(_issue(fault, some_of(parts)))
    return found
