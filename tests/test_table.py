"""Tables that import an entry when it is first read."""

import importlib
import subprocess
import sys

import pytest

from hpnlp.table import Table


def test_entries_are_imported_when_they_are_read():
    program = """
import sys
from hpnlp.table import Table
table = Table({"a": "colorsys:rgb_to_hsv", "b": "no.such.module:x"})
assert list(table) == ["a", "b"] and len(table) == 2 and "b" in table and "colorsys" not in sys.modules
table["a"], table.get("c")
assert "colorsys" in sys.modules and list(table.read()) == ["a"]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_entry_is_finished_once():
    made = []
    table = Table({"a": "colorsys:hsv_to_rgb"}, finish=lambda name, entry: made.append(name) or (name, entry))
    import colorsys

    assert table["a"] is table["a"] and table["a"] == ("a", colorsys.hsv_to_rgb) and made == ["a"]


def test_entries_are_set_and_deleted(monkeypatch):
    table = Table({"a": "colorsys:hsv_to_rgb", "c": sum})
    with monkeypatch.context() as patch:
        patch.setitem(table, "b", max)
        patch.setitem(table, "a", min)
        assert dict(table) == {"a": min, "b": max, "c": sum}
    assert "b" not in table and table["a"].__name__ == "hsv_to_rgb"
    assert table | {"a": min} == {"a": min, "c": sum}
    table |= {"d": max}
    del table["c"], table["d"]
    assert list(table) == ["a"]


def test_an_unknown_name_is_a_key_error():
    with pytest.raises(KeyError, match="x"):
        Table({})["x"]


@pytest.mark.parametrize("name", ["hpnlp.data", "hpnlp.data.examples", "hpnlp.report"])
def test_a_package_exports_the_names_that_it_lists(name):
    package = importlib.import_module(name)
    for exported in package.__all__:
        assert getattr(package, exported).__module__.startswith(name)
    with pytest.raises(AttributeError, match=f"'{name}' has no attribute 'absent'"):
        package.absent  # noqa: B018
