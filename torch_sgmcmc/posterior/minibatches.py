"""Minibatches of a chain, and the steps that are made with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torch_sgmcmc.compile import compile_steps
from torch_sgmcmc.samplers.ewsg import EWSG
from torch_sgmcmc.samplers.hmc import HMC
from torch_sgmcmc.samplers.hmc_ecs import HMCECS
from torch_sgmcmc.samplers.psgld import needs_graph
from torch_sgmcmc.samplers.sampler import Sampler
from torch_sgmcmc.samplers.sbps import SBPS
from torch_sgmcmc.seeds import fold_in


def one_gradient_a_step(sampler: Sampler) -> bool:
    """Returns whether each step takes one minibatch."""
    return not isinstance(sampler, EWSG | HMC | HMCECS | SBPS)


def closure_of(
    sampler: Sampler, loss: Callable[[], Tensor]
) -> Callable[[], Tensor | float]:
    """Returns the closure for the step of any sampler but HMCECS.

    ``loss()`` draws a minibatch, and returns its mean loss, of each example for SBPS.
    """
    if isinstance(sampler, HMCECS):
        raise TypeError(
            "Invalid sampler: HMCECS draws its own subsamples by index (make a loop of "
            "its steps, and collect with Collector)"
        )
    if isinstance(sampler, SBPS):
        return loss

    def backward() -> Tensor:
        if one_gradient_a_step(sampler):  # others see to it
            sampler.zero_grad()
        value = loss()
        value.backward(create_graph=needs_graph(sampler))
        return value.detach()

    return backward


class Minibatches:
    """Endless passes over a loader, each in an order of its own.

    torch's default generator is seeded at the start of every epoch, from which loaders
    shuffle; so are generators that a loader was given, and this library's batch
    samplers. A place is thus found again by reading an epoch up to it. A DataLoader's
    workers begin anew with each epoch, ``persistent_workers`` or not.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self._batches: Iterator[Any] | None = None
        self.epoch, self.position = 0, 0

    def move_to(self, epoch: int, position: int) -> None:
        """Goes to a place, given by full passes and the minibatches of one."""
        self.epoch, self.position = epoch, 0
        self._batches = None
        for _ in range(position):
            self.next()

    def next(self) -> Any:
        """The next minibatch, which may be the first of an epoch."""
        if self._batches is None:
            self._batches = self._begin()
        try:
            batch = next(self._batches)
        except StopIteration:
            if self.position == 0:
                raise ValueError(
                    "Invalid loader: it has no minibatch (an iterator is read but "
                    "once: give a list or a DataLoader)"
                ) from None
            self.epoch, self.position = self.epoch + 1, 0
            self._batches = self._begin()
            return self.next()
        self.position += 1
        return batch

    def close(self) -> None:
        """Ends the pass in progress and its worker processes."""
        self._batches = None
        if getattr(self._loader, "persistent_workers", False):
            self._loader._iterator = None

    def _begin(self) -> Iterator[Any]:
        # Persistent workers have the random numbers of the epochs before, and an
        # iterator that is used again draws others than a new one.
        self.close()
        seed = fold_in(self._seed, self.epoch)
        if torch.cuda.is_initialized():
            torch.manual_seed(seed)
        else:  # which would note where it is called for each kind of device: 1 ms
            torch.default_generator.manual_seed(seed)
        for owner in (
            self._loader,
            getattr(self._loader, "sampler", None),
            getattr(self._loader, "batch_sampler", None),
        ):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            if hasattr(owner, "set_epoch"):  # that of torch's DistributedSampler
                owner.set_epoch(self.epoch)
            if hasattr(owner, "load_state_dict") and hasattr(owner, "num_drawn"):
                owner.load_state_dict({"seed": seed, "num_drawn": 0, "position": 0})
        return iter(self._loader)


#: Steps of a block at most.
LONGEST = 20


def length_of_blocks(burn_in: int, every: int, *ends: int) -> int:
    """The longest that have a draw at their end or none, and end where a chain does."""
    common = math.gcd(burn_in, every, *ends)
    return max(n for n in range(1, LONGEST + 1) if common % n == 0)


class _Loss(nn.Module):
    """The loss as a module, of which functional_call takes the parameters."""

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
        # Known of the first minibatch: a graph is made for one kind of them.
        self._put_together: Callable[[list[Tensor]], Any] | None = None

        def of_minibatch(params: dict[str, Tensor], *parts: Tensor) -> Tensor:
            batch = self._put_together(list(parts))  # type: ignore[misc]
            return functional_call(whole, params, (batch,))

        self.block = compile_steps(sampler, of_minibatch, params, steps=steps)

    def stacked(self, batches: list[Any]) -> list[Tensor]:
        """Minibatches as the block takes them: what each has, in rows."""
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
    """A minibatch's tensors, and what puts them together again."""
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
