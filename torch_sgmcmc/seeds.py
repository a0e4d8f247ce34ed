"""Seeds for samplers that are to share no noise, and a warning where some do."""

from __future__ import annotations

import torch_sgmcmc._C as _C
from torch_sgmcmc._impl.hyperparams import check_integer, draw_seed

__all__ = ["SharedNoiseWarning", "fold_in"]


class SharedNoiseWarning(UserWarning):
    """Two samplers with one seed make steps in turns: their noise is the same.

    Give each a seed of its own, with :func:`fold_in`.
    """


def fold_in(seed: int, stream: int) -> int:
    """The seed of a stream: one of many that a seed can be made into.

    A sampler's noise is a function of (seed, step, purpose, element), and elements
    are counted from 0 in every sampler: two samplers with one seed draw the same
    noise. Several chains, and the parts of a model that have a sampler each, need
    seeds of their own; replicas of one chain, as under
    :class:`~torch.nn.parallel.DistributedDataParallel`, the same.

    Args:
        seed: a 64-bit int.
        stream: a 63-bit int, >= 0: which of the seeds.

    Returns:
        A 64-bit int: 64 bits of Philox4x32-10, a pure function of the arguments, the
        same in C++. It may be folded again. The seeds of n streams are as good as n
        random ones: some two of them agree with a probability of n² / 2⁶⁵.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is not an int.

    Example:
        >>> encoder = SGHMC(model.encoder.parameters(), lr=0.1, num_data=50_000,
        ...                 seed=fold_in(seed, 0))
        >>> decoder = SGHMC(model.decoder.parameters(), lr=0.01, num_data=50_000,
        ...                 seed=fold_in(seed, 1))
    """
    check_integer("seed", seed, low=-(2**63))  # None is not drawn here
    check_integer("stream", stream)
    if stream >= 2**63:
        raise ValueError(f"Invalid stream: {stream} (must fit in 64 bits)")
    return _C.fold_in(draw_seed(seed), stream)
