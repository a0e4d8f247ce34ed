"""``report``: convergence, temperatures and issues of a run."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.core.hyperparams import wrong_type
from torch_sgmcmc.core.utils import panels
from torch_sgmcmc.diagnostics import run_issues, run_record
from torch_sgmcmc.diagnostics.convergence import Convergence
from torch_sgmcmc.diagnostics.temperatures import TemperatureMonitor
from torch_sgmcmc.draws.averages import Link, link_of
from torch_sgmcmc.draws.forward import as_tensor, weight_of
from torch_sgmcmc.draws.store import Draw, SampleStore
from torch_sgmcmc.draws.store_files import finite
from torch_sgmcmc.io import replace_file

# Most quantities of the outputs that are compared; rows of the table of tensors.
_MOST, _ROWS = 500, 12
# Number of outputs whose autocorrelations are drawn.
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class Report:
    """The result of :func:`report`, which can be printed, saved and plotted."""

    #: Issues of the run, the worst first; empty if there are none.
    issues: tuple[run_issues.Issue, ...]
    #: What is unknown, and why.
    unknown: tuple[str, ...]
    #: The run record of each chain, None where unknown.
    runs: run_issues.Runs
    #: R-hat and effective sample sizes of outputs, in one row; None without inputs.
    convergence: Convergence | None
    #: Outputs of the draws, [chains, draws, ...].
    outputs: Tensor | None
    #: R-hat and effective sample sizes of the norm of each tensor.
    norms: Convergence | None = None
    #: Steps from one draw to the next; None if unknown.
    spacing: float | None = None
    #: The error of all draws together and of one draw; empty if unknown.
    score: str = ""

    def __str__(self) -> str:
        """Returns numbers, issues and unknowns as text."""
        table = [str(self.convergence)] if _varies(self.convergence) else []
        return "\n".join([*self._numbers(), *self._lines(len(self.issues)), *table])

    def short(self) -> str:
        """Returns the text in at most five lines."""
        return "\n".join([*self._numbers()[:2], *self._lines(2)])

    def _numbers(self) -> list[str]:
        sizes = " ".join(filter(None, (self._sizes(), self._starts())))
        lines = self._temperatures(), sizes, self.score
        return [line for line in lines if line]

    def _starts(self) -> str:
        """Describes the starts of chains that agree."""
        starts = run_issues.starts_of(self.runs)
        against = {*run_issues.SERIOUS, "chains differ", "not converged", "few draws"}
        found = self.norms if self.convergence is None else self.convergence
        is_judged = found is not None and found.num_draws >= run_issues.JUDGED
        if not is_judged or against & {issue.kind for issue in self.issues}:
            return ""
        if len({*starts.values()}) < 2:
            return ""
        row = ", ".join(f"{start} (chain {i})" for i, start in starts.items())
        return f"Chains from different starts agree: {row}."

    def _lines(self, most: int) -> list[str]:
        lines = [issue.message for issue in self.issues[:most]]
        lines = lines or ["The report found no issue."]
        if len(self.issues) > most:
            lines[-1] += f" ({len(self.issues) - most} more: print(report).)"
        unknown = [f"Not known: {'; '.join(self.unknown)}."] if self.unknown else []
        return lines + unknown

    def _temperatures(self) -> str:
        runs = {i: ran for i, ran in self.runs.items() if ran and ran.tensors}
        if not runs:
            return ""
        highest, name, chain = run_issues.hottest(runs)
        where, known = f", chain {chain}" * (len(self.runs) > 1), runs.values()
        of_all = [r.all.kinetic.mean / r.intended_of() for r in known if r.all]
        each = {r.intended_of(name): 0 for r in known for name in r.tensors}
        temperatures = " or ".join(f"{t:g}" for t in each)
        return (
            f"T_kin is {sum(of_all) / len(of_all):.3g} T on average, highest in "
            f"{name}: {highest:.3g} T (T = {temperatures}){where}."
        )

    def _sizes(self) -> str:
        of = "outputs" if self.convergence is not None else "tensors' norms"
        found = self.norms if self.convergence is None else self.convergence
        if found is None or not _varies(found):
            return ""
        rhat, ess, tail = found.shown(0.5, 0.9, 1.0).values()
        draws, s = found.num_chains * found.num_draws, "s" * (found.num_chains > 1)
        size = (
            f"an effective sample size of {ess[0]:.3g} (worst tenth of {of}: "
            f"{ess[1]:.3g}, for their tails {tail[1]:.3g})"
        )
        if not found.is_ess_known:  # of each chain
            size = "too few draws a chain for an effective sample size"
        return (
            f"{draws} draws of {found.num_chains} chain{s} have {size}; R-hat "
            f"{rhat[0]:.3f}, {rhat[2]:.3f} in the worst."
        )

    def json(self) -> str:
        """Returns all numbers except the outputs as JSON, null if not finite.

        Temperatures are absolute, beside each chain's T. Each part has a line.
        """
        runs = ((i, ran and run_record.plain(ran)) for i, ran in self.runs.items())
        content = {
            "issues": [issue._asdict() for issue in self.issues],
            "unknown": self.unknown,
            "convergence": _numbers_of(self.convergence),
            "norms": _numbers_of(self.norms),
            "chains": dict(runs),
        }
        pairs = finite(content).items()
        parts = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in pairs)
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def markdown(self) -> str:
        """Returns Markdown: issues, and a table of the tensors furthest above T."""
        lines = [f"* {line}" for line in self._lines(len(self.issues))]
        lines = ["# What was sampled", "", *self._numbers(), "", *lines, ""]
        return "\n".join(lines + self._table())

    def _table(self) -> list[str]:
        """Returns means of T_kin and T_conf over chains, in units of T."""
        known = [ran for ran in self.runs.values() if ran and ran.tensors]
        rows = []
        for name in {name: 0 for ran in known for name in ran.tensors}:
            runs = [ran for ran in known if name in ran.tensors]
            cells = [name]
            for key in ("kinetic", "configurational", "excess"):
                reads = [
                    (getattr(r.tensors[name], key), r.intended_of(name)) for r in runs
                ]
                mean = statistics.fmean(read.mean / t for read, t in reads)
                width = math.hypot(*(read.half_width / t for read, t in reads))
                is_known = math.isfinite(width)
                cells.append(f"{mean:.3g}" + f" ± {width / len(runs):.2g}" * is_known)
            heat = sum(r.tensors[name].kinetic.mean / r.intended_of(name) for r in runs)
            rows.append((-heat / len(runs), f"| {' | '.join(cells)} |"))
        if not rows:
            return []
        lines = ["| tensor | T_kin / T | T_conf / T | difference |"]
        lines += [
            "| --- | --- | --- | --- |",
            *(row for _, row in sorted(rows)[:_ROWS]),
        ]
        more = f"{len(rows) - _ROWS} more are in report.json."
        return [*lines, "", *([more] if len(rows) > _ROWS else [])]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``report.md`` and ``report.json`` into a folder."""
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        replace_file(path / "report.md", self.markdown().encode())
        replace_file(path / "report.json", self.json().encode())

    def plot(self) -> Any:
        """Draws losses and temperatures over steps, and autocorrelations.

        Returns:
            The matplotlib figure, without panels for unknown parts.

        Raises:
            ImportError: matplotlib is not installed.
        """
        runs = [ran for ran in self.runs.values() if ran is not None]
        parts = {
            _losses: any(ran.losses for ran in runs),
            _temperatures: any(ran.kinetic for ran in runs),
            _autocorrelations: _varies(self.convergence),
        }
        shown = [draw for draw, is_known in parts.items() if is_known]
        figure, axes = panels("Report.plot()", len(shown), 4, 3)
        for draw, panel in zip(shown, axes, strict=True):
            draw(panel, self)
        return figure


def _varies(found: Convergence | None) -> bool:
    return found is not None and not bool(found.constant.all())


def _numbers_of(found: Convergence | None) -> dict[str, Any] | None:
    if found is None:
        return None
    levels = (0.5, 0.9, 0.99, 1.0)
    shown = {name: v.tolist() for name, v in found.shown(*levels).items()}
    counts = {"num_chains": found.num_chains, "num_draws": found.num_draws}
    return {"levels": levels, **shown, **counts}


def report(
    model: nn.Module | None,
    store: str | os.PathLike[str] | Any,
    inputs: Any = None,
    targets: Any = None,
    *,
    monitor: TemperatureMonitor | Sequence[TemperatureMonitor] | None = None,
    **options: Any,
) -> Report:
    """Reports whether the draws can be trusted, and what to do if not.

    .. code-block:: python

        print(sg.report(model, store, x_test, y_test))

    All draws of all chains are read. R̂ and effective sample sizes, of ranks and of
    tails (ArviZ's), are computed for outputs of some inputs and for the norm of each
    tensor. Chains and their halves are compared beyond their errors. Chains that are
    identical, share their noise, stand still or have other settings are named by their
    numbers. Run records add T_kin and T_conf of each tensor in units of T
    (:class:`TemperatureMonitor`), skipped steps, and HMC's acceptance. About one report
    of a hundred has a false alarm (docs/first_run.md). It lists what is unknown. All
    draws weigh 1, and if they have other weights, it says so.

    :func:`sample` stores the run records and the report beside the draws.

    Args:
        model: the network that draws are put into; None without inputs.
        store: a :class:`SampleStore`, its folder, or draws with an attribute ``chain``
            (``store[::10]`` takes less time).
        inputs: inputs of the compared outputs, as for :func:`predict`: a hundred or so
            are enough. None compares no outputs. Default: None.
        targets: a tensor or NumPy's array of the inputs' labels of classes, of which
            -100 is ignored, or of numbers, in the shape of the outputs: for the error
            of all draws together and of one draw. Default: None.
        monitor: the monitors of the chains, in their order, for runs without
            :func:`sample`. Default: the store's records.
        **options: options of :func:`predict`, such as link: "identity" for regression.
            Default: the link of the draws' likelihood, else "softmax".

    Returns:
        A :class:`Report`.

    Raises:
        TypeError, ValueError: an argument is invalid; there are no draws.
    """
    targets = as_tensor(targets, torch.float64, "targets")
    if not isinstance(targets, Tensor | None):
        raise wrong_type("targets", targets, "a Tensor or a NumPy array")
    draws = SampleStore(store) if isinstance(store, str | os.PathLike) else store
    if len(draws) == 0:
        raise ValueError("Invalid store: it has no draws (was each step skipped?)")
    chains = run_issues.by_chain(draws)
    runs = _runs(chains, monitor)
    unknown = []
    if inputs is None:
        model = None
        unknown.append("whether outputs have converged (no inputs were given)")
    elif not isinstance(model, nn.Module):
        raise wrong_type("model", model, "a Module")
    series, outputs = run_issues.read(chains, model, inputs, **options)
    found = run_issues.compare_chains(series, runs)
    names, norms = _norms(series, runs)
    shared = norms.shape[1]
    if shared < max(map(len, chains.values())):
        unknown.append(f"the longer chains' draws before the last {shared}")
    convergence = of_norms = None
    is_defined = shared >= run_issues.DEFINED and bool(norms.isfinite().all())
    if is_defined and outputs is not None and not bool(outputs.isfinite().all()):
        unknown.append("whether outputs have converged (some are not finite)")
    elif is_defined and outputs is not None:
        convergence, more = run_issues.compare_values(
            _quantities(outputs), "Outputs", [*chains], "output {}".format
        )
        found += more
    if is_defined and norms.shape[2]:
        of = [f"the norm of {name}" for name in names]
        of_norms, more = run_issues.compare_values(
            norms, "Norms of tensors", [*chains], of.__getitem__
        )
        found += more
    score, no_score = _scored(draws, outputs, targets, options)
    unknown += no_score
    few = run_issues.few_draws(convergence, sum(map(len, chains.values())), len(chains))
    unknown += _unsure(shared, bool(few), convergence, runs)
    judged, not_known = run_issues.check_runs(runs)
    late, more_unknown = run_issues.check_relaxation(series, runs)
    return Report(
        issues=run_issues.sorted_by_kind([*judged, *late, *found, *few]),
        unknown=(*unknown, *not_known, *more_unknown),
        runs=runs,
        convergence=convergence,
        outputs=outputs,
        norms=of_norms,
        spacing=_spacing(series),
        score=score,
    )


def _scored(
    draws: Sequence[Any],
    outputs: Tensor | None,
    targets: Tensor | None,
    options: Mapping[str, Any],
) -> tuple[str, list[str]]:
    """Returns the score, and why there is none."""
    weights = [weight_of(draw, None) for draw in draws]
    if len({*weights}) > 1:
        worth = sum(weights) ** 2 / sum(w * w for w in weights)
        return "", [
            f"the error, and what weights change (the {len(weights)} draws are worth "
            f"{worth:.3g} of equal weight in predictions; here each counts as 1)"
        ]
    score = _score(outputs, targets, link_of(draws[0], **options)[0])
    return score, [] if score else _no_score(outputs, targets)


def _no_score(outputs: Tensor | None, targets: Tensor | None) -> list[str]:
    if outputs is None or targets is None:
        return []
    shape, dtype = [*targets.shape], targets.dtype
    of = f"outputs of shape {[*outputs.shape[2:]]}"
    return [f"the error (targets of shape {shape} and dtype {dtype} for {of})"]


def _score(outputs: Tensor | None, targets: Tensor | None, link: Link) -> str:
    """Returns the error of all draws and of one, empty if targets do not fit."""
    if outputs is None or targets is None:
        return ""
    targets, outputs = targets.detach().cpu(), outputs.double().cpu()
    both = outputs.mean((0, 1)), outputs
    shape, name, form = outputs.shape[2:], "Error", "{:.2%}"
    are_numbers = link.name in ("identity", "gaussian")
    if are_numbers or link.name == "sigmoid" or targets.is_floating_point():
        if [n for n in targets.shape if n != 1] != [n for n in shape if n != 1]:
            return ""
        aims = targets.double().reshape(shape)
        if link.name == "sigmoid":
            wrong = [((p > 0.5) != (aims > 0.5)).double().mean() for p in both]
        else:
            name, form = "Root mean squared error", "{:.3g}"
            wrong = [(each - aims).square().mean().sqrt() for each in both]
    else:
        dim = link.dim % len(shape) - len(shape)  # from the end
        known = targets != -100  # what cross_entropy ignores
        is_class = (targets >= 0) & (targets < shape[dim])
        if shape[dim] < 2 or targets.shape != both[0].argmax(dim).shape:
            return ""
        if not bool(known.any()) or not bool(is_class[known].all()):
            return ""
        wrong = [(p.argmax(dim) != targets)[..., known].double().mean() for p in both]
    mean, one = (form.format(float(value)) for value in wrong)
    return f"{name} of all draws together {mean}, of one draw {one}."


def _unsure(
    shared: int, are_few: bool, convergence: Convergence | None, runs: run_issues.Runs
) -> Iterator[str]:
    """Yields what so few draws, chains and starts do not show."""
    if shared < run_issues.JUDGED and not are_few:  # R-hat of so few is not judged
        yield f"whether chains agree (each has {shared} draws)"
    if not are_few and convergence is not None and not convergence.is_ess_known:
        yield f"whether draws are enough (each chain has {shared} of 25)"
    if len(runs) == 1:
        yield "other modes (there is one chain: start some at other places)"
    starts = {*run_issues.starts_of(runs).values()}
    if len(runs) > 1 and len(starts) == 1:
        yield f"whether chains from other starts agree (all: {min(starts)})"


def _norms(
    series: Mapping[int, run_issues.Series], runs: run_issues.Runs
) -> tuple[tuple[str, ...], Tensor]:
    sampled = {name for ran in runs.values() if ran for name in ran.tensors}
    first = next(iter(series.values())).names
    names = tuple(name for name in first if name in sampled) or tuple(first)
    length = min(len(each.norms) for each in series.values())
    rows = []
    for each in series.values():
        places = [each.names.index(name) for name in names]
        rows.append(torch.stack(each.norms[len(each.norms) - length :])[:, places])
    return names, torch.stack(rows)


def _quantities(outputs: Tensor) -> Tensor:
    """Returns the compared ones of the outputs, [chains, draws, quantities]."""
    # Of the probabilities of two classes one says it all.
    if outputs.shape[-1] == 2 and bool(((outputs.sum(-1) - 1).abs() < 1e-6).all()):
        outputs = outputs[..., 0]
    flat = outputs.reshape(*outputs.shape[:2], -1)
    return flat[:, :, :: -(-flat.shape[2] // _MOST)].double().cpu()


def _spacing(series: Mapping[int, run_issues.Series]) -> float | None:
    pairs = [pair for each in series.values() for pair in pairwise(each.steps)]
    gaps = [b - a for a, b in pairs if a is not None and b is not None]
    return statistics.median(gaps) if gaps else None


def _runs(
    chains: Mapping[int, list[Any]],
    monitor: TemperatureMonitor | Sequence[TemperatureMonitor] | None,
) -> run_issues.Runs:
    if monitor is None:
        stored = {i: d[0] for i, d in chains.items() if isinstance(d[0], Draw)}
        found = {i: run_record.read_run_record(draw) for i, draw in stored.items()}
        return {**dict.fromkeys(chains), **found}
    several = [monitor] if isinstance(monitor, TemperatureMonitor) else [*monitor]
    if not all(isinstance(each, TemperatureMonitor) for each in several):
        raise wrong_type("monitor", monitor, "a TemperatureMonitor, or one a chain")
    if len(several) == 1:  # for example of many chains in one sampler
        several *= len(chains)
    if len(several) != len(chains) or any(each.sampler is None for each in several):
        raise ValueError(
            f"Invalid monitor: {len(several)} (must be one for each of {len(chains)} "
            "chains, whose samplers still exist)"
        )
    pairs = zip(chains, several, strict=True)
    return {
        chain: run_record.RunRecorder(each.sampler, each).record()
        for chain, each in pairs
    }


def _known(found: Report) -> Iterator[tuple[int, run_record.RunRecord]]:
    return ((chain, ran) for chain, ran in found.runs.items() if ran is not None)


def _losses(axes: Any, found: Report) -> None:
    for chain, ran in _known(found):
        steps = [(i + 1) * ran.loss_width for i in range(len(ran.losses))]
        axes.plot(steps, ran.losses, label=f"chain {chain}", linewidth=1)
    axes.set(title="loss of minibatches", xlabel="step")
    axes.legend(fontsize="small")


def _temperatures(axes: Any, found: Report) -> None:
    for chain, ran in _known(found):
        for series, line in ((ran.kinetic, "-"), (ran.configurational, ":")):
            each = ran.num_observed * ran.interval / max(1, len(series))
            times = [(i + 0.5) * each for i in range(len(series))]
            ratios = [value / ran.intended_of() for value in series]
            axes.plot(times, ratios, line, color=f"C{chain % 10}")
    axes.axhline(1, color="0.6", linewidth=1)
    axes.set(title="T_kin / T, and T_conf / T (dotted)", xlabel="step since burn-in")


def _autocorrelations(axes: Any, found: Report) -> None:
    from arviz_stats.base import array_stats

    assert found.convergence is not None and found.outputs is not None
    ess = found.convergence.ess.flatten().nan_to_num(nan=torch.inf)
    values, finite = _quantities(found.outputs), int(ess.isfinite().sum())
    places = torch.linspace(0, finite - 1, min(_SHOWN, finite), device="cpu").long()
    noise = 2 / math.sqrt(values.shape[0] * values.shape[1])
    for place in ess.argsort()[places].unique_consecutive().tolist():
        each = torch.from_numpy(array_stats.autocorr(values[:, :, place].numpy()))
        mean = each.nan_to_num(nan=0.0).mean(0)
        below = (mean < noise).nonzero().flatten().tolist()
        end = min([*below, len(mean)][0], len(mean) // 2) + 1
        times = [lag * (found.spacing or 1) for lag in range(end)]
        axes.plot(times, mean[:end], ".-", linewidth=1, markersize=3)
    axes.axhspan(-noise, noise, color="0.9")
    lags = "steps" if found.spacing else "draws"
    axes.set(title="autocorrelation, to where noise begins", xlabel=lags)
