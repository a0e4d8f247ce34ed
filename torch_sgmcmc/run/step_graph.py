"""The graph of a block of steps: gradients and updates as tensor arithmetic.

Note [Compiled blocks]
A block is one inductor graph. The gradient of one chain is traced, its small matrix
products are written as products and sums, which inductor fuses, and with several chains
the trace is evaluated with the chains as a further, last dimension, so that all
operations are vectorised over chains. The updates are arithmetic on the same tensors.
Noise and coefficients are inputs: the noise of all steps is drawn by one call, and a
schedule needs no other graph. Nothing is written in place: the caller copies the
results if all gradients were finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.func import functionalize, grad_and_value, vmap
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_sgmcmc.core.ops import chain_product
from torch_sgmcmc.run.rules import Rule

aten = torch.ops.aten

# Products with at most so many multiplications are fused: a call costs more. Of one
# chain, and of several at a time.
_FUSED = 50_000, 20_000
# Larger products of several chains at a time leave the cache.
_LARGEST_OF_CHAINS = 500_000


# Operations without a right vmap: a tensor with chains has other strides, and torch
# 2.11 reads wrong sizes of normalisations.
_ALONE = (aten.as_strided, aten.native_layer_norm, aten.native_group_norm)
# Operations whose decompositions do not return what their backwards read.
_WHOLE = (aten._scaled_dot_product_flash_attention_for_cpu.default,)


def _tanh(x: Tensor) -> Tensor:
    """Returns tanh of fp32 by Eigen's ratio of polynomials: relative error 4e-7."""
    if x.dtype is not torch.float32:
        return NotImplemented
    x = x.clamp(-7.90531111, 7.90531111)
    s = x * x
    above = -2.76076848e-16 * s + 2.00018790e-13
    above = (above * s - 8.60467152e-11) * s + 5.12229709e-08
    above = (above * s + 1.48572236e-05) * s + 6.37261929e-04
    above = above * s + 4.89352456e-03
    below = 1.19825839e-06 * s + 1.18534706e-04
    below = (below * s + 2.26843464e-03) * s + 4.89352519e-03
    return x * above / below


def trace_gradient(
    loss: Callable[..., Tensor],
    params: Sequence[Tensor],
    names: Sequence[Sequence[str]],
    batch: Sequence[Tensor],
    *,
    has_chains: bool,
) -> GraphModule | None:
    """Traces the gradients of a chain's parameters, and the loss.

    Returns:
        The graph; None if it is for several chains at a time and does not suit them.
    """
    sizes = [0]

    def mm(a: Tensor, b: Tensor) -> Tensor:
        sizes.append(a.shape[0] * a.shape[1] * b.shape[1])
        if sizes[-1] > _FUSED[has_chains]:
            return NotImplemented
        return a * b if a.shape[1] == 1 else (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)

    def addmm(c: Tensor, a: Tensor, b: Tensor, **scales: float) -> Tensor:
        if scales:
            return NotImplemented
        product = mm(a, b)
        if product is not NotImplemented:
            return c + product
        # A difference: inductor takes a sum for an addmm, which copies c.
        return aten.mm(a, b) - (-c)

    def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
        own, rest = tensors[: len(params)], tensors[len(params) :]

        def of(own: tuple[Tensor, ...]) -> Tensor:
            pairs = zip(own, names, strict=True)
            value = loss({name: p for p, some in pairs for name in some}, *rest)
            if not isinstance(value, Tensor) or value.dim():
                got = list(value.shape) if isinstance(value, Tensor) else value
                raise ValueError(
                    f"Invalid loss: it returned {got!r} (must be a chain's mean loss, "
                    "a Tensor of shape [])"
                )
            return value

        gradients, value = grad_and_value(of)(own)
        return (*gradients, value)

    own = {aten.mm.default: mm, aten.addmm.default: addmm, aten.tanh.default: _tanh}
    table = {**core_aten_decompositions(), **own}
    for operator in _WHOLE:
        table.pop(operator, None)
    with _explained_errors():
        trace = make_fx(functionalize(gradient), decomposition_table=table)
        graph = trace(*params, *batch)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    used = {getattr(n.target, "overloadpacket", None) for n in graph.graph.nodes}
    is_alone = max(sizes) > _LARGEST_OF_CHAINS or not used.isdisjoint(_ALONE)
    if has_chains and not is_alone:
        is_alone = not _fits_chains(graph, params, batch)
    return None if has_chains and is_alone else graph


@contextmanager
def _explained_errors() -> Iterator[None]:
    """Says what a loss does that cannot be traced."""
    try:
        yield
    except RuntimeError as error:
        if "mutate a captured Tensor" in str(error):
            what = "changes a tensor in place, such as a buffer of batch norm"
        elif "get value out of a tracing tensor" in str(error):
            what = "reads the value of a tensor, such as by item() or in an if"
        else:
            raise
        raise ValueError(
            f"Invalid loss: it {what}, which a compiled loss must not (use step())"
        ) from error


def _fits_chains(
    graph: GraphModule, params: Sequence[Tensor], batch: Sequence[Tensor]
) -> bool:
    """Returns whether two chains evaluated together are as one by one."""
    chains = [[p * scale for p in params] for scale in (1.0, 0.97)]
    inputs = [torch.stack(each, -1) for each in zip(*chains, strict=True)]
    rows = [row.unsqueeze(-1) for row in batch]
    with torch.random.fork_rng([]):
        try:
            found = ChainsLast(graph).run(*inputs, *rows)
        except Exception:  # of an operation that vmap refuses
            return False
        one_by_one = [graph(*own, *batch) for own in chains]
    random = torch.Tag.nondeterministic_seeded
    is_random = any(random in getattr(n.target, "tags", ()) for n in graph.graph.nodes)
    for together, *alone in zip(found, *one_by_one, strict=True):
        wanted = torch.stack(alone, -1)
        if together.shape[:-1] != wanted.shape[:-1]:
            return False
        size = float(wanted.nan_to_num(0, 0, 0).norm()) / max(wanted.numel(), 1) ** 0.5
        near = torch.isclose(
            together, wanted, rtol=1e-2, atol=1e-3 * size, equal_nan=True
        )
        if not is_random and not bool(near.all()):
            return False
    return True


def has_products(graph: GraphModule) -> bool:
    """Returns whether a graph has matrix products that are not fused."""
    products = (aten.mm.default, aten.addmm.default)
    return any(node.target in products for node in graph.graph.nodes)


class ChainsLast(Interpreter):
    """Evaluates a chain's graph for several chains: the last dimension of all tensors.

    The dimension has size 1 where the chains have the same values.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the graph."""
        self._width = max(tensor.shape[-1] for tensor in args)
        return super().run(*args, **kwargs)

    def call_function(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Evaluates an operation: by broadcasting, at its sizes, or by vmap."""
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        if torch.Tag.nondeterministic_seeded in target.tags:
            return _by_vmap(target, args, kwargs, self._width)
        if torch.Tag.pointwise in target.tags:
            return super().call_function(target, args, kwargs)
        rule = _WITH_CHAINS.get(target.overloadpacket)
        if rule is None or target is aten.view.dtype:
            return _by_vmap(target, args, kwargs)
        return rule(*args, **kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Returns a constant."""
        return super().get_attr(target, args, kwargs).unsqueeze(-1)


def _by_vmap(target: Any, args: Any, kwargs: Any, drawn: int = 0) -> Any:
    """Evaluates an operation for each chain; ``drawn`` chains draw own numbers.

    Kernels get what one chain gives them: many read memory as if it were contiguous.
    """
    flat, spec = tree_flatten((args, kwargs))
    places = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
    dims = [None if flat[i].shape[-1] == 1 else 0 for i in places]
    tensors = [
        (flat[i].squeeze(-1) if dim is None else flat[i].movedim(-1, 0)).contiguous()
        for i, dim in zip(places, dims, strict=True)
    ]
    if drawn:
        dims.append(0)
        tensors.append(torch.empty(drawn, device="cpu"))
    kinds: list[Any] = []

    def call(*tensors: Tensor) -> list[Tensor]:
        given = list(flat)
        for i, tensor in zip(places, tensors, strict=False):
            given[i] = tensor
        args, kwargs = tree_unflatten(given, spec)
        found, kind = tree_flatten(target(*args, **kwargs))
        kinds[:] = [kind, [value is None for value in found]]
        return [value for value in found if value is not None]

    if any(dim is not None for dim in dims):
        made = vmap(call, tuple(dims), -1, randomness="different")(*tensors)
    else:
        made = [value.unsqueeze(-1) for value in call(*tensors)]
    rest = iter(made)
    kind, are_none = kinds
    return tree_unflatten([None if none else next(rest) for none in are_none], kind)


def _before_chains(tensor: Tensor, dims: Any) -> list[int]:
    """Returns dimensions of a tensor without its chains; of all, if none are named."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return list(range(tensor.dim() - 1))
    each = dims if isinstance(dims, Sequence) else [dims]
    return [d if d >= 0 else d - 1 for d in each]


def _reduced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(x: Tensor, dims: Any = None, keepdim: bool = False, **kw: Any) -> Tensor:
        if x.dim() == 1:  # one number of each chain
            return function(x.unsqueeze(0), [0], **kw)
        return function(x, _before_chains(x, dims), keepdim=keepdim, **kw)

    return reduce


def _mm(a: Tensor, b: Tensor) -> Tensor:
    chains = max(a.shape[-1], b.shape[-1])
    if chains == 1 or a.dtype is not torch.float32:
        return _by_vmap(aten.mm.default, (a, b), {})
    own = [
        t if t.shape[-1] == chains else t.expand(*t.shape[:-1], chains).contiguous()
        for t in (a, b)
    ]
    return chain_product(*own)


def _slice_scatter(x: Tensor, part: Tensor, dim: int = 0, *ends: Any) -> Tensor:
    chains = max(x.shape[-1], part.shape[-1])
    own = [t.expand(*t.shape[:-1], chains) for t in (x, part)]
    return aten.slice_scatter(*own, *_before_chains(x, dim), *ends)


# Operations that know the chains' dimension, where vmap would move it, or overflows.
_WITH_CHAINS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys(
        (aten.view, aten._unsafe_view, aten.reshape),
        lambda x, size: x.reshape(*size, x.shape[-1]),
    ),
    aten.expand: lambda x, size, **_: x.expand(*size, x.shape[-1]),
    aten.permute: lambda x, dims: x.permute(
        *(d % (x.dim() - 1) for d in dims), x.dim() - 1
    ),
    aten.t: lambda x: x.transpose(0, 1) if x.dim() > 2 else x,
    aten.unsqueeze: lambda x, dim: x.unsqueeze(*_before_chains(x, dim)),
    aten.squeeze: lambda x, dims: x.squeeze(_before_chains(x, dims)),
    aten.slice: lambda x, dim=0, *ends: aten.slice(x, *_before_chains(x, dim), *ends),
    aten.slice_scatter: _slice_scatter,
    aten.mm: _mm,
    aten.addmm: lambda c, a, b, **scales: (
        _by_vmap(aten.addmm.default, (c, a, b), scales) if scales else c + _mm(a, b)
    ),
    aten.sum: _reduced(torch.sum),
    aten.mean: _reduced(torch.mean),
    aten.amax: _reduced(torch.amax),
    aten.amin: _reduced(torch.amin),
}


class Updated(NamedTuple):
    """A parameter of the graph: its group, rule, and whether its prior has a mean."""

    group: int
    rule: Rule
    has_mean: bool

    @property
    def num_inputs(self) -> int:
        """The number of inputs: θ, state, prior mean, noise."""
        return 2 + len(self.rule.keys) + self.has_mean


def trace_block(
    gradient: GraphModule,
    params: Sequence[Updated],
    num_groups: int,
    has_chains: bool,
    inputs: Sequence[Tensor],
) -> GraphModule:
    """Traces a block of steps.

    Args:
        gradient: of :func:`trace_gradient`.
        params: the parameters.
        num_groups: the number of param groups.
        has_chains: whether chains are the last dimension of parameters and state, and
            the second of noise.
        inputs: for each parameter θ, its state, its prior mean if it has one, and its
            noise with a row for each step; the groups' coefficients; the chains'
            record if the rule has one; the minibatches, with a row for each step.

    Returns:
        A graph of the same inputs. Its outputs are the new θ and state of each
        parameter, the record if there is one, the losses with a row for each step, and
        a number that is finite if all θ are. Once a gradient is not finite, its θ is
        not.
    """
    evaluate = ChainsLast(gradient).run if has_chains else gradient
    shared = params[0].rule.shared if params else None

    def block(*inputs: Tensor) -> tuple[Tensor | int, ...]:
        rest = iter(inputs)
        theta, noise = [], []
        state: list[list[Tensor]] = []
        means: list[Tensor | None] = []
        for p in params:
            theta.append(next(rest))
            state.append([next(rest) for _ in p.rule.keys])
            means.append(next(rest) if p.has_mean else None)
            xi = next(rest)
            noise.append(xi.movedim(1, -1) if has_chains else xi)
        packed = [next(rest) for _ in range(num_groups)]
        coefficients = [[c[i] for i in range(len(c))] for c in packed]
        record = [next(rest)] if shared else []
        batches = [*rest]
        losses = []
        for step in range(len(noise[0])):
            rows = [batch[step] for batch in batches]
            if has_chains:
                rows = [row.unsqueeze(-1) for row in rows]
            *gradients, loss = evaluate(*theta, *rows)
            losses.append(loss)
            g = []
            for i, (p, grad) in enumerate(zip(params, gradients, strict=True)):
                weight_decay, mean, *_ = coefficients[p.group]
                tensor = means[i]
                center = mean if tensor is None else tensor
                # A difference: inductor takes the sum for an addmm, and copies.
                g.append(grad - weight_decay * (center - theta[i]))
            drawn = [own[step] for own in noise]
            numbers = [own[2:] for own in coefficients]
            if shared:
                each = [(*own, *s) for *own, s in zip(g, drawn, state, strict=True)]
                found, record[0] = shared(numbers[0], each, record[0], has_chains)
                numbers = [found] * num_groups
            for i, (p, grad) in enumerate(zip(params, gradients, strict=True)):
                theta[i], *state[i] = p.rule.update(
                    numbers[p.group], theta[i], g[i], grad, drawn[i], *state[i]
                )
        is_finite = sum((t * 0).sum() for t in theta)
        outputs = [
            t for one, more in zip(theta, state, strict=True) for t in (one, *more)
        ]
        return (*outputs, *record, torch.stack(losses), is_finite)

    return make_fx(block, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def compile_graph(
    graph: GraphModule, inputs: list[Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    """Compiles a graph by inductor."""
    # Named, since the key of inductor's cache has the options but not the processor:
    # another machine's graph of wider vectors would leave elements uncomputed.
    width = {"AVX2": 256, "AVX512": 512}.get(torch.backends.cpu.get_cpu_capability())
    return torch._inductor.compile(graph, [*inputs], {"cpp.simdlen": width, **options})
