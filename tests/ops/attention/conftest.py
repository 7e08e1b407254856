"""attend as the oracles meet it."""

import functools
import importlib

import pytest

from hpnlp.ops.attention import attend


@pytest.fixture(params=["panels", "loop"])
def blockwise(request, monkeypatch):
    """`attend` in blocks of 16, by each of the two drivers: short sequences run as panels, long ones as a loop."""
    if request.param == "loop":
        monkeypatch.setattr(importlib.import_module("hpnlp.ops.attention.flash"), "PANEL_PAIRS", 0)
    return functools.partial(attend, impl="xla", block_size=16)
