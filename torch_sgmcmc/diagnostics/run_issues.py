"""Issues of a run, found in its draws and in the records of its chains."""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.core.hyperparams import check_integer
from torch_sgmcmc.core.spec import UNKNOWN, traits_of
from torch_sgmcmc.diagnostics import convergence as compared
from torch_sgmcmc.diagnostics.run_record import RunRecord
from torch_sgmcmc.diagnostics.setup_issues import (
    Issue,
    in_passes,
    is_from_prior,
    some_of,
)
from torch_sgmcmc.diagnostics.temperature_means import relaxation
from torch_sgmcmc.draws.predict import predict
from torch_sgmcmc.draws.store import Draw

Runs = Mapping[int, RunRecord | None]

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
    #: By name the settings that the draws had, in their order.
    settings: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)

    def add(self, draws: Sequence[Any]) -> None:
        """Adds draws with the same tensors."""
        several = [_floating(draw) for draw in draws]
        self.names = self.names or [k for k, t in several[0].items() if t.numel()]
        each = max(1, _COORDINATES // max(1, len(self.names)))
        norms, elements = ([_NONE.expand(len(draws), 0)] for _ in range(2))
        for name in self.names:
            t = torch.stack([tensors[name] for tensors in several])
            t = t.reshape(len(draws), -1)
            norm = t if t.shape[1] == 1 else t.norm(dim=1, dtype=torch.float64)[:, None]
            norms.append(norm.double().cpu())
            some = t[:, :: max(1, t.shape[1] // each)][:, :each]
            elements.append(some.double().cpu())
        self.norms += torch.cat(norms, 1)
        self.elements += torch.cat(elements, 1)
        for draw in draws:
            self._add_settings(draw)

    def _add_settings(self, draw: Any) -> None:
        self.steps.append(getattr(draw, "step", None))
        for name in ("temperature", "prior_precision", "lr"):
            value = getattr(draw, name, None)
            if value not in (None, ()) and value == value:
                values = value if isinstance(value, tuple) else (value,)
                self.settings.setdefault(name, []).append(values)


def _floating(draw: Any) -> dict[str, Tensor]:
    """Returns a draw's floating-point tensors."""
    if isinstance(draw, nn.Module):
        draw = {**dict(draw.named_parameters()), **dict(draw.named_buffers())}
    tensors = {k: t for k in draw if isinstance(t := draw[k], Tensor)}
    return {k: t.detach() for k, t in tensors.items() if t.is_floating_point()}


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
    **options: Any,
) -> tuple[dict[int, Series], Tensor | None]:
    """Returns series of all draws, and outputs [chains, draws, inputs, ...].

    Outputs are of the last draws, as many of each chain as the shortest has.
    """
    length = min(map(len, chains.values()))
    given = options.pop("chunk_size", None)
    size = _together(chains)
    if given is not None:
        size = check_integer("chunk_size", given, low=1)
    series: dict[int, Series] = {}
    outputs: list[Tensor] = []
    for number, chain in chains.items():

        def some(
            size: int, number: int = number, chain: list[Any] = chain
        ) -> Iterator[Any]:
            series[number] = Series()
            return _read(chain, series[number], len(chain) - length, size)

        if model is None:
            deque(some(size), 0)
            continue
        try:
            found = predict(
                model, some(size), inputs, keep_draws=True, chunk_size=size, **options
            )
        except RuntimeError:  # vmap does not take every model, nor do draws all fit
            if given is not None or size == 1:
                raise
            found = predict(model, some(1), inputs, keep_draws=True, **options)
        assert found.draws is not None  # kept
        outputs.append(found.draws)
    return series, torch.stack(outputs) if outputs else None


# Elements, and draws, that are read and evaluated at once.
_ELEMENTS, _DRAWS = 2**17, 50


def _together(chains: Mapping[int, list[Any]]) -> int:
    """Returns how many draws are evaluated at once: many of a small network."""
    first = copy.copy(next(iter(chains.values()))[0])
    count = sum(t.numel() for t in _floating(first).values())
    return max(1, min(_DRAWS, _ELEMENTS // max(1, count)))


def _read(chain: list[Any], series: Series, first: int, size: int) -> Iterator[Any]:
    for begin in range(0, len(chain), size):
        draws = [
            copy.copy(draw) if isinstance(draw, Draw) else draw
            for draw in chain[begin : begin + size]
        ]
        series.add(draws)
        yield from draws[max(0, first - begin) :]


# Rates of false alarms of comparisons; R-hat of a converged quantity, and the effective
# sample size of each chain that it needs (Vehtari et al. 2021).
_RATES = {"chains": 0.002, "halves": 0.0005}
_RHAT, _EACH = 1.01, 100
# Number of quantities, with the largest R-hat, whose chains are compared.
_COMPARED = 100
# Fewest effective draws: in the median quantity, and in the worst tenth.
_MEDIAN, _WORST = 50, 25
# Fewest draws of a chain for which R-hat is defined, and is judged.
DEFINED, JUDGED = 4, 16
# The usual energy error of microcanonical samplers, and that of an issue. The error
# grows as lr³.
_ENERGY_ERROR, _MOST_ENERGY_ERROR = 5e-4, 5e-3
# The acceptance below which most of HMC's work is lost.
_ACCEPTANCE = 0.4


# By kind, the worst first: what happened, why it matters, what to do.
_TEXTS = {
    "not finite": "Draws of {chains} are not finite, in chain {first} from draw {draw} "
    "on: the chain has diverged. Lower lr, and sample again.",
    "not moving": "{chains} are the same: the chain has not moved. Is lr 0, is every "
    "proposal rejected, or has the model no gradients?",
    "identical": "{chains} are identical at the end: they count as one chain. Give "
    "each its own seed (torch_sgmcmc.fold_in(seed, chain)).",
    "shared noise": "{chains} share their noise: they are not independent, and R-hat "
    "is too small. Give each its own seed (torch_sgmcmc.fold_in(seed, chain)).",
    "settings differ": "Chains differ in {settings}: together they are not a sample of "
    "any law. Report each alone, store.chain(i), or run all with one setting.",
    "biased gradient": "Gradients are not the loss's, T_conf is off: {}. Are they "
    "clipped, or summed, or stale?",
    "burn-in too short": "The first draws of chain {chain} are far outside of the "
    "later ones, and widen {quantity} {factor:.2g} times. Use a longer burn_in, or "
    "drop the first draws.",
    "not in equilibrium": "Not in equilibrium, T_conf is not T_kin: {}. The chain has "
    "not converged, or flat directions take longer than the run: use a longer burn_in.",
    "relaxation": "{names} of {chains} did not leave the start: where there are no "
    "data it is forgotten in {steps:,.0f} steps{passes}, and the run had {run:,}. "
    "Raise prior_precision, start at draws from the prior, or run {times:.2g} times as "
    "long.",
    "chains differ": "Chains differ{spreads} by more than their errors: chain {chain} "
    "most, in {quantity} (R-hat {rhat:.3g}). They sample different parts of the "
    "posterior, or have different faults. Compare their settings, and run them longer.",
    "not converged": "Second halves of the chains differ from the first ones{spreads}: "
    "most in chain {chain}, {quantity} (R-hat {rhat:.3g}). Run longer, with a longer "
    "burn_in.",
    "above T": "Sampled above T, T_kin is {}: spreads are too wide. Lower "
    "lr / (1 - momentum), or use larger minibatches.",
    "below T": "Sampled below T, T_kin is {}: spreads are too narrow. Is noise "
    "subtracted twice (noise_estimate), or lr changed by something else?",
    "rejected": "{rate:.2g} of the trajectories were accepted in {chains}: most of the "
    "work is lost. Use a smaller step_size, or warmup().",
    "energy error": "The energy error is {error:.2g} per dimension in {chains} (usual "
    "is {usual:g}): steps are too large, unless gradients are of minibatches. "
    "Use {factor:.2g} times the lr.",
    "skipped steps": "{count} of {steps} steps of {chains} were skipped (gradients "
    "were not finite): the target is another. Lower lr, or inspect the data.",
    "few draws": "{draws} draws of {chains} {what}",
}


#: Kinds of issues that make draws useless.
SERIOUS = tuple(_TEXTS)[: [*_TEXTS].index("burn-in too short")]


def _issue(kind: str, *args: Any, **names: Any) -> Issue:
    return Issue(kind, _TEXTS[kind].format(*args, **names))


def sorted_by_kind(issues: Sequence[Issue]) -> tuple[Issue, ...]:
    """Sorts issues, the worst first, each kind once."""
    first = {issue.kind: issue for issue in reversed(issues)}
    return tuple(first[kind] for kind in _TEXTS if kind in first)


def _chains(numbers: Iterable[int]) -> str:
    several = sorted(numbers)
    return f"chain{'s' * (len(several) > 1)} {', '.join(map(str, several))}"


def compare_chains(series: Mapping[int, Series], runs: Runs) -> list[Issue]:
    """Finds chains that are equal, stand still, share noise or differ in settings."""
    elements = {i: torch.stack(each.elements) for i, each in series.items()}
    broken = [i for i, e in elements.items() if not bool(e.isfinite().all())]
    if broken:
        first = broken[0]
        draw = int((~elements[first].isfinite().all(1)).nonzero()[0])
        chains = _chains(broken)
        return [_issue("not finite", chains=chains, first=first, draw=draw)]
    still = [i for i, e in elements.items() if compared.never_moves(e)]
    moving = {i: e for i, e in elements.items() if i not in still}
    alike = {i for pair in compared.identical_chains(moving) for i in pair}
    who = f"Draws of {_chains(still)}" if moving else "All draws"
    issues = [_issue("not moving", chains=who)] if still else []
    if alike:
        issues.append(_issue("identical", chains=_chains(alike).capitalize()))
    elif shared := _sharing(series, runs, moving):
        issues.append(_issue("shared noise", chains=_chains(shared).capitalize()))
    settings = _different_settings(series, runs)
    if settings:
        issues.append(_issue("settings differ", settings=", ".join(settings)))
    return issues


def _sharing(
    series: Mapping[int, Series], runs: Runs, moving: Mapping[int, Tensor]
) -> set[int]:
    """Finds chains with one seed at the same steps, or with correlated increments."""
    found = {i for pair in compared.shared_noise(moving) for i in pair}
    for i, j in combinations(moving, 2):
        one, other = runs.get(i), runs.get(j)
        if one is None or other is None or one is other or one.seed is None:
            continue
        a, b = ([s for s in series[k].steps if s is not None] for k in (i, j))
        # Noise of one seed differs between steps.
        are_apart = a and b and (a[-1] < b[0] or b[-1] < a[0])
        if one.seed == other.seed and not are_apart:
            found |= {i, j}
    return found


def _different_settings(series: Mapping[int, Series], runs: Runs) -> list[str]:
    found = []
    names = ["temperature", "prior_precision", "num_data", "lr"]
    ran = [each for each in runs.values() if each]
    tuned = any(group.get("tune_steps") for each in ran for group in each.settings)
    if tuned or any(traits_of(each.sampler).accepts for each in ran):
        names.remove("lr")  # each chain has set its own
    for name in names:
        groups: dict[str, list[int]] = {}
        for chain, values in _settings(name, series, runs).items():
            value = ", ".join(f"{v:.6g}" for v in dict.fromkeys(values))
            groups.setdefault(value, []).append(chain)
        if len(groups) > 1:
            each = (f"{value} in {_chains(some)}" for value, some in groups.items())
            found.append(f"{name} ({'; '.join(each)})")
    return found


def _settings(
    name: str, series: Mapping[int, Series], runs: Runs
) -> dict[int, tuple[float, ...]]:
    """Returns each chain's value of a setting, if they can be compared."""
    stored = {i: each.settings.get(name, []) for i, each in series.items()}
    count = min(map(len, stored.values()))
    if count:
        # Precisions may be drawn with the parameters; schedules need common steps.
        steps = {each.steps[count - 1] for each in series.values()}
        varies = any(len({*values}) > 1 for values in stored.values())
        is_other = varies and (name == "prior_precision" or len(steps) > 1)
        last = {i: values[count - 1] for i, values in stored.items()}
        return {} if is_other else last
    known = {i: ran for i, ran in runs.items() if ran is not None and ran.settings}
    if name == "lr" and len({ran.steps for ran in known.values()}) > 1:
        return {}
    keys = ("lr", "step_size") if name == "lr" else (name,)
    return {
        i: tuple(group[key] for group in ran.settings for key in keys if key in group)
        for i, ran in known.items()
    }


def compare_values(
    values: Tensor, title: str, chains: Sequence[int], name: Callable[[int], str]
) -> tuple[compared.Convergence, list[Issue]]:
    """Returns R-hat and ESS of [chains, draws, quantities], and issues of chains."""
    convergence = compared.convergence_of(values, title)
    if bool(convergence.constant.all()):
        return convergence, []
    found = []
    short = compared.short_burn_in(values)
    if short is not None:
        names = {"chain": chains[short.chain], "quantity": name(short.quantity)}
        found.append(_issue("burn-in too short", **names, factor=short.factor))
    rhat = convergence.rhat.nan_to_num(nan=0.0, posinf=torch.inf)
    order = rhat.argsort(descending=True)[:_COMPARED]
    order = order[rhat[order] > _RHAT]
    for each in compared.differences(values[:, :, order], int((rhat > 0).sum())):
        if each.probability < _RATES[each.between]:
            place = int(order[each.quantity])
            kind = "not converged" if each.between == "halves" else "chains differ"
            spreads = " in their spread" if each.what == "scale" else ""
            names = {"chain": chains[each.chain], "quantity": name(place)}
            rhat_of = float(rhat[place])
            found.append(_issue(kind, **names, rhat=rhat_of, spreads=spreads))
    return convergence, found


def few_draws(
    convergence: compared.Convergence | None, draws: int, chains: int
) -> list[Issue]:
    """Finds too small an effective sample size of outputs, or too few draws."""
    wanted = _EACH * chains
    if convergence is None or not convergence.is_ess_known:
        median = worst = math.inf if draws >= _MEDIAN else 0.0
        what = f"are few, and errors of predictions unknown: {wanted} are a start."
    else:
        median, worst = convergence.quantiles(0.5, 0.9)["ess"].tolist()
        # Estimates this small are hardly above their minimum.
        least = "at least " if worst < 10 * chains else ""
        what = (
            f"have an effective sample size of {worst:.2g} in the worst tenth of "
            f"outputs ({median:.2g} in the median): run {least}"
            f"{max(2.0, wanted / worst):.2g} times as long, to {_EACH} of each chain."
        )
    if not (median < _MEDIAN or worst < _WORST):  # NaN where all is constant
        return []
    several = f"{chains} chain{'s' * (chains > 1)}"
    return [_issue("few draws", draws=draws, chains=several, what=what)]


def starts_of(runs: Runs) -> dict[int, str]:
    """Returns the kind of each chain's start, nothing if one is not known."""
    starts = {i: ran.start for i, ran in runs.items() if ran is not None and ran.start}
    return starts if len(starts) == len(runs) else {}


def check_relaxation(
    series: Mapping[int, Series], runs: Runs
) -> tuple[list[Issue], list[str]]:
    """Finds param groups whose run is too short to forget the start, and unknowns."""
    late: dict[int, dict[str, Any]] = {}
    unknown: dict[str, int] = {}
    for i, ran in runs.items():
        if ran is None or not ran.settings or is_from_prior(ran.start):
            continue
        for j, group in enumerate(_mean_settings(ran, series[i].settings)):
            steps, names = relaxation(ran.sampler, group), "parameters"
            names = some_of(ran.names[j]) if j < len(ran.names) else names
            if math.isnan(steps):
                unknown["how long the start is remembered (of these settings)"] = i
            elif group["prior_precision"] == 0:
                unknown["how long the start is remembered (no prior)"] = i
            elif ran.steps >= 3 * steps:
                continue
            elif ran.start is None:
                passes = in_passes(steps, ran.steps_per_pass)
                words = (
                    f"whether {names} has left its start ({steps:,.0f} steps{passes}"
                )
                unknown[f"{words}, if not a draw from the prior)"] = i
            elif steps > late.get(i, {"steps": 0.0})["steps"]:
                passes = in_passes(steps, ran.steps_per_pass)
                late[i] = {"names": names, "steps": steps, "passes": passes}
                late[i] |= {"run": ran.steps, "times": 3 * steps / max(1, ran.steps)}
    found = []
    if late:
        worst = max(late, key=lambda i: late[i]["times"])
        found = [_issue("relaxation", chains=_chains(late), **late[worst])]
    return found, [*unknown]


def _mean_settings(
    ran: RunRecord, drawn: Mapping[str, list[tuple[float, ...]]]
) -> Iterator[dict[str, float]]:
    """Yields each group's settings, lr and precision as means over the draws."""
    first, lrs = ran.settings[0].get("lr", math.nan), drawn.get("lr", [])
    mean_lr = statistics.fmean(row[0] for row in lrs) if lrs else first
    for j, group in enumerate(ran.settings):
        precisions = [row[j] for row in drawn.get("prior_precision", []) if row[j:]]
        mean = statistics.fmean(precisions or [group["prior_precision"]])
        # Schedules keep the groups' ratios; at their end all may be 0.
        lr = mean_lr * (group.get("lr", math.nan) / first if first else 1.0)
        yield {**group, "prior_precision": mean, "lr": lr}


def check_runs(runs: Runs) -> tuple[list[Issue], list[str]]:
    """Finds issues of temperatures, skipped steps and acceptance, and unknowns."""
    known = {i: ran for i, ran in runs.items() if ran is not None}
    found = _temperature_issues(known)
    skipped = {i: ran for i, ran in known.items() if ran.num_skipped}
    if skipped:
        count = sum(ran.num_skipped for ran in skipped.values())
        steps = count + sum(ran.steps for ran in skipped.values())
        chains = _chains(skipped)
        found.append(_issue("skipped steps", count=count, steps=steps, chains=chains))
    rates = {i: r.acceptance for i, r in known.items() if traits_of(r.sampler).accepts}
    low = {i: x for i, x in rates.items() if x is not None and x < _ACCEPTANCE}
    if low:
        found.append(_issue("rejected", rate=min(low.values()), chains=_chains(low)))
    errors = {i: r.energy_error for i, r in known.items()}
    large = {
        i: x for i, x in errors.items() if x is not None and x > _MOST_ENERGY_ERROR
    }
    if large:
        worst = max(large.values())
        factor = (_ENERGY_ERROR / worst) ** (1 / 3)
        found.append(
            _issue(
                "energy error",
                error=worst,
                chains=_chains(large),
                usual=_ENERGY_ERROR,
                factor=factor,
            )
        )
    observed = {i for i, r in known.items() if r.tensors or _has_none(r.sampler)}
    chains = _chains([i for i in runs if i not in observed][:6])
    some = f"temperatures of {chains} (no monitor has observed them)"
    return found, [some] if len(observed) < len(runs) else []


def _has_none(sampler: str) -> bool:
    """Returns whether the sampler is known to have no temperatures."""
    traits = traits_of(sampler)
    return traits is not UNKNOWN and traits.motion is None


def hottest(runs: Mapping[int, RunRecord]) -> tuple[float, str, int]:
    """Returns the highest T_kin / T, its tensor and chain: of issues, if there are."""
    ratios = {
        (i, name): read.kinetic.mean / ran.intended_of(name)
        for i, ran in runs.items()
        for name, read in ran.tensors.items()
    }
    above = [
        (i, each.name)
        for i, ran in runs.items()
        for each in ran.issues
        if each.fault == "above T" and each.name in ran.tensors
    ]
    chain, name = max(above or ratios, key=ratios.__getitem__)
    return ratios[chain, name], name, chain


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
            chains = tensors[name]
            worst = max(chains, key=chains.__getitem__)
            size, most = chains[worst], f" most of {_chains(chains)}"
            number = {"above T": f"{1 + size:.3g}", "below T": f"{1 - size:.3g}"}
            where = f" (chain {worst}{most * (len(chains) > 1)})" * (len(runs) > 1)
            parts.append(f"{number.get(fault, f'by {size:.3g}')} T in {name}{where}")
        found.append(_issue(fault, some_of(parts)))
    return found
