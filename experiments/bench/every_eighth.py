"""A plugin of pytest for `commits.py`: every eighth test that a tree has, in the order of their names."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.nodeid)
    items[:] = items[3::8]
