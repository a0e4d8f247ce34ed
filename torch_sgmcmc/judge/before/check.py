"""``check``: a look before a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.chain.closures import kept_gradients
from torch_sgmcmc.chain.record import chain_of, state_bytes_of
from torch_sgmcmc.chain.rows import halves, rows_of
from torch_sgmcmc.chain.wrappers import unwrapped
from torch_sgmcmc.hmcecs import HMCECS
from torch_sgmcmc.judge.before.curvature import largest_curvature, stable_lr
from torch_sgmcmc.judge.before.data import data_of, look_at_data
from torch_sgmcmc.judge.before.losses import (
    Look,
    known_loss,
    look,
    look_at_outputs,
    residuals_of,
    watched,
    width_of,
)
from torch_sgmcmc.judge.before.modes import batch_norms, dropouts, kept, quiet
from torch_sgmcmc.judge.before.noise import NoiseHeat, is_heat_known
from torch_sgmcmc.judge.before.outcome import KINDS, Check, Problem
from torch_sgmcmc.posterior.predictive.forward import model_device, moved
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sbps import SBPS

__all__ = ["check"]

_PAIRS, _ITERATIONS, _CURVED = 8, 10, 2
# log2 of (gradient of a minibatch) / (mean of its halves'): 0 of means and 1 of sums.
_EXPONENT = 0.5
# What of it is in another direction.
_REST = 0.1
# Heat that tells of a wrong lr wherever the chain is: at a random start the output's
# biases have much more than they will have.
_HOT, _HOT_TENSOR = 0.5, 20.0

Loss = Callable[[nn.Module, Any], Tensor]


def check(
    model: nn.Module, loss: Loss, loader: Iterable[Any], sampler: Sampler
) -> Check:
    r"""Looks at what is going to be sampled, before it is.

    .. code-block:: python

        print(sg.check(model, loss, loader, sampler))

    By at most 60 gradients of a few minibatches: is the loss a mean and that of the
    model's outputs, ``num_data`` that of the loader, is what is sampled the model's,
    is each layer a function of one input (docs/first_run.md has all), and

    * lr against the largest curvature h of the mean loss, :math:`2 (1 + m) / h`;
    * the heat that minibatches would add with m the momentum (SGLD: 0), V the variance
      of a gradient's element,

      .. math:: \frac{T_\text{kin}}{T} - 1 \approx \frac{\mathrm{lr}\, N V}{2 (1 - m) T}
          - \hat\beta \frac{1}{1 - m}

      (:class:`BAOA`: (1 + m) / 2 of it).

    Both limit lr: ``largest_lr`` is stable, at ``noise_lr`` the mean coordinate's heat
    is 5 %, and ``limit`` says which is smaller.

    Parameters, buffers, gradients and torch's default generators are as before when it
    ends, and so are generators of the loader.

    Args:
        model: as the loss takes it, in the mode in which it will be trained.
        loss: ``loss(model, batch)``, as for :func:`sample`: the mean loss of a
            minibatch, which has been moved to the model's device; of each example for
            SBPS.
        loader: minibatches, an iterable that can be read again.
        sampler: the sampler, before its first step or later. Not an HMCECS.

    Returns:
        A :class:`Check` that can be printed: problems, the worst first, and numbers.

    Raises:
        TypeError: an argument is not as above.
        ValueError: the loader has no minibatch.
        Exception: what the loss raises.

    Note:
        That nothing is found is no proof. Curvature grows while a network is trained,
        and noise mostly falls: look again after burn-in, and see :class:`Gauges`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Invalid model: of type {type(model).__name__} (a Module)")
    if not isinstance(sampler, Sampler) or isinstance(sampler, HMCECS):
        raise TypeError(
            f"Invalid sampler: a {type(sampler).__name__} (must be a sampler of "
            "torch_sgmcmc, and no HMCECS, which draws its own subsamples)"
        )
    if not callable(loss):
        raise TypeError(f"Invalid loss: {loss!r} (must be a function)")
    if isinstance(loader, Iterator):
        raise TypeError(
            f"Invalid loader: an iterator of type {type(loader).__name__} (is read "
            "once only, and would lose minibatches: give a list or a DataLoader)"
        )
    looking = _Looking(model, loss, sampler)
    with looking.without_trace(loader):
        batches = [*islice(loader, 2 * _PAIRS)]
        if not batches:
            raise ValueError("Invalid loader: it has no minibatch")
        looking.at_parameters()
        looking.at_potential(batches)
        if looking.sampled:
            looking.at_modes()
            looking.at_loss(loader, batches)
        looking.at_data(loader, batches)
        if looking.is_sound:
            looking.at_steps(batches)
    order = {kind: i for i, kind in enumerate(KINDS)}
    tensors = [*unwrapped(model).state_dict().values()]
    return Check(
        problems=tuple(sorted(looking.problems, key=lambda p: order[p.kind])),
        unknown=tuple(looking.unknown),
        target=sampler.target_summary(),
        num_data=data_of(loader),
        num_sampled=sum(p.numel() for p in looking.sampled),
        not_sampled=tuple(looking.not_sampled),
        loss=looking.loss_here,
        curvature=looking.curvature,
        largest_lr=looking.largest_lr,
        noise_lr=looking.noise_lr,
        heating=looking.heating,
        residuals=looking.residuals,
        draw_bytes=sum(t.numel() * t.element_size() for t in tensors),
        state_bytes=state_bytes_of(sampler),
        gradients=looking.gradients,
    )


class _Looking:
    """One look, and what has been found so far."""

    def __init__(self, model: nn.Module, loss: Loss, sampler: Sampler) -> None:
        self.model, self.loss, self.sampler = model, loss, sampler
        params = chain_of(sampler).params
        self.sampled = [p for p in params if p.requires_grad]
        self.all = list({id(p): p for p in (*params, *model.parameters())}.values())
        self.problems: list[Problem] = []
        self.unknown: list[str] = []
        self.not_sampled: list[str] = []
        self.loss_here = self.curvature = math.nan
        self.largest_lr = self.noise_lr = math.nan
        self.heating: dict[str, float] = {}
        self.residuals = math.nan
        self.gradients = 0
        self.loss_shape: list[int] = []
        # Whether the loss is U itself, of all data; and how many targets a datum has,
        # if it is a mean over these.
        self.is_potential = False
        self.width = 1

    @property
    def is_sound(self) -> bool:
        """Whether steps can be looked at."""
        worse = KINDS[: KINDS.index("sum")]
        return bool(self.sampled) and not any(p.kind in worse for p in self.problems)

    def found(self, kind: str, words: str) -> None:
        """Notes a problem."""
        self.problems.append(Problem(kind, words))

    @contextmanager
    def without_trace(self, loader: Any) -> Iterator[None]:
        """All is afterwards as before, as far as it can be known."""
        indices, batches = (
            getattr(loader, name, None) for name in ("sampler", "batch_sampler")
        )
        inside = (getattr(owner, "sampler", None) for owner in (indices, batches))
        owners = (loader, indices, batches, *inside)
        found = [getattr(owner, "generator", None) for owner in owners]
        generators = {id(g): g for g in found if isinstance(g, torch.Generator)}
        states = {key: g.get_state() for key, g in generators.items()}
        drawing = [owner for owner in owners if hasattr(owner, "num_drawn")]
        draws = [(owner, owner.state_dict()) for owner in drawing]
        devices = sorted({p.device.index for p in self.all if p.device.type == "cuda"})
        try:
            with (
                torch.random.fork_rng(devices),
                kept(self.model),
                kept_gradients(self.all),
            ):
                yield
        finally:
            for key, generator in generators.items():
                generator.set_state(states[key])
            for owner, state in draws:
                owner.load_state_dict(state)

    # ---- Gradients ------------------------------------------------------------

    def gradient(self, batch: Any) -> tuple[list[Tensor | None], Look]:
        """That of the loss of a minibatch, of what is sampled."""
        for p in self.all:
            p.grad = None
        with torch.enable_grad(), watched(self.model) as outputs:
            value = self._value(batch)
            value.mean().backward()
        self.gradients += 1
        return [p.grad for p in self.sampled], look(value, outputs, batch)

    def _value(self, batch: Any) -> Tensor:
        value = self.loss(self.model, moved(batch, model_device(self.model)))
        if not isinstance(value, Tensor):
            raise TypeError(
                f"Invalid loss: the function returned {type(value).__name__} (must "
                "return the mean loss of the minibatch, a Tensor)"
            )
        self.loss_shape = list(value.shape)
        return value

    def _glance(self, batch: Any) -> Look:
        """At the loss alone."""
        with torch.no_grad(), watched(self.model) as outputs:
            return look(self._value(batch), outputs, batch)

    def gradient_in_mean(self, batches: list[Any]) -> list[Tensor]:
        """Over some minibatches; zero where there is none."""
        sums = [torch.zeros_like(p) for p in self.sampled]
        for batch in batches:
            for s, g in zip(sums, self.gradient(batch)[0], strict=True):
                if g is not None:
                    s += g / len(batches)
        return sums

    # ---- Looks ----------------------------------------------------------------

    def at_parameters(self) -> None:
        """Which parameters are sampled."""
        own = {id(p) for p in self.sampled}
        named = dict(self.model.named_parameters())
        self.not_sampled = [name for name, p in named.items() if id(p) not in own]
        if not self.sampled:
            self.found(
                "frozen",
                "No parameter of the sampler requires a gradient: there is nothing to "
                "sample. Set requires_grad of those that are to be.",
            )
        elif len(self.not_sampled) == len(named):
            self.found(
                "other model",
                "None of the model's parameters is the sampler's: it would sample "
                "another model, or this one before it was copied or moved. Make the "
                "sampler of model.parameters(), last of all.",
            )

    def at_potential(self, batches: list[Any]) -> None:
        """Whether the loss is U itself, of all data."""
        given = {float(group["num_data"]) for group in self.sampler.param_groups}
        self.is_potential = given == {1.0} and len(batches) == 1

    def at_data(self, loader: Any, batches: list[Any]) -> None:
        """Whether the loader has the data that are meant, and how it has them."""
        if self.is_potential:
            return
        rows = rows_of(batches[0])
        self.problems += look_at_data(self.sampler, loader, rows, self.width)
        if data_of(loader) is None:
            self.unknown.append("whether num_data is the number of the loader's data")

    def at_modes(self) -> None:
        """Layers that are not a function of one input."""
        if names := dropouts(self.model):
            self.found(
                "random loss",
                f"Dropout is on ({_some(names)}): the loss is that of another random "
                "network each time, and not a likelihood. Call model.eval() or set "
                "p=0; the prior regularises.",
            )
        if names := batch_norms(self.model):
            self.found(
                "batch norm",
                f"Batch norm takes the minibatch's statistics ({_some(names)}): the "
                "loss of an example depends on others, and predictions are another "
                "function's. Call eval() on these layers once they have statistics, or "
                "take group norm.",
            )

    def at_loss(self, loader: Any, batches: list[Any]) -> None:
        """Whether it is a mean, of what, and finite."""
        with quiet(self.model):
            grads, seen = self.gradient(batches[0])
            self.loss_here = seen.loss
            if not self._is_usable(grads, seen):
                return
            again, _ = self.gradient(batches[0])
            if _length(_less(again, grads)) > 1e-3 * _length(grads):
                self.found(
                    "random loss",
                    "The loss of one minibatch is another each time: something in the "
                    "model or the loss is random (dropout as a function, noise), and "
                    "it is not a likelihood.",
                )
                return
            if self.is_potential:
                self.unknown.append("what the potential, as num_data is 1, is made of")
                return
            looks = [seen, *(self._glance(batch) for batch in batches[1:4])]
            parts = halves(batches[0])
            if parts is None:
                self.unknown.append("whether the loss is a mean (no rows to cut)")
            else:
                looks += self._at_halves(*parts)
        self.residuals = residuals_of(looks)
        if getattr(self.loss, "is_likelihood", False):
            return
        is_mean = not any(p.kind == "sum" for p in self.problems)
        known = known_loss(looks) if is_mean else None
        if known is not None:
            name, factor = known
            width, data = width_of(seen), data_of(loader)
            given = {float(group["num_data"]) for group in self.sampler.param_groups}
            counts_all = data is None or given == {float(width * data)}
            if abs(factor - 1) < 1e-2 and counts_all:
                self.width = width
            self.problems += look_at_outputs(name, factor, looks, counts_all=counts_all)

    def _is_usable(self, grads: list[Tensor | None], seen: Look) -> bool:
        """Whether a first gradient is one, and of all that is sampled."""
        takes_each = isinstance(self.sampler, SBPS)
        if len(self.loss_shape) != takes_each:
            what = (
                "the loss of each example" if takes_each else "one number, their mean"
            )
            self.found(
                "shape",
                f"The loss of a minibatch has shape {self.loss_shape}, and "
                f"{type(self.sampler).__name__} takes {what}.",
            )
            return False
        finite = [g is None or bool(g.isfinite().all()) for g in grads]
        if not math.isfinite(seen.loss) or not all(finite):
            self.found(
                "not finite",
                f"The loss of a minibatch is {seen.loss:.3g}, and "
                f"{finite.count(False)} of {len(finite)} tensors have gradients that "
                "are not finite: look at the data and the model's start.",
            )
            return False
        own = {id(p) for p in self.model.parameters()}
        lost = [
            p
            for p, grad in zip(self.sampled, grads, strict=True)
            if grad is None and id(p) not in own
        ]
        if lost and len(lost) < len(grads):
            self.found(
                "other model",
                f"{len(lost)} of the sampler's {len(grads)} tensors are not the "
                "model's, and have no gradient: was a layer replaced after the sampler "
                "was made? Make it last of all.",
            )
        elif all(g is None for g in grads):
            self.found("other model", "No parameter has a gradient of the loss.")
            return False
        return True

    def _at_halves(self, first: Any, second: Any, both: Any) -> list[Look]:
        try:
            (one, a), (other, b), (whole, _) = map(self.gradient, (first, second, both))
        except Exception as error:
            self.unknown.append(
                f"whether the loss is a mean (of half a minibatch it raises {error!r})"
            )
            return []
        mean = [
            None if g is None or h is None else (g + h) / 2
            for g, h in zip(one, other, strict=True)
        ]
        square = _dot(mean, mean)
        ratio = _dot(whole, mean) / square if square > 0 else math.nan
        rest = _length(_less(whole, [None if g is None else ratio * g for g in mean]))
        exponent = math.log2(ratio) if ratio > 0 else math.nan
        # What halves with other weights' or words' sums may differ by.
        chance = max(_REST, 2 / math.sqrt(rows_of(both) or 1))
        if rest > chance * _length(whole) or not -1.5 < exponent < 1.5:
            if not any(p.kind == "batch norm" for p in self.problems):
                self.found(
                    "minibatch",
                    "The gradient of a minibatch is not the mean of its halves': is it "
                    "divided by the sum of weights, or of words that are not padding "
                    "(divide by the number of data), or does the loss of an example "
                    "depend on others, as in contrastive losses, which are no "
                    "likelihood?",
                )
        elif abs(exponent) > _EXPONENT:
            is_sum = exponent > 0
            self.found(
                "sum",
                f"The loss is {'a sum over' if is_sum else 'divided twice by'} the "
                "minibatch: a minibatch of twice the size has "
                f"{ratio:.3g} times its halves' gradient. Samplers take the mean, and "
                "num_data for the number of data"
                + (' (reduction="mean").' if is_sum else "."),
            )
        return [a, b]

    def at_steps(self, batches: list[Any]) -> None:
        """The lr beside the curvature and the noise."""
        chain = chain_of(self.sampler)
        if not chain.placement.is_whole:
            self.unknown.append("curvature and heat of parameters that are DTensors")
            return
        if any(p.dtype not in (torch.float32, torch.float64) for p in self.sampled):
            self.unknown.append("the curvature of parameters in low precision")
        else:
            some, scales = batches[:_CURVED], self._scales()
            with quiet(self.model):
                of_loss = largest_curvature(
                    *(self.sampled, scales, lambda: self.gradient_in_mean(some)),
                    _ITERATIONS,
                )
            self._at_curvature(of_loss)
        if len(batches) > 1:
            self._at_noise(batches)

    def _scales(self) -> list[float]:
        """Of the coordinates in which all have the largest group's lr."""
        groups = self.sampler.param_groups
        lrs = [float(group.get("lr", 0.0)) for group in groups]
        return [
            math.sqrt(lr / max(lrs)) if max(lrs) > 0 else 1.0
            for lr, group in zip(lrs, groups, strict=True)
            for p in group["params"]
            if p.requires_grad
        ]

    def _at_curvature(self, of_loss: float) -> None:
        groups = self.sampler.param_groups
        self.curvature = of_loss + max(
            group["prior_precision"] / group["num_data"] for group in groups
        )
        self.largest_lr = stable_lr(self.sampler, self.curvature)
        lr = max(float(group.get("lr", 0.0)) for group in groups)
        if lr > self.largest_lr:
            self.found(
                "unstable",
                f"lr {lr:.3g} is beyond {self.largest_lr:.2g}, from where on a chain "
                f"leaves along the largest curvature, {self.curvature:.3g}: begin with "
                f"{self.largest_lr / 4:.1g}.",
            )

    def _at_noise(self, batches: list[Any]) -> None:
        sampler = self.sampler
        if not is_heat_known(sampler):
            self.unknown.append(
                f"how minibatches heat a {type(sampler).__name__} with these settings "
                "(Gauges tell while it runs)"
            )
            return
        params, pairs = chain_of(sampler).params, []
        with quiet(self.model):
            for first, second in zip(batches[::2], batches[1::2], strict=False):
                both = []
                for batch in (first, second):
                    self.gradient(batch)
                    grads = (p.grad for p in params)
                    both.append([None if g is None else g.clone() for g in grads])
                pairs.append((both[0], both[1]))
        found = NoiseHeat.of(sampler, pairs)
        heats, names = found.tensors, []
        for group in sampler.param_groups:
            for i, p in enumerate(group["params"]):
                known = group.get("param_names")
                names.append(known[i] if known else f"{len(names)} {list(p.shape)}")
        known = [i for i, heat in enumerate(heats) if not math.isnan(heat)]
        if not known:
            return
        self.heating = {names[i]: heats[i] for i in known}
        self.noise_lr = found.largest_lr
        worst = max(known, key=lambda i: heats[i])
        # A start's residuals are larger than the loss says they will be.
        is_start = self.residuals > 1 and int(sampler.param_groups[0]["step"]) == 0
        too_large = self.residuals if is_start else 1.0
        too_much = max(found.mean / _HOT, heats[worst] / _HOT_TENSOR) / too_large
        if too_much > 1:
            lr = float(sampler.param_groups[0]["lr"])
            self.found(
                "hot",
                "Minibatches would heat the chain: T_kin / T would be "
                f"{1 + found.mean:.3g} in the mean of all coordinates and "
                f"{1 + heats[worst]:.3g} in {names[worst]}, with the noise that "
                "gradients have here. Heat falls with lr / (1 - momentum): begin with "
                f"lr = {lr / (1.5 * too_much):.1g}, or take larger minibatches.",
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def _dot(a: list[Tensor | None], b: list[Tensor | None]) -> float:
    return sum(
        float((x.double() * y.double()).sum())
        for x, y in zip(a, b, strict=True)
        if x is not None and y is not None
    )


def _length(a: list[Tensor | None]) -> float:
    return math.sqrt(_dot(a, a))


def _less(a: list[Tensor | None], b: list[Tensor | None]) -> list[Tensor | None]:
    return [
        None if x is None or y is None else x - y for x, y in zip(a, b, strict=True)
    ]
