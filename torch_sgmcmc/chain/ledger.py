"""What is a sampler's own in its param groups, and not the user's.

Note [What groups hold of the sampler]
Bookkeeping is shown in the param groups, and so goes through state_dict, pickle and
deepcopy. But groups are written to by others: options that were saved are put back,
dicts are replaced, counters with them. What is the sampler's is kept here, too, and put
back before it is used.
"""

from __future__ import annotations

from typing import Any

from torch_sgmcmc.chain.numbering import OFFSETS, SIZES

__all__ = ["COUNTERS", "OF_GROUP", "Ledger"]

#: Counters that are equal in all groups, on the device if ``capturable``.
COUNTERS = ("step", "num_skipped")
#: What a group has of its own.
OF_GROUP = (OFFSETS, SIZES)


class Ledger:
    """Each group with what is the sampler's in it.

    Args:
        keys: of what is the sampler's.
        records: more of these, of each group by itself.
    """

    def __init__(self, keys: tuple[str, ...], records: tuple[str, ...] = ()) -> None:
        self._keys, self._records = (*keys, *records), records
        self.entries: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def note(self, groups: list[dict[str, Any]]) -> None:
        """Keeps it as it is now."""
        self.entries = [(g, {key: g[key] for key in self._keys}) for g in groups]

    def note_record(self, group: dict[str, Any], key: str) -> None:
        """Keeps a record of one group as it is now."""
        for known, own in self.entries:
            if known is group:
                own[key] = group[key]

    def note_steps(self) -> None:
        """As :meth:`note`, where only counters can have changed."""
        for group, own in self.entries:
            if isinstance(group["step"], int):
                own["step"], own["num_skipped"] = group["step"], group["num_skipped"]

    def put_back(self, groups: list[dict[str, Any]]) -> None:
        """Puts it back where users have written over it."""
        entries = self.entries
        if len(groups) == len(entries):
            for group, (known, values) in zip(groups, entries, strict=True):
                if group is not known:
                    break
                group.update(values)
            else:
                return
        kept = {id(group): values for group, values in entries}
        # Of a dict that is new, what all groups have alike.
        each = (*OF_GROUP, *self._records)
        alike = {k: v for k, v in entries[0][1].items() if k not in each}
        self.entries = [(g, kept.get(id(g)) or dict(alike)) for g in groups]
        for group, values in self.entries:
            group.update(values)
