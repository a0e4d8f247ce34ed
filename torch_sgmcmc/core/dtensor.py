"""Parameters of which this process has a part: DTensors.

Note [Shards]
A shard has its element indices in the whole parameter, and so draws its part of the
same noise: each element's update is bitwise identical, however parameters are sharded.
Operators take local tensors and their element indices, row by row in any memory format.
A shard along the first dimension has all indices from an offset on; along another
dimension it consists of rows at a fixed distance; shards along several dimensions are
cut into several pieces. Only sums and decisions over all elements communicate, in one
order on all ranks.

A parameter, its gradient and its state are DTensors of the same placements. Only this
module takes them apart; a sampler calls its :class:`Replicated` or :class:`Sharded`
placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from torch_sgmcmc.core.context import Replicated, has_master, local
from torch_sgmcmc.core.ops import count_nonfinite

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Returns whether a tensor is a DTensor, without importing DTensor."""
    return hasattr(type(tensor), "placements")


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns this process's part of each tensor."""
    return [*map(local, tensors)]


def refuse(what: str, tensors: Iterable[Tensor]) -> None:
    """Raises if there are DTensors among the tensors."""
    if any(map(is_dtensor, tensors)):
        raise ValueError(
            f"Invalid {what}: some are DTensors, which only steps and checkpoints of "
            "samplers take (keep whole parameters on every rank, as "
            "DistributedDataParallel does)"
        )


class Piece(NamedTuple):
    """A part of a shard that an operator takes, see the argument ``rows``."""

    begin: int  # index of its first element, relative to the parameter's
    row: int
    pitch: int
    part: tuple[slice, ...] | None  # in the shard; None: all of it


_WHOLE = Piece(0, 0, 0, None)  # a plain tensor


class Layout(NamedTuple):
    """The local shard of one parameter."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def layout_of(tensor: Any) -> Layout:
    """Returns the places of the elements of a DTensor's local tensor."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # a rank outside of the mesh
        return Layout((0,), ())
    shape = tuple(tensor.shape)
    indices = [
        _indices(mesh, coordinate, tensor.placements, d, n) for d, n in enumerate(shape)
    ]
    pieces: list[Piece] = []
    for box in product(*map(_runs, indices)):
        pieces += _pieces(box, shape)
    if len(pieces) == 1:
        pieces[0] = pieces[0]._replace(part=None)
    return Layout(tuple(map(len, indices)), tuple(pieces))


Run = tuple[int, int, int]


def _indices(
    mesh: Any, coordinate: Sequence[int], placements: Any, dim: int, size: int
) -> Tensor:
    indices = torch.arange(size)
    for axis, placement in enumerate(placements):
        if getattr(placement, "dim", None) != dim:
            continue
        # As in DTensor: a rank has a chunk, or with strides a part of each chunk.
        factor = getattr(placement, "split_factor", 1)
        outer = [_chunk(indices, k, factor) for k in range(factor)]
        inner = [_chunk(each, coordinate[axis], mesh.size(axis)) for each in outer]
        indices = torch.cat(inner)
    return indices


def _chunk(indices: Tensor, k: int, count: int) -> Tensor:
    length = -(-len(indices) // count)
    return indices[k * length : (k + 1) * length]


def _runs(indices: Tensor) -> list[Run]:
    """Returns runs of indices: start in the shard, start in the whole, length."""
    values = indices.tolist()
    begins = [i for i, x in enumerate(values) if i == 0 or x != values[i - 1] + 1]
    ends = [*begins[1:], len(values)]
    return [(i, values[i], end - i) for i, end in zip(begins, ends, strict=False)]


def _pieces(box: Sequence[Run], sizes: Sequence[int]) -> Iterator[Piece]:
    """Cuts a box into pieces of equidistant rows."""
    strides = [prod(sizes[d + 1 :]) for d in range(len(sizes))]
    begin = sum(first * s for (_, first, _), s in zip(box, strides, strict=True))
    lengths = [length for _, _, length in box]
    # Dimensions that are cut.
    cut = [d for d, n in enumerate(lengths) if n != sizes[d]]
    inner = cut[-1] if cut else 0
    outer = cut[-2] if len(cut) > 1 else 0
    row = prod(lengths[inner:])
    pitch = prod(sizes[inner:])
    for at in product(*map(range, lengths[:outer])):
        starts = [*(box[d][0] + i for d, i in enumerate(at))]
        index = [slice(i, i + 1) for i in starts]
        index += [slice(i, i + n) for i, _, n in box[outer:]]
        shift = sum(i * s for i, s in zip(at, strides[:outer], strict=True))
        yield Piece(begin + shift, row, pitch, tuple(index))


_MOST_KNOWN = 65536


def _make_room(known: dict[int, Any]) -> None:
    if len(known) >= _MOST_KNOWN:
        known.clear()


def _pieces_of(
    params: Sequence[Tensor],
    layouts: Sequence[Layout | None],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """Returns an operator's tensors for the local parts of the parameters."""
    if len(tensors) < len(params):  # masters, or none
        pairs = zip(params, layouts, strict=True)
        layouts = [layout for p, layout in pairs if has_master(p)] * bool(tensors)
    return [
        piece
        for tensor, layout in zip(tensors, layouts, strict=True)
        for piece in (
            _cut(local(tensor), layout)
            if layout is None or is_dtensor(tensor)
            else [tensor] * len(layout.pieces)  # numbers of chains
        )
    ]


def _cut(tensor: Tensor, layout: Layout | None) -> Iterator[Tensor]:
    """Yields the pieces of a local tensor."""
    for piece in (_WHOLE,) if layout is None else layout.pieces:
        yield tensor if piece.part is None else tensor[piece.part]


def check_shard(cannot: str, p: Any) -> Tensor:
    """Raises unless a DTensor can be sampled; returns its local tensor."""
    if any(placement.is_partial() for placement in p.placements):
        raise ValueError(
            f"{cannot} a DTensor with placements {p.placements} (must be Shard and "
            "Replicate: redistribute it)"
        )
    for entry in _cuts(p._spec) or ():
        if [*entry.mesh_dims] != sorted(entry.mesh_dims):
            raise ValueError(
                f"{cannot} a DTensor whose dimension {entry.tensor_dim} is cut along "
                f"dimensions {[*entry.mesh_dims]} of the mesh, in this order (must be "
                "ascending: redistribute it)"
            )
    tensor = local(p)
    expected = layout_of(p).shape
    if tuple(tensor.shape) != expected and prod(expected) + tensor.numel() > 0:
        raise ValueError(
            f"{cannot} a DTensor of shape {list(p.shape)} and placements "
            f"{p.placements} whose local tensor has shape {list(tensor.shape)} (must "
            f"be {list(expected)})"
        )
    return tensor


def _cuts(spec: Any) -> Any:
    """Returns the order of a dimension's cuts, if a strided shard has one."""
    return getattr(spec, "shard_order", None)


def same_shards(p: Any, tensor: Any) -> bool:
    """Returns whether two tensors are both whole, or sharded alike."""
    ours, theirs = getattr(p, "_spec", None), getattr(tensor, "_spec", None)
    if ours is None or theirs is None:
        return ours is theirs
    ours_in, theirs_in = _cuts(ours), _cuts(theirs)
    in_order = ours_in is None or theirs_in is None or ours_in == theirs_in
    return (ours.placements == theirs.placements and in_order) and (
        # Usually the same object; == takes longer.
        ours.mesh is theirs.mesh or ours.mesh == theirs.mesh
    )


def like(p: Any, tensor: Tensor, what: str) -> Tensor:
    """Returns a tensor of the parameter's shape, sharded as the parameter is.

    A whole tensor must be the same on all ranks; nothing is communicated. Raises a
    ValueError for a tensor that is sharded in another way.
    """
    if same_shards(p, tensor):
        return tensor
    if is_dtensor(tensor):
        raise ValueError(
            f"Invalid {what} is {_describe(tensor)}, for {_describe(p)} (must be cut "
            "alike, or whole: full_tensor())"
        )
    from torch.distributed.tensor import DTensor

    # Not distribute_tensor(), which on a GPU synchronises torch's generators.
    mesh, placements = p.device_mesh, p.placements
    coordinate, part = mesh.get_coordinate(), tensor.to(p.device)
    for dim, size in enumerate(p.shape if coordinate else ()):
        indices = _indices(mesh, coordinate, placements, dim, size)
        part = part.index_select(dim, indices.to(p.device))
    if not coordinate:  # a rank outside of the mesh
        part = part.new_empty(0)
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def _describe(tensor: Any) -> str:
    if not is_dtensor(tensor):
        return "a plain tensor"
    return f"a DTensor with placements {tensor.placements}"


def groups_of(tensor: Any) -> tuple[Any, ...]:
    """Returns the process groups over which a tensor is sharded."""
    if not is_dtensor(tensor) or tensor.device_mesh.get_coordinate() is None:
        return ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )


def _all_groups(params: Iterable[Tensor]) -> list[Any]:
    return list(dict.fromkeys(group for p in params for group in groups_of(p)))


def is_finite(tensor: Tensor) -> bool:
    """Returns whether all elements on all ranks are finite."""
    return max_over_ranks([tensor], float(not local(tensor).isfinite().all())) == 0


def max_over_ranks(params: Sequence[Tensor], value: float) -> float:
    """Returns the largest of the ranks' numbers."""
    groups = _all_groups(params)
    if not groups:
        return value
    result = torch.tensor([value], dtype=torch.float64, device=params[0].device)
    for group in groups:
        dist.all_reduce(result, dist.ReduceOp.MAX, group=group)
    return float(result)


def sum_over_ranks(groups: Iterable[Any], value: Tensor) -> Tensor:
    """Returns the sum of the ranks' tensors, in the order of the ranks."""
    for group in groups:
        rows = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, value, group=group)
        value = rows[0]
        for row in rows[1:]:
            value = value + row
    return value


class Sharded(Replicated):
    """Placement of parameters of which some are DTensors.

    Layouts are computed once, and cached by the specs that DTensors share with derived
    tensors. No tensor is kept, so parameters, gradients and their memory may be
    replaced at any time. Keeping a spec prevents another one with its id.
    """

    is_sharded = True

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Layout]] = {}
        self._alike: dict[int, tuple[Any, Any]] = {}

    def layout(self, tensor: Tensor) -> Layout | None:
        """Returns the layout of a DTensor, None for other tensors."""
        spec = getattr(tensor, "_spec", None)
        if spec is None:
            return None
        known = self._known.get(id(spec))
        if known is None:
            _make_room(self._known)
            known = self._known[id(spec)] = (spec, layout_of(tensor))
        return known[1]

    def check_gradient(self, name: str, p: Any, grad: Any) -> None:
        ours, theirs = getattr(p, "_spec", None), getattr(grad, "_spec", None)
        if ours is theirs:
            return
        known = self._alike.get(id(ours))
        if known is not None and known[1] is theirs:
            return
        if not same_shards(p, grad):
            raise RuntimeError(
                f"{name} got {_describe(grad)} as the gradient of {_describe(p)} of "
                f"shape {list(p.shape)} (must be cut alike: see DTensor.redistribute)"
            )
        _make_room(self._alike)
        self._alike[id(ours)] = (ours, theirs)

    def updating(self, operator: Callable[..., None]) -> Callable[..., None]:
        def call(
            params: list[Tensor],
            *lists: list[Tensor],
            offsets: list[int],
            prior_means: list[Tensor] | None = None,
            **arguments: Any,
        ) -> None:
            all_lists = [params, *lists, prior_means or []]
            *cut, means, places, rows = self.local_parts(params, all_lists, offsets)
            if not places:
                return
            if prior_means is not None:
                arguments["prior_means"] = means
            operator(*cut, offsets=places, rows=rows or None, **arguments)

        return call

    def without_noise(self, operator: Callable[..., None]) -> Callable[..., None]:
        def call(
            *lists: list[Tensor],
            prior_means: list[Tensor] | None = None,
            **arguments: Any,
        ) -> None:
            if prior_means is not None:
                arguments["prior_means"] = locals_of(prior_means)
            operator(*map(locals_of, lists), **arguments)

        return call

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        return locals_of(tensors)

    def sums(
        self,
        operator: Callable[..., Tensor],
        params: list[Tensor],
        *lists: list[Tensor],
        prior_means: list[Tensor] | None = None,
        **arguments: Any,
    ) -> list[Tensor]:
        # Replicas and whole tensors are counted once.
        by_groups: dict[tuple[Any, ...], list[int]] = {}
        for i, p in enumerate(params):
            by_groups.setdefault(groups_of(p), []).append(i)
        found = []
        for groups, indices in by_groups.items():

            def part(tensors: Any, indices: list[int] = indices) -> Any:
                return tensors and locals_of(tensors[i] for i in indices)

            if prior_means is not None:
                arguments["prior_means"] = part(prior_means)
            value = operator(*map(part, (params, *lists)), **arguments)
            found.append(sum_over_ranks(groups, value))
        return found

    def count_nonfinite(self, params: list[Tensor], tensors: list[Tensor]) -> Tensor:
        counts = count_nonfinite(locals_of(tensors))
        for group in _all_groups(params):
            for i, p in enumerate(params):
                # Replicated parameters count on one rank only.
                if group not in groups_of(p) and dist.get_rank(group) > 0:
                    counts[i].zero_()
            dist.all_reduce(counts, group=group)
        return counts

    def local_parts(
        self, params: list[Tensor], lists: list[list[Tensor]], offsets: list[int]
    ) -> list[Any]:
        layouts = [self.layout(p) for p in params]
        places: list[int] = []
        rows: list[int] = []
        for offset, layout in zip(offsets, layouts, strict=True):
            for piece in (_WHOLE,) if layout is None else layout.pieces:
                places.append(offset + piece.begin)
                rows += (piece.row, piece.pitch)
        cut = [_pieces_of(params, layouts, each) for each in lists]
        # Consecutive elements need no rows, which cost an operator time.
        pairs = zip(rows[::2], cut[0], strict=True)
        if all(row in (0, p.numel()) for row, p in pairs):
            rows = []
        return [*cut, places, rows]

    def local_gradients(
        self, params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        return _pieces_of(params, [self.layout(p) for p in params], grads)

    def largest(self, params: list[Tensor], value: float) -> float:
        return max_over_ranks(params, value)

    def mark_changed(self, params: list[Tensor]) -> None:
        increment_version([*params, *locals_of(params)])

    def refuse(self, message: str) -> None:
        raise ValueError(message)
