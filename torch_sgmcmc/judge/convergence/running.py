"""Convergence of draws that are not kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_sgmcmc.chain.checks import check_integer, wrong_shape
from torch_sgmcmc.chain.distributed import check_group, world_size
from torch_sgmcmc.chain.state_checks import check_tensor
from torch_sgmcmc.judge.convergence.batch_means import effective_draws, split_rhat
from torch_sgmcmc.judge.convergence.identical import check_different
from torch_sgmcmc.judge.convergence.report import Convergence

__all__ = ["RunningConvergence"]


class RunningConvergence:
    r"""Split R̂ and effective draws in memory that does not grow with their number.

    Of each chain it keeps the means and variances of at most ``batches`` batches of
    consecutive draws. When they are full, neighbours are merged in pairs, and batches
    are twice as long from then on: their length b is a power of two.

    **R̂** is that of the values themselves, ``arviz.rhat(..., method="split")``. Ranks
    need all draws: for those see :func:`~torch_sgmcmc.convergence.predictions`. What
    ranks are for, heavy tails, and chains that differ in scale alone, this R̂ does not
    see. It is exactly that of the first :math:`n' = 2b \lfloor n / 2b \rfloor` draws of
    each chain, n being the draws of the shortest chain and b the length of the longest
    batches: all but at most the part 4 / ``batches``, if chains are of one length.

    **Effective draws for the mean** are by batch means. With k batches of b draws in
    each of m chains, means :math:`\bar y`, and :math:`s^2` the variance of all draws,

    .. math::
        \hat\sigma^2 = \frac{b}{mk - 1} \sum_{i=1}^{mk} (\bar y_i - \bar y)^2, \qquad
        \mathrm{ESS} = m k b\, s^2 / \hat\sigma^2.

    Its relative standard error is √(2 / mk), and where a chain has E effective draws it
    is too large by a part of about k / 2E, as batches are not long enough. So batches
    are merged, for each quantity by itself, until E is at least 5 k, but not to less
    than 8 batches a chain. Where E is less than 5 k even then (at 8 batches: less than
    40 draws), the report says ``at_most``. Chains that disagree count for little,
    since the mean is that of all chains.

    Args:
        num_chains: m, >= 2.
        shape: of what is looked at in one draw, for instance (inputs, classes), or
            ``len(probe)``.
        batches: how many are kept of each chain, even and >= 16: two float64 each for
            every quantity (1 KiB a chain with 64). Default: 64.
        device: where they are kept. Default: the CPU.

    Raises:
        ValueError, TypeError: an argument is not as above.

    Example:
        >>> running = RunningConvergence(4, (len(x_test), 10))
        >>> for step in range(steps):
        ...     for i, (model, sampler) in enumerate(chains):
        ...         sampler.step(closure(model))
        ...         running.update(predict(model, x_test), chain=i)
        >>> print(running.report())

    Reference:
        Y. Yeh and B. Schmeiser, Simulation output analysis via dynamic batch means,
        Winter Simulation Conference 2000, for batches that are merged; N. T. Argon and
        S. Andradóttir, Replicated batch means for steady-state simulations, Naval
        Research Logistics 53, 2006, for those of several chains.
    """

    def __init__(
        self,
        num_chains: int,
        shape: int | Sequence[int],
        *,
        batches: int = 64,
        device: torch.device | str | None = None,
    ) -> None:
        self._num_chains = check_integer("num_chains", num_chains, low=2)
        sizes = [shape] if isinstance(shape, int) else list(shape)
        self._shape = [check_integer("shape", size, low=1) for size in sizes]
        self._batches = check_integer("batches", batches, low=16)
        if batches % 2:
            raise ValueError(f"Invalid batches: {batches} (must be even)")
        # Of each chain and batch; the batch that is being filled comes last.
        kept = [num_chains, batches, *self._shape]
        self._means = torch.zeros(kept, dtype=torch.float64, device=device)
        self._squares = torch.zeros_like(self._means)  # of distances from the mean
        self._draws = [0] * num_chains
        self._lengths = [1] * num_chains

    @property
    def num_draws(self) -> list[int]:
        """The number of draws of each chain so far."""
        return list(self._draws)

    def update(self, values: Any, chain: int | None = None) -> None:
        """Takes in one draw of a chain, or of all.

        Args:
            values: finite, of the shape given; or ``[num_chains, *shape]``, a draw of
                each chain.
            chain: whose draw it is, in [0, num_chains); None if there is one of each.
                Default: None.

        Raises:
            ValueError: values of another shape, or not finite; or there is no such
                chain. Nothing is taken in then.
        """
        values = torch.as_tensor(values).detach()
        wanted = self._shape
        chains = range(self._num_chains)
        if chain is None:
            wanted = [self._num_chains, *wanted]
        elif check_integer("chain", chain) >= self._num_chains:
            raise ValueError(
                f"Invalid chain: {chain} (must be in [0, {self._num_chains}))"
            )
        if list(values.shape) != wanted:
            raise wrong_shape("values", values, wanted)
        values = values.to(self._means.device, torch.float64)
        if not bool(values.isfinite().all()):
            wrong = int((~values.isfinite()).sum())
            raise ValueError(
                f"Invalid values: {wrong} of {values.numel()} are not finite"
            )
        for i in chains if chain is None else [chain]:
            self._take(i, values[i] if chain is None else values)

    def _take(self, chain: int, values: Tensor) -> None:
        full, filled = divmod(self._draws[chain], self._lengths[chain])
        if full == self._batches:
            means, squares = self._means[chain], self._squares[chain]
            half = self._batches // 2
            means[:half], squares[:half] = _merged(means, squares, self._lengths[chain])
            means[half:], squares[half:] = 0, 0
            self._lengths[chain] *= 2
            full = half
        mean, square = self._means[chain, full], self._squares[chain, full]
        before = values - mean
        mean += before / (filled + 1)
        square += before * (values - mean)
        self._draws[chain] += 1

    def gathered(
        self, process_group: dist.ProcessGroup | None = None
    ) -> RunningConvergence:
        """One of all chains, of which each rank of a process group follows some.

        A collective call: every rank has all ``num_chains`` chains' numbers then, and
        its own are as before. Draws are not sent, but the batches, and the result is to
        the bit that of one process that followed all chains.

        Args:
            process_group: the ranks; of ranks that sample one chain together, it may
                have but one: ``mesh.get_group("chain")``. Default: all.

        Raises:
            ValueError: on every rank. They differ in ``num_chains``, ``shape`` or
                ``batches``, or two of them follow one chain.
        """
        kept = {
            chain: (
                *(self._draws[chain], self._lengths[chain]),
                *(t[chain].to("cpu", copy=True) for t in (self._means, self._squares)),
            )
            for chain in range(self._num_chains)
            if self._draws[chain]
        }
        check_group(process_group)
        of_this = (self._num_chains, self._shape, self._batches)
        ranks: list[Any] = [(of_this, kept)] * world_size(process_group)
        if len(ranks) > 1:
            dist.all_gather_object(ranks, (of_this, kept), process_group)
        of_all = [of_one for of_one, _ in ranks]
        if any(of_one != of_all[0] for of_one in of_all):
            raise ValueError(
                "Invalid process_group: its ranks have (num_chains, shape, batches) = "
                f"{of_all} (must be equal)"
            )
        for chain in range(self._num_chains):
            holders = [rank for rank, (_, kept) in enumerate(ranks) if chain in kept]
            if len(holders) > 1:
                raise ValueError(
                    f"Invalid process_group: its ranks {holders} all follow chain "
                    f"{chain} (must be one for each chain)"
                )
        result = RunningConvergence(
            *(self._num_chains, self._shape),
            batches=self._batches,
            device=self._means.device,
        )
        for chain, (draws, length, means, squares) in (
            item for _, kept in ranks for item in kept.items()
        ):
            result._draws[chain], result._lengths[chain] = draws, length
            result._means[chain], result._squares[chain] = means, squares
        return result

    def report(self) -> Convergence:
        """R̂ and effective draws for the mean, up to now, on the CPU.

        Raises:
            ValueError: a chain has less than 4 draws, or so few that they fill no two
                batches of the length of the longest chain's; or two chains are
                identical.
        """
        means, squares, length = self._common()
        rhat, constant = split_rhat(means, squares, length)
        ess, at_most = effective_draws(means, squares, length)
        return Convergence(
            rhat=rhat.cpu(),
            ess={"mean": ess.cpu()},
            constant=constant.cpu(),
            at_most=at_most.cpu(),
            num_chains=self._num_chains,
            num_draws=means.shape[1] * length,
            title="Running draws",
        )

    def chain_ess(self) -> Tensor:
        """Effective draws for each chain's own mean, ``[num_chains, *shape]``.

        What a chain that never saw the other modes believes of itself: NaN where it
        stands still.

        Raises:
            ValueError: as for :meth:`report`.
        """
        means, squares, length = self._common()
        each = [
            effective_draws(means[i : i + 1], squares[i : i + 1], length)[0]
            for i in range(self._num_chains)
        ]
        return torch.stack(each)

    def _common(self) -> tuple[Tensor, Tensor, int]:
        """An even number of full batches of one length, of all chains."""
        length, least = max(self._lengths), min(self._draws)
        count = least // (2 * length) * 2
        if count * length < 4:
            raise ValueError(
                f"Too few draws: {self._draws} of the chains (must be at least "
                f"{max(4, 2 * length)} of each: batches are of {length} draws)"
            )
        pairs = []
        for i in range(self._num_chains):
            means, squares = self._means[i], self._squares[i]
            own = self._lengths[i]
            while own < length:
                means, squares = _merged(means, squares, own)
                own *= 2
            pairs.append((means[:count], squares[:count]))
        batches = torch.stack([means for means, _ in pairs])
        check_different("values", batches)
        return (
            batches,
            torch.stack([squares for _, squares in pairs]),
            length,
        )

    def state_dict(self) -> dict[str, Any]:
        """All that it keeps; tensors are shared, not copied."""
        return {
            "means": self._means,
            "squares": self._squares,
            "draws": list(self._draws),
            "lengths": list(self._lengths),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where another one was, with the same numbers to the bit.

        Raises:
            ValueError, TypeError: it is not one of as many chains, of this shape and
                with as many batches. Nothing has changed then.
        """
        keys = {"means", "squares", "draws", "lengths"}
        if set(state_dict) != keys:
            raise ValueError(
                f"Invalid state_dict: it has keys {sorted(state_dict)}, expected "
                f"{sorted(keys)}"
            )
        for name in ("means", "squares"):
            check_tensor(name, state_dict[name], self._means.shape, torch.float64)
        for name, low in (("draws", 0), ("lengths", 1)):
            if len(state_dict[name]) != self._num_chains:
                raise ValueError(
                    f"Invalid state_dict: {name} of {len(state_dict[name])} chains, "
                    f"expected {self._num_chains}"
                )
            for value in state_dict[name]:
                check_integer(name, value, low=low)
        draws, lengths = state_dict["draws"], state_dict["lengths"]
        for count, length in zip(draws, lengths, strict=True):
            if length & (length - 1) or count > length * self._batches:
                raise ValueError(
                    f"Invalid state_dict: {count} draws in batches of {length} (must "
                    f"fit in {self._batches}, of a power of two)"
                )
        device = self._means.device
        self._means = state_dict["means"].to(device, copy=True)
        self._squares = state_dict["squares"].to(device, copy=True)
        self._draws, self._lengths = list(draws), list(lengths)


def _merged(means: Tensor, squares: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Pairs of batches of a length as one, the means' distance entering squares.

    A pair of which the second has no draws comes out wrong, and is never used.
    """
    even = len(means) // 2 * 2
    first, second = means[:even:2], means[1:even:2]
    distance = second - first
    return (
        first + distance / 2,
        squares[:even:2] + squares[1:even:2] + distance.square() * (length / 2),
    )
