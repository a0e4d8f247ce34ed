"""Independent minibatches: their law and their counters."""

import copy
import pickle

import numpy as np
import pytest
import torch
from harness import minibatches
from harness.philox import philox
from harness.statistics import StatisticalError
from torch.utils.data import DataLoader, TensorDataset

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C


def by_library(num_data, n, count):
    return sg.IndependentBatchSampler(num_data, n, seed=1).draw(count).numpy()


def test_minibatches_are_uniform():
    minibatches.check_uniform(by_library)


def test_minibatches_are_independent():
    minibatches.check_independent(by_library)


def test_bugs_of_uniform_minibatches_are_caught():
    def repeating(num_data, n, count):
        batches = sg.IndependentBatchSampler(num_data, n, replacement=True, seed=1)
        return batches.draw(count).numpy()

    def by_epochs(num_data, n, count):
        random, per_epoch = np.random.default_rng(0), num_data // n
        epochs = [random.permutation(num_data) for _ in range(count // per_epoch + 1)]
        return np.concatenate(epochs).reshape(-1, n)[:count]

    with pytest.raises(StatisticalError):
        minibatches.check_uniform(repeating)
    with pytest.raises(StatisticalError):
        minibatches.check_independent(by_epochs)


def test_with_replacement():
    batches = sg.IndependentBatchSampler(3, 2, replacement=True, seed=2).draw(20_000)
    pairs = torch.bincount(3 * batches[:, 0] + batches[:, 1], minlength=9)
    expected = 20_000 / 9
    # χ² of 8 degrees of freedom: beyond 39.9 once in 3·10⁵ samplers that are right.
    assert float(((pairs - expected) ** 2 / expected).sum()) < 39.9
    assert sg.IndependentBatchSampler(3, 50, replacement=True).draw(1).shape == (1, 50)


def test_draws_follow_the_counter_layout():
    """An index is a 64-bit number modulo what is left, in a partial shuffle."""
    num_data, n, seed, step = 1000, 7, -5, 3
    counters = [
        [(i << 16) % 2**32, i >> 16, step, _C.Purpose.MINIBATCH << 16] for i in range(n)
    ]
    key = (seed % 2**32, (seed >> 32) % 2**32)
    words = philox(np.array(counters, dtype=np.uint64), key)
    order = list(range(num_data))
    for i in range(n):
        j = i + (int(words[i, 0]) << 32 | int(words[i, 1])) % (num_data - i)
        order[i], order[j] = order[j], order[i]
    sampler = sg.IndependentBatchSampler(num_data, n, seed=seed)
    assert sampler.draw(step + 1)[step].tolist() == order[:n]


def test_draws_never_change():
    # tests/cpp/optim_test.cpp expects the same of C++.
    uniform = sg.IndependentBatchSampler(10, 4, seed=-1)
    assert uniform.draw(3)[2].tolist() == [6, 0, 2, 5]
    repeated = sg.IndependentBatchSampler(10, 4, replacement=True, seed=-1)
    assert repeated.draw(3)[2].tolist() == [6, 3, 0, 5]
    second = {"seed": -1, "num_replicas": 2, "rank": 1}
    uniform = sg.IndependentBatchSampler(10, 4, **second)
    assert uniform.draw(3)[2].tolist() == [0, 5]
    repeated = sg.IndependentBatchSampler(10, 4, replacement=True, **second)
    assert repeated.draw(3)[2].tolist() == [3, 5]


def both(**options):
    return [
        sg.IndependentBatchSampler(40, 6, **options),
        sg.IndependentBatchSampler(40, 6, replacement=True, **options),
    ]


def test_iterations_resume_with_new_draws():
    for sampler, other in zip(both(seed=3), both(seed=3), strict=True):
        assert len(sampler) == 7  # 40 / 6, rounded up
        epochs = [list(sampler) for _ in range(3)]
        assert [len(e) for e in epochs] == [7, 7, 7]
        assert [*epochs[0], *epochs[1], *epochs[2]] == other.draw(21).tolist()
        assert sampler.num_drawn == 21
        assert all(isinstance(i, int) for i in epochs[0][0])
    for sampler in both(seed=3, num_batches=2):
        assert len(sampler) == len(list(sampler)) == 2


def test_an_abandoned_iteration_restarts():
    for sampler, other in zip(both(seed=3), both(seed=3), strict=True):
        for _ in zip(range(3), sampler, strict=False):
            pass
        drawn = sampler.num_drawn
        assert len(list(sampler)) == 7
        assert sampler.num_drawn == drawn + 7
        # Two iterations at a time share the draws, and not their places.
        pairs = list(zip(other, other, strict=True))
        assert len(pairs) == 7 and other.num_drawn == 14


def test_seeds():
    for a, b, c in zip(both(seed=3), both(seed=4), both(seed=-3), strict=True):
        assert len({str(s.draw(2).tolist()) for s in (a, b, c)}) == 3
    torch.manual_seed(1)
    first = both()[0].draw(2)
    torch.manual_seed(1)
    assert torch.equal(both()[0].draw(2), first)


@pytest.mark.parametrize("place", [0, 3, 7, 10])
def test_resumes_in_the_middle_of_an_iteration(place):
    for sampler, other in zip(both(seed=3), both(seed=99), strict=True):
        expected = [b for _ in range(3) for b in sampler][place:]
        fresh = copy.deepcopy(other)
        fresh.load_state_dict({"seed": 3, "num_drawn": 0, "position": 0})
        left = place
        while left > 0:
            for _ in fresh:
                left -= 1
                if left == 0:
                    break
        state = pickle.loads(pickle.dumps(fresh.state_dict()))
        other.load_state_dict(state)
        rest = list(other)
        assert len(rest) == 7 - place % 7
        while len(rest) < len(expected):
            rest += list(other)
        assert rest == expected


def test_in_a_data_loader():
    data = TensorDataset(torch.arange(40))
    for workers in (0, 2):
        for sampler, other in zip(both(seed=5), both(seed=5), strict=True):
            loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
            assert len(loader) == 7
            seen = [batch for _ in range(2) for (batch,) in loader]
            assert torch.equal(torch.stack(seen), other.draw(14))


def test_minibatches_by_their_numbers():
    parts = {"num_replicas": 2, "rank": 1}
    for options in ({}, parts):
        for sampler in both(seed=3, **options):
            drawn = sampler.draw(9)
            before = sampler.state_dict()
            for numbers in ([0], [8, 0, 1, 2, 2, 7, 6], torch.arange(3, 8)):
                assert torch.equal(sampler.at(numbers), drawn[numbers])
            assert sampler.state_dict() == before


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_have_the_minibatches_of_one_process(ranks):
    parts = [both(seed=3, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    for whole, *of_ranks in zip(both(seed=3), *parts, strict=True):
        for _ in range(2):
            drawn = [part.draw(5) for part in of_ranks]
            assert {part.shape for part in drawn} == {(5, 6 // ranks)}
            assert torch.equal(torch.stack(drawn, 2).flatten(1), whole.draw(5))
    with_replacement = [
        sg.IndependentBatchSampler(3, 6, replacement=True, seed=3, **rank).draw(2)
        for rank in ({}, *({"num_replicas": 2, "rank": rank} for rank in range(2)))
    ]
    whole, *drawn = with_replacement
    assert torch.equal(torch.stack(drawn, 2).flatten(1), whole)


def test_a_state_dict_equals_that_of_any_number_of_ranks():
    for whole, part in zip(
        both(seed=3), both(seed=9, num_replicas=2, rank=1), strict=True
    ):
        iteration = iter(whole)
        for _ in range(3):
            next(iteration)
        part.load_state_dict(whole.state_dict())
        assert part.state_dict() == whole.state_dict()
        assert list(part) == [batch[1::2] for batch in iteration]
        assert part.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: sg.IndependentBatchSampler(0, 1), ValueError,
         "Invalid num_data: 0 (must be >= 1)"),
        (lambda: sg.IndependentBatchSampler(3.0, 1), TypeError,
         "Invalid num_data: 3.0 (must be an int, got float)"),
        (lambda: sg.IndependentBatchSampler(3, 0, replacement=True), ValueError,
         "Invalid batch_size: 0 (must be >= 1)"),
        (lambda: sg.IndependentBatchSampler(3, 4), ValueError,
         "Invalid batch_size: 4 (must be <= num_data = 3 without replacement)"),
        (lambda: sg.IndependentBatchSampler(3, 1, replacement=1), TypeError,
         "Invalid replacement: 1 (must be a bool)"),
        (lambda: sg.IndependentBatchSampler(3, 1, num_batches=0), ValueError,
         "Invalid num_batches: 0 (must be >= 1)"),
        (lambda: sg.IndependentBatchSampler(3, 1, seed=2**63), ValueError,
         f"Invalid seed: {2**63} (must fit in 64 bits)"),
        (lambda: sg.IndependentBatchSampler(3, 1).draw(0), ValueError,
         "Invalid count: 0 (must be >= 1)"),
        (lambda: sg.IndependentBatchSampler(3, 1).at([]), ValueError,
         "Invalid numbers: shape [0] (must be one row, not empty)"),
        (lambda: sg.IndependentBatchSampler(2, 1).at([2, -1]), ValueError,
         "Invalid number: -1 (must be >= 0)"),
        (lambda: sg.IndependentBatchSampler(3, 1).at([0.5]), TypeError,
         "Invalid number: 0.5 (must be an int, got float)"),
        (lambda: sg.IndependentBatchSampler(30, 10, seed=0, num_replicas=4), ValueError,
         "Invalid batch_size: 10 (must be a multiple of num_replicas = 4: gradients "
         "of ranks enter their mean alike)"),
        (lambda: sg.IndependentBatchSampler(30, 9, seed=0, num_replicas=3, rank=3),
         ValueError, "Invalid rank: 3 (must be below num_replicas = 3)"),
        (lambda: sg.IndependentBatchSampler(30, 9, seed=0, num_replicas=0), ValueError,
         "Invalid num_replicas: 0 (must be >= 1)"),
        (lambda: sg.IndependentBatchSampler(2, 2, num_replicas=2), ValueError,
         "Invalid seed: None (the ranks of one minibatch need one seed, the "
         "sampler's for instance: seed=sampler.seed)"),
    ],
)  # fmt: skip
def test_errors(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message


def test_a_bad_state_dict_changes_nothing():
    for sampler in both(seed=3):
        sampler.draw(2)
        before = sampler.state_dict()
        for key, value, message in (
            ("seed", 2**64, f"Invalid seed: {2**64} (must fit in 64 bits)"),
            ("num_drawn", -1, "Invalid num_drawn: -1 (must be >= 0)"),
            ("position", -1, "Invalid position: -1 (must be >= 0)"),
            ("position", 7, "Invalid position: 7 (must be below num_batches = 7)"),
        ):
            with pytest.raises(ValueError) as error:
                sampler.load_state_dict({**before, key: value})
            assert str(error.value) == message
            assert sampler.state_dict() == before
            assert len(list(copy.deepcopy(sampler))) == 7
