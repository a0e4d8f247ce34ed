"""Samplers inside Lightning's Trainer, and what it says where one cannot work."""

import gc
import logging
import warnings
from typing import Any

import framework_problem as shared
import pytest
import torch
from short_chains import assert_same
from stored_files import contents
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import torch_sgmcmc as sg

lightning = pytest.importorskip("lightning")
boring = pytest.importorskip("lightning.pytorch.demos.boring_classes")

pytestmark = [
    pytest.mark.full,
    # Of what Lightning warns, all concerns speed or torch.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

MANUAL = (
    "set self.automatic_optimization = False, and in training_step call "
    "self.optimizers().step(closure) with a closure that draws a minibatch and calls "
    "self.manual_backward(loss)"
)


def trainer(epochs=1, **settings):
    names = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(("logger", *names), False)
    return lightning.Trainer(accelerator="cpu", max_epochs=epochs, **quiet, **settings)


class Automatic(lightning.LightningModule):
    """Leaves all to Lightning."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.net, self.kind, self.settings = shared.new_model(), kind, settings

    def training_step(self, batch, index):
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        sampler = shared.new_sampler(self.kind, self.net)
        for group in sampler.param_groups:
            group.update(self.settings)
        return sampler


class Manual(Automatic):
    """Makes its steps itself, as the page on frameworks shows."""

    def __init__(self, kind):
        super().__init__(kind)
        self.automatic_optimization = False
        self.batches = sg.IndependentBatchSampler(shared.NUM_DATA, 8, seed=5)

    def training_step(self, batch, index):
        if not shared.takes_closure(self.kind):
            sampler = self.optimizers()
            sampler.zero_grad()
            loss = mse_loss(self.net(batch[0]), batch[1])
            self.manual_backward(loss, **shared.graphs(self.kind))
            sampler.step()
            return
        sampler = self.optimizers(use_pl_optimizer=self.kind != "HMCECS")
        given = (self.kind, self.net, self.batches, self.manual_backward)
        sampler.step(shared.closure_of(*given))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["batches"] = self.batches.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.batches.load_state_dict(checkpoint["batches"])


def collecting(kind, store):
    """The same with a collector, which Lightning's checkpoints have as well."""
    base = Automatic if kind in shared.PLAIN else Manual

    class Collecting(base):
        saved = None

        def configure_optimizers(self):
            sampler = super().configure_optimizers()
            self.collector = shared.collector_of(sampler, self.net, store)
            return sampler

        def on_save_checkpoint(self, checkpoint):
            super().on_save_checkpoint(checkpoint)
            checkpoint["collector"] = self.collector.state_dict()

        def on_load_checkpoint(self, checkpoint):
            super().on_load_checkpoint(checkpoint)
            self.saved = checkpoint["collector"]  # there is no sampler yet

        def on_train_start(self):
            if self.saved is not None:
                self.collector.load_state_dict(self.saved)

        def on_train_end(self):
            self.collector.close()

    return Collecting(kind)


@pytest.mark.parametrize("kind", [*shared.PLAIN, *shared.CLOSED])
def test_a_chain_that_resumes_from_lightnings_checkpoint(kind, tmp_path):
    """Resumes under automatic optimization, or manual where there is a closure."""
    make = Automatic if kind in shared.PLAIN else Manual
    first, second = make(kind), make(kind)
    fit = trainer(1)
    fit.fit(first, shared.loader())
    assert fit.optimizers[0].param_groups[0]["step"] == 4
    assert_same(list(first.net.parameters()), shared.by_hand(kind, 4))
    fit.save_checkpoint(tmp_path / "last.ckpt")
    fit = trainer(3)
    fit.fit(second, shared.loader(), ckpt_path=tmp_path / "last.ckpt")
    assert fit.global_step == 12 or kind in shared.CLOSED
    assert_same(list(second.net.parameters()), shared.by_hand(kind, 12))


@pytest.mark.parametrize("kind", ["SGHMC", "EWSG", "SBPS"])
def test_draws_equal_those_of_a_loop_and_resume(kind, tmp_path):
    shared.by_hand(kind, 24, store=tmp_path / "loop")
    run = tmp_path / "run"
    fit, last = trainer(3), tmp_path / "last.ckpt"
    fit.fit(collecting(kind, run), shared.loader())
    fit.save_checkpoint(last)
    trainer(6).fit(collecting(kind, run), shared.loader(), ckpt_path=last)
    whole = contents(tmp_path / "loop")["draws"]
    assert len(whole) > 2
    assert contents(run)["draws"] == whole


@pytest.mark.parametrize("kind", ["SGHMC", "SGHMC with means"])
def test_accumulated_gradients_equal_those_of_a_larger_batch(kind):
    module = Automatic(kind)
    trainer(2, accumulate_grad_batches=2).fit(module, shared.loader())
    assert_same(list(module.net.parameters()), shared.by_hand(kind, 4, parts=2))


def test_gamma_in_automatic_optimization():
    class WithGraph(Automatic):
        def backward(self, loss):
            loss.backward(create_graph=True)

    module = WithGraph("PSGLD")
    trainer(2).fit(module, shared.loader())
    assert_same(list(module.net.parameters()), shared.by_hand("PSGLD", 8))


def test_hmc_in_automatic_optimization_has_all_data_in_a_batch():
    class Repeated(torch.utils.data.IterableDataset[Any]):
        def __iter__(self):
            return iter([shared.data()] * 12)

    x, y = shared.data()
    for batches in (
        DataLoader(TensorDataset(x, y), shared.NUM_DATA),  # one an epoch
        DataLoader(Repeated(), batch_size=None),  # many
    ):
        module = Automatic("HMC")
        fit = trainer(12, max_steps=12)
        fit.fit(module, batches)
        sampler = fit.optimizers[0]
        assert sampler.param_groups[0]["step"] == 12
        assert 0 < sampler.acceptance_rate <= 1
        assert_same(list(module.net.parameters()), shared.by_hand("HMC", 12))


def test_ewsg_with_one_minibatch_a_step_in_automatic_optimization():
    # It is SGHMC then, and nothing is wrong with that.
    module = Automatic("EWSG", index_chain_length=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="EWSG")
        trainer(2).fit(module, shared.loader())
    model = shared.new_model()
    sampler = shared.new_sampler("EWSG", model)
    sampler.param_groups[0]["index_chain_length"] = 0
    for x, y in [*shared.loader(), *shared.loader()]:
        sampler.step(lambda x=x, y=y: mse_loss(model(x), y).backward())
    assert_same(list(module.net.parameters()), list(model.parameters()))


def test_methods_of_a_sampler_through_lightnings_wrapper():
    class Warmed(Manual):
        def on_train_start(self):
            sampler = self.optimizers()
            assert isinstance(sampler, sg.HMC)
            given = ("HMC", self.net, self.batches, self.manual_backward)
            sampler.warmup(shared.closure_of(*given), 5, progress=False)

    module = Warmed("HMC")
    fit = trainer()
    fit.fit(module, shared.loader())
    model = shared.new_model()
    sampler = shared.new_sampler("HMC", model)
    closure = shared.closure_of("HMC", model, module.batches, Tensor.backward)
    sampler.warmup(closure, 5, progress=False)
    for _ in range(4):
        sampler.step(closure)
    assert_same(list(module.net.parameters()), list(model.parameters()))
    wrapped = module.optimizers()
    assert wrapped.acceptance_rate == sampler.acceptance_rate


def test_what_is_set_through_lightnings_wrapper_is_the_samplers():
    wrapper = lightning.pytorch.core.optimizer.LightningOptimizer
    chains = []
    for wrap in (wrapper, lambda sampler: sampler):
        theta = nn.Parameter(torch.ones(3))
        sampler = sg.HMC([theta], step_size=0.1, num_steps=2, num_data=10, seed=1)
        wrapped = wrap(sampler)
        wrapped.set_mass([100.0])

        def closure(theta=theta):
            loss = theta.sum()
            loss.backward()
            return loss

        for step in range(4):
            if step == 2:
                del wrapped  # the sampler goes on without it
                gc.collect()
            sampler.step(closure)
        chains.append(theta.detach())
    assert_same([chains[0]], [chains[1]])


def fit_fails(module, kind, message, **settings):
    """Fits until this error; returns the number of steps made before."""
    fit = trainer(100, **settings)
    with pytest.raises(kind) as error:
        fit.fit(module, shared.loader())
    assert str(error.value) == message
    return fit.strategy.optimizers[0].param_groups[0]["step"]


def test_ewsg_in_automatic_optimization_gets_one_minibatch_a_step():
    message = (
        "EWSG got the gradient of the minibatch before from 100 calls of the closure "
        f"running, which must draw a fresh minibatch at each call (in Lightning, "
        f"{MANUAL}). If each minibatch is all data, there is nothing to choose from: "
        "use SGHMC, or index_chain_length=0"
    )
    with pytest.warns(UserWarning) as caught:
        steps = fit_fails(Automatic("EWSG"), RuntimeError, message)
    assert steps == 99
    ours = [str(w.message) for w in caught if "EWSG" in str(w.message)]
    assert ours == [
        "EWSG draws several minibatches a step, but in Lightning's automatic "
        f"optimization training_step is given the same batch each time: {MANUAL}"
    ]


def test_hmc_in_automatic_optimization_gets_a_minibatch_a_trajectory():
    message = (
        "HMC got another loss at the start of 3 consecutive trajectories than at the "
        "end of the previous one, at the same parameters: the closure must always "
        "compute the same loss, of all data (no minibatches, no dropout), unless other "
        "quantities that it depends on are sampled in between. In Lightning's "
        "automatic optimization a batch must be all data. SGHMC is what minibatches "
        "need"
    )
    assert fit_fails(Automatic("HMC"), RuntimeError, message) == 3


@pytest.mark.parametrize("kind", ["EWSG", "HMC"])
def test_samplers_that_clear_what_lightning_accumulates(kind):
    message = (
        f"{kind} cannot be used with Lightning's accumulate_grad_batches=2: it has "
        "gradients cleared before each call of the closure, which leaves one loss of "
        "2, divided by 2. Use larger batches, or manual optimization "
        "(self.automatic_optimization = False) and a closure that accumulates within "
        "a call"
    )
    module = Automatic(kind)
    steps = fit_fails(module, RuntimeError, message, accumulate_grad_batches=2)
    assert steps == 0
    assert_same(list(module.net.parameters()), list(shared.new_model().parameters()))


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("SBPS", RuntimeError,
         "SBPS cannot be used in Lightning's automatic optimization, whose closure "
         "calls backward(): set self.automatic_optimization = False, and in "
         "training_step call self.optimizers().step(closure) with a closure that "
         "returns the losses of the examples"),
        ("HMCECS", TypeError,
         "HMCECS calls its closure with the indices of data, which Lightning does "
         "not pass on: set self.automatic_optimization = False, and in "
         "training_step call self.optimizers(use_pl_optimizer=False).step(closure)"),
        ("PSGLD", RuntimeError,
         "PSGLD got gradients without a graph, and Γ needs second derivatives: call "
         "loss.backward(create_graph=True), or set gamma=False and stop adaptation "
         "(adapt=False) after burn-in"),
    ],
)  # fmt: skip
def test_samplers_that_automatic_optimization_cannot_serve(kind, error, message):
    module = Automatic(kind)
    assert fit_fails(module, error, message) == 0
    assert_same(list(module.net.parameters()), list(shared.new_model().parameters()))
