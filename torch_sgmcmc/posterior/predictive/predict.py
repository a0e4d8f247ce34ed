"""Posterior predictive means and uncertainties, streaming over draws."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.chain.checks import check_integer, wrong_type
from torch_sgmcmc.chain.progress import progress_bar
from torch_sgmcmc.posterior.predictive.prediction import Prediction
from torch_sgmcmc.posterior.predictive.streaming import Predictive
from torch_sgmcmc.posterior.store import SampleStore

__all__ = ["predict"]


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
    r"""What the draws of a posterior predict together for each of the inputs.

    .. math::
        p(y | x) \approx \frac{\sum_j w_j\, p(y | x, \theta_j)}{\sum_j w_j}, \qquad
        \underbrace{H[\bar p]}_\text{total}
        = \underbrace{\overline{H[p_j]}}_\text{aleatoric}
        + \underbrace{H[\bar p] - \overline{H[p_j]}}_\text{epistemic}.

    There is one pass over the draws, which may come from files, and one over the inputs
    for each draw. Memory does not grow with the number of draws.

    Args:
        model: the network that draws are put into; left as it is. A warning is issued
            if the first draw, repeated at the end, gives other outputs.
        draws: an iterable of draws: mappings from names to Tensors, of all parameters
            and buffers of the model or of some, or modules; or the folder of a
            :class:`SampleStore`.
        inputs: a Tensor, a mapping of Tensors, or an iterable of batches, see
            :class:`Predictive`.
        weights: of the draws, finite numbers: step sizes, or signs. None takes the
            attribute ``weight`` of each draw, and 1 where it has none. Default: None.
        chunk_size: how many draws are evaluated at once by :func:`torch.func.vmap`, for
            many small networks: takes memory for so many draws and their outputs.
            Default: 1, one after the other.
        progress: show a progress bar, if tqdm is installed. Default: False.
        **options: those of :class:`Predictive`: ``link``, ``dim``, ``forward``,
            ``likelihood``, ``functions``, ``quantiles``, ``keep_draws``,
            ``batch_size``, ``refresh_batch_norm``. Stored draws of a chain that was run
            with one of :mod:`torch_sgmcmc.losses` have this as default ``likelihood``.

    Returns:
        Means, variances, entropies, quantiles and averages, rows as the inputs'.

    Raises:
        TypeError, ValueError: an argument is not as above; a draw does not fit the
            model; there are no draws, or not as many as weights; weights sum to 0.

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
    likelihood = getattr(draws, "likelihood", None)
    if likelihood is not None and not {"link", "likelihood"} & options.keys():
        options["likelihood"] = likelihood
    size = check_integer("chunk_size", chunk_size, low=1)
    predictive = Predictive(model, inputs, **options)
    pairs = _pairs(progress_bar(draws, "Draws", progress), weights)
    can_repeat = isinstance(draws, Sequence) and len(draws) > 1
    before = None
    while chunk := list(islice(pairs, size)):
        predictive.update_together(*map(list, zip(*chunk, strict=True)))
        del chunk  # or two chunks would be alive at once
        if can_repeat and before is None:
            before = predictive.of_first_batch(draws[0])  # type: ignore[index]
    if before is not None:
        _check_repeats(predictive, draws[0], before)  # type: ignore[index]
    return predictive.result()


def _check_repeats(predictive: Predictive, draw: Any, before: Tensor) -> None:
    """Warns if the outputs are not a function of the draws."""
    now = predictive.of_first_batch(draw)
    if not torch.equal(now.nan_to_num(), before.nan_to_num()):
        warnings.warn(
            "The first draw gives other outputs at the end than at first: the model "
            "keeps something from call to call, or draws random numbers in eval() "
            "mode, so predictions are not those of the draws. Make the model's outputs "
            "a function of its parameters and buffers",
            UserWarning,
            stacklevel=3,
        )
    elif predictive.is_constant:
        warnings.warn(
            f"All {predictive.num_draws} draws give the same outputs: the draws are "
            "the same, or the model does not use the tensors that they have",
            UserWarning,
            stacklevel=3,
        )


_END = object()


def _check_memory(draws: Iterable[Any]) -> None:
    """Warns of a list of draws that are one: the live tensors of a model."""
    if not isinstance(draws, list | tuple) or len(draws) < 2:
        return
    first, last = map(_places, (draws[0], draws[-1]))
    if first and first == last:
        warnings.warn(
            "The draws are in the same memory, as those of draws.append(model."
            "state_dict()), and so are all the last one: copy them, {name: t.clone() "
            "for name, t in model.state_dict().items()}",
            UserWarning,
            stacklevel=3,
        )


def _places(draw: Any) -> dict[str, int]:
    if isinstance(draw, nn.Module):
        draw = dict(draw.named_parameters())
    if type(draw) not in (dict, OrderedDict):  # a stored one would be read
        return {}
    tensors = {name: t for name, t in draw.items() if isinstance(t, Tensor)}
    return {name: t.data_ptr() for name, t in tensors.items() if t.numel() > 0}


def _pairs(
    draws: Iterable[Any], weights: Iterable[float] | None
) -> Iterable[tuple[Any, float | None]]:
    given = repeat(None) if weights is None else chain(weights, repeat(_END))
    given = iter(given)
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
