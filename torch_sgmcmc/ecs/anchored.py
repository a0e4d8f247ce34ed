"""What HMC-ECS keeps: the anchor, its expansions, a subsample and how it is drawn."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.distributed import refuse_common_state
from torch_sgmcmc.chain.prior import PRIOR_MEAN
from torch_sgmcmc.chain.shared_settings import SharedSettings
from torch_sgmcmc.chain.sizes import check_sizes
from torch_sgmcmc.ecs.anchor import AllData, Anchor, split
from torch_sgmcmc.ecs.likelihood_graph import Closure, flat
from torch_sgmcmc.ecs.prior import Prior
from torch_sgmcmc.ecs.state import KEYS, check_anchored_state, on_device
from torch_sgmcmc.ecs.subsample import Layout, Proposals, Subsample
from torch_sgmcmc.ecs.target import Point
from torch_sgmcmc.ecs.taylor import TaylorTerms

__all__ = ["Anchored"]


class Anchored(SharedSettings):
    """The half of :class:`HMCECS` that lasts from step to step."""

    # What can be computed again from the state, and is not saved.
    _present: Point | None = None
    _present_key: tuple[Any, ...] = ()
    _proposals: Proposals | None = None
    # From a warm-up's first step on, until it has ended or was given up.
    _is_warming_up: bool = False

    # ---- What it has done -----------------------------------------------------

    @property
    def sign(self) -> int:
        """The sign of the likelihood's estimate at the last draw: 1 or -1."""
        return self.param_groups[0]["sign"]

    @property
    def acceptance_rate(self) -> float:
        """The part of all trajectories that was accepted since the warm-up."""
        return self._rate("num_accepted")

    @property
    def subsample_acceptance_rate(self) -> float:
        """The part of all proposals for u that was accepted since the warm-up."""
        return self._rate("num_subsamples_accepted")

    @property
    def num_divergences(self) -> int:
        """Trajectories since the warm-up that ended out of bounds.

        Their energy was not finite, or the estimator's variance above ``max_variance``.
        """
        return self.param_groups[0]["num_divergences"]

    @property
    def num_evaluations(self) -> int:
        """Evaluations of single data's log-likelihoods and gradients, in all.

        Warm-up and control variates included: N for each choice of θ*.
        """
        return self.param_groups[0]["num_evaluations"]

    @property
    def estimator_variance(self) -> float:
        """The estimated variance of the log of the last draw's estimate; NaN before."""
        if self._present is None:
            return math.nan
        return self._present.estimate.variance

    def _rate(self, name: str) -> float:
        group = self.param_groups[0]
        return _C.ratio(group[name], group["num_trajectories"])

    # ---- What it keeps --------------------------------------------------------

    def _check_groups(self) -> None:
        self._check_all_groups()
        check_sizes(self._chain_now())
        params = self._all_params()
        if not params:
            raise RuntimeError("HMCECS has no parameters that require gradients")
        kept = self.state.get("control_variates")
        if kept is not None and len(kept["anchor"]) != sum(p.numel() for p in params):
            self._parameters_changed()  # some were frozen

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, see :meth:`Sampler.add_param_group`.

        θ* is then chosen anew.
        """
        super().add_param_group(param_group)
        self._parameters_changed()

    def _parameters_changed(self) -> None:
        for key in KEYS:  # all of them are of other parameters
            self.state.pop(key, None)
        self._present = self._proposals = None

    def _all_params(self) -> list[Tensor]:
        return [*filter(_moves, super()._all_params())]

    def _count(self, evaluations: int) -> None:
        group = self.param_groups[0]
        self._set(num_evaluations=group["num_evaluations"] + evaluations)

    def _prior(self) -> Prior:
        like = {"dtype": torch.float64, "device": self._all_params()[0].device}
        precisions, means = [], []
        for group in self.param_groups:
            for p in filter(_moves, group["params"]):
                precision = float(group["prior_precision"])
                precisions.append(torch.full((p.numel(),), precision, **like))
                mean = self.state.get(p, {}).get(PRIOR_MEAN, group[PRIOR_MEAN])
                means.append(torch.as_tensor(mean, **like).expand(p.shape).flatten())
        return Prior(torch.cat(precisions), torch.cat(means))

    def _layout(self) -> Layout:
        return Layout.of(self.param_groups[0])

    def _data(self, closure: Closure) -> AllData:
        group = self.param_groups[0]
        sizes = group["num_data"], group["chunk_size"], group["seed"]
        return AllData(closure, self._all_params(), *sizes)

    @property
    def _anchor(self) -> Anchor:
        return Anchor.load(self.state["control_variates"])

    def _anchor_at(
        self, closure: Closure, theta: Tensor, progress: bool, *, moved: bool = False
    ) -> None:
        """Puts θ* there. If it is moved by draws, they must be near the last θ*."""
        group, prior = self.param_groups[0], self._prior()
        chosen = Anchor.choose(self._data(closure), theta, prior, group, progress)
        if moved:
            total, temperature = chosen.sums.value, group["temperature"]
            self._anchor.check_near(total, chosen.theta, prior, temperature)
        kept = self.state.get("subsample")
        if kept is not None and self._layout().is_of(kept):
            # The same data, with other expansions.
            terms = self._expand(closure, kept["indices"], chosen)
            kept = {**kept, "terms": terms.fields()}
        else:
            kept = None  # of other sizes: the next step draws one
        # Nothing fails from here on.
        self.state["control_variates"] = chosen.save()
        self.state.pop("subsample", None)
        if kept is not None:
            self.state["subsample"] = kept
        self._present = self._proposals = None
        self._count(group["num_data"])
        self._set(mean_difference=0.0)

    @torch.no_grad()
    def _check_place(self, closure: Closure, progress: bool) -> None:
        """Raises if the parameters are not near θ*, with a pass through all data."""
        group = self.param_groups[0]
        total = self._data(closure).log_likelihood(progress)
        self._count(group["num_data"])
        theta = flat(self._all_params()).double()
        self._anchor.check_near(total, theta, self._prior(), group["temperature"])

    def _expand(
        self, closure: Closure, indices: Tensor, anchor: Anchor | None = None
    ) -> TaylorTerms:
        self._count(len(indices))
        return (anchor or self._anchor).expand(self._data(closure), indices)

    def _subsample(self, closure: Closure) -> Subsample:
        """That of the state, or a new one if sizes, blocks or the seed were changed."""
        layout, kept = self._layout(), self.state.get("subsample")
        if layout.is_of(kept):
            return Subsample.load(kept)
        expand, device = partial(self._expand, closure), self._all_params()[0].device
        return Subsample.draw(layout, self.param_groups[0]["step"], expand, device)

    def _proposed(self, closure: Closure, current: Subsample) -> Subsample:
        layout, step = self._layout(), self.param_groups[0]["step"]
        if self._proposals is None or not self._proposals.covers(layout, step):
            expand, device = partial(self._expand, closure), current.indices.device
            self._proposals = Proposals(layout, step, expand, device)
        return self._proposals.apply(step, current)

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        super()._check_state_dict(state_dict)
        size = sum(p.numel() for p in self._all_params())
        check_anchored_state(state_dict["state"], size)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Sampler.state_dict`.

        Raises:
            RuntimeError: a warm-up has not ended; or it is for
                ``torch.distributed.checkpoint``'s ``get_optimizer_state_dict``, which
                knows state of parameters alone.
        """
        self._check_warmed_up()
        refuse_common_state(self._chain_now())
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._check_warmed_up()
        return super().__getstate__()

    def _check_warmed_up(self) -> None:
        if self._is_warming_up:
            raise RuntimeError(
                "HMCECS cannot be saved inside a warm-up. Finish the warm-up (after an "
                "exception, call warmup() again), then save. Or give it up by "
                "set_anchor()"
            )

    def _finish_loading(self, state_dict: dict[str, Any]) -> None:
        super()._finish_loading(state_dict)
        params = self._all_params()
        # torch moves what belongs to a parameter alone.
        kept = {key: self.state.pop(key) for key in KEYS if key in self.state}
        anchor = kept.get("control_variates", {}).get("anchor")
        # With θ* rounded, the sums would not be its.
        if anchor is not None and torch.equal(
            flat(split(anchor, params)).double(), anchor
        ):
            self.state.update(on_device(kept, params[0].device))
        self._present = self._proposals = None
        self._is_warming_up = False

    def _target_key(self) -> tuple[Any, ...]:
        """What else the estimated density depends on."""
        group = self.param_groups[0]
        priors = [
            (group["prior_precision"], group[PRIOR_MEAN]) for group in self.param_groups
        ]
        means = [
            (id(mean), mean._version)
            for p in self._all_params()
            if (mean := self.state.get(p, {}).get(PRIOR_MEAN)) is not None
        ]
        return (*priors, *means, group["temperature"], group["mean_difference"])


def _moves(p: Tensor) -> bool:
    """Whether a parameter is sampled."""
    return p.requires_grad
