"""A sampler that keeps control variates around a point and a subsample of the data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.closures import exchanged
from torch_sgmcmc.core.distributed import CHECKPOINT, called_from
from torch_sgmcmc.core.operators import gaussian_
from torch_sgmcmc.core.progress import progress_bar
from torch_sgmcmc.ecs.expansions import (
    Terms,
    expand,
    kept_of,
    sum_up,
    terms_of,
)
from torch_sgmcmc.ecs.likelihood_graph import Closure, flat, log_likelihoods
from torch_sgmcmc.ecs.state import check_anchored_state
from torch_sgmcmc.ecs.subsample import Layout, Proposals, Subsample
from torch_sgmcmc.ecs.target import Point
from torch_sgmcmc.ecs.taylor import TaylorSums
from torch_sgmcmc.ecs.whitening import whitening
from torch_sgmcmc.sampler import Sampler

__all__ = ["AnchoredSampler"]

# What is kept of it, under string keys.
_STATE = ("control_variates", "subsample", "warmup")


class AnchoredSampler(Sampler):
    """What :class:`HMCECS` keeps besides its chain: θ*, the sums around it, and u."""

    _COMMON_STATE: ClassVar[tuple[str, ...]] = _STATE

    # What can be computed again from the state, and is not saved.
    _present: Point | None = None
    _proposals: tuple[Tensor, Proposals] | None = None
    _precisions: tuple[tuple[Any, ...], Tensor] | None = None

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        super()._check_state_dict(state_dict)
        size = sum(p.numel() for p in self._params())
        check_anchored_state(state_dict["state"], size)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Sampler.state_dict`.

        Raises:
            RuntimeError: it is for ``torch.distributed.checkpoint``'s
                ``get_optimizer_state_dict``, which knows state of parameters alone.
        """
        if called_from(CHECKPOINT):
            raise RuntimeError(
                f"{type(self).__name__} has state that belongs to no single parameter, "
                "which get_optimizer_state_dict cannot hold: save its state_dict() "
                "with torch.save"
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict; the chain then continues bit for bit.

        If the parameters' dtypes cannot hold its θ*, another one is chosen at the next
        step, where the parameters are: with θ* rounded, the sums would not be its.
        See :meth:`Sampler.load_state_dict`.
        """
        super().load_state_dict(state_dict)

    def _finish_loading(self, state_dict: dict[str, Any]) -> None:
        super()._finish_loading(state_dict)
        anchor = self.state.get("control_variates", {}).get("anchor")
        if anchor is not None:
            rounded = flat(_split(anchor, self._params())).double()
            if not torch.equal(rounded, anchor):
                del self.state["control_variates"]
                self.state.pop("subsample", None)
        # torch moves what belongs to a parameter alone.
        device = self._params()[0].device
        for key in _STATE:
            if key in self.state:
                kept = self.state[key]
                self.state[key] = {k: _moved(v, device) for k, v in kept.items()}
        self._present = self._proposals = None

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _set(self, **values: Any) -> None:
        for group in self.param_groups:
            group.update(values)

    # ---- Control variates -----------------------------------------------------

    def _forget_anchor(self) -> None:
        for key in _STATE:
            self.state.pop(key, None)
        self._present = self._proposals = None

    def _anchor_at(
        self, closure: Closure, anchor: Tensor, progress: bool, *, moved: bool = False
    ) -> None:
        """Puts θ* there. If it is moved by draws, they must be near the last θ*."""
        group, params = self.param_groups[0], self._params()
        anchors = _split(anchor, params)
        anchor = flat(anchors).double()  # as it is rounded
        probes = self._probes(anchor)
        with exchanged(params, anchors):
            sums = self._sum_up(closure, params, probes, progress)
        bent = sums.hessian
        finite = [sums.value, sums.gradient, *([] if bent is None else [bent])]
        if not all(bool(t.isfinite().all()) for t in finite):
            raise RuntimeError(
                "HMCECS got log-likelihoods or derivatives that are not finite at the "
                "anchor of the control variates"
            )
        if moved:
            self._check_near(sums.value, anchor)
        precision = None
        if bent is not None:
            precision = (self._prior().diag() - bent) / group["temperature"]
        chosen = {
            "anchor": anchor,
            "num_data": group["num_data"],
            **kept_of(sums),
            "whitening": whitening(group["mass_matrix"], precision),
        }
        kept = self.state.get("subsample")
        if kept is not None and kept["layout"] == list(vars(self._layout()).values()):
            # The same data, with other expansions.
            terms = self._expand(closure, kept["indices"], chosen)
            kept = {**kept, "terms": terms.fields()}
        else:
            kept = None  # of other sizes: the next step draws one
        # Nothing fails from here on.
        self.state["control_variates"] = chosen
        self.state.pop("subsample", None)
        if kept is not None:
            self.state["subsample"] = kept
        self._present = self._proposals = None
        evaluations = group["num_evaluations"] + group["num_data"]
        self._set(num_evaluations=evaluations, mean_difference=0.0)

    @torch.no_grad()
    def _check_place(self, closure: Closure, progress: bool) -> None:
        """Raises if the parameters are not near θ*, with a pass through all data."""
        sums = []
        for chunk in self._chunks("log posterior", progress):
            with torch.enable_grad():
                values = log_likelihoods(closure, chunk)
            sums.append(values.detach().double().sum())
        self._count(self.param_groups[0]["num_data"])
        self._check_near(torch.stack(sums).sum(), flat(self._params()).double())

    def _check_near(self, log_likelihood: Tensor, theta: Tensor) -> None:
        """Raises if the log posterior fell from θ* to θ as it falls to no draw.

        For a log-concave density in d dimensions, the fall from its mode to a draw is
        at most d + sqrt(2 d x) + x but for a probability of exp(-x): M. Fradelizi,
        M. Madiman and L. Wang, Optimal Concentration of Information Content for
        Log-Concave Densities, 2016. Other posteriors are taken to be like these.
        """
        kept, prior = self.state["control_variates"], self._prior()
        change = log_likelihood - kept["value"]
        change = change - 0.5 * torch.dot(prior * theta, theta)
        change = change + 0.5 * torch.dot(prior * kept["anchor"], kept["anchor"])
        fall = -float(change) / self.param_groups[0]["temperature"]
        d, x = len(theta), 20.0
        highest = d + math.sqrt(2 * d * x) + x
        if not fall <= highest:
            raise RuntimeError(
                "HMCECS has left the posterior: the log posterior of all data is "
                f"{fall:.4g} below that at θ* (that of draws is at most {highest:.4g} "
                "below). Start again nearer the mode (set_anchor() gives a warm-up "
                "up), with variant='perturbed', control_variate=2, or a larger "
                "subsample_size or num_products"
            )

    def _chunks(self, label: str, progress: bool) -> Iterable[Tensor]:
        """The indices of all data, chunk by chunk."""
        group, device = self.param_groups[0], self._params()[0].device
        n, size = group["num_data"], group["chunk_size"]
        for begin in progress_bar(range(0, n, size), label, progress):
            yield torch.arange(begin, min(n, begin + size), device=device)

    def _sum_up(
        self,
        closure: Closure,
        params: list[Tensor],
        probes: Tensor,
        progress: bool,
    ) -> TaylorSums:
        group = self.param_groups[0]
        order = group["control_variate"]
        return sum_up(
            closure,
            params,
            partial(self._chunks, "control variates", progress),
            probes,
            control_variate=order,
            with_hessian=order == 2 or group["mass_matrix"] != "identity",
        )

    def _probes(self, like: Tensor) -> Tensor:
        """Two random directions, as the parameters' type rounds them."""
        group = self.param_groups[0]
        probes = [torch.empty_like(like) for _ in range(2)]
        gaussian_(
            probes,
            std=1.0,
            offsets=[0, len(like)],
            purpose=_C.Purpose.PROBE,
            seed=group["seed"],
            step=0,
        )
        params = self._params()
        return torch.stack([flat(_split(z, params)).double() for z in probes])

    def _prior(self) -> Tensor:
        """The prior precision of each element."""
        device = self._params()[0].device
        sizes = [sum(p.numel() for p in g["params"]) for g in self.param_groups]
        precisions = [float(g["prior_precision"]) for g in self.param_groups]
        key = (*sizes, *precisions, device)
        if self._precisions is None or self._precisions[0] != key:
            like = {"dtype": torch.float64, "device": device}
            row = torch.tensor(precisions, **like)
            row = row.repeat_interleave(torch.tensor(sizes, device=device))
            self._precisions = key, row
        return self._precisions[1]

    # ---- The subsample --------------------------------------------------------

    def _layout(self) -> Layout:
        group = self.param_groups[0]
        signed = group["variant"] == "signed"
        cells = group["num_products"] if signed else group["subsample_size"]
        return Layout(
            num_data=group["num_data"],
            num_cells=cells,
            num_blocks=min(group["num_blocks"], cells),
            batch_size=group["subsample_size"] if signed else 1,
            poisson=signed,
            seed=group["seed"],
        )

    def _expand(
        self, closure: Closure, indices: Tensor, kept: dict[str, Any] | None = None
    ) -> Terms:
        params = self._params()
        kept = self.state["control_variates"] if kept is None else kept
        probe = self._probes(kept["anchor"])[0]
        self._count(len(indices))
        with exchanged(params, _split(kept["anchor"], params)):
            return expand(closure, params, indices, kept["form"], probe)

    def _count(self, evaluations: int) -> None:
        group = self.param_groups[0]
        self._set(num_evaluations=group["num_evaluations"] + evaluations)

    def _keep(self, subsample: Subsample) -> None:
        self.state["subsample"] = {
            "layout": list(vars(self._layout()).values()),
            "counts": subsample.counts,
            "indices": subsample.indices,
            "terms": subsample.terms.fields(),
        }

    def _subsample(self, closure: Closure) -> Subsample:
        """That of the state, or a new one if sizes, blocks or the seed were changed."""
        layout, kept = self._layout(), self.state.get("subsample")
        if kept is not None and kept["layout"] == list(vars(layout).values()):
            terms = terms_of(self.state["control_variates"]["form"], kept["terms"])
            return Subsample(kept["counts"], kept["indices"], terms)
        device = self._params()[0].device
        step = self.param_groups[0]["step"]
        return Subsample.draw(layout, step, partial(self._expand, closure), device)

    def _proposed(self, closure: Closure, current: Subsample) -> Subsample:
        layout, step = self._layout(), self.param_groups[0]["step"]
        anchor = self.state["control_variates"]["anchor"]
        ahead = self._proposals
        if (
            ahead is None
            or ahead[0] is not anchor
            or ahead[1].layout != layout
            or not ahead[1].covers(step)
        ):
            expand = partial(self._expand, closure)
            ahead = (anchor, Proposals(layout, step, expand, anchor.device))
            self._proposals = ahead
        return ahead[1].apply(step, current)


def _moved(value: Any, device: torch.device) -> Any:
    """The same with all tensors on this device, those in lists too."""
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor) else value


def _split(theta: Tensor, params: list[Tensor]) -> list[Tensor]:
    """A row's parts in the shapes and types of the parameters."""
    parts = theta.split([p.numel() for p in params])
    return [
        part.view(p.shape).to(p.dtype) for part, p in zip(parts, params, strict=True)
    ]
