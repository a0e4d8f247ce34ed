"""Which tensors of a model are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from torch_sgmcmc.chain.shards import is_dtensor, refuse
from torch_sgmcmc.chain.wrappers import plain_names

__all__ = ["Chosen"]


class Chosen:
    """Names that are chosen once, and the tensors that have them at a time.

    The arguments are those of :class:`Collector`.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        sampler: Any,
        parameters: str | Iterable[str],
        buffers: bool,
    ) -> None:
        self._model = model
        self._plain: dict[str, str] = {}
        if isinstance(model, nn.Module):
            tensors = (*model.named_parameters(), *model.named_buffers())
            self._plain = plain_names(model, (name for name, _ in tensors))
        named = self._parameters()
        sampled = {
            id(p) for g in sampler.param_groups for p in g["params"] if p.requires_grad
        }
        if parameters == "all":
            self._names = list(named)
        elif parameters == "sampled":
            self._names = [name for name, p in named.items() if id(p) in sampled]
        elif isinstance(parameters, str) or not isinstance(parameters, Iterable):
            raise ValueError(
                f"Invalid parameters: {parameters!r} (must be 'all', 'sampled' or a "
                "list of names)"
            )
        else:
            self._names = self._matching(list(parameters), list(named))
        if not self._names:
            raise ValueError("Invalid parameters: none of the model's is chosen")
        refuse("parameters", (named[name] for name in self._names))
        if not _any_of(sampler, [named[name] for name in self._names]):
            raise ValueError(
                "Invalid parameters: the sampler has none of those that would be "
                "stored, so all draws would be the same (was the model copied after "
                "the sampler was made?)"
            )
        #: What is neither stored nor sampled.
        self.rest = {
            name: tensor
            for name, tensor in named.items()
            if name not in self._names and id(tensor) not in sampled
        }
        self._buffers: list[str] = []
        if buffers and isinstance(model, nn.Module):
            saved = model.state_dict()
            held = [name for name, _ in model.named_buffers() if name in saved]
            self._buffers = [self._plain[name] for name in held]

    @staticmethod
    def _matching(patterns: list[str], names: list[str]) -> list[str]:
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"Invalid parameters: no parameter is named {pattern!r} (there are "
                    f"{names})"
                )
        return [n for n in names if any(fnmatchcase(n, p) for p in patterns)]

    def _parameters(self) -> dict[str, Tensor]:
        if isinstance(self._model, nn.Module):
            return self._by_plain_name(self._model.named_parameters())
        return dict(self._model)

    def _by_plain_name(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {self._plain.get(name, name): tensor for name, tensor in named}

    def now(self) -> dict[str, Tensor]:
        """The tensors by name, those of the model itself."""
        named = self._parameters()
        gone = next((name for name in self._names if name not in named), None)
        if gone is not None:
            raise RuntimeError(
                f"the model has no parameter {gone!r} any more (weight_norm and the "
                "like rename parameters: make the collector after them)"
            )
        tensors = {name: named[name].detach() for name in self._names}
        if self._buffers:
            assert isinstance(self._model, nn.Module)
            held = self._by_plain_name(self._model.named_buffers())
            tensors |= {name: held[name] for name in self._buffers}
        return tensors


def _any_of(sampler: Any, tensors: list[Tensor]) -> bool:
    """Whether a sampler has one of the tensors, or what shares its memory."""
    sampled = [p for group in sampler.param_groups for p in group["params"]]
    if not {*map(id, sampled)}.isdisjoint(map(id, tensors)):
        return True
    memory = {p.untyped_storage().data_ptr() for p in sampled if not is_dtensor(p)}
    return any(t.untyped_storage().data_ptr() in memory for t in tensors)
