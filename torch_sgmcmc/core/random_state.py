"""Seeds, and the object that owns a sampler's seed, counters and noise offsets.

Note [Numbers of elements]
Noise is a function of (seed, step, purpose, element). Each parameter has its own range
of elements: ``offsets`` are the starts of the ranges, ``sizes`` their lengths, and
``next_offset`` is the first element that was never used. A parameter that grows would
reach into its neighbour's range, and two independent coordinates would share their
noise. So a step compares sizes, and :meth:`Sampler.reassign_noise_offsets` gives a
changed parameter a range behind all others.

Note [Values in groups]
``torch.distributed.checkpoint`` keeps only the keys of live param groups, so groups
show the values that this object owns: the same tensors and lists, changed in place.
Nothing is read back from a group. A group that holds another object raises at the next
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.hyperparams import (
    ESTIMATE_SETTINGS,
    MOMENTUM_SETTINGS,
    check_integer,
    draw_seed,
)
from torch_sgmcmc.core.utils import Interrupts

#: Keys of a group: the start and the size of each of its parameters, and, equal in all
#: groups, the first unused element.
OFFSETS, SIZES, NEXT = "offsets", "sizes", "next_offset"
#: The key of the step counter in a parameter's state, one tensor for all.
STEP = "step"
#: Counters that are equal in all groups, on the device if ``capturable``.
COUNTERS = ("step", "num_skipped")
#: Keys whose values differ between groups.
OF_GROUP = (OFFSETS, SIZES)

#: The format of state dicts. Another number is refused.
FORMAT = 1

_MOST = 2**62  # C++ adds to it in 64 bits


class RandomState:
    """The state that determines a sampler's noise, and its counters.

    Args:
        sampler: the saved name of the sampler's class.
        progress: further counters of the sampler, with their first values.
        records: keys of each group's records of settings; lists, empty at first.
    """

    def __init__(
        self, sampler: str, progress: Mapping[str, Any], records: tuple[str, ...]
    ) -> None:
        self._sampler = sampler
        self._records = records
        self.seed = 0
        self.next_offset = 0
        #: Numbers of made and of skipped updates: 0-dim int64 tensors.
        self.step, self.num_skipped = _counter(), _counter()
        self.progress = dict(progress)
        #: Offsets, sizes and records of each group.
        self.of_groups: list[dict[str, Any]] = []

    @classmethod
    def of(
        cls,
        groups: Sequence[Mapping[str, Any]],
        progress: Mapping[str, Any],
        records: tuple[str, ...],
    ) -> RandomState:
        """Returns the random state that copied or unpickled groups show."""
        self = cls(groups[0]["sampler"], progress, records)
        self.load(groups)
        self.step, self.num_skipped = (groups[0][key] for key in COUNTERS)
        return self

    @property
    def steps(self) -> int:
        """The number of updates; the host may have to wait for it."""
        return int(self.step)

    def owned(self, index: int) -> dict[str, Any]:
        """Returns the values that a group shows, except progress."""
        return {
            "sampler": self._sampler,
            "format": FORMAT,
            "seed": self.seed,
            "step": self.step,
            "num_skipped": self.num_skipped,
            NEXT: self.next_offset,
            **self.of_groups[index],
        }

    def show(self, groups: Sequence[dict[str, Any]]) -> None:
        """Shows all values in the groups."""
        for i, group in enumerate(groups):
            group.update({**self.owned(i), **self.progress})

    def overlaps(self, other: RandomState) -> bool:
        """Returns whether noise of one seed would be shared."""
        ranges = sorted(r for rng in (self, other) for r in rng._ranges())
        return any(end > begin for (_, end), (begin, _) in pairwise(ranges))

    def _ranges(self) -> Iterator[tuple[int, int]]:
        for own in self.of_groups:
            for begin, size in zip(own[OFFSETS], own[SIZES], strict=True):
                if size:
                    yield begin, begin + size

    def reorder(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Takes over the order of groups; returns False if one is not known."""
        known = {id(own[OFFSETS]): own for own in self.of_groups}
        found = (known.get(id(group.get(OFFSETS))) for group in groups)
        in_order = [own for own in found if own is not None]
        if len(in_order) < len(groups):
            return False
        self.of_groups = in_order  # some may have been removed
        return True

    def check(self, name: str, groups: Sequence[dict[str, Any]]) -> None:
        """Raises if a group holds other objects."""
        count = len(self.of_groups)
        if not self.reorder(groups) and len(groups) != count:
            raise RuntimeError(
                f"{name} has {len(groups)} param groups (must be the {count} that it "
                "was given: use add_param_group)"
            )
        for i, group in enumerate(groups):
            for key, value in {**self.owned(i), **self.progress}.items():
                shown = group.get(key)
                if shown is value:
                    continue
                is_object = isinstance(value, (Tensor, list))
                if not is_object and type(shown) is type(value) and shown == value:
                    group[key] = value
                    continue
                raise RuntimeError(
                    f"Invalid param group {i}: {key!r} was replaced ({name} owns "
                    "its seed, counters and noise offsets). Set hyperparameters "
                    "alone, and restore a chain by load_state_dict"
                )

    def count(self, steps: int = 1) -> None:
        """Counts updates; a negative number takes them back."""
        self.step.add_(steps)

    def skip(self) -> None:
        """Counts a skipped step."""
        self.num_skipped.add_(1)

    def set_progress(self, groups: Sequence[dict[str, Any]], **values: Any) -> None:
        """Sets further counters."""
        with Interrupts():
            self.progress.update(values)
            for group in groups:
                group.update(values)

    def put_on(self, device: torch.device) -> None:
        """Moves the counters to a device."""
        for key in COUNTERS:
            counter = getattr(self, key)
            if counter.device != device:
                setattr(self, key, counter.to(device))

    def load(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Loads the values of groups into the existing tensors."""
        first = groups[0]
        self.seed, self.next_offset = int(first["seed"]), int(first[NEXT])
        for key in COUNTERS:
            getattr(self, key).fill_(int(first[key]))
        self.progress = {key: first[key] for key in self.progress}
        self.of_groups = [
            {key: list(group[key] or ()) for key in OF_GROUP}
            # Zeros are of a chain at its start.
            | {k: list(group[k]) if any(group[k] or ()) else [] for k in self._records}
            for group in groups
        ]

    def snapshot(self) -> dict[str, Any]:
        """Returns a snapshot for :meth:`restore`."""
        return {
            **vars(self),
            **{key: int(getattr(self, key)) for key in COUNTERS},
            "tensors": {key: getattr(self, key) for key in COUNTERS},
            "progress": dict(self.progress),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restores a snapshot into the same tensors."""
        saved = dict(snapshot)
        for key, tensor in saved.pop("tensors").items():
            saved[key] = tensor.fill_(saved[key])
        vars(self).update(saved)

    def add_group(self, sizes: list[int]) -> None:
        """Assigns offsets to the parameters of a new group."""
        own: dict[str, Any] = {key: [] for key in self._records}
        self.of_groups.append({**own, OFFSETS: self._number(sizes), SIZES: sizes})

    def reassign_noise_offsets(self, sizes: Sequence[list[int]]) -> bool:
        """Gives resized parameters new elements; returns True if any was resized."""
        changed = False
        for own, new in zip(self.of_groups, sizes, strict=True):
            old = own[SIZES]
            if new == old:
                continue
            changed = True
            if len(new) != len(old):
                own[OFFSETS][:] = self._number(new)
            else:
                for i, (now, before) in enumerate(zip(new, old, strict=True)):
                    if now != before:
                        [own[OFFSETS][i]] = self._number([now])
            own[SIZES][:] = new
        return changed

    def _number(self, sizes: Sequence[int]) -> list[int]:
        offsets = []
        for size in sizes:
            offsets.append(self.next_offset)
            self.next_offset = _C.next_offset(self.next_offset, size)
        return offsets


def _counter() -> Tensor:
    with torch.inference_mode(False):  # else updates outside would fail
        return torch.tensor(0, dtype=torch.int64, device="cpu")


def check_numbers(
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    numel: Callable[[Tensor], int],
) -> None:
    """Raises if saved ranges do not fit the sampler's groups, or overlap."""
    offsets, all_sizes = [], []
    for i, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        sizes = [numel(p) for p in group["params"]]
        for key in ("params", SIZES):
            if len(saved[key]) != len(sizes):
                raise ValueError(
                    f"Invalid state_dict: param group {i} has {len(saved[key])} "
                    f"parameters, expected {len(sizes)}"
                )
        if list(saved[SIZES]) != sizes:
            raise ValueError(
                f"Invalid state_dict: param group {i} was saved for parameters of "
                f"other sizes ({saved[SIZES]}, expected {sizes})"
            )
        offsets.append(
            [check_integer(OFFSETS, each, high=_MOST) for each in saved[OFFSETS]]
        )
        all_sizes.append(sizes)
    end = check_integer(NEXT, saved_groups[0][NEXT], high=_MOST)
    _C.check_ranges(offsets, all_sizes, end)


class SharedNoiseWarning(UserWarning):
    """Two samplers with one seed make steps alternately: they share their noise.

    Give each its own seed, with :func:`fold_in`.
    """


def fold_in(seed: int, stream: int) -> int:
    """Returns the seed of a stream, one of many seeds derived from one.

    A sampler's noise is a function of (seed, step, purpose, element), and every sampler
    counts elements from 0: two samplers with one seed draw the same noise. Give
    different seeds to chains, and to samplers of parts of a model. Give replicas of one
    chain, as under :class:`~torch.nn.parallel.DistributedDataParallel`, the same seed.

    Args:
        seed: a 64-bit int.
        stream: the number of the stream, a 63-bit int >= 0.

    Returns:
        A 64-bit int: 64 bits of Philox4x32-10, a pure function of the arguments, the
        same in C++. It may be folded again. Like n random seeds, the seeds of n streams
        contain two equal ones with a probability of n² / 2⁶⁵.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is not an int.
    """
    check_integer("seed", seed, low=-(2**63))  # None is not drawn here
    check_integer("stream", stream)
    if stream >= 2**63:
        raise ValueError(f"Invalid stream: {stream} (must fit in 64 bits)")
    return _C.fold_in(draw_seed(seed), stream)


def blank_records(
    group: Mapping[str, Any], records: Iterable[str]
) -> dict[str, list[float] | None]:
    """Returns zeros in place of the records that a chain's first step makes."""
    blank: dict[str, list[float] | None] = dict.fromkeys(records)
    if MOMENTUM_SETTINGS in blank:
        blank[MOMENTUM_SETTINGS] = [0.0] * 3
    estimate = group.get("noise_estimate", 0)
    if ESTIMATE_SETTINGS in blank and estimate and not isinstance(estimate, str):
        blank[ESTIMATE_SETTINGS] = [0.0] * 4
    return blank
