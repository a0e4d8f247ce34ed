"""What all samplers share: a torch optimizer that keeps track of its noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from torch_sgmcmc import _C
from torch_sgmcmc._checks import check_integer, check_real, draw_seed
from torch_sgmcmc._library import HAS_CUDA

__all__ = ["Sampler"]

# A group, its parameters that have a gradient and are on one device, their gradients,
# and their noise offsets.
Work = tuple[dict[str, Any], list[Tensor], list[Tensor], list[int]]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Sampler(Optimizer):
    r"""Base class of the samplers: a :class:`torch.optim.Optimizer`.

    A subclass names its hyperparameters in ``defaults``, checks them in
    :meth:`_check_group` and does one update of one list of parameters in
    :meth:`_update`. Everything else is here: param groups, seeds and noise
    offsets, missing gradients, closures, state dicts.

    All bookkeeping lives in the param groups, and so goes through
    ``state_dict``, pickle and deepcopy like any hyperparameter:

    * ``seed``: the key of the noise, equal in all groups;
    * ``step``: number of updates made, equal in all groups; an int, or with
      ``capturable`` an int64 scalar on the parameters' device;
    * ``offsets``: for each parameter, the index of its first element in the
      noise stream. Fixed when the parameter is added, so that a missing gradient
      never shifts another parameter's noise.

    Args:
        params: parameters, dicts that define param groups, or named parameters,
            as for every torch optimizer.
        defaults: hyperparameters of groups that do not set their own.
        seed: the seed, any 64-bit int; None draws one from torch's default
            generator.
        capturable: keep the step counter in device memory, see :class:`SGLD`.
    """

    #: Keys that the sampler manages itself; a param group must not set them.
    _MANAGED: ClassVar[tuple[str, ...]] = ("seed", "step", "offsets", "capturable")

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        seed: int | None,
        capturable: bool,
    ) -> None:
        if not isinstance(capturable, bool):
            raise TypeError(f"Invalid capturable: {capturable!r} (must be a bool)")
        defaults = {**defaults, "capturable": capturable}
        self._check_group(defaults)
        super().__init__(params, {**defaults, "seed": draw_seed(seed), "step": 0})

    # ---- For subclasses -------------------------------------------------------

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises if a hyperparameter of the group is invalid."""
        check_real("lr", group["lr"])
        self._check_target(group)

    @staticmethod
    def _check_target(group: dict[str, Any]) -> None:
        """Raises if what defines the target density is invalid."""
        check_real("num_data", group["num_data"], low_open=True)
        check_real("prior_precision", group["prior_precision"])
        check_real("temperature", group["temperature"])

    def _prepare(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        offsets: list[int],
    ) -> Any:
        """Initialises state and makes checks that need it, before any update.

        Returns:
            The state that :meth:`_update` will be given.
        """

    def _prepare_all(self, work: list[Work]) -> list[Any]:
        """Calls :meth:`_prepare` for all lists; for what concerns them together."""
        return [self._prepare(*lists) for lists in work]

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        offsets: list[int],
        prepared: Any,
    ) -> None:
        """Makes one update of params, which are on one device."""
        raise NotImplementedError

    # ---- The optimizer interface ----------------------------------------------

    @property
    def seed(self) -> int:
        """The seed that keys all noise of this sampler."""
        return self.param_groups[0]["seed"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group; its noise follows that of the existing groups.

        Args:
            param_group: ``{"params": ..., hyperparameters ...}``; what it leaves
                out is taken from the defaults.

        Raises:
            ValueError: a hyperparameter is out of range, or a parameter is of a
                dtype that cannot be sampled. Nothing is added then.
        """
        if isinstance(param_group, dict):
            for key in self._MANAGED:
                if key in param_group:
                    raise ValueError(
                        f"Invalid param group: {key!r} is managed by "
                        f"{type(self).__name__} and cannot be set for a group"
                    )
            self._check_group({**self.defaults, **param_group})
            param_group = dict(param_group)  # torch would write into the caller's
        before = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[before]
        try:
            for p in group["params"]:
                self._check_parameter(p)
        except ValueError:
            del self.param_groups[before]
            raise
        group["step"] = int(self.param_groups[0]["step"])
        if group["capturable"]:
            device = group["params"][0].device if group["params"] else None
            group["step"] = torch.tensor(group["step"], device=device)
        offset = 0
        for previous in self.param_groups[:before]:
            for start, p in zip(previous["offsets"], previous["params"], strict=True):
                offset = _next_offset(start, p.numel())
        group["offsets"] = offsets = []
        for p in group["params"]:
            offsets.append(offset)
            offset = _next_offset(offset, p.numel())

    def _check_parameter(self, p: Tensor) -> None:
        if p.dtype not in _DTYPES:
            raise ValueError(
                f"Invalid parameter: {type(self).__name__} cannot sample {p.dtype} "
                f"(must be float32, float64, bfloat16 or float16; a complex parameter "
                f"can be kept as torch.view_as_real of it)"
            )

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps :meth:`step` for hooks and profilers, at no cost without them.

        torch's own wrapper opens a profiler record at every call, which takes
        longer than a step of a small network.
        """
        observed = Optimizer.profile_hook_step(func)

        @wraps(func)
        def wrapper(self: Sampler, *args: Any, **kwargs: Any) -> Any:
            if (
                self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks
                or _global_optimizer_post_hooks
            ):
                return observed(self, *args, **kwargs)
            if torch.compiler.is_compiling():
                if self.defaults["capturable"]:
                    return func(self, *args, **kwargs)
                # The step counter is a Python int: torch.compile would guard on it
                # and compile every step anew.
                return torch.compiler.disable(func)(self, *args, **kwargs)
            if _profiler_enabled():
                return observed(self, *args, **kwargs)
            return func(self, *args, **kwargs)

        return wrapper

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Makes one update of all parameters that have a gradient.

        Inside ``torch.compile`` it is traced if the sampler is ``capturable``;
        otherwise it runs as it is, with a graph break around it.

        Args:
            closure: computes the loss, calls ``backward()`` and returns the loss.
                Called once, before the update.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a hyperparameter has left its range (through a scheduler,
                say). No parameter has changed.
            RuntimeError: a gradient is sparse or does not fit its parameter. No
                parameter has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        work = self._gather()
        self._advance(work, self._prepare_all(work))
        return loss

    def _gather(self, *, checked: bool = False) -> list[Work]:
        """Checks gradients, and groups if need be, and lists what is to be updated."""
        work = []
        for group in self.param_groups:
            if not checked:
                self._check_group(group)
            work.extend(self._collect(group))
        if len(work) > 1:
            # An operator changes nothing if its arguments do not fit, but by then
            # another group's operator may have made its update.
            for _, params, grads, _ in work:
                for p, grad in zip(params, grads, strict=True):
                    self._check_fit(p, grad)
        return work

    def _advance(self, work: list[Work], prepared: list[Any]) -> None:
        """Makes the update of everything listed and counts the step."""
        for (group, params, grads, offsets), state in zip(work, prepared, strict=True):
            self._update(group, params, grads, offsets, state)
            # The operators are opaque to autograd: tell it that these changed.
            increment_version(params)
        for group in self.param_groups:
            group["step"] += 1  # in place if it is a tensor

    def _step_arguments(self, group: dict[str, Any]) -> dict[str, Any]:
        """The arguments seed, step and device_step of an operator."""
        step = group["step"]
        if isinstance(step, int):
            return {"seed": group["seed"], "step": step}
        return {"seed": group["seed"], "step": 0, "device_step": step}

    def _collect(self, group: dict[str, Any]) -> list[Work]:
        """The group's parameters that have a gradient, a list for each device."""
        params: list[Tensor] = []
        grads: list[Tensor] = []
        offsets: list[int] = []
        devices = set()
        for p, offset in zip(group["params"], group["offsets"], strict=True):
            grad = p.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients: got "
                    f"one of layout {grad.layout} for a parameter of shape "
                    f"{list(p.shape)} (for nn.Embedding, use sparse=False)"
                )
            params.append(p)
            grads.append(grad)
            offsets.append(offset)
            devices.add(p.device)
        if not params:
            return []
        if any(device.type == "cuda" for device in devices):
            self._check_cuda(group)
        if len(devices) == 1:
            return [(group, params, grads, offsets)]
        work: dict[torch.device, Any] = {}
        for p, grad, offset in zip(params, grads, offsets, strict=True):
            lists = work.setdefault(p.device, (group, [], [], []))
            lists[1].append(p)
            lists[2].append(grad)
            lists[3].append(offset)
        return list(work.values())

    def _check_fit(self, p: Tensor, grad: Tensor) -> None:
        """Raises if an operator would refuse the parameter, gradient or state."""
        if grad.dtype != p.dtype or grad.shape != p.shape:
            raise RuntimeError(
                f"{type(self).__name__} got a gradient of {grad.dtype} and shape "
                f"{list(grad.shape)} for a parameter of {p.dtype} and shape "
                f"{list(p.shape)} (must be equal)"
            )
        if any(n > 1 and s == 0 for n, s in zip(p.shape, p.stride(), strict=True)):
            raise RuntimeError(
                f"{type(self).__name__} cannot update an expanded parameter (several "
                f"elements share memory): shape {list(p.shape)}, strides "
                f"{list(p.stride())}"
            )
        for key, value in self.state.get(p, {}).items():
            if torch.is_tensor(value) and value.shape != p.shape:
                raise RuntimeError(
                    f"{type(self).__name__} has a {key} of shape {list(value.shape)} "
                    f"for a parameter of shape {list(p.shape)}: was the parameter "
                    f"replaced?"
                )

    def _check_cuda(self, group: dict[str, Any]) -> None:
        if not HAS_CUDA:
            raise RuntimeError(
                f"{type(self).__name__} got parameters on a CUDA device, but "
                "torch_sgmcmc was built without CUDA kernels: reinstall it with "
                "TORCH_SGMCMC_CUDA=1"
            )
        # A step counter on the host would be frozen into the graph, and every
        # replay would inject the same noise.
        if not group["capturable"] and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__} cannot be captured in a CUDA graph: construct "
                "it with capturable=True"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict; the chain then continues bit for bit.

        Args:
            state_dict: what :meth:`state_dict` returned, for the same parameters
                in the same order.

        Raises:
            ValueError: it comes from another kind of optimizer or from other
                parameters. Nothing has been loaded.
        """
        self._check_state_dict(state_dict)
        super().load_state_dict(state_dict)
        # torch casts state to the parameter's dtype. Ours may be wider: restore.
        saved = state_dict["state"]
        ids = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        ours = chain.from_iterable(g["params"] for g in self.param_groups)
        for i, p in zip(ids, ours, strict=True):
            for key, value in saved.get(i, {}).items():
                state = self.state[p]
                if torch.is_tensor(value) and state[key].dtype != value.dtype:
                    state[key] = value.to(device=p.device, copy=True)
        for group in self.param_groups:
            if torch.is_tensor(group["step"]) and group["params"]:
                group["step"] = group["step"].to(group["params"][0].device)

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"Invalid state_dict: it has {len(groups)} param groups, expected "
                f"{len(self.param_groups)}"
            )
        for i, (theirs, ours) in enumerate(zip(groups, self.param_groups, strict=True)):
            missing = [k for k in (*self.defaults, "offsets") if k not in theirs]
            if missing:
                raise ValueError(
                    f"Invalid state_dict: param group {i} lacks "
                    f"{', '.join(missing)}; it is not one of {type(self).__name__}"
                )
            if len(theirs["params"]) != len(ours["params"]):
                raise ValueError(
                    f"Invalid state_dict: param group {i} has "
                    f"{len(theirs['params'])} parameters, expected "
                    f"{len(ours['params'])}"
                )
            if list(theirs["offsets"]) != ours["offsets"]:
                raise ValueError(
                    f"Invalid state_dict: param group {i} was saved for parameters "
                    f"of other sizes (noise offsets {theirs['offsets']}, expected "
                    f"{ours['offsets']})"
                )
            self._check_group(theirs)
            check_integer("step", int(theirs["step"]))
            for index, p in zip(theirs["params"], ours["params"], strict=True):
                for key, value in state_dict["state"].get(index, {}).items():
                    if torch.is_tensor(value) and value.shape != p.shape:
                        raise ValueError(
                            f"Invalid state_dict: {key} of parameter {index} has "
                            f"shape {list(value.shape)}, expected {list(p.shape)}"
                        )

    # ---- In words -------------------------------------------------------------

    def target_summary(self) -> str:
        """Says which distribution is sampled: data scale, prior, temperature."""
        lines = [
            f"{type(self).__name__} samples p(θ) ∝ exp(−U(θ)/T), "
            "U(θ) = N · (mean loss) + Σ λ‖θ‖²/2."
        ]
        for i, group in enumerate(self.param_groups):
            n, t = group["num_data"], group["temperature"]
            precision = group["prior_precision"]
            count = sum(p.numel() for p in group["params"])
            data = (
                "the loss is U itself (N = 1)"
                if n == 1
                else f"the loss is a mean over N = {n:,} data"
            )
            prior = (
                "flat prior (λ = 0)"
                if precision == 0
                else f"prior N(0, {1 / precision:.4g}) on each (λ = {precision:.4g})"
            )
            if t == 1:
                heat = "T = 1: the Bayesian posterior"
            elif t == 0:
                heat = "T = 0: no noise, an optimizer and not a sampler"
            else:
                heat = (
                    f"T = {t:.4g}: {'colder' if t < 1 else 'hotter'} than the posterior"
                )
            lines.append(f"Group {i}, {count:,} parameters: {data}; {prior}; {heat}.")
        return "\n".join(lines)


def _next_offset(offset: int, numel: int) -> int:
    """The first multiple of the noise block at or after offset + numel."""
    block = _C.NOISE_BLOCK
    return (offset + numel + block - 1) // block * block
