"""``report``: a verdict on what was sampled."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torch_sgmcmc.chain.checks import check_integer
from torch_sgmcmc.chain.files import replace_file
from torch_sgmcmc.judge.after.agreement import Agreement, agreement_of
from torch_sgmcmc.judge.after.plots import page
from torch_sgmcmc.judge.after.stored import by_chain, outputs_of
from torch_sgmcmc.judge.after.verdicts import Verdict, verdicts_of
from torch_sgmcmc.judge.convergence.report import Convergence
from torch_sgmcmc.judge.gauges import Gauges
from torch_sgmcmc.posterior.ran import Ran, finite, plain, ran_of, read_ran
from torch_sgmcmc.posterior.store import Draw, SampleStore

__all__ = ["Report", "report"]


@dataclass(frozen=True, eq=False)
class Report:
    """What :func:`report` has found; it can be printed, saved and plotted."""

    #: What speaks against the run, the worst first; empty if nothing does.
    verdicts: tuple[Verdict, ...]
    #: What could not be known, and why.
    unknown: tuple[str, ...]
    #: By chain what ran beside it, None where that is not known.
    runs: Mapping[int, Ran | None]
    #: R-hat and effective draws of outputs; None without inputs.
    convergence: Convergence | None
    #: What the draws put out, [chains, draws, ...], and labels of the inputs.
    outputs: Tensor | None
    targets: Tensor | None

    def __str__(self) -> str:
        """Numbers, verdicts, and what is not known."""
        parts = [self._heats(), self._worth(), *self._lines(len(self.verdicts))]
        if self.convergence is not None and not bool(self.convergence.constant.all()):
            parts.append(str(self.convergence))
        return "\n".join(p for p in parts if p)

    def short(self) -> str:
        """The same in at most five lines."""
        return "\n".join(
            line for line in (self._heats(), self._worth(), *self._lines(2)) if line
        )

    def _lines(self, most: int) -> list[str]:
        lines = [verdict.words for verdict in self.verdicts[:most]]
        if not self.verdicts:
            lines = ["Nothing is seen that speaks against it."]
        more = len(self.verdicts) - most
        if more > 0:
            lines[-1] += f" ({more} more: print(report).)"
        if self.unknown:
            lines.append(f"Not known: {'; '.join(self.unknown)}.")
        return lines

    def _heats(self) -> str:
        known = [ran for ran in self.runs.values() if ran and ran.tensors]
        if not known:
            return ""
        temperature = known[0].temperature
        hottest, heat = "", -math.inf
        for ran in known:
            for name, read in ran.tensors.items():
                if read.kinetic.mean > heat:
                    hottest, heat = name, read.kinetic.mean
        of_all = [ran.all.kinetic.mean for ran in known if ran.all]
        return (
            f"T_kin {sum(of_all) / len(of_all):.3g} in the mean (T = {temperature:g}), "
            f"{heat:.3g} in {hottest}, the hottest."
        )

    def _worth(self) -> str:
        found = self.convergence
        if found is None or bool(found.constant.all()):
            return ""
        rhat, ess = (found.quantiles(0.5, 0.9, 1.0)[k] for k in ("rhat", "ess"))
        draws = found.num_chains * found.num_draws
        most = "at most " if bool(found.at_most.any()) else ""
        return (
            f"{draws} draws of {found.num_chains} chains are worth {most}{ess[0]:.3g} "
            f"(worst tenth of outputs: {ess[1]:.3g}); R-hat {rhat[0]:.3f}, "
            f"{rhat[2]:.3f} in the worst."
        )

    # ---- Other forms ----------------------------------------------------------

    def json(self) -> str:
        """All numbers but the outputs, as JSON; what is not finite is null."""
        found = self.convergence
        convergence = None
        if found is not None:
            levels = (0.5, 0.9, 0.99, 1.0)
            quantiles = found.quantiles(*levels)
            convergence = {
                "num_chains": found.num_chains,
                "num_draws": found.num_draws,
                "levels": levels,
                **{name: values.tolist() for name, values in quantiles.items()},
            }
        content = {
            "verdicts": [verdict._asdict() for verdict in self.verdicts],
            "unknown": self.unknown,
            "convergence": convergence,
            "chains": {
                chain: None if ran is None else plain(ran)
                for chain, ran in self.runs.items()
            },
        }
        return json.dumps(finite(content), indent=1)

    def markdown(self) -> str:
        """For people: verdicts, and a table of temperatures."""
        lines = ["# What was sampled", "", self._heats(), "", self._worth(), ""]
        if self.verdicts:
            lines += [f"* **{v.kind}**: {v.words}" for v in self.verdicts]
        else:
            lines.append("Nothing is seen that speaks against it.")
        lines += ["", *(f"Not known: {words}.\n" for words in self.unknown)]
        for chain, ran in self.runs.items():
            if ran is None or not ran.tensors:
                continue
            lines += [
                f"## Chain {chain}, {ran.sampler}, {ran.steps:,} steps",
                "",
                "| tensor | T_kin | T_conf | T_conf − T_kin |",
                "| --- | --- | --- | --- |",
            ]
            for name, read in ran.tensors.items():
                cells = (
                    f"{r.mean:.3g} ± {r.half_width:.2g}"
                    for r in (read.kinetic, read.configurational, read.excess)
                )
                lines.append(f"| {name} | {' | '.join(cells)} |")
            lines.append("")
        return "\n".join(lines)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``report.md`` and ``report.json`` into a folder."""
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        replace_file(path / "report.md", self.markdown().encode())
        replace_file(path / "report.json", self.json().encode())

    def plot(self) -> Any:
        """A page: losses, temperatures, R-hat, autocorrelation, reliability.

        Returns:
            The matplotlib figure; what is not known is not drawn.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return page(self.runs, self.convergence, self.outputs, self.targets)


def report(
    model: nn.Module | None,
    store: str | os.PathLike[str] | Any,
    inputs: Any = None,
    targets: Tensor | None = None,
    *,
    gauges: Gauges | Sequence[Gauges] | None = None,
    max_draws: int | None = None,
    link: str | Callable[[Tensor], Tensor] = "softmax",
    progress: bool = False,
    **options: Any,
) -> Report:
    """Says whether to believe what was sampled, and what to do if not.

    .. code-block:: python

        print(sg.report(model, store, x_test, y_test))

    From what ran beside the chains: T_kin and T_conf of each tensor (:class:`Gauges`),
    steps that were left out, HMC's acceptance. From what the draws put out for some
    inputs: R̂ and effective draws in function space, and whether chains, and their
    halves, differ by more than their errors, at a rate of false alarms of 2 % for all
    of the report together. What cannot be known is said as such.

    :func:`sample` leaves beside the draws what ran beside each chain, and its report.

    Args:
        model: the network that draws are put into; None without inputs.
        store: a :class:`SampleStore`, its folder, or draws with an attribute ``chain``.
        inputs: what outputs are computed for, as for :func:`predict`: a hundred or so
            are enough. None leaves outputs out. Default: None.
        targets: labels of the inputs, for the picture of calibration. Default: None.
        gauges: that have observed the chains, in their order, where it is not
            ``sample`` that ran them. Default: what the store has.
        max_draws: draws of each chain, evenly spaced, that outputs are computed for;
            None is all. Default: None.
        link: as for :func:`predict`; "identity" for regression. Default: "softmax".
        progress: show a progress bar, if tqdm is installed. Default: False.
        **options: others of :class:`Predictive`.

    Returns:
        A :class:`Report`.

    Raises:
        TypeError, ValueError: an argument is not as above; there are no draws.
    """
    if max_draws is not None:
        check_integer("max_draws", max_draws, low=1)
    draws = SampleStore(store) if isinstance(store, str | os.PathLike) else store
    if len(draws) == 0:
        raise ValueError("Invalid store: it has no draws")
    chains = by_chain(draws)
    runs = _runs(chains, gauges)
    outputs = agreement = None
    unknown, is_thinned = [], False
    if inputs is None:
        unknown.append("whether outputs have converged (no inputs were given)")
    else:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Invalid model: of type {type(model).__name__} (a Module)")
        if "likelihood" not in options:
            options["link"] = link
        options["progress"] = progress
        outputs = outputs_of(model, draws, inputs, max_draws=max_draws, **options)
        is_thinned = outputs.shape[1] < min(map(len, chains.values()))
        agreement, why = _agreement(outputs)
        unknown += why
        if len({getattr(draw, "weight", 1.0) for draw in draws}) > 1:
            unknown.append("what weights of draws change (each counts alike here)")
    found, not_known = verdicts_of(agreement, runs, is_thinned=is_thinned)
    return Report(
        verdicts=tuple(found),
        unknown=(*unknown, *not_known),
        runs=runs,
        convergence=None if agreement is None else agreement.convergence,
        outputs=outputs,
        targets=targets,
    )


def _runs(
    chains: Mapping[int, list[Any]], gauges: Gauges | Sequence[Gauges] | None
) -> dict[int, Ran | None]:
    if gauges is None:
        return {chain: _found_by(draws[0]) for chain, draws in chains.items()}
    several = [gauges] if isinstance(gauges, Gauges) else [*gauges]
    if not all(isinstance(each, Gauges) for each in several):
        raise TypeError(f"Invalid gauges: {type(gauges).__name__} (must be Gauges)")
    if len(several) == 1:  # of many chains in one sampler, say
        several *= len(chains)
    if len(several) != len(chains):
        raise ValueError(
            f"Invalid gauges: {len(several)} (there are {len(chains)} chains)"
        )
    if any(each.sampler is None for each in several):
        raise ValueError(
            "Invalid gauges: the sampler that they have observed is no more (keep it "
            "until the report)"
        )
    return {
        chain: ran_of(each.sampler, each)
        for chain, each in zip(chains, several, strict=True)
    }


def _found_by(draw: Any) -> Ran | None:
    """What is beside a chain's draws, if they are of a store."""
    return read_ran(draw) if isinstance(draw, Draw) else None


def _agreement(outputs: Tensor) -> tuple[Agreement | None, list[str]]:
    if outputs.shape[1] < 4:
        return None, [f"whether outputs have converged ({outputs.shape[1]} draws)"]
    if not bool(outputs.isfinite().all()):
        return None, ["whether outputs have converged (some are not finite)"]
    return agreement_of(outputs), []
