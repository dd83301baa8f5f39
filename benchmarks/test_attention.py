"""The operation alone: fastattn's backends, torch's SDPA kernels and the naive formula."""

LEVEL = "attention"


def test_attention(time_verified, job, contender):
    time_verified(job, contender)
