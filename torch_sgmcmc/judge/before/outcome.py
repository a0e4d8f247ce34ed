"""What a look before a run has found, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch_sgmcmc.judge.before.messages import Problem

__all__ = ["REMARKED", "Check"]

#: T_kin / T - 1 of a tensor from which on the summary remarks it.
REMARKED = 1.0


@dataclass(frozen=True)
class Check:
    """What :func:`check` has found."""

    #: The worst first; empty if nothing was found.
    problems: tuple[Problem, ...]
    #: Results between right and wrong, such as a tensor with T_kin above 2 T.
    remarks: tuple[str, ...]
    #: What could not be looked at, and why.
    unknown: tuple[str, ...]
    #: The sampler's target, in words.
    target: str
    #: Data that the loader goes through; None if that is not known.
    num_data: int | None
    #: Elements that are sampled, and names of the model's parameters that are not.
    num_sampled: int
    not_sampled: tuple[str, ...]
    #: The loss of a minibatch.
    loss: float
    #: The largest curvature of the mean loss and the prior here, and the lr beyond
    #: which a chain leaves; NaN where it is not known.
    curvature: float
    largest_lr: float
    #: The lr at which minibatches add 5 % to T_kin in the mean of all coordinates, with
    #: the gradients' noise as it is here; NaN where it is not known. Both are the
    #: largest group's lr; the others keep their ratios to it.
    noise_lr: float
    #: By tensor, what minibatches would add to T_kin / T with the gradients' noise as
    #: it is here. At a random start the last layer has more than it will have.
    heating: Mapping[str, float]
    #: The same for residuals with the variance of a Gaussian likelihood; empty after
    #: the first step, and for other likelihoods.
    fitted_heating: Mapping[str, float]
    #: Bytes of a draw in a store, and of the sampler's state.
    draw_bytes: int
    state_bytes: int
    #: Gradients that were computed.
    gradients: int

    @property
    def limit(self) -> str:
        """The smaller limit of lr: "stability", "gradient noise", or "" if unknown."""
        if math.isnan(self.largest_lr) or math.isnan(self.noise_lr):
            return ""
        return "stability" if self.largest_lr <= self.noise_lr else "gradient noise"

    def __str__(self) -> str:
        """The summary."""
        return self.summary()

    def summary(self) -> str:
        """Problems and numbers, in words."""
        lines = [f"{i}. {p.words}" for i, p in enumerate(self.problems, 1)]
        if not lines and not self.remarks:
            lines.append("Nothing is seen that is wrong.")
        lines += [f"Remark: {words}" for words in self.remarks]
        lines += ["", self.target, f"Sampled: {self.num_sampled:,} numbers."]
        if self.not_sampled:
            names = ", ".join(self.not_sampled[:6])
            more = len(self.not_sampled) - 6
            lines[-1] += f" Not sampled: {names}" + (
                f" and {more} more." if more > 0 else "."
            )
        if not math.isnan(self.curvature):
            lines.append(
                f"Largest curvature here {self.curvature:.3g}: stable up to lr = "
                f"{self.largest_lr:.2g}."
            )
        if math.isfinite(self.noise_lr):
            lines.append(
                f"Minibatches add 5 % to T_kin at lr = {self.noise_lr:.2g}, with the "
                "gradients' noise as it is here."
            )
        if self.limit:
            smaller = min(self.largest_lr, self.noise_lr)
            lines.append(f"The smaller limit of lr is {self.limit}: {smaller:.2g}.")
        for words, heats in (
            ("T_kin / T with the minibatches' noise as it is here", self.heating),
            ("With residuals of the loss's own variance", self.fitted_heating),
        ):
            hottest = sorted(heats.items(), key=lambda item: -item[1])[:4]
            if hottest:
                some = [f"{name} {1 + heat:.3g}" for name, heat in hottest]
                lines.append(f"{words}: {', '.join(some)}.")
        lines.append(
            f"A draw takes {_size(self.draw_bytes)} in a store, the sampler's state "
            f"{_size(self.state_bytes)} of memory."
        )
        lines += [f"Not known: {words}." for words in self.unknown]
        return "\n".join(lines)


def _size(count: int) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"
