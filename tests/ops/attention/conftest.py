"""attend as the oracles meet it."""

import functools

import pytest

from hpnlp.ops.attention import attend
from hpnlp.ops.attention.block_sparse import cost_model, unrolled
from tests.contracts import executor_with


@pytest.fixture(params=["panels", "visits", "parts"])
def blockwise(request):
    """`attend` in blocks of 16, in each form that the executor chooses among by cost.

    Panels; the visits of one block plan; and all parts of a mask that may run in an order of their own doing so.
    """
    changes = [] if request.param == "panels" else [(unrolled, "PAIRS", 0)]
    if request.param == "parts":
        changes += [(cost_model, name, -1e9) for name in ("MERGING", "FOLDING")]
    with executor_with(*changes):
        yield functools.partial(attend, impl="xla", block_size=16)
