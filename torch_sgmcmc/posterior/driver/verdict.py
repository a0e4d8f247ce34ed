"""The verdict with which ``sample`` ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from torch_sgmcmc.chain.rows import first_rows
from torch_sgmcmc.judge.after import Report, report
from torch_sgmcmc.losses import Likelihood
from torch_sgmcmc.posterior.driver.chain import Settings, first_of
from torch_sgmcmc.posterior.store import SampleStore

__all__ = ["verdict_of"]

# Rows that outputs are computed for.
_ROWS = 50


def verdict_of(settings: Settings) -> Report | None:
    """What can be said of all chains, by the first minibatch, if there are draws."""
    store = settings.store
    if not isinstance(store, SampleStore):
        store = SampleStore(store)
    store.refresh()
    if len(store) == 0:
        return None
    words = "whether outputs have converged (the loader can be read once only)"
    if not isinstance(settings.loader, Iterator):
        try:
            return _by_outputs(settings, store)
        except Exception as error:  # of a model that is called in another way
            words = (
                f"whether outputs have converged ({type(error).__name__} {error}: say "
                "sg.report(model, store, inputs, link=..., forward=...))"
            )
    found = report(None, store)
    return replace(found, unknown=(words, *found.unknown[1:]))


def _by_outputs(settings: Settings, store: SampleStore) -> Report:
    model, batch = first_of(settings)
    batch = first_rows(batch, _ROWS)
    targets = _targets_of(batch)
    if isinstance(settings.loss, Likelihood):
        return report(model, store, [batch], targets, likelihood=settings.loss)
    if targets is not None and not targets.is_floating_point():
        try:
            return report(model, store, [batch], targets, link="softmax")
        except ValueError:  # it has no classes
            targets = None
    return report(model, store, [batch], targets, link="identity")


def _targets_of(batch: Any) -> Tensor | None:
    """Labels of classes, or numbers, where these are what a minibatch ends with."""
    if isinstance(batch, Mapping):
        batch = [batch["labels"]] if "labels" in batch else []
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        return None
    last = batch[-1]
    if not isinstance(last, Tensor):
        return None
    return last if last.is_floating_point() or last.dim() == 1 else None
