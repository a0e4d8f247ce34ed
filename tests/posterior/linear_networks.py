"""Deep linear networks, whose learning coefficients are known."""

import itertools

import torch
from torch import nn

__all__ = ["learning_coefficient", "linear_network"]


def learning_coefficient(sizes, rank):
    """λ of a network of these widths, the true map having this rank.

    M. Aoyagi, Consideration on the Learning Efficiency of Multiple-Layered Neural
    Networks with Linear Units, Neural Networks 172, 2024, theorem 1.
    """
    excess = [size - rank for size in sizes]
    places = range(len(sizes))
    for count in range(2, len(sizes) + 1):
        for chosen in itertools.combinations(places, count):
            inner = [excess[i] for i in chosen]
            rest = [excess[i] for i in places if i not in chosen]
            hidden, total = count - 1, sum(inner)
            fits = total >= hidden * max(inner) and all(
                max(inner) < other and total < hidden * other for other in rest
            )
            if not fits:
                continue
            a = total - ((total + hidden - 1) // hidden - 1) * hidden
            pairs = (total**2 - sum(m * m for m in inner)) / 2
            return (
                (rank * (sizes[0] + sizes[-1]) - rank**2) / 2
                + a * (hidden - a) / (4 * hidden)
                - hidden * (hidden - 1) / 4 * (total / hidden) ** 2
                + pairs / 2
            )
    raise AssertionError("there is always one")


def linear_network(sizes, rank):
    """Weights, and the expected loss, with inputs N(0, I) and unit noise.

    At the weights the loss is least. They are in balance: all have the rank of the map.
    """
    g = torch.Generator().manual_seed(1)
    turns = [
        torch.linalg.qr(torch.randn(size, size, generator=g).double())[0]
        for size in sizes
    ]
    weights, product = [], torch.eye(sizes[0], dtype=torch.float64)
    for i in range(len(sizes) - 1):
        core = torch.zeros(sizes[i + 1], sizes[i], dtype=torch.float64)
        core[:rank, :rank] = torch.eye(rank)
        weights.append(nn.Parameter(turns[i + 1] @ core @ turns[i].T))
        product = weights[-1].detach() @ product

    def loss(indices):
        result = weights[0]
        for weight in weights[1:]:
            result = weight @ result
        return (result - product).square().sum() / 2

    return weights, loss
