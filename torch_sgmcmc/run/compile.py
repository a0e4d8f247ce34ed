"""Many steps of a small network in one compiled call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.fx import GraphModule

from torch_sgmcmc.core.context import context_of, has_hooks, name_of
from torch_sgmcmc.core.hyperparams import check_integer, rests
from torch_sgmcmc.core.ops import noise_steps_
from torch_sgmcmc.core.random_state import STEP
from torch_sgmcmc.core.sampler import Sampler, check_sampler
from torch_sgmcmc.core.state import PRIOR_MEAN, record_estimate
from torch_sgmcmc.core.steps import (
    Snapshot,
    begin_step,
    check_groups_of,
    is_adapting,
    numbers_of,
    record_of,
    rescale_momenta,
)
from torch_sgmcmc.data import one_gradient_a_step, parts_of, stacked
from torch_sgmcmc.run.rules import Rule, coefficients_of, rules_of
from torch_sgmcmc.run.step_graph import (
    Updated,
    compile_graph,
    has_products,
    trace_block,
    trace_gradient,
)
from torch_sgmcmc.run.tiles import Tile, TileValues

# Steps of a graph of one chain, of many nodes, of many chains: they take compile time.
_UNROLLED, _NODES = (20, 10, 5), 80
# Most chains of a graph: one vector of AVX-512, or more if products do most of the
# work; still more leave the cache. Fewer than the minimum are faster one by one.
_CHAINS, _CHAINS_OF_PRODUCTS, _MIN_CHAINS = 16, 20, 7
# Most kinds of minibatches whose graphs are kept.
_KINDS = 8
# Bytes of inputs of one chain whose graph has one allocation.
_POOL = 1 << 20
# Inductor's C++ wrapper makes calls between kernels without Python. tanh takes most of
# a small network's time: here it is one exponential in fp64, and in fp32 a ratio of
# polynomials by fused multiplications, whose operations exceed the threshold, so that
# it is computed once for all that read it.
_OPTIONS = {
    "cpp_wrapper": True,
    "cpp.use_decompose_tanh": True,
    "cpp.enable_floating_point_contract_flag": "fast",
    "realize_opcount_threshold": 20,
}


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
    them once. The noise is bitwise that of single steps, so the chain is that of
    ``steps`` calls of ``sampler.step()`` up to the rounding of gradients and updates.
    lr and the other hyperparameters may change between blocks; momenta are then
    rescaled, as at any step.

    Args:
        sampler: SGLD, SGHMC, BAOA, SGLRW, SGNHT, MCLMC or PSGLD (with
            ``gamma=False``), of parameters in fp32 or fp64 on the CPU, and without
            hooks: inspect the chain between blocks, and draw by :meth:`Collector.run`.
        loss: ``loss(params, *batch)``, the mean loss of a minibatch as a function of
            the parameters by name, as for :func:`torch.func.functional_call`. With
            ``num_chains`` it is one chain's: its parameters have no dimension of
            chains.
        params: the sampler's parameters by name.
        steps: steps of a block, >= 1. Default: 20.
        options: options of inductor, instead of those that are fast here.

    Returns:
        ``block(*batches)``, which makes the steps. Batches are tensors [steps, ...];
        step i uses row i (all data: ``x.expand(steps, *x.shape)``). The block returns
        the losses, [steps] or [steps, num_chains], and leaves no gradients. Steps are
        made one by one, without a graph, where gradients are not finite (errors and
        skipped steps are then those of ``step()``), the sampler's state is created,
        momenta are drawn afresh, MCLMC tunes itself, a group rests at lr = 0, or a
        :class:`TemperatureMonitor` observes one of a graph's steps. Up to 20 steps are
        a graph (5 with ``num_chains >= 7``), compiled when first needed; minibatches of
        other shapes or strides compile another, and the last 8 kinds are kept. A
        parameter that the loss does not use has gradient 0.

    Raises:
        ValueError: the sampler cannot be compiled, ``params`` are not its own, or, from
            the block, a monitor observes a step of each graph.
    """
    check_sampler(sampler)
    steps = check_integer("steps", steps, low=1)
    if not callable(loss) or not isinstance(params, Mapping):
        raise TypeError(
            f"Invalid loss or params: got {type(loss).__name__} and "
            f"{type(params).__name__} (must be a function, and parameters by name "
            "such as dict(model.named_parameters()))"
        )
    params = dict(params)
    own = {id(p) for group in sampler.param_groups for p in group["params"]}
    if {id(p) for p in params.values()} != own:
        raise ValueError(
            f"Invalid params: {len(params)} that differ from the sampler's {len(own)} "
            "(must be its parameters, by name)"
        )
    _check_params(sampler)
    rules_of(sampler)
    return _CompiledSteps(
        sampler, loss, params, steps, _OPTIONS if options is None else options
    )


def _check_params(sampler: Sampler) -> None:
    groups = sampler.param_groups
    params = [p for group in groups for p in group["params"]]
    for p in params:
        known = (torch.float32, torch.float64)
        if p.dtype not in known or p.dtype is not params[0].dtype:
            found = f"{p.dtype}"
            wanted = "torch.float32 or torch.float64, and the same for all"
        elif not p.is_cpu or type(p.data) is not Tensor:
            found = f"a {type(p.data).__name__} on {p.device}"
            wanted = "a Tensor on the CPU. On a GPU capture step() in a CUDA graph"
        elif not p.requires_grad:
            found, wanted = "requires_grad=False", "True"
        else:
            continue
        raise ValueError(
            f"Invalid params: parameter {name_of(groups, p)} has {found} (must be "
            f"{wanted})"
        )


def _fits(kept: Tensor, p: Tensor) -> bool:
    return kept.dtype is p.dtype and kept.shape == p.shape


def _layouts(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Returns what a graph keeps of its inputs."""
    return tuple((t.shape, t.dtype, t.stride()) for t in tensors)


class _Block(NamedTuple):
    """The steps of a graph, and their minibatches."""

    steps: int
    batches: list[Tensor]


class _Traced(NamedTuple):
    """A traced gradient: its graph, its tiles, and its compiled blocks."""

    graph: GraphModule
    tiles: list[Tile]
    blocks: dict[Any, Callable[..., Any]]


class _Known(NamedTuple):
    """A checked sampler's inputs of graphs, valid while a snapshot of it holds."""

    traced: _Traced
    snapshot: Snapshot
    params: list[Updated]
    means: list[Tensor | None]
    coefficients: list[Tensor]


class _CompiledSteps:
    """Makes blocks of steps; the result of :func:`compile_steps`."""

    def __init__(
        self,
        sampler: Sampler,
        loss: Callable[..., Tensor],
        params: Mapping[str, Tensor],
        steps: int,
        options: Mapping[str, Any],
    ) -> None:
        names: dict[int, list[str]] = {}
        for name, p in params.items():
            names.setdefault(id(p), []).append(name)
        self._sampler, self._loss, self._options = sampler, loss, dict(options)
        self._params = [p for group in sampler.param_groups for p in group["params"]]
        self._groups = [
            i for i, group in enumerate(sampler.param_groups) for _ in group["params"]
        ]
        # A tied parameter has a part of its gradient under each name.
        self._names = [names[id(p)] for p in self._params]
        self._num_chains = context_of(sampler).num_chains
        self._steps = steps
        self._traced: dict[Any, _Traced] = {}
        self._noise: dict[Any, list[Tensor]] = {}
        self._known: _Known | None = None

    def __call__(self, *batches: Tensor) -> Tensor:
        for k, batch in enumerate(batches):
            if not isinstance(batch, Tensor) or batch.shape[:1] != (self._steps,):
                got = (
                    f"shape {list(batch.shape)}"
                    if isinstance(batch, Tensor)
                    else type(batch).__name__
                )
                raise ValueError(
                    f"Invalid batches[{k}]: {got} (must be a Tensor with a row for "
                    f"each of the {self._steps} steps)"
                )
        if has_hooks(self._sampler):
            raise ValueError(
                "Invalid sampler: it has hooks, which a compiled block does not call "
                "(remove them, and inspect the chain between blocks; a Collector has "
                "run())"
            )
        params = [p for g in self._sampler.param_groups for p in g["params"]]
        if list(map(id, params)) != list(map(id, self._params)):
            raise ValueError(
                "Invalid sampler: it has other parameters than when it was compiled "
                "(call compile_steps again)"
            )
        _check_params(self._sampler)
        with torch.no_grad():
            traced = self._trace(batches)
            tiles = traced.tiles
            is_large = len(traced.graph.graph.nodes) > _NODES
            most = _UNROLLED[2 if tiles[0].width > 1 else is_large]
            blocks = [
                _Block(min(most, self._steps - i), [t[i : i + most] for t in batches])
                for i in range(0, self._steps, most)
            ]
            self._check_monitor(blocks[0].steps)
            losses: list[Tensor] = []
            while len(losses) < len(blocks):
                losses += self._run(traced, blocks[len(losses) :])
                if len(losses) < len(blocks):
                    losses.append(self._make_single_steps(blocks[len(losses)]))
        return torch.cat(losses)

    def _check_monitor(self, steps: int) -> None:
        """Raises if a monitor observes a step of each graph: none would be compiled."""
        monitor = context_of(self._sampler).monitor
        if monitor is not None and monitor._interval <= steps:
            raise ValueError(
                f"Invalid sampler: its TemperatureMonitor observes every "
                f"{monitor._interval} steps, and so one of each graph's {steps}, which "
                "would be made singly (must be more steps, such as every=1000)"
            )

    def _trace(self, batches: Sequence[Tensor]) -> _Traced:
        """Returns the traced gradient for these minibatches."""
        key = _layouts([*self._params, *batches])
        if key not in self._traced:
            own = [p.detach() for p in self._params]
            if self._num_chains is not None:
                own = [p[0] for p in own]
            rows = [batch[0] for batch in batches]
            trace = partial(trace_gradient, self._loss, own, self._names, rows)
            chains = self._num_chains or 0
            graph = trace(has_chains=True) if chains >= _MIN_CHAINS else None
            if graph is None:
                graph, width = trace(has_chains=False), 1
                assert graph is not None  # of one chain
            elif has_products(graph):
                width = -(-chains // -(-chains // _CHAINS_OF_PRODUCTS))
            else:
                width = min(chains, _CHAINS)
            if len(self._traced) == _KINDS:
                del self._traced[next(iter(self._traced))]
            # The last tile begins in the one before, if need be.
            begins = (min(b, chains - width) for b in range(0, chains, width))
            tiles = [Tile(begin, width) for begin in begins] or [Tile(0, 0)]
            self._traced[key] = _Traced(graph, tiles, {})
        return self._traced[key]

    def _run(self, traced: _Traced, blocks: list[_Block]) -> list[Tensor]:
        """Makes blocks up to one that needs single steps; returns their losses."""
        tiles = traced.tiles
        sampler, context = self._sampler, context_of(self._sampler)
        # After any error all is checked again.
        known, self._known = self._known, None
        if known is None or known.traced is not traced or not known.snapshot.holds():
            known = self._prepare(traced)
            if known is None:
                return []
        _, _, params, means, coefficients = known
        old = [
            [p.detach(), *(context.state[p][key] for key in updated.rule.keys)]
            for p, updated in zip(self._params, params, strict=True)
        ]
        if not all(_fits(kept, p) for p, *own in old for kept in own):
            return []  # a step's error names it
        record = record_of(sampler)
        each_tile = [TileValues(tile, old, means, record) for tile in tiles]
        is_checked = context.groups[0]["nonfinite"] != "ignore"
        losses: list[Tensor] = []
        count, begin = 0, context.rng.steps
        for steps, batches in blocks:
            if self._draws_momenta(begin + count, steps):
                break
            monitor = context.monitor
            if monitor is not None and monitor._is_due(range(count, count + steps)):
                break
            noise = self._draw_noise(steps, params[0].rule, begin + count)
            found = []
            for now in each_tile:
                inputs = [*now.inputs(noise, coefficients), *batches]
                graph = self._graph(traced, params, now.tile, steps, inputs)
                found.append(graph(*inputs))
            if is_checked and not all(math.isfinite(each[-1]) for each in found):
                break
            for now, outputs in zip(each_tile, found, strict=True):
                now.take(outputs)
            shape = [steps] if self._num_chains is None else [steps, self._num_chains]
            losses.append(found[0][-2].new_empty(shape))
            for tile, each in zip(tiles, found, strict=True):
                tile.place_in(losses[-1], 1).copy_(tile.back(each[-2], 1))
            count += steps
        if count:
            # One call, so that no interrupt comes between parameters and counter.
            places, new = [context.rng.step], [context.rng.step + count]
            for now in each_tile:
                for place, value in now.results():
                    places.append(place)
                    new.append(value)
            torch._foreach_copy_(places, new)
            torch.clear_autocast_cache()
            context.keep_created()
        self._known = known
        return losses

    def _prepare(self, traced: _Traced) -> _Known | None:
        """Checks the sampler before steps; returns None if single ones are needed."""
        sampler, context = self._sampler, context_of(self._sampler)
        check_groups_of(sampler)
        begin_step(sampler)
        rules = rules_of(sampler)
        if self._needs_single_steps(rules):
            return None
        record_estimate(context, can_fail=True)
        rescale_momenta(sampler)
        means = [context.state[p].get(PRIOR_MEAN) for p in self._params]
        params = [
            Updated(g, rules[g], mean is not None)
            for g, mean in zip(self._groups, means, strict=True)
        ]
        coefficients = [
            self._coefficients(rule, group)
            for rule, group in zip(rules, sampler.param_groups, strict=True)
        ]
        return _Known(traced, Snapshot(sampler), params, means, coefficients)

    def _needs_single_steps(self, rules: list[Rule]) -> bool:
        """Returns whether steps create state, refuse it, or move some groups only."""
        state = self._sampler.state
        has_resting = any(map(rests, self._sampler.param_groups))
        if has_resting or context_of(self._sampler).blank or is_adapting(self._sampler):
            return True
        for p, g in zip(self._params, self._groups, strict=True):
            own = state.get(p, {})
            if any(key not in own for key in (STEP, *rules[g].keys)):
                return True
            kept = [own.get(key, p) for key in (PRIOR_MEAN, *rules[g].keys)]
            if not all(_fits(tensor, p) for tensor in kept):
                return True  # a step's error names it
        return False

    def _draws_momenta(self, begin: int, steps: int) -> bool:
        """Returns whether momenta are drawn afresh in one of the steps."""
        every = [g.get("resample_momentum_every") for g in self._sampler.param_groups]
        return any(k and -(-begin // k) * k < begin + steps for k in every)

    def _make_single_steps(self, block: _Block) -> Tensor:
        """Makes steps of the sampler, with gradients that are not compiled."""

        def loss(own: list[Tensor], *rows: Tensor) -> Tensor:
            pairs = zip(own, self._names, strict=True)
            named = {name: p for p, names in pairs for name in names}
            return self._loss(named, *rows)

        gradient = grad_and_value(loss)
        losses = []
        try:
            for i in range(block.steps):
                rows = [batch[i] for batch in block.batches]
                own = [p.detach() for p in self._params]
                if self._num_chains is None:
                    gradients, value = gradient(own, *rows)
                else:  # one by one: some layers have no vmap
                    chains = [
                        gradient([*each], *rows) for each in zip(*own, strict=True)
                    ]
                    by_param = zip(*(of_chain for of_chain, _ in chains), strict=True)
                    gradients = [torch.stack(each) for each in by_param]
                    value = torch.stack([value for _, value in chains])
                for p, grad in zip(self._params, gradients, strict=True):
                    p.grad = grad
                self._sampler.step()
                losses.append(value)
        finally:
            for p in self._params:
                p.grad = None
        return torch.stack(losses)

    def _coefficients(self, rule: Rule, group: dict[str, Any]) -> Tensor:
        numbers = coefficients_of(rule, numbers_of(self._sampler, group))
        return torch.tensor(numbers, dtype=self._params[0].dtype, device="cpu")

    def _draw_noise(self, steps: int, rule: Rule, begin: int) -> list[Tensor]:
        """Draws the noise of the next steps by one call."""
        context = context_of(self._sampler)
        dtype = self._params[0].dtype
        if (steps, dtype) not in self._noise:
            sizes = [p.numel() for p in self._params]
            rows = torch.empty((steps, sum(sizes)), dtype=dtype, device="cpu")
            self._noise[steps, dtype] = [
                part.view(steps, *p.shape)
                for part, p in zip(rows.split(sizes, 1), self._params, strict=True)
            ]
        noise_steps_(
            self._noise[steps, dtype],
            [offset for group in context.groups for offset in group["offsets"]],
            uniform=int(rule.is_uniform),
            seed=context.rng.seed,
            step=begin,
            num_chains=self._num_chains or 0,
        )
        return self._noise[steps, dtype]

    def _graph(
        self,
        traced: _Traced,
        params: list[Updated],
        tile: Tile,
        steps: int,
        inputs: list[Tensor],
    ) -> Callable[..., Any]:
        """Returns the compiled graph of some steps."""
        rules = tuple((p.rule.update, p.has_mean) for p in params)
        key = rules, steps, _layouts(inputs)
        if key not in traced.blocks:
            num_groups = len(self._sampler.param_groups)
            has_chains = tile.width > 1
            block = trace_block(traced.graph, params, num_groups, has_chains, inputs)
            # One allocation for the buffers of all steps, where the cache holds them.
            # With an update of all parameters its planner recurses too deeply, and
            # inductor writes new directions over those that are still read.
            is_joint = params[0].rule.shared is not None
            is_small = sum(t.nbytes for t in inputs) < _POOL
            planning = is_small and not has_chains and not is_joint
            options = {
                "memory_planning": planning,
                "inplace_buffers": not is_joint,
                **self._options,
            }
            traced.blocks[key] = compile_graph(block, inputs, options)
        return traced.blocks[key]


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
    """Makes several steps at a time, of a sampler without schedules."""

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
                "at each step what a block keeps (must be without a schedule)"
            )
        self.steps = steps
        named = dict(model.named_parameters())
        sampled = {id(p) for group in sampler.param_groups for p in group["params"]}
        params = {f"model.{k}": p for k, p in named.items() if id(p) in sampled}
        whole = _Loss(model, loss)
        # Set by the first minibatch: a graph is made for one kind of minibatch.
        self._put_together: Callable[[list[Tensor]], Any] | None = None

        def of_minibatch(params: dict[str, Tensor], *parts: Tensor) -> Tensor:
            assert self._put_together is not None
            batch = self._put_together(list(parts))
            return functional_call(whole, params, (batch,))

        self.block = compile_steps(sampler, of_minibatch, params, steps=steps)

    def stacked(self, batches: list[Any]) -> list[Tensor]:
        """Returns minibatches as the block takes them, stacked part by part."""
        if self._put_together is None:
            self._put_together = parts_of(batches[0])[1]
        return stacked(batches)
