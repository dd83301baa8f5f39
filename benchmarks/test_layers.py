"""Whole layers, projections included: fastattn.MultiHeadAttention and torch.nn.MultiheadAttention."""

LEVEL = "layer"


def test_layer(time_verified, job, contender):
    time_verified(job, contender)
