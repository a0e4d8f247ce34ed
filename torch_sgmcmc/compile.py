"""Many steps of a small network in one compiled call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.torch_version import TorchVersion

from torch_sgmcmc._impl.context import has_hooks, rescale_momenta
from torch_sgmcmc._impl.hyperparams import check_integer
from torch_sgmcmc.data import one_gradient_a_step
from torch_sgmcmc.samplers.sampler import Sampler, check_sampler

__all__ = ["compile_steps"]

# The first torch with correct results of blocks.
_FIRST = "2.15"
# Most settings of the param groups whose graphs are kept.
_GRAPHS = 8
# Inductor's C++ wrapper makes calls between kernels without Python. tanh by one
# exponential has an absolute error of 1e-7; the exact tanh takes most of a small
# network's time.
_OPTIONS = {"cpp_wrapper": True, "cpp.use_decompose_tanh": True}


def _copy_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a function with its own code: torch.compile keeps 8 graphs for a code."""
    names = ("__globals__", "__name__", "__defaults__", "__closure__")
    parts = (getattr(function, name) for name in names)
    return FunctionType(function.__code__.replace(), *parts)


def hyperparameters(sampler: Sampler) -> list[dict[str, Any]]:
    """Returns the numbers of the param groups that are compiled into a graph."""
    ignored = ("params", "seed", "step", "num_skipped")
    return [
        {
            name: value
            for name, value in group.items()
            if name not in ignored and isinstance(value, bool | int | float | str)
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
    """Compiles a block of steps: gradients and updates in one inductor graph.

    In a small network Python, autograd and dispatch take most of a step; a block has
    them once. With the same gradients the chain is bitwise identical to ``steps`` calls
    of ``sampler.step()``; inductor may round gradients differently from autograd. Each
    param group's numbers are compiled in: a schedule that changes them compiles again
    at each block.

    Args:
        sampler: a gradient-only sampler with ``capturable=True``, without hooks:
            inspect the chain between blocks, and draw by :meth:`Collector.run`.
        loss: ``loss(params, *batch)``, the mean loss of a minibatch as a function of
            the parameters by name, as for :func:`torch.func.functional_call`. With
            ``num_chains`` the sum over the chains, by :func:`torch.func.vmap`.
        params: the sampler's parameters by name.
        steps: steps of a block, >= 1. Compile time grows with them, less than in
            proportion. Default: 20.
        options: options of :func:`torch.compile`. Default: ``{"cpp_wrapper": True,
            "cpp.use_decompose_tanh": True}``.

    Returns:
        ``block(*batches)``, which makes the steps. Batches are tensors [steps, ...];
        step i uses row i (all data: ``x.expand(steps, *x.shape)``). The block returns
        the losses [steps] and leaves no gradients. With ``nonfinite="raise"`` it raises
        a RuntimeError after a block with skipped steps, whose gradients were not
        finite. The first block of a sampler without state is not compiled.
        RuntimeError: torch is older than 2.15 (with 2.11 losses were wrong).
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
            "True: its counter is then not a constant of the graph)"
        )
    params = dict(params)
    own = {id(p) for group in sampler.param_groups for p in group["params"]}
    if {id(p) for p in params.values()} != own:
        raise ValueError(
            f"Invalid params: {len(params)} that differ from the sampler's {len(own)} "
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
                # A tied parameter has a part of its gradient under each name.
                p.grad = sum(
                    (gradients[name] for name in names[1:]), start=gradients[names[0]]
                )
            sampler.step()
            losses.append(value)
        for p in params.values():
            p.grad = None
        return torch.stack(losses)

    # A function for each setting of the groups: torch.compile fails after 8 graphs of
    # one.
    compiled: dict[str, Callable[..., Tensor]] = {}

    def graph() -> Callable[..., Tensor]:
        key = repr(hyperparameters(sampler))
        if key not in compiled:
            if len(compiled) == _GRAPHS:
                del compiled[next(iter(compiled))]
            compiled[key] = torch.compile(
                _copy_code(block), fullgraph=True, options={**(options or _OPTIONS)}
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
                "(remove them, and inspect the chain between blocks; a Collector has "
                "run())"
            )
        before = sampler.num_skipped
        # State that the first step creates is not part of a graph.
        has_begun = int(sampler.param_groups[0]["step"]) > 0
        rescale_momenta(sampler)  # between blocks, never inside
        losses = (graph() if has_begun else block)(*batches)
        skipped = sampler.num_skipped - before
        if skipped and sampler.param_groups[0]["nonfinite"] == "raise":
            raise RuntimeError(
                f"{skipped} of {steps} steps of {type(sampler).__name__} were skipped: "
                "gradients were not finite. Parameters are as after the other steps"
            )
        return losses

    return run


#: Most steps of a block.
LONGEST = 20


def length_of_blocks(burn_in: int, every: int, *ends: int) -> int:
    """Returns the longest length of blocks with draws only at their ends."""
    common = math.gcd(burn_in, every, *ends)
    return max(n for n in range(1, LONGEST + 1) if common % n == 0)


class _Loss(nn.Module):
    """The loss as a module, so that functional_call can replace parameters."""

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]
    ) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


class Blocks:
    """Makes several steps at a time, of a capturable sampler without schedules."""

    def __init__(
        self,
        model: nn.Module,
        sampler: Sampler,
        loss: Callable[[nn.Module, Any], Tensor],
        schedules: list[Any],
        steps: int,
    ) -> None:
        if not one_gradient_a_step(sampler):
            kind, wanted = type(sampler).__name__, "a sampler whose steps take one"
            raise ValueError(f"Invalid compile: {kind} (must be {wanted} gradient)")
        if any(group["nonfinite"] == "skip" for group in sampler.param_groups):
            raise ValueError(
                "Invalid compile: with nonfinite='skip', skipped steps would move "
                "draws into the middle of a block (must be 'raise', or compile=False)"
            )
        if schedules:
            raise ValueError(
                f"Invalid compile: with a {type(schedules[0]).__name__}, which changes "
                "at each step what is compiled in (must be without a schedule)"
            )
        self.steps = steps
        named = dict(model.named_parameters())
        sampled = {id(p) for group in sampler.param_groups for p in group["params"]}
        params = {f"model.{k}": p for k, p in named.items() if id(p) in sampled}
        whole = _Loss(model, loss)
        # Set by the first minibatch: a graph is made for one kind of minibatch.
        self._put_together: Callable[[list[Tensor]], Any] | None = None

        def of_minibatch(params: dict[str, Tensor], *parts: Tensor) -> Tensor:
            batch = self._put_together(list(parts))  # type: ignore[misc]
            return functional_call(whole, params, (batch,))

        self.block = compile_steps(sampler, of_minibatch, params, steps=steps)

    def stacked(self, batches: list[Any]) -> list[Tensor]:
        """Returns minibatches as the block takes them, stacked part by part."""
        if self._put_together is None:
            self._put_together = _parts_of(batches[0])[1]
        columns = zip(*(_parts_of(batch)[0] for batch in batches), strict=True)
        rows = [list(column) for column in columns]
        for tensors in rows:
            sizes = {tuple(t.shape) for t in tensors}
            if len(sizes) > 1:
                raise ValueError(
                    f"Invalid loader: minibatches of shapes {sorted(sizes)} in one "
                    "compiled block (must be of one: drop_last=True)"
                )
        return [torch.stack(tensors) for tensors in rows]


def _parts_of(batch: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """Returns a minibatch's tensors, and a function that reassembles it."""
    if isinstance(batch, Tensor):
        return [batch], lambda parts: parts[0]
    if isinstance(batch, dict) and all(isinstance(t, Tensor) for t in batch.values()):
        keys = list(batch)
        return [*batch.values()], lambda parts: dict(zip(keys, parts, strict=True))
    if isinstance(batch, tuple | list) and all(isinstance(t, Tensor) for t in batch):
        return [*batch], list if isinstance(batch, list) else tuple
    raise TypeError(
        f"Invalid loader: a minibatch is a {type(batch).__name__} (must be, for "
        "compiled blocks, a Tensor, or a tuple, list or dict of Tensors)"
    )
