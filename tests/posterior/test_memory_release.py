"""Nothing outlives a call: no worker process, no cycle through model or loader."""

import gc
import multiprocessing
import weakref

import driver_problem as problem
import pytest
from torch.utils.data import DataLoader

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

forked = problem.forked


@pytest.fixture
def no_gc():
    """Switches the garbage collector off: only reference counts free memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Made:
    """Makes models and remembers them weakly."""

    def __init__(self):
        self.models = []

    def __call__(self):
        model = problem.model()
        self.models.append(weakref.ref(model))
        return model

    @property
    def num_alive(self):
        return sum(model() is not None for model in self.models)


def _loader(persistent=False, shuffle=True):
    workers = {"num_workers": 1, "persistent_workers": persistent}
    return DataLoader(problem.data(), batch_size=10, shuffle=shuffle, **workers)


def _children():
    return multiprocessing.active_children()


def _sample(loader, made, folder, **options):
    given = {"steps": 14, "burn_in": 3, "every": 1, "seed": 1, "progress": False}
    return sg.sample(
        made, problem.sghmc, loader, problem.loss, folder, **{**given, **options}
    )


@pytest.mark.default
@pytest.mark.parametrize("persistent", [False, True])
def test_sample_releases_workers_and_models(persistent, tmp_path, no_gc):
    made, loader = Made(), _loader(persistent)
    _sample(loader, made, tmp_path)
    assert made.models
    assert _children() == []
    assert made.num_alive == 0
    loader_alive = weakref.ref(loader)
    del loader
    assert loader_alive() is None


def test_sample_that_fails_releases_workers(tmp_path, no_gc):
    made = Made()

    def fail(state):
        raise OSError("no more")

    # The steps stop within an epoch, whose workers are running.
    with pytest.raises(OSError, match="no more"):
        _sample(_loader(), made, tmp_path, callbacks=fail, check=False)
    assert _children() == []


def test_sample_with_a_schedule_releases_models(tmp_path, no_gc):
    made = Made()
    _sample(_loader(), made, tmp_path, schedule=problem.cycles)
    assert _children() == []
    assert made.num_alive == 0


def test_the_tools_release_model_and_loader(tmp_path, no_gc):
    store = _sample(_loader(), problem.model, tmp_path)
    x, y = problem.data().tensors

    def released(use):
        model, loader = problem.model(), _loader(shuffle=False)
        alive = weakref.ref(model), weakref.ref(loader)
        use(model, loader)
        del model, loader
        assert _children() == []
        assert [each() for each in alive] == [None, None]

    def check(model, loader):
        sampler = problem.sghmc(model.named_parameters(), seed=1)
        print(sg.check_setup(model, problem.loss, loader, sampler))

    released(check)
    released(lambda model, loader: sg.predict(model, store, loader))
    released(lambda model, loader: sg.predict(model, store, x).mean.sum())
    released(lambda model, loader: sg.report(model, store, x, y))


def test_a_sampler_is_released(no_gc):
    """Steps, hooks, monitor and a collector leave no cycle behind."""
    model = problem.model()
    sampler = problem.sghmc(model.named_parameters(), seed=1)
    alive = weakref.ref(model), weakref.ref(sampler)
    monitor = sg.TemperatureMonitor(sampler)
    with sg.Collector(sampler, model, sg.SampleStore(), every=1, monitor=monitor):
        for _ in range(3):
            sampler.zero_grad()
            problem.loss(model, problem.data()[:10]).backward()
            sampler.step()
    del model, sampler
    assert [each() for each in alive] == [None, None]


def test_processes_end_with_their_chains(tmp_path, forked):
    _sample(_loader(), problem.model, tmp_path, chains=2, processes=2)
    assert _children() == []
