"""Gradients of less variance: control variates whose anchor follows the chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from torch_sgmcmc._impl.hyperparams import check_integer
from torch_sgmcmc.control_variates import ControlVariates, LossFunction
from torch_sgmcmc.sampler import Sampler, check_sampler

__all__ = ["SVRG"]


class SVRG(ControlVariates):
    r"""Control variates whose anchor follows the chain: SVRG.

    :class:`ControlVariates` with the anchor put anew where the parameters are, with
    a pass through all data, at the first :meth:`backward` and whenever the sampler
    has made ``refresh_every`` steps since. It needs no mode to start from. With
    :class:`SGLD` this is SVRG-LD.

    Args:
        sampler: whose parameters get the gradients; its steps are counted.
        loss_fn: the mean loss of a batch, see :class:`ControlVariates`.
        loader: yields every datum once, in batches of any sizes, each time that it is
            iterated over.
        refresh_every: number of the sampler's steps between passes, >= 1. N / n for
            minibatches of n is one pass for an epoch.
        batch_size: the number of data of a batch, see :class:`ControlVariates`.
        progress: whether passes show a progress bar, if they can. Default: True.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: refresh_every is out of range, or the loader has no data.
        RuntimeError: see :class:`ControlVariates`.

    Example:
        In the loop of :class:`ControlVariates`, with its sampler and loss:

        >>> estimator = SVRG(sampler, loss_fn, DataLoader(data, batch_size=10_000),
        ...                  refresh_every=len(loader))

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
        """Puts the anchor where the parameters are, before its time.

        Args:
            loader: yields every datum once. Default: the loader of the constructor.

        Returns:
            The mean loss of all data at the anchor.

        Raises:
            ValueError: there are no data. The anchor is as before.
            RuntimeError: see :class:`ControlVariates`. The anchor is as before.
        """
        loss = super().set_anchor(self.loader if loader is None else loader)
        self._anchor_step = self._step()
        return loss

    def backward(
        self, batch: Any, *, weight: float = 1.0, create_graph: bool = False
    ) -> Tensor:
        """Refreshes the anchor if it is time, then see :class:`ControlVariates`."""
        # A sampler whose step count has gone back was given another state.
        age = self._step() - self._anchor_step
        if self._anchor is None or not 0 <= age < self.refresh_every:
            self.set_anchor()
        return super().backward(batch, weight=weight, create_graph=create_graph)

    def state_dict(self) -> dict[str, Any]:
        """The anchor, the full gradient, the step they are of, and the schedule."""
        return {
            **super().state_dict(),
            "anchor_step": self._anchor_step,
            "refresh_every": self.refresh_every,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned.

        Raises:
            ValueError: it is of other parameters, or a number is out of range. Nothing
                has been loaded.
        """
        anchor_step = check_integer("anchor_step", state_dict["anchor_step"])
        refresh_every = check_integer(
            "refresh_every", state_dict["refresh_every"], low=1
        )
        super().load_state_dict(state_dict)
        self._anchor_step, self.refresh_every = anchor_step, refresh_every

    def _step(self) -> int:
        return int(self.sampler.param_groups[0]["step"])
