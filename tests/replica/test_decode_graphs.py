"""Which batch sizes decode graphs are recorded for; what they compute is in `tests/kernels/triton`."""

import pytest

from replica.decode_graphs import ladder


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (4, (1, 2, 4)),
        (5, (1, 2, 4, 5)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
    ],
)
def test_ladder(most, sizes):
    assert ladder(most) == sizes
