"""A plugin of pytest for `commits.py`: an eighth of the tests that a tree runs, by hashes of their names."""

from __future__ import annotations

import zlib

import pytest


@pytest.hookimpl(trylast=True)  # after the tests of other tiers are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % 8 == 3]
