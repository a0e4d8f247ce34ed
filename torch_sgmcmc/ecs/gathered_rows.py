"""Rows of data at indices that change little from one time to the next."""

from __future__ import annotations

from torch import Tensor

__all__ = ["GatheredRows"]

# Below this part of changed rows the others are copied from what is at hand.
_FEW = 0.25


class GatheredRows:
    """The rows ``tensor[indices]``, of which only changed ones are looked up anew.

    For the closures of :class:`HMCECS`. One step changes 1 / ``num_blocks`` of its
    subsample, and rows that are scattered over the memory of a large data set take
    longer to fetch than to compute with.

    Args:
        tensors: the data, one or more tensors of equal length, on one device. They
            must not change.

    Raises:
        ValueError: no tensors, or of different lengths.

    Example:
        >>> rows = GatheredRows(x, y)
        >>> def closure(indices):
        ...     xs, ys = rows(indices)
        ...     return -F.binary_cross_entropy_with_logits(
        ...         xs @ theta, ys, reduction="none")
    """

    def __init__(self, *tensors: Tensor) -> None:
        lengths = [t.shape[0] if t.dim() > 0 else 0 for t in tensors]
        if not tensors or len(set(lengths)) > 1 or any(t.dim() == 0 for t in tensors):
            raise ValueError(
                f"Invalid tensors: shapes {[list(t.shape) for t in tensors]} (must be "
                "one or more, of equal length)"
            )
        self.tensors = tensors
        self._indices: Tensor | None = None
        self._version = 0
        self._copy: Tensor | None = None
        self._rows: tuple[Tensor, ...] = ()

    def __call__(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The rows of each tensor.

        Args:
            indices: int64 [M], in [0, length of the tensors).

        Returns:
            A tensor [M, ...] for each of the data. Not to be changed in place: they are
            returned again where indices are the same.
        """
        if indices is self._indices and indices._version == self._version:
            return self._rows
        self._rows = self._gather(indices)
        self._indices, self._version = indices, indices._version
        self._copy = indices.clone()  # what was asked for, whatever becomes of it
        return self._rows

    def _gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        if self._copy is not None and self._copy.shape == indices.shape:
            changed = (indices != self._copy).nonzero().flatten()
            if changed.shape[0] <= _FEW * indices.shape[0]:
                fresh = indices[changed]
                return tuple(
                    row.index_copy(0, changed, t.index_select(0, fresh))
                    for row, t in zip(self._rows, self.tensors, strict=True)
                )
        return tuple(t.index_select(0, indices) for t in self.tensors)
