"""Gradients of less variance: control variates with an anchor."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.checks import check_callable, check_integer, check_real
from torch_sgmcmc.chain.closures import exchanged, kept_gradients
from torch_sgmcmc.chain.distributed import world_size
from torch_sgmcmc.chain.dtypes import state_dtype
from torch_sgmcmc.chain.jacobians import jacobian
from torch_sgmcmc.chain.operators import control_variate_
from torch_sgmcmc.chain.rows import tensors_in
from torch_sgmcmc.chain.shards import refuse
from torch_sgmcmc.chain.state_checks import check_tensor

__all__ = ["ControlVariates", "LossFunction"]

LossFunction = Callable[[Any], Tensor]
# What is differentiated besides the loss, and with which weights.
Roots = tuple[list[Tensor], list[Tensor]]


class ControlVariates:
    r"""Gradients with a control variate at a fixed point, the anchor.

    With :math:`\bar g` the gradient of a minibatch's mean loss and
    :math:`\nabla\bar L` that of all data,

    .. math::
        g = \bar g(\theta) - \bar g(\theta^*) + \nabla\bar L(\theta^*)

    is unbiased, and its variance vanishes as θ comes to :math:`\theta^*`, where g is
    the full gradient. It takes the place of ``loss.backward()`` before any sampler's
    step, and costs two backward passes and memory for one copy of the parameters and
    one of their gradients.

    That is ``order=1``. With ``order=2``, :math:`\delta = \theta - \theta^*`, and
    Hessians :math:`\bar h` and :math:`\bar H` of the same losses as
    :math:`\bar g` and :math:`\nabla\bar L`,

    .. math::
        g = \bar g(\theta) - [\bar g(\theta^*) + \bar h(\theta^*)\, \delta]
            + \nabla\bar L(\theta^*) + \bar H(\theta^*)\, \delta

    is unbiased too, exact where losses are quadratic, and its variance vanishes like
    :math:`|\delta|^4` and not :math:`|\delta|^2`. With d parameters, at most 11585, it
    costs a backward pass through a backward pass, memory for d² numbers, and for the
    anchor as much as d passes through all data.

    Args:
        sampler: whose parameters get the gradients: a sampler, or any torch optimizer.
        loss_fn: ``loss_fn(batch)`` returns the mean loss of a minibatch as a tensor
            with a graph, from which it does not call ``backward()`` itself. Prior and
            temperature are the sampler's affair.
        batch_size: ``batch_size(batch)`` returns the number of data of a batch, its
            weight in the full gradient. Default: the length of its first tensor.
        progress: whether the pass through the data shows a progress bar. It needs
            tqdm and a terminal, else there is none. Default: True.
        order: of the expansion around the anchor, 1 or 2. Default: 1.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: order is neither, or 2 with too many parameters.
        RuntimeError: no anchor is set, the parameters are not those that it was set
            for, or the loss is not as described. Parameters and gradients are as
            before.

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
        mode for batch norm. Save ``estimator.state_dict()`` along with the sampler's:
        the chain then goes on bit for bit. For several chains in a leading dimension
        of the parameters, let ``loss_fn`` return the sum of the chains' mean losses.
        Not for ``torch.amp.GradScaler``: the full gradient is not scaled. More:
        docs/samplers/control_variates.md.

    Reference:
        J. Baker, P. Fearnhead, E. B. Fox and C. Nemeth, Control variates for
        stochastic gradient MCMC, Statistics and Computing 29, 2019. Order 2: K.-D. Dang
        et al., Hamiltonian Monte Carlo with Energy Conserving Subsampling, JMLR 20,
        2019, section 6.2.
    """

    def __init__(
        self,
        sampler: Optimizer,
        loss_fn: LossFunction,
        *,
        batch_size: Callable[[Any], int] | None = None,
        progress: bool = True,
        order: int = 1,
    ) -> None:
        if not isinstance(sampler, Optimizer):
            raise TypeError(
                f"Invalid sampler: got {type(sampler).__name__} (must be a sampler or "
                "another torch optimizer)"
            )
        check_callable("loss_fn", loss_fn)
        if batch_size is not None:
            check_callable("batch_size", batch_size)
        if not isinstance(progress, bool):
            raise TypeError(f"Invalid progress: {progress!r} (must be a bool)")
        refuse("parameters", (p for g in sampler.param_groups for p in g["params"]))
        self.sampler = sampler
        self.loss_fn = loss_fn
        self.batch_size = batch_size or _first_length
        self.progress = progress
        self.order = check_integer("order", order, low=1, high=3)
        self._anchor: list[Tensor] | None = None
        self._full_grads: list[Tensor | None] = []
        self._full_hessian: Tensor | None = None  # [d, d], with order 2
        self._check_order(self._params())

    def set_anchor(self, loader: Iterable[Any]) -> float:
        """Puts the anchor where the parameters are, with a pass through all data.

        Args:
            loader: yields every datum once, in batches of any sizes.

        Returns:
            The mean loss of all data at the anchor.

        Raises:
            ValueError: there are no data, or too many parameters for order 2. The
                anchor is as before.
            RuntimeError: the loss is not as described, or the full gradient or Hessian
                is not finite. The anchor is as before.
        """
        params = self._params()
        self._check_order(params)
        total_loss, count = 0.0, 0
        sums: list[Tensor | None] = [None] * len(params)
        hessian = _no_hessian(params) if self.order == 2 else None
        with kept_gradients(params):
            for batch in self._watched(loader):
                size = self._size(batch)
                look = None
                if hessian is not None:
                    look = partial(self._add_hessian, hessian, params, size)
                loss, grads = self._gradients(params, batch, look=look)
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
                "the full gradient is not finite: there can be no anchor here"
            )
        if hessian is not None:
            hessian = (hessian / count).to(_widest(params))
            if not bool(torch.isfinite(hessian).all()):
                raise RuntimeError(
                    "the full Hessian is not finite: there can be no anchor here"
                )
        self._anchor = [p.detach().clone() for p in params]
        self._full_grads, self._full_hessian = full, hessian
        return total_loss / count

    def backward(
        self, batch: Any, *, weight: float = 1.0, create_graph: bool = False
    ) -> Tensor:
        """Adds the gradient of a minibatch, with the control variate, to ``p.grad``.

        Args:
            batch: a minibatch drawn uniformly, for ``loss_fn``.
            weight: the gradient's factor. To accumulate the gradient of a minibatch
                over parts of it, give each the weight of its share. Default: 1.
            create_graph: keep a graph of the gradient, as for
                :meth:`torch.Tensor.backward`; ``PSGLD`` with Γ needs it. Not with
                order 2. Default: False.

        Returns:
            The loss of the minibatch at θ.

        Raises:
            ValueError: an argument is out of range.
            RuntimeError: see the class. Parameters and gradients are as before.
        """
        weight = check_real("weight", weight)
        if create_graph and self.order == 2:
            raise ValueError(
                "Invalid create_graph: True (must be False with order=2, whose "
                "expansion has no graph: use order=1, or PSGLD's gamma=False)"
            )
        params = self._params()
        anchor = self._fitting_anchor(params)
        full, look = self._full_grads, None
        if self._full_hessian is not None:
            # In the parameters' type: the same for the minibatch and for all data.
            moves = [p.detach() - a for p, a in zip(params, anchor, strict=True)]
            full = _bent(full, self._full_hessian, moves)
            look = partial(self._hessian_product, params, moves)
        with kept_gradients(params) as before:
            with exchanged(params, anchor):
                _, anchor_grads = self._gradients(params, batch, look=look)
            loss, grads = self._gradients(params, batch, create_graph)
            self._combine(params, grads, anchor_grads, full, create_graph)
        for p, old, grad in zip(params, before, grads, strict=True):
            if grad is None:
                continue
            if weight != 1.0:
                grad = grad * weight
            p.grad = grad if old is None else old + grad
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The anchor and the full gradient there; two None before there is any.

        With order 2 also the full Hessian, once there is one.
        """
        if self._anchor is None:
            return {"anchor": None, "full_grads": None}
        state = {"anchor": list(self._anchor), "full_grads": list(self._full_grads)}
        if self._full_hessian is None:
            return state
        return {**state, "full_hessian": self._full_hessian}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned.

        Raises:
            ValueError: it is of other parameters or another order. Nothing has been
                loaded.
        """
        anchor, full = state_dict["anchor"], state_dict["full_grads"]
        if anchor is None:
            self._anchor, self._full_grads, self._full_hessian = None, [], None
            return
        order = 2 if "full_hessian" in state_dict else 1
        if order != self.order:
            raise ValueError(
                f"Invalid state_dict: it is of order {order}, expected {self.order}"
            )
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
        hessian = state_dict.get("full_hessian")
        if order == 2:
            size = sum(p.numel() for p in params)
            check_tensor("full_hessian", hessian, [size, size])
            hessian = hessian.to(params[0].device, _widest(params), copy=True)
        self._anchor = [
            t.to(p.device, p.dtype, copy=True)
            for t, p in zip(anchor, params, strict=True)
        ]
        self._full_grads = [
            None if t is None else t.to(p.device, state_dtype(p), copy=True)
            for t, p in zip(full, params, strict=True)
        ]
        self._full_hessian = hessian

    # ---- Pieces -----------------------------------------------------------------

    def _params(self) -> list[Tensor]:
        """The sampler's parameters that are not frozen."""
        groups = self.sampler.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def _check_order(self, params: list[Tensor]) -> None:
        """Raises if there can be no Hessian of all data."""
        if self.order == 1:
            return
        _C.check_hessian_size(sum(p.numel() for p in params))
        if len({p.device for p in params}) > 1:
            raise ValueError(
                "Invalid order: 2 (must be 1 for parameters on several devices)"
            )
        ranks = world_size(getattr(self.sampler, "process_group", None))
        if ranks > 1:
            raise RuntimeError(
                f"{type(self).__name__} of order 2 cannot run in a process group of "
                f"{ranks} ranks, which would each have a Hessian of their own: use "
                "order=1, or a process_group of one rank for a chain of its own"
            )

    def _fitting_anchor(self, params: list[Tensor]) -> list[Tensor]:
        if self._anchor is None:
            raise RuntimeError(
                f"{type(self).__name__} has no anchor yet: call set_anchor() first"
            )
        fits = len(params) == len(self._anchor) and all(
            (p.shape, p.dtype, p.device) == (a.shape, a.dtype, a.device)
            for p, a in zip(params, self._anchor, strict=True)
        )
        if not fits:
            raise RuntimeError(
                f"{type(self).__name__} has an anchor for other parameters than the "
                "sampler's (their number, a shape, dtype or device has changed): call "
                "set_anchor() again"
            )
        return self._anchor

    def _gradients(
        self,
        params: list[Tensor],
        batch: Any,
        create_graph: bool = False,
        look: Callable[[Tensor], Roots] | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The loss of a batch and its gradients, taken out of ``p.grad``.

        By ``backward()``, and not by ``torch.autograd.grad``, so that hooks run, for
        instance those that average over data-parallel replicas. What ``look`` makes of
        the loss is differentiated along with it.
        """
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
            roots, weights = look(loss) if look is not None else ([], [])
            torch.autograd.backward(
                [loss, *roots], [None, *weights], create_graph=create_graph
            )
        grads = [p.grad for p in params]
        self._check_dense(grads)
        return loss, grads

    def _add_hessian(
        self, total: Tensor, params: list[Tensor], num_data: int, loss: Tensor
    ) -> Roots:
        """Adds that of a batch's loss, times the number of its data."""
        slopes = self._slopes(params, loss)
        total.add_(_hessian(slopes, params, num_data), alpha=num_data)
        return [], []

    def _hessian_product(
        self, params: list[Tensor], moves: list[Tensor], loss: Tensor
    ) -> Roots:
        """What has the gradient h δ."""
        pairs = zip(self._slopes(params, loss), moves, strict=True)
        bent = [(s, m) for s, m in pairs if s is not None and s.requires_grad]
        return [s for s, _ in bent], [m for _, m in bent]

    def _slopes(self, params: list[Tensor], loss: Tensor) -> list[Tensor | None]:
        """The gradients of the loss, with a graph."""
        slopes = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        self._check_dense(slopes)
        return list(slopes)

    def _check_dense(self, grads: Iterable[Tensor | None]) -> None:
        if any(g is not None and g.layout is not torch.strided for g in grads):
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients (for "
                "nn.Embedding, use sparse=False)"
            )

    def _combine(
        self,
        params: list[Tensor],
        grads: list[Tensor | None],
        anchor_grads: list[Tensor | None],
        full_grads: list[Tensor | None],
        create_graph: bool,
    ) -> None:
        """Makes (g - a) + f of grads; one that is missing counts as zero."""
        lists: dict[torch.device, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
        for i, (p, g, a, f) in enumerate(
            zip(params, grads, anchor_grads, full_grads, strict=True)
        ):
            if g is None and a is None and f is None:
                continue
            # No graph can miss its gradient: only values are made up here.
            g = torch.zeros_like(p) if g is None else g
            a = torch.zeros_like(g) if a is None else a
            f = torch.zeros_like(g, dtype=state_dtype(g)) if f is None else f
            if g.data_ptr() == a.data_ptr() and g.numel() > 0:
                raise RuntimeError(
                    f"{type(self).__name__} got the gradients at θ in the memory of "
                    "those at the anchor, which it still needs: gradients must not be "
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

    def _watched(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The loader with a progress bar, if there can be one."""
        if not self.progress:
            return loader
        try:
            bar = importlib.import_module("tqdm").tqdm
        except ImportError:
            return loader
        name = "full gradient" if self.order == 1 else "full gradient and Hessian"
        return bar(loader, desc=name, leave=False, disable=None)


def _widest(params: list[Tensor]) -> torch.dtype:
    """The type that arithmetic with all parameters takes."""
    wide = any(p.dtype == torch.float64 for p in params)
    return torch.float64 if wide else torch.float32


def _no_hessian(params: list[Tensor]) -> Tensor:
    """Of no data: [d, d]."""
    d = sum(p.numel() for p in params)
    device = params[0].device if params else None
    return torch.zeros(d, d, dtype=torch.float64, device=device)


def _hessian(
    slopes: list[Tensor | None], params: list[Tensor], num_data: int
) -> Tensor:
    """Of the mean loss of some data, whose gradients these are: [d, d]."""
    row = torch.cat(
        [
            torch.zeros_like(p).flatten() if s is None else s.flatten()
            for s, p in zip(slopes, params, strict=True)
        ]
    )
    if not row.requires_grad:  # the loss is linear
        return row.new_zeros(len(row), len(row))
    # A network's activations of a datum are about as many as its parameters at most.
    return jacobian(row, params, len(row) * num_data)


def _bent(
    full_grads: list[Tensor | None], hessian: Tensor, moves: list[Tensor]
) -> list[Tensor | None]:
    """The full gradients with the Hessian's term, H δ."""
    row = torch.cat([m.flatten() for m in moves]).to(hessian.dtype)
    parts = torch.mv(hessian, row).split([m.numel() for m in moves])
    return [
        None if f is None else f + part.view(f.shape).to(f.dtype)
        for f, part in zip(full_grads, parts, strict=True)
    ]


def _first_length(batch: Any) -> int:
    """The length of the first tensor in a batch."""
    for tensor in tensors_in(batch):
        if tensor.dim() > 0:
            return len(tensor)
    raise RuntimeError(
        f"the number of data in a batch of type {type(batch).__name__} is unknown: "
        "give batch_size, a function that returns it"
    )
