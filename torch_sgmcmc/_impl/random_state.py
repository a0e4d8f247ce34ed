"""Seed, counters and noise offsets of a sampler, which one object owns.

Note [Numbers of elements]
Noise is a function of (seed, step, purpose, element). Each parameter has a range of
elements of its own: ``offsets`` are where the ranges begin, ``sizes`` how long they
are, and ``next_offset`` is the first element that was never used. A parameter that
grows would reach into its neighbour's range, and two independent coordinates would
share their noise. So a step compares sizes, and
:meth:`Sampler.reassign_noise_offsets` gives what has changed a range behind all others.

Note [What groups show]
``torch.distributed.checkpoint`` keeps only the keys of live param groups, so groups
show what is owned here: the very same tensors and lists, which are changed in place.
Nothing is read back from a group. A group that holds another object raises at the next
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc._impl.hyperparams import check_integer

__all__ = [
    "COUNTERS",
    "FORMAT",
    "NEXT",
    "OFFSETS",
    "OF_GROUP",
    "SIZES",
    "RandomState",
    "check_numbers",
]

#: Keys of a group: where each of its parameters begins, how many elements it has, and,
#: equal in all groups, the first one that was never used.
OFFSETS, SIZES, NEXT = "offsets", "sizes", "next_offset"
#: Counters that are equal in all groups, on the device if ``capturable``.
COUNTERS = ("step", "num_skipped")
#: What each group has for itself.
OF_GROUP = (OFFSETS, SIZES)

#: The format of state dicts. Another number is refused.
FORMAT = 1

_MOST = 2**62  # C++ has 64 bits to add to it


class RandomState:
    """The state that a sampler's noise is a function of, and its counters.

    Args:
        sampler: the saved name of the sampler's class.
        progress: what the sampler counts besides steps, and its first values.
        records: keys of what each group records of settings; lists, empty at first.
    """

    def __init__(
        self, sampler: str, progress: Mapping[str, Any], records: tuple[str, ...]
    ) -> None:
        self._sampler = sampler
        self._records = records
        self.seed = 0
        self.next_offset = 0
        #: Numbers of updates made and left out: 0-dim int64 tensors.
        self.step, self.num_skipped = _counter(0), _counter(0)
        self.progress = dict(progress)
        #: Of each group: offsets, sizes and records.
        self.of_groups: list[dict[str, Any]] = []

    @classmethod
    def of(
        cls,
        groups: Sequence[Mapping[str, Any]],
        progress: Mapping[str, Any],
        records: tuple[str, ...],
    ) -> RandomState:
        """Returns what copied or unpickled groups show."""
        self = cls(groups[0]["sampler"], progress, records)
        self.load(groups)
        self.step, self.num_skipped = (groups[0][key] for key in COUNTERS)
        return self

    @property
    def steps(self) -> int:
        """The number of updates made, for which the host may have to wait."""
        return int(self.step)

    def owned(self, index: int) -> dict[str, Any]:
        """Returns what a group shows, but for the progress."""
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
        """Puts everything into the groups."""
        for i, group in enumerate(groups):
            group.update({**self.owned(i), **self.progress})

    def check(self, name: str, groups: Sequence[dict[str, Any]]) -> None:
        """Raises if a group holds anything else.

        Raises:
            RuntimeError: something was replaced, or groups were added by hand.
        """
        known = {id(own[OFFSETS]): own for own in self.of_groups}
        in_order = [known.get(id(group.get(OFFSETS))) for group in groups]
        if all(in_order):  # groups may have been put in another order, or taken out
            self.of_groups = in_order
        elif len(groups) != len(known):
            raise RuntimeError(
                f"{name} has {len(groups)} param groups (must be the {len(known)} "
                "that it was given: use add_param_group)"
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

    # ---- Counting ----------------------------------------------------------------

    def count(self, steps: int = 1) -> None:
        """Counts updates that were made, or takes them back."""
        self.step.add_(steps)

    def skip(self) -> None:
        """Counts a step that was left out."""
        self.num_skipped.add_(1)

    def set_progress(self, groups: Sequence[dict[str, Any]], **values: Any) -> None:
        """Sets what is counted besides steps."""
        self.progress.update(values)
        for group in groups:
            group.update(values)

    def put_on(self, device: torch.device) -> None:
        """Moves the counters to a device, if they are not there."""
        for key in COUNTERS:
            counter = getattr(self, key)
            if counter.device != device:
                setattr(self, key, counter.to(device))

    # ---- State dicts -------------------------------------------------------------

    def load(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes the values of groups, into the tensors that there are."""
        first = groups[0]
        self.seed, self.next_offset = int(first["seed"]), int(first[NEXT])
        for key in COUNTERS:
            getattr(self, key).fill_(int(first[key]))
        self.progress = {key: first[key] for key in self.progress}
        self.of_groups = [
            {key: list(group[key] or ()) for key in (*OF_GROUP, *self._records)}
            for group in groups
        ]

    def snapshot(self) -> dict[str, Any]:
        """Returns what :meth:`restore` puts back."""
        return {
            **vars(self),
            **{key: int(getattr(self, key)) for key in COUNTERS},
            "tensors": {key: getattr(self, key) for key in COUNTERS},
            "progress": dict(self.progress),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Puts back what there was, in the same tensors."""
        saved = dict(snapshot)
        for key, tensor in saved.pop("tensors").items():
            saved[key] = tensor.fill_(saved[key])
        vars(self).update(saved)

    # ---- Numbers of elements -----------------------------------------------------

    def add_group(self, sizes: list[int]) -> None:
        """Numbers the parameters of a further group."""
        own: dict[str, Any] = {key: [] for key in self._records}
        self.of_groups.append({**own, OFFSETS: self._number(sizes), SIZES: sizes})

    def reassign_noise_offsets(self, sizes: Sequence[list[int]]) -> bool:
        """Gives what has changed its size new elements; returns if anything has."""
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
            self.next_offset = _end(self.next_offset, size)
        return offsets


def _counter(value: int) -> Tensor:
    with torch.inference_mode(False):  # else it could not be changed outside
        return torch.tensor(value, dtype=torch.int64, device="cpu")


def _end(offset: int, size: int) -> int:
    """Returns the first multiple of the noise block at or after offset + size."""
    block = _C.NOISE_BLOCK
    return (offset + size + block - 1) // block * block


def check_numbers(
    saved_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    numel: Callable[[Tensor], int],
) -> None:
    """Raises if saved ranges are not those of the sampler's groups, or overlap."""
    ranges = []
    for i, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        sizes = [numel(p) for p in group["params"]]
        for key in ("params", SIZES, OFFSETS):
            if len(saved[key]) != len(sizes):
                raise ValueError(
                    f"Invalid state_dict: param group {i} has {len(saved[key])} "
                    f"{key if key == OFFSETS else 'parameters'}, expected {len(sizes)}"
                )
        if list(saved[SIZES]) != sizes:
            raise ValueError(
                f"Invalid state_dict: param group {i} was saved for parameters of "
                f"other sizes ({saved[SIZES]}, expected {sizes})"
            )
        for offset, size in zip(saved[OFFSETS], sizes, strict=True):
            check_integer(OFFSETS, offset, high=_MOST)
            if offset % _C.NOISE_BLOCK:
                raise ValueError(
                    f"Invalid offsets: {offset} in param group {i} (must be a multiple "
                    f"of {_C.NOISE_BLOCK})"
                )
            if size > 0:
                ranges.append((offset, _end(offset, size)))
    end = check_integer(NEXT, saved_groups[0][NEXT], high=_MOST)
    if end % _C.NOISE_BLOCK:
        raise ValueError(
            f"Invalid {NEXT}: {end} (must be a multiple of {_C.NOISE_BLOCK})"
        )
    ranges.sort()
    following = [*(begin for begin, _ in ranges[1:]), end]
    for (begin, last), limit in zip(ranges, following, strict=False):
        if last > limit:
            raise ValueError(
                f"Invalid offsets: elements [{begin}, {last}) reach beyond {limit} "
                f"(each parameter needs its own, before {NEXT} = {end})"
            )
