"""Samplers with Hugging Face's accelerate, and in its own tests."""

import framework_problem as shared
import pytest
from short_chains import assert_same
from stored_files import contents
from torch.nn.functional import mse_loss

import torch_sgmcmc as sg

accelerate = pytest.importorskip("accelerate")

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def no_state_left():
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


class Run:
    """A training loop as accelerate's documents have it."""

    def __init__(self, kind, parts=1, store=None):
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=parts
        )
        self.kind, self.parts = kind, parts
        self.batches = sg.IndependentBatchSampler(shared.NUM_DATA, 8, seed=5)
        model = shared.new_model()
        sampler = shared.new_sampler(kind, model)
        self.model, self.sampler, self.loader = self.accelerator.prepare(
            model, sampler, shared.loader()
        )
        self.accelerator.register_for_checkpointing(self.batches)
        if store is not None:
            self.collector = shared.collector_of(sampler, model, store)
            self.accelerator.register_for_checkpointing(self.collector)

    def epochs(self, number):
        for _ in range(number):
            for x, y in self.loader:
                if shared.takes_closure(self.kind):
                    backward = self.accelerator.backward
                    self.sampler.step(
                        shared.closure_of(self.kind, self.model, self.batches, backward)
                    )
                    continue
                with self.accelerator.accumulate(self.model):
                    loss = mse_loss(self.model(x), y)
                    self.accelerator.backward(loss, **shared.graphs(self.kind))
                    self.sampler.step()
                    self.sampler.zero_grad()
        return list(self.model.parameters())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("kind", shared.EVERY)
def test_the_chain_equals_that_of_a_loop_and_resumes(kind, tmp_path):
    run = Run(kind)
    run.epochs(1)
    run.accelerator.save_state(str(tmp_path))
    whole = run.epochs(2)
    assert_same(whole, shared.by_hand(kind, 12))
    accelerate.state.AcceleratorState._reset_state(True)
    resumed = Run(kind)
    resumed.accelerator.load_state(str(tmp_path))
    assert_same(resumed.epochs(2), whole)


@pytest.mark.parametrize("kind", ["SGHMC", "SGHMC with means"])
def test_accumulated_gradients(kind):
    assert_same(Run(kind, parts=2).epochs(2), shared.by_hand(kind, 4, parts=2))


@pytest.mark.parametrize(("kind", "parts"), [("SGHMC", 2), ("SBPS", 1)])
def test_draws_equal_those_of_a_loop_and_resume(kind, parts, tmp_path):
    shared.by_hand(kind, 24 // parts, parts=parts, store=tmp_path / "loop")
    run = Run(kind, parts, tmp_path / "run")
    run.epochs(3)
    run.accelerator.save_state(str(tmp_path / "state"))
    run.epochs(2)  # of which nothing is left
    run.collector.close()
    accelerate.state.AcceleratorState._reset_state(True)
    resumed = Run(kind, parts, tmp_path / "run")
    resumed.accelerator.load_state(str(tmp_path / "state"))
    resumed.epochs(3)
    resumed.collector.close()
    whole = contents(tmp_path / "loop")["draws"]
    assert len(whole) > 2
    assert contents(tmp_path / "run")["draws"] == whole
