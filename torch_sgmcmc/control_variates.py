"""Gradients of lower variance: control variates with a fixed or a moving anchor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_sgmcmc.core.context import state_dtype
from torch_sgmcmc.core.dtensor import refuse
from torch_sgmcmc.core.hyperparams import (
    check_flag,
    check_function,
    check_integer,
    check_real,
    warn,
    wrong_type,
)
from torch_sgmcmc.core.ops import control_variate_
from torch_sgmcmc.core.parameters import are_others, exchanged, kept_gradients
from torch_sgmcmc.core.sampler import Sampler, check_sampler
from torch_sgmcmc.core.state_dict import check_keys, check_tensor
from torch_sgmcmc.core.utils import progress_bar, tensors_in

LossFunction = Callable[[Any], Tensor]


class ControlVariates:
    r"""Gradients with a control variate at a fixed point, the anchor.

    With :math:`\bar g` the gradient of a minibatch's mean loss and :math:`\nabla\bar L`
    the gradient of the mean loss of all data,

    .. math::
        g = \bar g(\theta) - \bar g(\theta^*) + \nabla\bar L(\theta^*)

    is unbiased. Its variance vanishes as θ approaches :math:`\theta^*`, where g is the
    full gradient. :meth:`backward` replaces ``loss.backward()`` before any sampler's
    step. It costs two backward passes and memory for one copy of the parameters and one
    of their gradients.

    Args:
        sampler: the sampler, or any torch optimizer, whose parameters get the
            gradients.
        loss_fn: ``loss_fn(batch)`` returns the mean loss of a minibatch as a tensor
            with a graph, without calling ``backward()`` and without the prior.
        batch_size: ``batch_size(batch)`` returns the number of data of a batch, its
            weight in the full gradient. Default: the length of its first tensor.
        progress: show a progress bar for the pass through the data, if tqdm and a
            terminal are available. Default: True.

    Raises:
        TypeError: an argument of the wrong type.
        RuntimeError: no anchor is set, the anchor was set for other parameters, or the
            loss is invalid. Parameters and gradients are unchanged.

    Example:
        >>> optimize(model)  # to a mode
        >>> sampler = SGLD(model.parameters(), lr=0.1, num_data=len(data))
        >>> estimator = ControlVariates(
        ...     sampler, lambda batch: F.cross_entropy(model(batch[0]), batch[1])
        ... )
        >>> estimator.set_anchor(DataLoader(data, batch_size=10_000))
        >>> for batch in loader:
        ...     sampler.zero_grad()
        ...     loss = estimator.backward(batch)
        ...     sampler.step()

        With a sampler that draws minibatches itself:

        >>> sampler.step(lambda: estimator.backward(next(minibatches)))

    Note:
        ``loss_fn`` is called twice for a minibatch, first at the anchor: use ``eval()``
        mode for batch norm. Parameters outside of the sampler get no gradient, and must
        stay as they are until the next :meth:`set_anchor`. Save
        ``estimator.state_dict()`` along with the sampler's to resume bitwise
        identically. For several chains in a leading dimension of the parameters, let
        ``loss_fn`` return the sum of the chains' mean losses. Checkpointed layers need
        ``use_reentrant=False``. Not for ``torch.amp.GradScaler``: the full gradient is
        not scaled. More: docs/samplers/control_variates.md.

    Reference:
        J. Baker, P. Fearnhead, E. B. Fox and C. Nemeth, Control variates for
        stochastic gradient MCMC, Statistics and Computing 29, 2019.
    """

    def __init__(
        self,
        sampler: Optimizer,
        loss_fn: LossFunction,
        *,
        batch_size: Callable[[Any], int] | None = None,
        progress: bool = True,
    ) -> None:
        if not isinstance(sampler, Optimizer):
            wanted = "a sampler or another torch optimizer"
            raise wrong_type("sampler", sampler, wanted)
        check_function("loss_fn", loss_fn)
        if batch_size is not None:
            check_function("batch_size", batch_size)
        check_flag("progress", progress)
        refuse("parameters", (p for g in sampler.param_groups for p in g["params"]))
        self.sampler = sampler
        self.loss_fn = loss_fn
        self.batch_size = batch_size or _first_length
        self.progress = progress
        self._anchor: list[Tensor] | None = None
        self._full_grads: list[Tensor | None] = []
        self._of: list[Tensor] = []  # the parameters that it is of
        self._has_warned = False

    def set_anchor(self, loader: Iterable[Any]) -> float:
        """Sets the anchor to the present parameters, by a pass through all data.

        Args:
            loader: yields every datum once, in batches of any sizes.

        Returns:
            The mean loss of all data at the anchor.

        Warns:
            UserWarning: the loss draws random numbers, such as dropout's masks.

        Raises:
            ValueError: the loader has no data. The anchor is unchanged.
            RuntimeError: the loss is invalid, or the full gradient is not finite. The
                anchor is unchanged.
        """
        params = self._params()
        total_loss, count = 0.0, 0
        sums: list[Tensor | None] = [None] * len(params)
        with kept_gradients(params):
            for batch in progress_bar(loader, "full gradient", self.progress):
                size = self._size(batch)
                before = _random_states(params)
                loss, grads = self._gradients(params, batch)
                if not all(map(torch.equal, before, _random_states(params))):
                    self._warn_of_random_numbers()
                total_loss += float(loss.detach()) * size
                count += size
                for i, grad in enumerate(grads):
                    if grad is not None:
                        total = sums[i]
                        if total is None:
                            total = torch.zeros_like(grad, dtype=torch.float64)
                        sums[i] = total.add_(grad, alpha=size)
        if count == 0:
            raise ValueError("Invalid loader: it has no data")
        full = [
            None if total is None else (total / count).to(state_dtype(p))
            for p, total in zip(params, sums, strict=True)
        ]
        if not all(f is None or bool(torch.isfinite(f).all()) for f in full):
            raise RuntimeError(
                "the full gradient is not finite at the present parameters"
            )
        self._anchor = [p.detach().clone() for p in params]
        self._full_grads, self._of = full, params
        return total_loss / count

    def backward(
        self, batch: Any, *, weight: float = 1.0, create_graph: bool = False
    ) -> Tensor:
        """Adds the gradient of a minibatch, with the control variate, to ``p.grad``.

        Args:
            batch: a minibatch drawn uniformly, for ``loss_fn``.
            weight: the gradient's factor. To accumulate the gradient of a minibatch
                over its parts, give each part its share. Default: 1.
            create_graph: keep a graph of the gradient, as for
                :meth:`torch.Tensor.backward`; ``PSGLD`` with Γ needs it. Default:
                False.

        Returns:
            The loss of the minibatch at θ.

        Raises:
            ValueError: an argument is out of range.
            RuntimeError: see the class. Parameters and gradients are unchanged.
        """
        weight = check_real("weight", weight)
        params = self._params()
        anchor = self._fitting_anchor(params)
        with kept_gradients(params) as before:
            with exchanged(params, anchor):
                _, anchor_grads = self._gradients(params, batch)
            loss, grads = self._gradients(params, batch, create_graph)
            self._combine(params, grads, anchor_grads, create_graph)
        for p, old, grad in zip(params, before, grads, strict=True):
            if grad is None:
                continue
            if weight != 1.0:
                grad = grad * weight
            p.grad = grad if old is None else old + grad
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Returns the anchor and its full gradient; None without an anchor."""
        if self._anchor is None:
            return {"anchor": None, "full_grads": None}
        return {"anchor": list(self._anchor), "full_grads": list(self._full_grads)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of :meth:`state_dict`.

        Raises:
            ValueError: the state belongs to other parameters. Nothing has been loaded.
        """
        check_keys(state_dict, type(self).__name__, "anchor", "full_grads")
        anchor, full = state_dict["anchor"], state_dict["full_grads"]
        if anchor is None:
            self._anchor, self._full_grads = None, []
            return
        params = self._params()
        for name, tensors in (("anchor", anchor), ("full_grads", full)):
            if len(tensors) != len(params):
                raise ValueError(
                    f"Invalid state_dict: {name} has {len(tensors)} tensors, expected "
                    f"{len(params)}"
                )
            for i, (t, p) in enumerate(zip(tensors, params, strict=True)):
                if name == "anchor" or t is not None:
                    check_tensor(f"{name} of parameter {i}", t, p.shape)
        self._anchor = [
            t.to(p.device, p.dtype, copy=True)
            for t, p in zip(anchor, params, strict=True)
        ]
        self._full_grads = [
            None if t is None else t.to(p.device, state_dtype(p), copy=True)
            for t, p in zip(full, params, strict=True)
        ]
        self._of = params

    def _warn_of_random_numbers(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warn(
            "loss_fn draws random numbers, such as dropout's masks: the full gradient "
            "at the anchor has one draw of them, so that all gradients have the same "
            "error until the next anchor. Call model.eval(), or do without "
            f"{type(self).__name__}"
        )

    def _params(self) -> list[Tensor]:
        groups = self.sampler.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def _fitting_anchor(self, params: list[Tensor]) -> list[Tensor]:
        if self._anchor is None:
            raise RuntimeError(
                f"{type(self).__name__} has no anchor yet: call set_anchor() first"
            )
        fits = not are_others(self._of, params) and all(
            (p.shape, p.dtype, p.device) == (a.shape, a.dtype, a.device)
            for p, a in zip(params, self._anchor, strict=True)
        )
        if not fits:
            raise RuntimeError(
                f"{type(self).__name__} has an anchor for other parameters than the "
                "sampler's (others require gradients, or a shape, dtype or device has "
                "changed): call set_anchor() again"
            )
        return self._anchor

    def _gradients(
        self, params: list[Tensor], batch: Any, create_graph: bool = False
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Returns a batch's loss and gradients, by ``backward()`` so that hooks run."""
        for p in params:
            p.grad = None
        with torch.enable_grad():
            loss = self.loss_fn(batch)
            if not isinstance(loss, Tensor):
                raise RuntimeError(
                    f"loss_fn returned {type(loss).__name__}, expected the loss as a "
                    "tensor"
                )
            if loss.numel() != 1:
                raise RuntimeError(
                    f"loss_fn returned a tensor of shape {list(loss.shape)}, expected "
                    "one number"
                )
            if any(p.grad is not None for p in params):
                raise RuntimeError(
                    "loss_fn has made gradients: it must return the loss and leave "
                    "backward() to the estimator"
                )
            if not loss.requires_grad:
                raise RuntimeError(
                    "loss_fn returned a loss without a graph: it must compute it from "
                    "the sampler's parameters, with gradients enabled"
                )
            # Of these alone: other parameters may be another sampler's.
            loss.backward(create_graph=create_graph, inputs=params)
        grads = [p.grad for p in params]
        if any(g is not None and g.layout is not torch.strided for g in grads):
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients (for "
                "nn.Embedding, use sparse=False)"
            )
        return loss, grads

    def _combine(
        self,
        params: list[Tensor],
        grads: list[Tensor | None],
        anchor_grads: list[Tensor | None],
        create_graph: bool,
    ) -> None:
        """Replaces each gradient g by (g - a) + f; a missing one counts as 0."""
        lists: dict[torch.device, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
        for i, (p, g, a, f) in enumerate(
            zip(params, grads, anchor_grads, self._full_grads, strict=True)
        ):
            if g is None and a is None and f is None:
                continue
            # Zeros are values only: no graph needs their gradient.
            g = torch.zeros_like(p) if g is None else g
            a = torch.zeros_like(g) if a is None else a
            f = torch.zeros_like(g, dtype=state_dtype(g)) if f is None else f
            if g.data_ptr() == a.data_ptr() and g.numel() > 0:
                raise RuntimeError(
                    f"{type(self).__name__} got the gradients at θ in the memory of "
                    "the gradients at the anchor, still in use: gradients must not be "
                    "reused (for DistributedDataParallel, set "
                    "gradient_as_bucket_view=False)"
                )
            if create_graph:
                grads[i] = ((g.to(f.dtype) - a) + f).to(g.dtype)
                continue
            grads[i] = g
            for list_, tensor in zip(
                lists.setdefault(p.device, ([], [], [])), (g, a, f), strict=True
            ):
                list_.append(tensor)
        for on_device in lists.values():
            control_variate_(*on_device)

    def _size(self, batch: Any) -> int:
        size = self.batch_size(batch)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise RuntimeError(
                f"batch_size returned {size!r} for a batch (must be an int >= 1)"
            )
        return size


class SVRG(ControlVariates):
    r"""Control variates whose anchor follows the chain: SVRG.

    :class:`ControlVariates` that moves the anchor to the present parameters, by a pass
    through all data, at the first :meth:`backward` and whenever the sampler has made
    ``refresh_every`` steps since. It needs no mode to start from. With :class:`SGLD`
    this is SVRG-LD.

    Args:
        sampler: the sampler whose parameters get the gradients; its steps are counted.
        loss_fn: the mean loss of a batch, see :class:`ControlVariates`.
        loader: yields every datum once, in batches of any sizes, at each iteration.
        refresh_every: number of the sampler's steps between passes, >= 1. N / n for
            minibatches of n is one pass for an epoch.
        batch_size: the number of data of a batch, see :class:`ControlVariates`.
        progress: show progress bars, if available. Default: True.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: refresh_every is out of range, or the loader has no data.
        RuntimeError: see :class:`ControlVariates`.

    Note:
        With the sampler's state dict :meth:`state_dict` resumes in the middle of an
        epoch, without another pass. More: docs/samplers/control_variates.md.

    Reference:
        A. Dubey et al., Variance Reduction in Stochastic Gradient Langevin Dynamics,
        NIPS 2016 (SVRG-LD).
    """

    def __init__(
        self,
        sampler: Sampler,
        loss_fn: LossFunction,
        loader: Iterable[Any],
        *,
        refresh_every: int,
        batch_size: Callable[[Any], int] | None = None,
        progress: bool = True,
    ) -> None:
        check_sampler(sampler)
        super().__init__(sampler, loss_fn, batch_size=batch_size, progress=progress)
        self.loader = loader
        self.refresh_every = check_integer("refresh_every", refresh_every, low=1)
        self._anchor_step = 0

    def set_anchor(self, loader: Iterable[Any] | None = None) -> float:
        """Sets the anchor to the present parameters, ahead of schedule.

        Args:
            loader: yields every datum once. Default: the loader of the constructor.

        Returns:
            The mean loss of all data at the anchor.

        Raises:
            ValueError: the loader has no data. The anchor is unchanged.
            RuntimeError: see :class:`ControlVariates`. The anchor is unchanged.
        """
        loss = super().set_anchor(self.loader if loader is None else loader)
        self._anchor_step = self._step()
        return loss

    def backward(
        self, batch: Any, *, weight: float = 1.0, create_graph: bool = False
    ) -> Tensor:
        """Refreshes the anchor if due, then acts as :class:`ControlVariates`."""
        # A step count that went back belongs to another state.
        age = self._step() - self._anchor_step
        if self._anchor is None or not 0 <= age < self.refresh_every:
            self.set_anchor()
        return super().backward(batch, weight=weight, create_graph=create_graph)

    def state_dict(self) -> dict[str, Any]:
        """Returns the anchor, its full gradient and step, and the schedule."""
        return {
            **super().state_dict(),
            "anchor_step": self._anchor_step,
            "refresh_every": self.refresh_every,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of :meth:`state_dict`.

        Raises:
            ValueError: the state belongs to other parameters, or a number is out of
                range. Nothing has been loaded.
        """
        keys = ("anchor_step", "refresh_every", "anchor", "full_grads")
        check_keys(state_dict, type(self).__name__, *keys)
        anchor_step = check_integer("anchor_step", state_dict["anchor_step"])
        refresh_every = check_integer(
            "refresh_every", state_dict["refresh_every"], low=1
        )
        super().load_state_dict(state_dict)
        self._anchor_step, self.refresh_every = anchor_step, refresh_every

    def _step(self) -> int:
        return int(self.sampler.param_groups[0]["step"])


def _random_states(params: list[Tensor]) -> list[Tensor]:
    """Returns the states of the generators that dropout's masks come from."""
    devices = {p.device for p in params if p.is_cuda}
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _first_length(batch: Any) -> int:
    lengths = [len(tensor) for tensor in tensors_in(batch) if tensor.dim() > 0]
    if lengths:
        return lengths[0]
    raise RuntimeError(
        f"the number of data in a batch of type {type(batch).__name__} is unknown: "
        "give batch_size, a function that returns it"
    )
