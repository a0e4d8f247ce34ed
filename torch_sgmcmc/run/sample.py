"""Runs chains of a model from start to end."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException, start_processes

from torch_sgmcmc.core.hyperparams import check_function, check_integer, draw_seed
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.utils import check_docstrings, first_rows, length_of
from torch_sgmcmc.diagnostics.report import Report, report
from torch_sgmcmc.diagnostics.run_issues import SERIOUS
from torch_sgmcmc.draws.store import SampleStore, folder_of
from torch_sgmcmc.draws.store_files import check_files, delete_all
from torch_sgmcmc.losses import Likelihood
from torch_sgmcmc.run.chain import (
    ChainState,
    Settings,
    check_construction,
    check_first_chain,
    first_chain_of,
    run_chain,
)
from torch_sgmcmc.run.start import Start, check_starts, checkpoint, checkpoint_path

# Rows of the outputs in the report.
_ROWS = 50


def report_on(settings: Settings) -> Report | None:
    """Returns a report of all chains on the first minibatch, None without draws."""
    store = settings.store
    if not isinstance(store, SampleStore):
        store = SampleStore(store)
    store.refresh()
    if len(store) == 0:
        return None
    unknown = "whether outputs have converged (the loader can be read once only)"
    if not isinstance(settings.loader, Iterator):
        try:
            return _by_outputs(settings, store)
        except Exception as error:  # from a model that is called in another way
            unknown = (
                f"whether outputs have converged ({type(error).__name__} {error}: call "
                "sg.report(model, store, inputs, link=..., forward=...))"
            )
    found = report(None, store)
    return replace(found, unknown=(unknown, *found.unknown[1:]))


def _by_outputs(settings: Settings, store: SampleStore) -> Report:
    model, batch = first_chain_of(settings)
    batch = first_rows(batch, _ROWS)
    targets = _targets_of(batch)
    if isinstance(settings.loss, Likelihood):
        return report(model, store, [batch], targets, likelihood=settings.loss)
    if targets is not None and not targets.is_floating_point():
        try:
            return report(model, store, [batch], targets, link="softmax")
        except ValueError:  # the model has no classes
            targets = None
    return report(model, store, [batch], targets, link="identity")


def _targets_of(batch: Any) -> Tensor | None:
    if isinstance(batch, Mapping):
        batch = [batch["labels"]] if "labels" in batch else []
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        return None
    last = batch[-1]
    if not isinstance(last, Tensor):
        return None
    return last if last.is_floating_point() or last.dim() == 1 else None


# From Linux's <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1

# Seconds in which ended processes may save their chains.
_GRACE = 30.0

_GUARD = (
    "functions belong into a file that can be imported, and the call of sample() under "
    'if __name__ == "__main__":'
)


def check_processes(settings: Settings, processes: int) -> None:
    """Raises if chains cannot run in other processes, before any change."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            f"sample(processes={processes}) was called by a process that it started "
            f"itself, and that reads this script: {_GUARD}"
        )
    try:
        content = pickle.dumps(settings)
    except Exception as error:
        raise TypeError(
            f"Invalid processes: {processes}, and an argument cannot be sent to them "
            f"({error}): give functions that can be imported, or processes=1"
        ) from error
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    is_lost = spec is None and file is not None and not os.path.exists(file)
    if is_lost or (file is None and b"__main__" in content):
        raise TypeError(
            f"Invalid processes: {processes}, and they cannot import definitions of a "
            "notebook or of standard input (put the functions into a file and import "
            "them, or processes=1)"
        )


def side_by_side(settings: Settings, processes: int) -> None:
    """Runs all chains, ``processes`` at a time."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // processes)
    others = {*multiprocessing.active_children()}
    running = None
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder)
        work = (settings, context.Value("q", 0), threads, errors, os.getpid())
        try:
            running = start_processes(_work, work, processes, join=False)
            while not running.join():  # the first process that ends
                pass
        except ProcessException as error:
            own, said = _read_error(errors, error)
            raise own from RuntimeError(said)
        finally:
            if running is None:  # interrupted
                _end({*multiprocessing.active_children()} - others)
            else:
                _end(running.processes)


def _work(
    index: int, settings: Settings, begun: Any, threads: int, errors: Path, parent: int
) -> None:
    """Runs chains in a process, one after another, until none is left."""
    chain = None
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        torch.set_num_threads(threads)
        while os.getppid() == parent:
            with begun.get_lock():
                chain = begun.value
                begun.value += 1
            if chain >= settings.chains:
                return
            (errors / f"chain-{index}").write_text(str(chain))
            run_chain(settings, chain)
    except BaseException as error:
        _write_error(error, errors / f"error-{index}")
        sys.exit(1)


def _write_error(error: BaseException, path: Path) -> None:
    said = traceback.format_exc()
    try:
        content = pickle.dumps((error, said))
        pickle.loads(content)  # some cannot be unpickled
    except Exception:
        content = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), said))
    path.write_bytes(content)


def _read_error(errors: Path, ended: ProcessException) -> tuple[BaseException, str]:
    index = ended.error_index
    path = errors / f"error-{index}"
    if path.exists():
        error, said = pickle.loads(path.read_bytes())
        return error, f"\n{said}"
    chain = errors / f"chain-{index}"
    if not chain.exists():
        text = f"A process for chains could not start (see what it printed): {_GUARD}"
    else:
        text = (
            f"The process of chain {chain.read_text()} has ended (was there too little "
            "memory?): sample() resumes at its last checkpoint when called again"
        )
    return RuntimeError(text), str(ended)


def _end(processes: Iterable[BaseProcess]) -> None:
    try:
        for process in processes:
            process.terminate()
        end = time.monotonic() + _GRACE
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()


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
    groups: Iterable[Mapping[str, Any]] = (),
    start: Start | Sequence[Start] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    optimizer_epochs: int = 0,
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

    With a training loop of your own, use a :class:`Collector` (three lines). A chain
    can be killed at any moment. It resumes when this is called again with the same
    arguments, and its draws are bitwise identical. With more ``steps`` or ``epochs``, a
    finished chain continues.

    Args:
        model: a function that returns a module on its device, called for each chain so
            that chains begin at different points; or a module, of which each chain
            copies the present parameters, and which is not changed.
        sampler: ``sampler(params, seed=seed)`` returns a sampler of named parameters:
            ``partial(SGHMC, lr=0.03, momentum=0.9, num_data=N, prior_precision=1)``.
            Not an HMCECS.
        loader: minibatches, an iterable that can be read again: a DataLoader.
        loss: ``loss(model, batch)`` returns the mean loss of a minibatch, which has
            been moved to the model's device; for SBPS, the loss of each example.
        store: a folder or a :class:`SampleStore`. It also holds the checkpoints,
            ``checkpoint-<chain>.pt``. None keeps draws in memory, without checkpoints,
            for one process. Default: None.
        steps: steps of each chain, >= 1. Give ``steps`` or ``epochs``.
        epochs: passes over the loader, >= 1, with a step for each minibatch.
        burn_in: number of first steps of each chain that are not stored. With a
            :class:`CyclicalSchedule`, this and ``every`` count steps of sampling
            phases. Default: 0.
        every: steps from one draw to the next. Default: 1.
        chains: number of chains, >= 1. Default: 1.
        groups: param groups of a model, as made by :func:`prior_groups`, whose options
            the chains' parameters of the same names have. Default: one group.
        start: where chains begin, or a list from which they take turns: "model", as it
            is; "reset", after its modules' ``reset_parameters()``; "prior", a draw from
            the prior (:meth:`Sampler.draw_from_prior`); or a function that changes the
            chain's model. None lets chains begin at different places, whose agreement
            shows that they have reached the posterior: the first at "model", every
            second at "prior" (if there is one), others at new initial values. Default:
            None.
        optimizer: ``optimizer(params)`` returns a torch optimizer, which first makes
            ``optimizer_epochs`` passes from the start: ``partial(Adam, lr=1e-3)``.
            Default: None.
        optimizer_epochs: passes of the optimizer over the loader, >= 0. Default: 0.
        processes: number of chains that run at a time, each in its own process.
            Arguments must then be importable, and the script guarded by ``if __name__
            == "__main__"``. The first error ends all. Default: 1, one after another.
        seed: a 64-bit int, from which all seeds of all chains follow. None is the
            resumed run's seed, or draws one from torch's default generator. Default:
            None.
        schedule: ``schedule(sampler)`` returns a scheduler, stepped after each step; or
            several such functions, such as :class:`GammaPrecision` (skipped at T = 0)
            and a schedule. With a :class:`CyclicalSchedule` only sampling phases are
            stored; with a :class:`PolynomialDecay` draws are weighted with their step
            size.
        callbacks: a function or several, called with a :class:`ChainState` after each
            step.
        checkpoint_every: steps from one checkpoint to the next; None is five minutes.
            There is also one at the end, and after the step in which Ctrl-C or SIGTERM
            end the program. Default: None.
        check: call :func:`check_setup` before the first step: a few gradients that
            change nothing. Issues are a UserWarning. Default: True.
        report: observe each chain with a :class:`TemperatureMonitor`, and end with a
            :class:`Report` of the outputs for the loader's first minibatch:
            ``report.md`` and ``report.json`` beside the draws, a short form printed
            with the progress bars. Issues that make draws useless are a UserWarning.
            Default: True.
        compile: make steps in blocks of one compiled call, :func:`compile_steps`, for
            small networks. Callbacks and checkpoints come at the ends of blocks. For
            gradient-only samplers without a schedule. Minibatches are tensors of one
            shape (``drop_last=True``), or tuples, lists or dicts of such. Everything
            else that ``loss`` reads is compiled in. More: docs/small_networks.md.
            Default: False.
        restart: delete all chains of the store and start again, after the arguments
            have been checked and if no chain has a writer. Default: False.
        progress: show a progress bar for each chain, if tqdm is installed. Default:
            True.
        **collecting: options of :class:`Collector`: ``parameters``, ``buffers``,
            ``dtype``, ``weight``, ``when``.

    Returns:
        The store with the draws of all chains.

    Raises:
        TypeError, ValueError: an argument is invalid, or differs from the resumed
            run's: the seed, the schedule and its settings, the collector's settings,
            the sampler's hyperparameters, numbers of minibatches and of data. (Another
            name of the loss or the model is a warning.)
        RuntimeError: an error of a step or of the store, or a chain that has diverged.
            The chain resumes at its last checkpoint when this is called again.

    Example:
        >>> def loss(model, batch):
        ...     x, y = batch
        ...     return F.cross_entropy(model(x), y)
        >>> store = sg.sample(
        ...     make_model, partial(sg.SGHMC, lr=0.03, momentum=0.9, num_data=60_000),
        ...     loader, loss, "draws", epochs=100, burn_in=20 * len(loader),
        ...     every=100, chains=4, seed=0, checkpoint_every=1000)
        >>> prediction = sg.predict(make_model(), store, x_test)

        In place of an ensemble of five SGD runs of ``steps``, with their lr, momentum,
        weight decay and schedule (docs/swap.md):

        >>> sampler = partial(sg.SGHMC, lr=0.1, momentum=0.9, num_data=N,
        ...                   prior_precision=N * weight_decay, temperature=0.03)
        >>> store = sg.sample(
        ...     make_model, sampler, loader, loss, "cold", steps=steps, chains=5,
        ...     schedule=partial(CosineAnnealingLR, T_max=steps), start="model", seed=0,
        ...     burn_in=3 * steps // 4, every=steps // 16)

    Note:
        Torch's own operations may round differently with another number of threads:
        bitwise identical draws need the same number. Processes share this one's
        threads.
    """
    given = locals()
    _check_arguments(given)
    store = SampleStore() if store is None else store
    folder = folder_of(store)
    if folder is None and processes > 1:
        raise ValueError(
            f"Invalid store: in memory, with processes={processes} (must be a folder, "
            "into which all processes write)"
        )
    if folder is not None:
        check_files(folder)
    if report:
        check_docstrings()
    begun = None if folder is None or restart else checkpoint_path(folder, 0)
    is_resumed = begun is not None and begun.exists()
    if seed is None and begun is not None and is_resumed:
        seed = checkpoint(begun).get("seed")
    settings = _settings(given, store if folder is None else folder, draw_seed(seed))
    processes = min(processes, settings.chains)
    _check_run(settings, processes, check and not is_resumed)
    if restart:
        check_construction(settings)
        _delete(settings.store)
    if processes > 1:
        side_by_side(settings, processes)
    else:
        for chain in range(settings.chains):
            run_chain(settings, chain)
    _end_with_report(settings)
    return store.refresh() if isinstance(store, SampleStore) else SampleStore(folder)


def _check_arguments(given: Mapping[str, Any]) -> None:
    """Raises if an argument of :func:`sample` is invalid, whatever the store has."""
    if (given["steps"] is None) == (given["epochs"] is None):
        raise ValueError("Invalid steps: give steps or epochs, one of the two")
    for name in ("steps", "epochs", "checkpoint_every"):
        if given[name] is not None:
            check_integer(name, given[name], low=1)
    lowest = {"chains": 1, "burn_in": 0, "every": 1, "optimizer_epochs": 0}
    for name, low in lowest.items():
        check_integer(name, given[name], low=low)
    optimizer, passes = given["optimizer"], given["optimizer_epochs"]
    if (optimizer is None) != (passes == 0):
        raise ValueError(
            f"Invalid optimizer_epochs: {passes}, with optimizer={optimizer!r} (give "
            "both, or neither)"
        )
    check_integer("processes", given["processes"], low=1)
    counts_passes = given["epochs"] is not None or passes > 0
    if counts_passes and length_of(given["loader"]) is None:
        raise TypeError(
            "Invalid loader: it has no length (give steps, not epochs, and no "
            "optimizer_epochs)"
        )
    for name in ("model", "sampler", "loss"):
        check_function(name, given[name])
    if "chain" in given["collecting"]:
        raise TypeError("Invalid chain: sample() numbers its chains from 0 on")
    if "monitor" in given["collecting"]:
        raise TypeError("Invalid monitor: sample() makes one for each chain (report)")


def _settings(given: Mapping[str, Any], store: Any, seed: int) -> Settings:
    """Returns what all chains share of the arguments of :func:`sample`."""
    every = {name: given[name] for name in ("burn_in", "every")}
    values = {
        **given,
        "store": store,
        "seed": seed,
        "schedules": _functions("schedule", given["schedule"]),
        "callbacks": _functions("callbacks", given["callbacks"]),
        "chains": int(given["chains"]),
        "reports": given["report"],
        "compiles": bool(given["compile"]),
        "groups": _without_params(given["groups"]),
        "starts": check_starts(given["start"]),
        "collecting": {**every, **given["collecting"]},
    }
    return Settings(**{field.name: values[field.name] for field in fields(Settings)})


def _check_run(settings: Settings, processes: int, checks: bool) -> None:
    """Checks processes, and the set-up if wanted, before any change."""
    if processes > 1:
        check_processes(settings, processes)
    # The check would lose minibatches of a loader that is read once.
    if checks and not isinstance(settings.loader, Iterator):
        issues = check_first_chain(settings).issues
        if issues:
            text = "\n".join(issue.message for issue in issues)
            warnings.warn(f"check_setup found issues:\n{text}", stacklevel=3)


def _delete(store: Path | SampleStore) -> None:
    """Deletes all chains."""
    if isinstance(store, SampleStore):
        store.memory.clear()
    else:
        delete_all(store)


def _end_with_report(settings: Settings) -> None:
    """Saves and shows the report, or deletes that of an earlier call."""
    folder = settings.store if isinstance(settings.store, Path) else None
    if not settings.reports:
        if folder is not None:
            for name in ("report.md", "report.json"):
                (folder / name).unlink(missing_ok=True)
        return
    serious = ["No draw was stored: is lr 0, or was each step skipped?"]
    found = report_on(settings)
    if found is not None:
        if folder is not None:
            found.save(folder)
        if settings.progress:
            print(found.short())
        serious = [p.message for p in found.issues if p.kind in SERIOUS]
    if serious:
        text = "\n".join(serious)
        warnings.warn(f"the report found issues:\n{text}", stacklevel=3)


def _without_params(groups: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Returns groups with the names of their parameters alone."""
    found = []
    for group in groups:
        params = [*group["params"]]
        if not all(isinstance(p, tuple) and isinstance(p[0], str) for p in params):
            raise TypeError(
                "Invalid groups: a group has parameters without names (must have "
                "named parameters, as those of sg.prior_groups(model))"
            )
        found.append({**group, "params": [(name, None) for name, _ in params]})
    return tuple(found)


def _functions(name: str, given: Any) -> tuple[Any, ...]:
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
