"""Many steps of a small network in one compiled call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.torch_version import TorchVersion

from torch_sgmcmc._impl.context import has_hooks, rescale_momenta
from torch_sgmcmc._impl.hyperparams import check_integer
from torch_sgmcmc.samplers.sampler import Sampler, check_sampler

__all__ = ["compile_steps"]

# With which blocks are seen to be right.
_FIRST = "2.15"
# Settings of the param groups whose graphs are kept.
_GRAPHS = 8
# Inductor's wrapper in C++: what is called between kernels does not go by Python. And
# tanh by one exponential, with an absolute error of 1e-7: the other takes most of a
# small network's time.
_OPTIONS = {"cpp_wrapper": True, "cpp.use_decompose_tanh": True}


def _of_its_own(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with code of its own: torch.compile keeps 8 graphs for a code."""
    names = ("__globals__", "__name__", "__defaults__", "__closure__")
    parts = (getattr(function, name) for name in names)
    return FunctionType(function.__code__.replace(), *parts)


def hyperparameters(sampler: Sampler) -> list[dict[str, Any]]:
    """Returns the numbers of the param groups that are compiled into a graph."""
    left_out = ("params", "seed", "step", "num_skipped")
    return [
        {
            name: value
            for name, value in group.items()
            if name not in left_out and isinstance(value, bool | int | float | str)
        }
        for group in sampler.param_groups
    ]


def compile_steps(
    sampler: Sampler,
    loss: Callable[..., Tensor],
    params: Mapping[str, Tensor],
    *,
    steps: int = 20,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Tensor]:
    """Compiles a block of steps: gradients and updates in one graph of inductor's.

    Where a network is small, Python, autograd and dispatch take most of a step; a block
    has them once. The chain is that of ``steps`` calls of ``sampler.step()`` with the
    same gradients, to the bit; inductor's gradients may be rounded otherwise than
    autograd's. Each param group's numbers are compiled in: a schedule that changes them
    at each block compiles again and again.

    Args:
        sampler: one that goes by gradients alone, with ``capturable=True``, without
            hooks: look at the chain between blocks, and draw by :meth:`Collector.run`.
        loss: ``loss(params, *batch)``, the mean loss of a minibatch as a function of
            the parameters by name, as :func:`torch.func.functional_call` takes them.
            For a sampler of ``num_chains`` the sum over the chains, by
            :func:`torch.func.vmap`.
        params: the sampler's parameters by name.
        steps: of a block, >= 1; compiling takes the longer, but not in proportion.
            Default: 20.
        options: of :func:`torch.compile`. Default: ``{"cpp_wrapper": True,
            "cpp.use_decompose_tanh": True}``.

    Returns:
        ``block(*batches)``, which makes the steps. Batches are tensors [steps, ...],
        of which step i has row i (all data: ``x.expand(steps, *x.shape)``); it returns
        the losses [steps], and leaves no gradients behind. It raises a RuntimeError
        after a block in which gradients were not finite, whose steps are left out, if
        ``nonfinite="raise"``. The first block of a sampler that has no state yet is not
        compiled.

    Raises:
        TypeError, ValueError: an argument is not as above.
        RuntimeError: torch is older than 2.15 (with 2.11 losses were wrong).

    Example:
        >>> def loss(params, x, y):
        ...     return F.mse_loss(functional_call(model, params, (x,)), y) / 0.02
        >>> params = dict(model.named_parameters())
        >>> sampler = sg.SGHMC(params.values(), 1e-3, 0.9, num_data=len(x),
        ...                    capturable=True, seed=0)
        >>> block = sg.compile_steps(sampler, loss, params)
        >>> for _ in range(1000):
        ...     i = torch.randint(len(x), (20, 32))
        ...     block(x[i], y[i])
    """
    if TorchVersion(torch.__version__) < _FIRST:
        raise RuntimeError(
            f"compile_steps needs torch {_FIRST} or newer (this is "
            f"{torch.__version__}; with 2.11 the compiled losses were wrong)"
        )
    check_sampler(sampler)
    steps = check_integer("steps", steps, low=1)
    if not sampler.defaults.get("capturable", False):
        raise ValueError(
            f"Invalid sampler: {type(sampler).__name__} with capturable=False (must be "
            "True: its counter is then no constant of the graph)"
        )
    params = dict(params)
    own = {id(p) for group in sampler.param_groups for p in group["params"]}
    if {id(p) for p in params.values()} != own:
        raise ValueError(
            f"Invalid params: {len(params)} that are not the sampler's {len(own)} "
            "(must be its parameters, by name)"
        )

    names_of: dict[int, list[str]] = {}
    for name, p in params.items():
        names_of.setdefault(id(p), []).append(name)
    own_names = [(params[names[0]], names) for names in names_of.values()]

    def block(*batches: Tensor) -> Tensor:
        losses = []
        for i in range(steps):
            gradients, value = grad_and_value(loss)(
                {name: p.detach() for name, p in params.items()},
                *(batch[i] for batch in batches),
            )
            for p, names in own_names:
                # Under several names it has a part of the gradient for each.
                p.grad = sum(
                    (gradients[name] for name in names[1:]), start=gradients[names[0]]
                )
            sampler.step()
            losses.append(value)
        for p in params.values():
            p.grad = None
        return torch.stack(losses)

    # A function for each setting of the groups, since torch.compile makes 8 graphs of
    # one and then fails.
    compiled: dict[str, Callable[..., Tensor]] = {}

    def graph() -> Callable[..., Tensor]:
        key = repr(hyperparameters(sampler))
        if key not in compiled:
            if len(compiled) == _GRAPHS:
                del compiled[next(iter(compiled))]
            compiled[key] = torch.compile(
                _of_its_own(block), fullgraph=True, options={**(options or _OPTIONS)}
            )
        return compiled[key]

    def run(*batches: Tensor) -> Tensor:
        for k, batch in enumerate(batches):
            if not isinstance(batch, Tensor) or batch.shape[:1] != (steps,):
                got = (
                    f"shape {list(batch.shape)}"
                    if isinstance(batch, Tensor)
                    else type(batch).__name__
                )
                raise ValueError(
                    f"Invalid batches[{k}]: {got} (must be a Tensor with a row for "
                    f"each of the {steps} steps)"
                )
        if has_hooks(sampler):
            raise ValueError(
                "Invalid sampler: it has hooks, which a compiled block does not call "
                "(remove them, and look at the chain between blocks; a Collector has "
                "run())"
            )
        before = sampler.num_skipped
        # What the first step creates is no part of a graph.
        has_begun = int(sampler.param_groups[0]["step"]) > 0
        rescale_momenta(sampler)  # between blocks, never inside
        losses = (graph() if has_begun else block)(*batches)
        left_out = sampler.num_skipped - before
        if left_out and sampler.param_groups[0]["nonfinite"] == "raise":
            raise RuntimeError(
                f"{left_out} of {steps} steps of {type(sampler).__name__} were left "
                "out: gradients were not finite. Parameters are as after the others"
            )
        return losses

    return run
