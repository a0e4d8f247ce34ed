"""Runs chains of a model from start to end."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from torch_sgmcmc.chain.checks import check_function, check_integer, draw_seed
from torch_sgmcmc.chain.lengths import length_of
from torch_sgmcmc.posterior.driver.chain import (
    ChainState,
    Settings,
    checkpoint,
    checkpoint_path,
    look_before,
    rehearse,
    run_chain,
)
from torch_sgmcmc.posterior.driver.processes import check_processes, side_by_side
from torch_sgmcmc.posterior.driver.verdict import verdict_of
from torch_sgmcmc.posterior.store import SampleStore, folder_of
from torch_sgmcmc.posterior.store_files import delete_all
from torch_sgmcmc.sampler import Sampler

__all__ = ["sample"]


def sample(
    model: nn.Module | Callable[[], nn.Module],
    sampler: Callable[..., Sampler],
    loader: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    store: str | os.PathLike[str] | SampleStore | None = None,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    burn_in: int = 0,
    every: int = 1,
    chains: int = 1,
    processes: int = 1,
    seed: int | None = None,
    schedule: Callable[[Sampler], Any]
    | Iterable[Callable[[Sampler], Any]]
    | None = None,
    callbacks: Callable[[ChainState], Any] | Iterable[Callable[[ChainState], Any]] = (),
    checkpoint_every: int | None = None,
    check: bool = True,
    report: bool = True,
    compile: bool = False,
    restart: bool = False,
    progress: bool = True,
    **collecting: Any,
) -> SampleStore:
    """Runs chains of a model, and stores their draws.

    For those who have no training loop of their own; with one, a :class:`Collector` is
    three lines. A chain is killed at any moment and goes on when this is called again
    with the same arguments, to the same draws to the last byte; with more ``steps`` or
    ``epochs``, a finished one goes on as well.

    Args:
        model: a function that returns a module on its device, called for each chain:
            chains begin at different points; or a module, of which each chain has a
            copy and begins there, and which is not changed.
        sampler: ``sampler(params, seed=seed)`` returns a sampler of named parameters:
            ``partial(SGHMC, lr=0.03, momentum=0.9, num_data=N, prior_precision=1)``.
            Not an HMCECS.
        loader: minibatches, an iterable that can be read again: a DataLoader.
        loss: ``loss(model, batch)`` returns the mean loss of a minibatch, which has
            been moved to the model's device; for SBPS, the loss of each example.
        store: a folder or a :class:`SampleStore`. There are also the checkpoints,
            ``checkpoint-<chain>.pt``. None keeps draws in memory, without checkpoints,
            for one process. Default: None.
        steps: of each chain, >= 1; or
        epochs: passes over the loader, >= 1, a step each minibatch. One of the two.
        burn_in: steps of each chain that come first and are not stored. With a
            :class:`CyclicalSchedule`, this and ``every`` count steps of sampling
            phases. Default: 0.
        every: steps from one draw to the next. Default: 1.
        chains: how many, >= 1. Default: 1.
        processes: how many chains run at a time, each in a process of its own; what is
            given must then be importable, and the script guarded by
            ``if __name__ == "__main__"``. The first error ends all. Default: 1, one
            after another.
        seed: of all that is random, a 64-bit int; chains have seeds of their own. None
            is that of the run that goes on, or draws one from torch's default
            generator. Default: None.
        schedule: ``schedule(sampler)`` returns a scheduler, stepped after each step, or
            several such functions, as :class:`GammaPrecision` beside a schedule, whose
            draws are left out at T = 0. Of a :class:`CyclicalSchedule` only sampling
            phases are stored, and of a :class:`PolynomialDecay` draws are weighted with
            their step size.
        callbacks: a function or several, called with a :class:`ChainState` after each
            step.
        checkpoint_every: steps from one checkpoint to the next; None is five minutes.
            There is one at the end, and after the step in which Ctrl-C or SIGTERM end
            the program. Default: None.
        check: look before the first step of a run with :func:`check`, a few gradients
            that leave no trace; what it finds is a UserWarning. Default: True.
        report: observe each chain with :class:`Gauges`, and end with a :class:`Report`,
            of the outputs for the loader's first minibatch: ``report.md`` and
            ``report.json`` beside the draws, its short form printed with the progress
            bars. Default: True.
        compile: make steps in blocks of one compiled call, :func:`compiled_steps`, as
            small networks want it; callbacks, checkpoints and gradients that are not
            finite come at their ends. For samplers that go by gradients alone, with
            ``capturable=True``, without a schedule; minibatches are tensors of one
            shape (``drop_last=True``), or tuples, lists or dicts of such. What ``loss``
            reads beside its arguments is compiled in. More: docs/small_networks.md.
            Default: False.
        restart: delete all chains of the store and begin anew, once the arguments are
            seen to be right and no chain has a writer. Default: False.
        progress: show a progress bar a chain, if tqdm is installed. Default: True.
        **collecting: others of :class:`Collector`: ``parameters``, ``buffers``,
            ``dtype``, ``weight``, ``when``.

    Returns:
        The store with the draws of all chains.

    Raises:
        TypeError, ValueError: an argument is not as above, or not that of the run that
            goes on: the seed, the schedule and its settings, the collector's, the
            sampler's hyperparameters, numbers of minibatches and of data. (Another name
            of the loss or the model is a warning.)
        RuntimeError: of a step or of the store; the chain goes on from its last
            checkpoint when this is called again. A chain that has diverged says so.

    Example:
        >>> def loss(model, batch):
        ...     x, y = batch
        ...     return F.cross_entropy(model(x), y)
        >>> store = sg.sample(
        ...     make_model, partial(sg.SGHMC, lr=0.03, momentum=0.9, num_data=60_000),
        ...     loader, loss, "draws", epochs=100, burn_in=20 * len(loader),
        ...     every=100, chains=4, seed=0, checkpoint_every=1000)
        >>> prediction = sg.predict(make_model(), store, x_test)

    Note:
        Torch's own operations may round differently with another number of threads:
        the same bits need the same number. In processes, each has its part of those
        that this one has.
    """
    if (steps is None) == (epochs is None):
        raise ValueError("Invalid steps: give steps or epochs, one of the two")
    given = {"steps": steps, "epochs": epochs, "checkpoint_every": checkpoint_every}
    for name, value in given.items():
        if value is not None:
            check_integer(name, value, low=1)
    chains = check_integer("chains", chains, low=1)
    check_integer("burn_in", burn_in)
    check_integer("every", every, low=1)
    processes = check_integer("processes", processes, low=1)
    if epochs is not None and length_of(loader) is None:
        raise TypeError("Invalid loader: it has no length (give steps, not epochs)")
    for name, function in {"model": model, "sampler": sampler, "loss": loss}.items():
        check_function(name, function)
    if "chain" in collecting:
        raise TypeError("Invalid chain: sample() numbers its chains from 0 on")
    if "gauges" in collecting:
        raise TypeError("Invalid gauges: sample() makes those of each chain (report)")
    if store is None:
        store = SampleStore()
    folder = folder_of(store)
    if folder is None and processes > 1:
        raise ValueError(
            f"Invalid store: in memory, with processes={processes} (must be a folder, "
            "into which all processes write)"
        )
    begun = None if folder is None else checkpoint_path(folder, 0)
    goes_on = begun is not None and begun.exists() and not restart
    if seed is None and goes_on:
        seed = checkpoint(begun)["seed"]
    schedules = _functions("schedule", schedule)
    settings = Settings(
        *(model, sampler, loader, loss, folder or store, steps, epochs),
        draw_seed(seed),
        *(schedules, _functions("callbacks", callbacks), checkpoint_every),
        *(progress, chains, report, bool(compile)),
        {"burn_in": burn_in, "every": every, **collecting},
    )
    processes = min(processes, chains)
    if processes > 1:
        check_processes(settings, processes)
    is_read_once = isinstance(loader, Iterator)  # of which nothing is to be lost
    if check and not is_read_once and not goes_on:
        found = look_before(settings)
        if found.problems:
            words = "\n".join(problem.words for problem in found.problems)
            warnings.warn(f"before the first step:\n{words}", stacklevel=2)
    if restart:
        rehearse(settings)
        if folder is not None:
            delete_all(folder)
        else:
            assert isinstance(store, SampleStore)
            store.memory.clear()
    if processes > 1:
        side_by_side(settings, processes)
    else:
        for chain in range(chains):
            run_chain(settings, chain)
    if not report and folder is not None:
        for name in ("report.md", "report.json"):  # of an earlier call
            (folder / name).unlink(missing_ok=True)
    found = verdict_of(settings) if report else None
    if found is not None:
        if folder is not None:
            found.save(folder)
        if progress:
            print(found.short())
    return store.refresh() if isinstance(store, SampleStore) else SampleStore(folder)


def _functions(name: str, given: Any) -> tuple[Any, ...]:
    """One function, several, or None; as a tuple."""
    functions = tuple(given) if isinstance(given, Iterable) else (given,)
    if given is None:
        functions = ()
    for function in functions:
        if not callable(function):
            raise TypeError(
                f"Invalid {name}: {type(function).__name__} (must be a function, or a "
                "list of functions)"
            )
    return functions
