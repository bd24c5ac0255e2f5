"""The endless order of samples: a function of the position alone, each sample once per epoch on any mesh."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from common.data.sampler import epoch_order, samples_at
from common.data.text import lm_samples, load_text, rank_slice
from common.errors import UsageError


@pytest.mark.parametrize("samples", [1, 2, 7, 23, 1000])
def test_every_epoch_holds_every_sample_once(samples: int) -> None:
    for epoch in range(4):
        mine = samples_at(5, samples, epoch * samples, (epoch + 1) * samples)
        assert sorted(mine.tolist()) == list(range(samples))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_ranks_share_an_epoch_without_padding(world: int) -> None:
    for samples in (1, 5, 23):  # fewer than ranks, too: some then have none
        parts = [samples_at(0, samples, *rank_slice(samples, r, world)) for r in range(world)]
        assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_global_batches_are_the_same_on_every_mesh_and_across_the_ends_of_epochs() -> None:
    endless = np.concatenate([epoch_order(1, epoch, 7) for epoch in range(6)])
    for batch in (1, 3, 4, 10, 20):  # 10 and 20: a batch holds the end of several epochs
        for step in range(2):
            for world in (1, 2, 3, 8):
                cuts = [rank_slice(batch, r, world) for r in range(world)]
                parts = [samples_at(1, 7, step * batch + lo, step * batch + hi) for lo, hi in cuts]
                assert np.concatenate(parts).tolist() == endless[step * batch : (step + 1) * batch].tolist()


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    orders = [epoch_order(seed, epoch, 50).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    # no place prefers a sample: over 2000 epochs of 4 samples each comes first 500 times, give or take
    first = np.bincount([epoch_order(0, epoch, 4)[0] for epoch in range(2000)])
    assert all(abs(first - 500) < 5 * np.sqrt(2000 * 0.25 * 0.75))


def test_an_epoch_cannot_be_changed_by_its_user() -> None:
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(0, 0, 5)[0] = 1
    samples_at(0, 5, 0, 5)[0] = 99
    assert sorted(samples_at(0, 5, 0, 5).tolist()) == [0, 1, 2, 3, 4]


def test_torch_loads_batches_in_this_order() -> None:
    data = TensorDataset(torch.arange(7))
    batches = [samples_at(0, 7, 3 * t, 3 * t + 3).tolist() for t in range(4)]
    loaded = [x.tolist() for (x,) in DataLoader(data, batch_sampler=batches)]
    assert loaded == batches


@pytest.mark.parametrize(("samples", "lo", "hi"), [(0, 0, 1), (5, 3, 2), (5, -1, 2)])
def test_bad_ranges_are_refused(samples: int, lo: int, hi: int) -> None:
    with pytest.raises(UsageError, match="positions"):
        samples_at(0, samples, lo, hi)


def test_samples_of_a_text_make_every_byte_a_target_once() -> None:
    text = load_text().train[:50]
    for length in (1, 4, 7, 49):
        count = 49 // length
        tokens, targets = lm_samples(text, np.arange(count), length)
        assert tokens.flatten().tolist() == text[: count * length].tolist()
        assert targets.flatten().tolist() == text[1 : count * length + 1].tolist()
        assert lm_samples(text, np.arange(0), length)[0].shape == (0, length)
        with pytest.raises(UsageError, match=f"samples 0 to {count - 1}"):
            lm_samples(text, np.array([count]), length)
