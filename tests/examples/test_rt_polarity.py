"""The film reviews: how they are read, split and batched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from examples import rt_polarity
from examples.rt_polarity import Review
from examples.training import InputError

REAL = Path(os.environ.get("FASTATTN_DATA") or Path(__file__).parents[3] / "shared" / "data") / "rt-polarity"


def test_the_split_is_complete_and_seeded():
    train, test = rt_polarity.load(rt_polarity.TINY, seed=0, test_share=0.25)
    assert (len(train), len(test)) == (30, 10)
    assert len({*train, *test}) == 40
    assert sum(review.label for review in test) == 5
    assert [review.label for review in train] != sorted(review.label for review in train)
    assert rt_polarity.load(rt_polarity.TINY, seed=0, test_share=0.25) == (train, test)
    assert {*rt_polarity.load(rt_polarity.TINY, seed=1, test_share=0.25)[1]} != {*test}


def test_labels_and_encoding():
    reviews = [review for part in rt_polarity.load(rt_polarity.TINY, seed=0) for review in part]
    assert Review("a charming café comedy with a big heart .", 1) in reviews
    assert Review("a bland café comedy without a single laugh .", 0) in reviews


def test_lines_end_where_they_do(tmp_path):
    (tmp_path / "rt-polarity.neg").write_bytes(b"one\x85two\n\n  \nthree \r\n")
    (tmp_path / "rt-polarity.pos").write_bytes(b"four\nfive")
    train, test = rt_polarity.load(tmp_path, seed=0, test_share=0.5)
    assert sorted(train + test) == [("five", 1), ("four", 1), ("one\x85two", 0), ("three", 0)]
    with pytest.raises(InputError, match="must have sentences for training and for testing, got 4 and 0"):
        rt_polarity.load(tmp_path, seed=0, test_share=0.1)


def test_files_that_are_missing_or_empty(tmp_path):
    with pytest.raises(InputError, match=r"rt-polarity.neg must be a file with a sentence a line, got No such file"):
        rt_polarity.load(tmp_path, seed=0)
    (tmp_path / "rt-polarity.neg").write_text("\n \n")
    with pytest.raises(InputError, match=r"rt-polarity.neg must have at least one sentence, got none"):
        rt_polarity.load(tmp_path, seed=0)


def test_batches_hold_every_review_once_and_alike_lengths_together():
    reviews = [Review("x" * (1 + i * 7 % 100), i % 2) for i in range(203)]
    batches = rt_polarity.batches(reviews, 8, torch.Generator().manual_seed(0))
    assert sorted(review for batch in batches for review in batch) == sorted(reviews)
    assert sorted(map(len, batches)) == [3] + [8] * 25
    assert max(len(batch[-1].text) - len(batch[0].text) for batch in batches) <= 8
    lengths = [len(batch[0].text) for batch in batches]
    assert lengths != sorted(lengths)
    assert batches == rt_polarity.batches(reviews, 8, torch.Generator().manual_seed(0))
    assert batches != rt_polarity.batches(reviews, 8, torch.Generator().manual_seed(1))


def test_accuracy_and_loss():
    reviews = [Review("good", 1), Review("bad", 0), Review("good", 0), Review("bad", 0), Review("good", 1)]

    def logits(texts: list[str]) -> tuple[torch.Tensor, int]:
        return torch.tensor([[0.0, 2.0] if text == "good" else [2.0, 0.0] for text in texts]), 3 * len(texts)

    assert rt_polarity.accuracy(logits, reviews, batch_size=2) == 4 / 5
    loss = rt_polarity.loss(logits, reviews)
    right, wrong = torch.tensor([-2.0, 2.0]).exp().log1p()
    torch.testing.assert_close(loss.mean, (4 * right + wrong) / 5)
    assert (loss.count, loss.tokens) == (5, 15)


@pytest.mark.skipif(not REAL.is_dir(), reason=f"needs the rt-polarity data in {REAL}")
def test_the_real_data():
    train, test = rt_polarity.load(REAL, seed=0)
    assert (len(train), len(test)) == (2 * 4798, 2 * 533)
    assert sum(review.label for review in train) == 4798
