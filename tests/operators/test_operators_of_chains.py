"""Gradients of every operator of torch, of several chains at a time and of one."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_sgmcmc.run.step_graph import ChainsLast, trace_gradient

pytestmark = pytest.mark.nightly

CHAINS, SAMPLES, LARGEST = 8, 3, 3000
NEAR = {"rtol": 1e-6, "atol": 1e-8, "equal_nan": True}
OPERATORS = {
    f"{op.name}.{op.variant_test_name}".rstrip("."): op
    for op in op_db
    if torch.float64 in op.supported_dtypes("cpu") and op.supports_autograd
    # Parts of a view's memory are not those of its copies.
    if op.variant_test_name != "partial_views"
}
#: Operators whose chains must be evaluated together.
TOGETHER = [
    "matmul",
    "cdist",
    "softmax",
    "nn.functional.conv2d",
    "index_select",
    "cat",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.pdist",
    "addmm",
]


def samples(op):
    """Yields sample inputs: all values, the places of parameters and of data."""
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
        params = [i for i in tensors if flat[i].requires_grad]
        if params and sum(flat[i].numel() for i in tensors) <= LARGEST:
            yield flat, spec, params, [i for i in tensors if i not in params]


def loss_of(op, flat, spec, params, rest):
    """Returns a function of parameters by name and of data: a number."""

    def loss(named, *rows):
        own = list(flat)
        for i, value in zip([*params, *rest], [*named.values(), *rows], strict=True):
            own[i] = value
        first, args, kwargs = tree_unflatten(own, spec)
        total = torch.zeros((), dtype=torch.float64)
        for value in tree_flatten(op(first, *args, **kwargs))[0]:
            if isinstance(value, Tensor) and value.is_complex():
                value = torch.view_as_real(value.resolve_conj())
            if isinstance(value, Tensor) and value.is_floating_point():
                weights = torch.linspace(0.5, 1.5, value.numel(), dtype=torch.float64)
                total = total + (value * weights.view(value.shape)).atan().sum()
        return total

    return loss


def draws_numbers(node):
    """Returns whether an operator is random; attention is where it drops numbers."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return is_random and "dot_product" not in str(node.target)


def gradients(loss, own, data):
    own = [value.clone().requires_grad_() for value in own]
    value = loss({str(i): each for i, each in enumerate(own)}, *data)
    options = {"allow_unused": True, "materialize_grads": True}
    return [*torch.autograd.grad(value, own, **options), value.detach()]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_are_those_of_autograd(name):
    op = OPERATORS[name]
    are_together = []
    for flat, spec, places, rest in itertools.islice(samples(op), 4 * SAMPLES):
        if len(are_together) == SAMPLES:
            break
        loss = loss_of(op, flat, spec, places, rest)
        params, data = ([flat[i].detach() for i in some] for some in (places, rest))
        chains = [[p * (1 - 0.02 * k) for p in params] for k in range(CHAINS)]
        names = [[str(i)] for i in range(len(params))]
        try:
            one = trace_gradient(loss, params, names, data, has_chains=False)
            alone = [gradients(loss, own, data) for own in chains]
        except (RuntimeError, ValueError, NotImplementedError):
            continue  # torch traces no gradient of these, and says so
        pairs = zip(one(*params, *data), one(*params, *data), strict=True)
        is_same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
        if not is_same or any(map(draws_numbers, one.graph.nodes)):
            continue
        for own, wanted in zip(chains, alone, strict=True):
            torch.testing.assert_close([*one(*own, *data)], wanted, **NEAR)
        graph = trace_gradient(loss, params, names, data, has_chains=True)
        are_together.append(graph is not None)
        if graph is None:  # the chains are evaluated one by one
            continue
        inputs = [torch.stack(each, -1) for each in zip(*chains, strict=True)]
        inputs += [each.unsqueeze(-1) for each in data]
        for found, *each in zip(ChainsLast(graph).run(*inputs), *alone, strict=True):
            wanted = torch.stack(each, -1)
            found = found.expand(*found.shape[:-1], CHAINS)
            torch.testing.assert_close(found, wanted, **NEAR)
    assert name not in TOGETHER or (are_together and all(are_together))


def test_the_list_has_what_must_be_evaluated_together():
    assert OPERATORS.keys() >= {*TOGETHER}
