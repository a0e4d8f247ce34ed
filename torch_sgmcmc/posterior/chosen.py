"""Which tensors of a model are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_sgmcmc.chain.shards import is_dtensor, refuse
from torch_sgmcmc.chain.wrappers import plain_names

__all__ = ["Chosen"]


def tensors_of(
    model: nn.Module | Mapping[str, Tensor],
) -> Iterable[tuple[str, Tensor]]:
    """Returns parameters and buffers by name."""
    if not isinstance(model, nn.Module):
        return model.items()
    return *model.named_parameters(), *model.named_buffers()


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
            self._plain = plain_names(model, (name for name, _ in tensors_of(model)))
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
        for name, tensor in tensors_of(model):
            if is_lazy(tensor):
                raise ValueError(
                    f"Invalid model: {name!r} has no shape yet (call the model once)"
                )
        #: The objects that have these names, of a module.
        self._objects = {
            name: named[name]
            for name in self._names
            if isinstance(model, nn.Module) and isinstance(named[name], nn.Parameter)
        }
        self._check_sampled(sampler, named)
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

    def _check_sampled(self, sampler: Any, named: Mapping[str, Tensor]) -> None:
        """Raises unless the sampler's parameters are those that are stored."""
        own, sampled = {*map(_place, named.values())}, {}
        for group in sampler.param_groups:
            sampled |= {_place(p): p for p in group["params"]}
        if sampled.keys().isdisjoint(_place(named[name]) for name in self._names):
            raise ValueError(
                "Invalid parameters: the sampler has none of those that would be "
                "stored, so all draws would be the same (was the model copied after "
                "the sampler was made?)"
            )
        missing = [p for place, p in sampled.items() if place not in own]
        # Of a mapping, users choose what is in it.
        if missing and isinstance(self._model, nn.Module):
            raise ValueError(
                f"Invalid model: it lacks {len(missing)} of the sampler's parameters, "
                f"one of shape {list(missing[0].shape)} (was a layer replaced after "
                "the sampler was made? Make the sampler after it; or give a mapping "
                "from names to all tensors that are to be stored)"
            )

    @staticmethod
    def _matching(patterns: list[str], names: list[str]) -> list[str]:
        # "w[0]" is the name of a parameter before it is a pattern for "w0".
        for pattern in patterns:
            if not any(_matches(name, pattern, names) for name in names):
                raise ValueError(
                    f"Invalid parameters: no parameter is named {pattern!r} (there are "
                    f"{names})"
                )
        return [n for n in names if any(_matches(n, p, names) for p in patterns)]

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
        other = next((n for n, p in self._objects.items() if named[n] is not p), None)
        if other is not None:
            raise RuntimeError(
                f"the model's parameter {other!r} is another tensor than when the "
                "collector was made (was a layer replaced? Make the sampler and the "
                "collector after it)"
            )
        tensors = {name: named[name].detach() for name in self._names}
        if self._buffers:
            assert isinstance(self._model, nn.Module)
            held = self._by_plain_name(self._model.named_buffers())
            tensors |= {name: held[name] for name in self._buffers}
        return tensors


def _matches(name: str, pattern: str, names: list[str]) -> bool:
    return name == pattern if pattern in names else fnmatchcase(name, pattern)


def _place(tensor: Tensor) -> int:
    """What tells a parameter from others, also where a view of it is sampled."""
    if is_dtensor(tensor) or tensor.numel() == 0:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()
