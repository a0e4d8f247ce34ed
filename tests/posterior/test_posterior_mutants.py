"""The tests of stores and predictions, tested: known bugs that they must catch."""

import pytest
import test_collector
import test_predict

from torch_sgmcmc.posterior import collector, predict, writer
from torch_sgmcmc.posterior.collector import Chosen
from torch_sgmcmc.posterior.forward import BatchNorm
from torch_sgmcmc.posterior.predict import Sums

pytestmark = pytest.mark.nightly

Patch = pytest.MonkeyPatch


def stored_before_the_update(patch):
    before = {}
    now, before_step = Chosen.now, collector.Collector._before_step

    def remember(self, *arguments):
        before_step(self, *arguments)
        before[id(self._chosen)] = {k: t.clone() for k, t in now(self._chosen).items()}

    patch.setattr(collector.Collector, "_before_step", remember)
    patch.setattr(Chosen, "now", lambda self: before.get(id(self)) or now(self))


def alias_of_the_parameter(patch):
    patch.setattr(writer, "_copied", lambda tensor, dtype: tensor.detach())


def no_sign_stored(patch):
    patch.setattr(collector, "_sign", lambda sampler: 1.0)


def no_sign_in_averages(patch):
    weight_of = predict.weight_of
    patch.setattr(predict, "weight_of", lambda *draw: abs(weight_of(*draw)))


def no_weight_in_sums(patch):
    add = Sums.add
    patch.setattr(
        Sums, "add", lambda self, terms, _, keep: add(self, terms, 1, keep=keep)
    )


def one_draw_too_many_in_the_mean(patch):
    mean = Sums.mean
    patch.setattr(Sums, "mean", lambda self, weight: mean(self, weight + 1))


def buffers_of_the_draw_before(patch):
    of = BatchNorm.of
    last = {}

    def stale(self, tensors, *arguments, **live):
        own = {k: t for k, t in tensors.items() if "running" in k}
        former = last.get(id(self), own)
        last[id(self)] = own
        return of(self, {**tensors, **former}, *arguments, **live)

    patch.setattr(BatchNorm, "of", stale)


def statistics_of_the_model(patch):
    of = BatchNorm.of

    def own(self, tensors, *arguments, **live):
        kept = {k: t for k, t in tensors.items() if "running" not in k}
        return of(self, kept, *arguments, **live)

    patch.setattr(BatchNorm, "of", own)


STORES = [
    (stored_before_the_update, test_collector.test_draws_are_the_model_after_the_step),
    (alias_of_the_parameter, test_collector.test_a_draw_is_a_copy),
    (no_sign_stored, test_collector.test_signs_of_hmcecs_are_weights),
]
PREDICTIONS = [
    (no_sign_in_averages, test_predict.test_signed_draws_give_ratios),
    (
        no_weight_in_sums,
        test_predict.test_mean_variance_and_quantiles_of_outputs_with_weights,
    ),
    (one_draw_too_many_in_the_mean, test_predict.test_mean_and_entropies_of_classes),
    (buffers_of_the_draw_before, test_predict.test_batch_norm_of_the_draw),
    (statistics_of_the_model, test_predict.test_batch_norm_of_the_draw),
]


@pytest.mark.full
@pytest.mark.parametrize(("mutant", "test"), STORES)
def test_stores(mutant, test, tmp_path, monkeypatch):
    test(tmp_path / "right")
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test(tmp_path / "wrong")


@pytest.mark.filterwarnings("ignore:The model has batch norm")
@pytest.mark.parametrize(("mutant", "test"), PREDICTIONS)
def test_predictions(mutant, test, monkeypatch):
    test()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test()
