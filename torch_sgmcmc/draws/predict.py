"""Predictions from the draws of a posterior."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.core.hyperparams import check_integer, check_real, wrong_type
from torch_sgmcmc.core.state_dict import check_keys
from torch_sgmcmc.core.utils import progress_bar, unwrapped
from torch_sgmcmc.draws.averages import SUMS, Sums, Terms, link_of, weighted_quantiles
from torch_sgmcmc.draws.forward import (
    Batches,
    BatchNorm,
    Evaluation,
    Replacements,
    default_forward,
    evaluating,
    model_device,
    seed_evaluation,
    weight_of,
)
from torch_sgmcmc.draws.store import SampleStore
from torch_sgmcmc.losses import Likelihood


@dataclass(frozen=True, eq=False)
class Prediction:
    r"""Predictions for each input, averaged over weighted draws.

    Means over draws are :math:`\bar f = \sum_j w_j f_j / \sum_j w_j`. Signed draws have
    weights of both signs. Their ratios are consistent, but a mean of probabilities may
    lie outside of [0, 1] by its error (``total`` is NaN where one is negative), a
    variance or ``epistemic`` may be negative, and there are no quantiles.

    Attributes:
        mean: [inputs, ...], the mean of values: of class probabilities with the link
            "softmax" or "sigmoid", of outputs with "identity".
        variance: like ``mean``, the posterior variance of values over draws (divided by
            the sum of weights, without the noise of data).
        total: entropy of the mean probabilities, in nats; for Gaussian likelihoods the
            variance of new data; else None.
        aleatoric: mean of the draws' entropies, or of σ²: the part that no data will
            reduce.
        epistemic: ``total`` minus ``aleatoric``: the mutual information of label and
            parameters, or the variance of f.
        quantiles: [levels, inputs, ...] of values, in the order of ``levels``: the
            smallest value at which the cumulative weight reaches the level. None
            without levels.
        levels: the levels of the quantiles.
        draws: [draws, inputs, ...], the values of each draw, on the CPU; None unless
            ``keep_draws``.
        averages: by name, the mean of each function of the outputs.
        num_draws: the number of draws.
        weight: the sum of their weights.
        effective_draws: :math:`(\sum w)^2 / \sum w^2`: the number of independent draws
            of equal weight with the same variance. It ignores correlation between
            draws.
    """

    mean: Tensor
    variance: Tensor
    total: Tensor | None
    aleatoric: Tensor | None
    epistemic: Tensor | None
    quantiles: Tensor | None
    levels: tuple[float, ...]
    draws: Tensor | None
    averages: Mapping[str, Tensor]
    num_draws: int
    weight: float
    effective_draws: float

    def __repr__(self) -> str:
        """Returns one line; the numbers are in the attributes."""
        text = f"Prediction of {self.num_draws} draws"
        if self.effective_draws < self.num_draws - 0.5:
            text += f" ({self.effective_draws:.3g} effective)"
        text += f": mean {list(self.mean.shape)}"
        if self.total is not None and self.epistemic is not None:
            total, epistemic = float(self.total.mean()), float(self.epistemic.mean())
            is_variance = self.epistemic.equal(self.variance)
            what = "variance {:.3g}" if is_variance else "entropy {:.3g} nats"
            text += f", {what.format(total)}, {epistemic:.3g} of it epistemic"
        for name, value in self.averages.items():
            text += f", {name} {list(value.shape)}"
        return text


class Predictive:
    r"""Posterior predictive of some inputs, updated with draw after draw.

    Predicts while a chain runs, without keeping draws; :func:`predict` is a loop over
    this class. Memory is constant in the number of draws (except with ``quantiles``):
    five numbers for each value, and the values of one draw.

    The model's parameters, buffers, training flags, gradients and torch's random
    numbers are unchanged afterwards, also after an error. Dropout is off.

    **Batch norm.** A draw is predicted with its own running statistics, if it has these
    buffers, or with statistics computed on ``refresh_batch_norm``. A warning is issued
    for a draw that has parameters before a batch norm but no statistics.

    Args:
        model: the network that draws are put into.
        inputs: a Tensor [inputs, ...], a mapping of Tensors that the model takes by
            name, or an iterable of batches such as a list or DataLoader, which is read
            once for each draw and must give the same each time: tensors, tuples whose
            first item is the model's input, or mappings.
        link: the averaged values. "softmax": class probabilities, "sigmoid": the
            probability of each output, "identity": outputs, "gaussian": the means,
            where outputs are means and log σ; or a function of a batch's outputs that
            returns a row for each of theirs. None is the link of the likelihood of the
            first draw, if it is a stored one, else "softmax". Default: None.
        likelihood: in place of ``link``: "classification", "bernoulli", "regression" (f
            alone), "heteroscedastic", or the chain's loss, if it is one of
            :mod:`torch_sgmcmc.losses`: ``losses.gaussian(noise="log_noise")``. Default:
            None.
        dim: the classes' dimension, for "softmax". None is 1 for the likelihood
            "classification", as for ``F.cross_entropy``, else -1. Default: None.
        forward: ``forward(model, batch)``, which returns the outputs as a Tensor with a
            row for each input. None calls the model with the batch and takes its
            result's ``.logits`` if there are any. Default: None.
        functions: ``{name: function}`` of a batch's outputs, with a row for each. Their
            means are in :attr:`Prediction.averages`. Default: none.
        quantiles: levels in [0, 1]. They keep all draws' values on the CPU: memory for
            draws × values. Default: none.
        keep_draws: keep the values of all draws, for :attr:`Prediction.draws`. Default:
            False.
        batch_size: rows of a batch, for inputs without batches. Default: 1000.
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
        link: str | Callable[[Tensor], Tensor] | None = None,
        dim: int | None = None,
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
        dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
        self._batches = Batches(
            "inputs", inputs, batch_size, in_order=True, dtype=next(dtypes, None)
        )
        self._given: dict[str, Any] = {
            "link": link,
            "dim": dim,
            "likelihood": likelihood,
        }
        self._forward = forward
        self._choose_link(None)
        self._functions = _checked(functions or {})
        self._levels = tuple(quantiles)
        for level in self._levels:
            if check_real("quantile", level) > 1:
                raise ValueError(f"Invalid quantile: {level} (must be in [0, 1])")
        self._keeps = bool(self._levels) or keep_draws
        self._keep_draws = keep_draws
        self._replacements = Replacements(model)
        refresh = None
        if refresh_batch_norm is not None:
            refresh = Batches(
                "refresh_batch_norm", refresh_batch_norm, batch_size, in_order=False
            )
        self._batch_norm = BatchNorm(model, refresh)
        self._sums: Sums | None = None
        self._weights: list[float] = []
        self._looks = 0

    def _choose_link(self, draw: Any) -> None:
        self._link, likelihood = link_of(draw, **self._given)
        forward = self._forward
        if likelihood is not None:
            forward = likelihood.forward(forward or default_forward)
        self._evaluation = Evaluation(self._model, forward)

    @property
    def num_draws(self) -> int:
        """The number of added draws."""
        return len(self._weights)

    def update(self, draw: Any = None, weight: float | None = None) -> None:
        """Adds a draw.

        Args:
            draw: a mapping from names to Tensors, of all parameters and buffers of the
                model or of some (the model provides the others); or a module. None is
                the present model. Default: None.
            weight: any finite number: a step size, or the sign of a signed draw. None
                is ``draw.weight`` if a mapping has that attribute, else 1. Default:
                None.

        Raises:
            TypeError, ValueError: the draw does not fit the model, outputs have other
                shapes or inputs other values than before, or a weight is negative with
                quantiles. Nothing has been added.
        """
        self.update_together([draw], [weight])

    def update_together(
        self, draws: Sequence[Any], weights: Sequence[float | None] | None = None
    ) -> None:
        """Adds several draws, evaluated at once by :func:`torch.func.vmap`.

        This is faster for many small networks. The arguments are :meth:`update`'s, in
        sequences of one length; all draws must have the same names.
        """
        if weights is None:
            weights = [None] * len(draws)
        numbers = [weight_of(d, w) for d, w in zip(draws, weights, strict=True)]
        if self._levels and min(numbers, default=0.0) < 0:
            raise ValueError(
                f"Invalid weight: {min(numbers)} (quantiles need weights >= 0, and "
                "signed draws have none)"
            )
        if not numbers:
            raise ValueError("Invalid draws: there is none")
        if not self._weights:
            self._choose_link(draws[0])
        torch.clear_autocast_cache()  # the model's tensors may have changed
        with evaluating(self._model):
            tensors = [self._tensors(draw) for draw in draws]
            seed_evaluation(self._model, 2 * len(self._weights))
            terms = self._terms(tensors)
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
        self._looks += 1
        with evaluating(self._model):
            tensors = self._tensors(draw)
            seed_evaluation(self._model, 2 * self._looks + 1)
            return self._evaluation.outputs(tensors, [self._batches.first])

    @property
    def is_constant(self) -> bool:
        """Returns whether all draws that count gave the same values, and some do."""
        has_several = sum(weight != 0 for weight in self._weights) > 1
        return has_several and self._sums is not None and not self._sums.squares.any()

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
            try:
                outputs = self._evaluation.together(draws, self._batches).unbind()
            except RuntimeError as error:
                raise RuntimeError(
                    f"{error} (of {len(draws)} draws at once, by torch.func.vmap, "
                    "which has no rules for some layers: set chunk_size=1)"
                ) from error
        return [Terms(out, self._link, self._functions) for out in outputs]

    def result(self) -> Prediction:
        """Returns the prediction from the sums.

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
        mean, variance = self._sums.mean(weight), self._sums.variance(weight)
        averages = {name: sums / weight for name, sums in self._sums.means.items()}
        total = aleatoric = epistemic = None
        if self._link.has_noise:
            aleatoric = averages.pop("")
            total, epistemic = aleatoric + variance, variance
        if self._link.has_entropy:
            aleatoric = averages.pop("")
            # Negative probabilities, possible with signed draws, have no entropy.
            total = self._link.entropy(mean.where(mean >= 0, torch.nan))
            epistemic = total - aleatoric
        quantiles = None
        if self._levels:
            levels = torch.tensor(self._levels, dtype=torch.float64, device="cpu")
            values = torch.stack(self._sums.kept)
            quantiles = weighted_quantiles(values, weights, levels)
        return Prediction(
            mean=mean.to(dtype),
            variance=variance.to(dtype),
            total=None if total is None else total.to(dtype),
            aleatoric=None if aleatoric is None else aleatoric.to(dtype),
            epistemic=None if epistemic is None else epistemic.to(dtype),
            quantiles=quantiles,
            levels=self._levels,
            draws=torch.stack(self._sums.kept) if self._keep_draws else None,
            averages={name: value.to(dtype) for name, value in averages.items()},
            num_draws=len(weights),
            weight=weight,
            effective_draws=weight * weight / float(weights.square().sum()),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums so far; tensors are shared, not copied."""
        sums = None
        if self._sums is not None:
            sums = self._link.saved(self._sums.origin.dim()) | self._sums.state_dict()
        return {"weights": list(self._weights), "sums": sums}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues the sums of another run with the same arguments.

        A link that came from stored draws must be given. Links that are functions are
        not compared.

        Raises:
            ValueError: the state dict is not a Predictive's, or has other options.
                Nothing has been loaded.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(str(wrong_type("state_dict", state_dict, "a mapping")))
        if set(state_dict) != {"weights", "sums"}:
            raise ValueError(
                f"Invalid state_dict: it has {', '.join(map(str, state_dict))} (must "
                "have weights and sums)"
            )
        state, loaded = state_dict["sums"], None
        if state is not None:
            keys = "link", "dim", *SUMS, "means", "dtype", "kept"
            check_keys(state, "Predictive", *keys)
            kept = len(state_dict["weights"]) if self._keeps else 0
            link = self._link.saved(state["origin"].dim())
            if (
                {*state["means"]} - {""} != {*self._functions}
                or len(state["kept"]) != kept
                or any(state[key] != value for key, value in link.items())
            ):
                raise ValueError(
                    "Invalid state_dict: it has other averages or quantiles (link, "
                    "dim, likelihood, functions and quantiles must be those it was "
                    "made with)"
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
            raise TypeError(f"Invalid functions: {name!r} is not a function")
    return dict(functions)


def predict(
    model: nn.Module,
    draws: Iterable[Any] | str | os.PathLike[str],
    inputs: Any,
    *,
    weights: Iterable[float] | None = None,
    chunk_size: int = 1,
    progress: bool = False,
    **options: Any,
) -> Prediction:
    r"""Predicts with the draws of a posterior for each of the inputs.

    .. math::
        p(y | x) \approx \frac{\sum_j w_j\, p(y | x, \theta_j)}{\sum_j w_j}, \qquad
        \underbrace{H[\bar p]}_\text{total}
        = \underbrace{\overline{H[p_j]}}_\text{aleatoric}
        + \underbrace{H[\bar p] - \overline{H[p_j]}}_\text{epistemic}.

    Makes one pass over the draws, which may come from files, and one over the inputs
    for each draw. Memory does not grow with the number of draws.

    Args:
        model: the network that draws are put into; unchanged afterwards. A warning is
            issued if the first draw, repeated at the end, gives other outputs.
        draws: an iterable of draws: mappings from names to Tensors, of all parameters
            and buffers of the model or of some, or modules; or the folder of a
            :class:`SampleStore`.
        inputs: a Tensor, a mapping of Tensors, or an iterable of batches, see
            :class:`Predictive`.
        weights: the draws' weights, finite numbers: step sizes, or signs. None takes
            the attribute ``weight`` of each draw, and 1 where it has none. Default:
            None.
        chunk_size: number of draws evaluated at once by :func:`torch.func.vmap`, for
            many small networks; takes memory for so many draws and their outputs.
            Default: 1, one after the other.
        progress: show a progress bar, if tqdm is installed. Default: False.
        **options: options of :class:`Predictive`: ``link``, ``dim``, ``forward``,
            ``likelihood``, ``functions``, ``quantiles``, ``keep_draws``,
            ``batch_size``, ``refresh_batch_norm``. The default ``likelihood`` of stored
            draws, also of a list of some, is the chain's loss, if it is one of
            :mod:`torch_sgmcmc.losses`.

    Returns:
        Means, variances, entropies, quantiles and averages, in the inputs' order.

    Raises:
        TypeError, ValueError: an argument is invalid; a draw does not fit the model;
            there are no draws, or not as many as weights; weights sum to 0.

    Example:
        >>> draws = [{k: t.clone() for k, t in state.items()} for state in states]
        >>> prediction = sg.predict(model, draws, x_test)
        >>> prediction.mean, prediction.epistemic

    Reference:
        S. Depeweg, J. M. Hernández-Lobato, F. Doshi-Velez and S. Udluft, Decomposition
        of Uncertainty in Bayesian Deep Learning for Efficient and Risk-sensitive
        Learning, ICML 2018.
    """
    if isinstance(draws, str | os.PathLike):
        draws = SampleStore(draws)
        if len(draws) == 0:
            raise ValueError(f"Invalid draws: {draws.path} has none")
    if isinstance(draws, nn.Module | Mapping | Tensor):
        raise wrong_type("draws", draws, "an iterable of draws: of one, [draw]")
    _check_memory(draws)
    size = check_integer("chunk_size", chunk_size, low=1)
    predictive = Predictive(model, inputs, **options)
    pairs = _pairs(progress_bar(draws, "Draws", progress), weights)
    again = draws if isinstance(draws, Sequence) and len(draws) > 1 else None
    before = None
    while chunk := list(islice(pairs, size)):
        predictive.update_together(*map(list, zip(*chunk, strict=True)))
        del chunk  # else two chunks would be in memory
        if again is not None and before is None:
            before = predictive.of_first_batch(again[0])
    if again is not None and before is not None:
        _check_repeats(predictive, again[0], before)
    return predictive.result()


def _check_repeats(predictive: Predictive, draw: Any, before: Tensor) -> None:
    """Warns if the outputs are not a function of the draws."""
    now = predictive.of_first_batch(draw)
    if not torch.equal(now.nan_to_num(), before.nan_to_num()):
        warnings.warn(
            "The first draw gives other outputs at the end than at first: the model "
            "keeps something from call to call, or draws random numbers in eval() "
            "mode, so the predictions do not belong to the draws. Make the model's "
            "outputs a function of its parameters and buffers",
            stacklevel=3,
        )
    elif predictive.is_constant:
        warnings.warn(
            f"All {predictive.num_draws} draws give the same outputs: the draws are "
            "the same, or the model does not use the tensors that they have",
            stacklevel=3,
        )


_END = object()


def _check_memory(draws: Iterable[Any]) -> None:
    if not isinstance(draws, list | tuple) or len(draws) < 2:
        return
    first, last = map(_places, (draws[0], draws[-1]))
    if first and first == last:
        warnings.warn(
            "All draws share storage, as with draws.append(model.state_dict()), so all "
            "equal the last one. Copy them, {name: t.clone() for name, t in "
            "model.state_dict().items()}",
            stacklevel=3,
        )


def _places(draw: Any) -> dict[str, int]:
    if isinstance(draw, nn.Module):
        draw = dict(draw.named_parameters())
    if type(draw) not in (dict, OrderedDict):  # a stored draw would be read
        return {}
    tensors = {name: t for name, t in draw.items() if isinstance(t, Tensor)}
    return {name: t.data_ptr() for name, t in tensors.items() if t.numel() > 0}


def _pairs(
    draws: Iterable[Any], weights: Iterable[float] | None
) -> Iterable[tuple[Any, float | None]]:
    given: Iterator[Any] = (
        repeat(None) if weights is None else chain(weights, repeat(_END))
    )
    count = 0
    for draw in draws:
        weight = next(given)
        if weight is _END:
            raise ValueError(f"Invalid weights: {count}, fewer than there are draws")
        yield draw, weight
        del draw
        count += 1
    if weights is not None and next(given) is not _END:
        raise ValueError(f"Invalid weights: more than there are draws ({count})")
