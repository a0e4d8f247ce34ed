"""The posterior predictive as a sum that grows draw by draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.chain.checks import check_real, wrong_type
from torch_sgmcmc.chain.wrappers import unwrapped
from torch_sgmcmc.losses import Likelihood, likelihood_of
from torch_sgmcmc.posterior.predictive.batch_norm import BatchNorm
from torch_sgmcmc.posterior.predictive.batches import Batches
from torch_sgmcmc.posterior.predictive.forward import (
    Evaluation,
    default_forward,
    evaluating,
    model_device,
)
from torch_sgmcmc.posterior.predictive.links import Link
from torch_sgmcmc.posterior.predictive.prediction import Prediction
from torch_sgmcmc.posterior.predictive.quantiles import weighted_quantiles
from torch_sgmcmc.posterior.predictive.replacements import Replacements, weight_of
from torch_sgmcmc.posterior.predictive.sums import Sums, Terms

__all__ = ["Predictive"]


class Predictive:
    r"""The posterior predictive of some inputs, updated with draw after draw.

    For predictions while a chain runs, without keeping draws; :func:`predict` is a loop
    over it. Memory is constant in the number of draws (but for ``quantiles``): five
    numbers for each value, and the values of one draw.

    The model gets its parameters, buffers, training flags and gradients back, also when
    something is raised; torch's random numbers go on as if nothing had been predicted.
    Dropout is off.

    **Batch norm.** A draw is predicted with its own running statistics, if it has
    these buffers, or with statistics computed anew on ``refresh_batch_norm``. Where
    neither is so and the draw has parameters before a batch norm, there is a warning.

    Args:
        model: the network that draws are put into.
        inputs: a Tensor [inputs, ...], a mapping of Tensors that the model takes by
            name, or a list, DataLoader or other iterable of batches, which is read once
            for each draw, and each time has to give the same: tensors, tuples of which
            the first is the model's input, or mappings.
        link: what is averaged. "softmax": class probabilities, "sigmoid": the
            probability of each output by itself, "identity": outputs, "gaussian": of
            outputs that are means and log σ the means, or a function of a batch's
            outputs that has a row for each of theirs. Default: "softmax".
        likelihood: in place of ``link``: "classification", "bernoulli", "regression" (f
            alone), "heteroscedastic", or one of :mod:`torch_sgmcmc.losses`, as the
            chain was run with: ``losses.gaussian(noise="log_noise")``. Default: None.
        dim: the classes' dimension, for "softmax". Default: -1.
        forward: ``forward(model, batch)``, which returns the outputs as a Tensor with a
            row for each input. None calls the model with the batch and takes
            ``.logits`` if that is there. Default: None.
        functions: ``{name: function}`` of a batch's outputs, with a row for each: their
            means are in :attr:`Prediction.averages`. Default: none.
        quantiles: levels in [0, 1]. All draws' values are kept for them, on the CPU:
            memory for draws × values. Default: none.
        keep_draws: keep the values of all draws, for :attr:`Prediction.draws`.
            Default: False.
        batch_size: rows of a batch, where the inputs have none. Default: 1000.
        refresh_batch_norm: data in batches, as inputs are, on which the running
            statistics of each draw are computed as in
            :func:`torch.optim.swa_utils.update_bn`, but without dropout. Default: None.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Example:
        >>> predictive = sg.Predictive(model, x_test)
        >>> for step in range(10_000):
        ...     sampler.step(closure)
        ...     if step >= 1000 and step % 100 == 0:
        ...         predictive.update()
        >>> predictive.result().mean
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        link: str | Callable[[Tensor], Tensor] = "softmax",
        dim: int = -1,
        likelihood: str | Likelihood | None = None,
        forward: Callable[[nn.Module, Any], Tensor] | None = None,
        functions: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        quantiles: Iterable[float] = (),
        keep_draws: bool = False,
        batch_size: int = 1000,
        refresh_batch_norm: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise wrong_type("model", model, "a Module")
        self._model = model = unwrapped(model)
        self._batches = Batches("inputs", inputs, batch_size, in_order=True)
        if likelihood is not None:
            if link != "softmax":
                raise ValueError("Invalid link: give link or likelihood, not both")
            chosen = likelihood_of(likelihood)
            link, forward = chosen.link, chosen.forward(forward or default_forward)
        self._link = Link(link, dim)
        self._functions = _checked(functions or {})
        self._levels = tuple(quantiles)
        for level in self._levels:
            if check_real("quantile", level) > 1:
                raise ValueError(f"Invalid quantile: {level} (must be in [0, 1])")
        self._keeps = bool(self._levels) or keep_draws
        self._keep_draws = keep_draws
        self._evaluation = Evaluation(model, forward)
        self._replacements = Replacements(model)
        refresh = None
        if refresh_batch_norm is not None:
            refresh = Batches(
                "refresh_batch_norm", refresh_batch_norm, batch_size, in_order=False
            )
        self._batch_norm = BatchNorm(model, refresh)
        self._sums: Sums | None = None
        self._weights: list[float] = []

    @property
    def num_draws(self) -> int:
        """The draws that have been added."""
        return len(self._weights)

    def update(self, draw: Any = None, weight: float | None = None) -> None:
        """Adds a draw.

        Args:
            draw: a mapping from names to Tensors, of all parameters and buffers of the
                model or of some, the others being the model's; or a module. None is the
                model as it is now. Default: None.
            weight: any finite number: a step size, or the sign of a signed draw. None
                is ``draw.weight`` if a mapping has that attribute, and else 1.
                Default: None.

        Raises:
            TypeError, ValueError: the draw does not fit the model, the outputs are of
                other shapes than before, or the inputs are not the same as before; a
                negative weight, and there are quantiles. Nothing has been added.
        """
        self.update_together([draw], [weight])

    def update_together(
        self, draws: Sequence[Any], weights: Sequence[float | None] | None = None
    ) -> None:
        """Adds several draws, which are evaluated at once by :func:`torch.func.vmap`.

        Many small networks take less time so. The arguments are those of
        :meth:`update`, in sequences of one length; draws must have the same names.
        """
        if weights is None:
            weights = [None] * len(draws)
        numbers = [weight_of(d, w) for d, w in zip(draws, weights, strict=True)]
        if self._levels and min(numbers, default=0.0) < 0:
            raise ValueError(
                f"Invalid weight: {min(numbers)} (quantiles need weights >= 0: those "
                "of signed draws are not defined)"
            )
        if not numbers:
            raise ValueError("Invalid draws: there is none")
        with evaluating(self._model):
            terms = self._terms([self._tensors(draw) for draw in draws])
        if self._sums is None:
            self._sums = Sums(terms[0])
        for term in terms:
            self._sums.check(term)
        for term, number in zip(terms, numbers, strict=True):
            self._sums.add(term, number, keep=self._keeps)
        self._weights += numbers

    def _tensors(self, draw: Any) -> Mapping[str, Tensor]:
        tensors = {} if draw is None else self._replacements.of(draw)
        return self._batch_norm.of(tensors, self._evaluation, live=draw is None)

    def of_first_batch(self, draw: Any) -> Tensor:
        """Returns a draw's outputs for the first batch of inputs."""
        with evaluating(self._model):
            return self._evaluation.outputs(self._tensors(draw), [self._batches.first])

    @property
    def is_constant(self) -> bool:
        """Whether all draws gave the same values."""
        return self._sums is not None and not bool(self._sums.squares.any())

    def _terms(self, draws: list[Mapping[str, Tensor]]) -> list[Terms]:
        outputs: Sequence[Tensor]
        if len(draws) == 1:
            outputs = [self._evaluation.outputs(draws[0], self._batches)]
        else:
            for draw in draws[1:]:
                if draw.keys() != draws[0].keys():
                    raise ValueError(
                        f"Invalid draws: one has {', '.join(draws[0]) or 'no tensor'}, "
                        f"another {', '.join(draw) or 'no tensor'} (draws that are "
                        "evaluated together must have the same names)"
                    )
            outputs = self._evaluation.together(draws, self._batches).unbind()
        return [Terms(out, self._link, self._functions) for out in outputs]

    def result(self) -> Prediction:
        """What has been added up.

        Raises:
            ValueError: there is no draw, or weights sum to 0.
        """
        if self._sums is None:
            raise ValueError("There is nothing to predict with: no draw was added")
        weights = torch.tensor(self._weights, dtype=torch.float64, device="cpu")
        weight = float(weights.sum())
        if weight == 0:
            raise ValueError("Invalid weights: they sum to 0")
        dtype = self._sums.dtype
        mean = self._sums.mean(weight)
        averages = {name: sums / weight for name, sums in self._sums.means.items()}
        total = aleatoric = epistemic = None
        variance = self._sums.variance(weight)
        if self._link.has_noise:
            aleatoric, epistemic = averages.pop(""), variance
            total = (aleatoric + epistemic).to(dtype)
            aleatoric, epistemic = aleatoric.to(dtype), epistemic.to(dtype)
        if self._link.has_entropy:
            aleatoric = averages.pop("")
            # There is none of negative probabilities, as signed draws may have.
            total = self._link.entropy(mean.where(mean >= 0, torch.nan))
            epistemic = (total - aleatoric).to(dtype)
            total, aleatoric = total.to(dtype), aleatoric.to(dtype)
        quantiles = None
        if self._levels:
            levels = torch.tensor(self._levels, dtype=torch.float64, device="cpu")
            values = torch.stack(self._sums.kept)
            quantiles = weighted_quantiles(values, weights, levels)
        return Prediction(
            mean=mean.to(dtype),
            variance=variance.to(dtype),
            total=total,
            aleatoric=aleatoric,
            epistemic=epistemic,
            quantiles=quantiles,
            levels=self._levels,
            draws=torch.stack(self._sums.kept) if self._keep_draws else None,
            averages={name: value.to(dtype) for name, value in averages.items()},
            num_draws=len(weights),
            weight=weight,
            effective_draws=weight * weight / float(weights.square().sum()),
        )

    def state_dict(self) -> dict[str, Any]:
        """The sums so far; tensors are shared, not copied."""
        return {
            "weights": list(self._weights),
            "sums": None if self._sums is None else self._sums.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues the sums of another run with the same arguments.

        Raises:
            ValueError: it is no state dict of a Predictive, or of one with other
                options. Nothing has been loaded.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(
                f"Invalid state_dict: of type {type(state_dict).__name__} (must be a "
                "mapping)"
            )
        if set(state_dict) != {"weights", "sums"}:
            raise ValueError(
                f"Invalid state_dict: it has {', '.join(map(str, state_dict))} (must "
                "have weights and sums)"
            )
        state, loaded = state_dict["sums"], None
        if state is not None:
            names = {*self._functions} | (
                {""} if self._link.has_entropy or self._link.has_noise else set()
            )
            kept = len(state_dict["weights"]) if self._keeps else 0
            if {*state["means"]} != names or len(state["kept"]) != kept:
                raise ValueError(
                    "Invalid state_dict: it has other averages or quantiles (link, "
                    "functions and quantiles must be those it was made with)"
                )
            loaded = Sums.from_state(state, model_device(self._model))
        self._weights = list(state_dict["weights"])
        self._sums = loaded


def _checked(functions: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    if not isinstance(functions, Mapping):
        raise wrong_type("functions", functions, "a mapping from names to functions")
    for name, function in functions.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"Invalid functions: a name {name!r}")
        if not callable(function):
            raise TypeError(f"Invalid functions: {name!r} is no function")
    return dict(functions)
