"""attend as the oracles meet it."""

import functools

import pytest

from hpnlp.ops.attention import attend, orders, panels


@pytest.fixture(params=["panels", "visits", "parts"])
def blockwise(request, monkeypatch):
    """`attend` in blocks of 16, in each form that the executor chooses among by cost.

    Panels; the visits of one block plan; and all parts of a mask that may run in an order of their own doing so.
    """
    orders.parts.cache_clear(), orders._cost.cache_clear()
    if request.param != "panels":
        monkeypatch.setattr(panels, "PAIRS", 0)
    if request.param == "parts":
        monkeypatch.setattr(orders, "MERGING", -1e9)
        monkeypatch.setattr(orders, "FOLDING", -1e9)
    yield functools.partial(attend, impl="xla", block_size=16)
    orders.parts.cache_clear(), orders._cost.cache_clear()
