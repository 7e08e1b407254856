"""Tables of entries that are imported when they are first read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

T = TypeVar("T")


class Table(MutableMapping[str, T]):
    """Entries by name. An entry is imported when it is first read, so that a program imports only those that it uses.

        MIXERS = Table({"full": "hpnlp.nn.mixers.exact:full"})
        MIXERS["own"] = OwnMixer

    Names, the length and `in` import nothing; `values()` and `items()` import all entries.

    Args:
      entries: Name -> "module:attribute", or the entry itself.
      finish: Makes the entry from its name and the attribute, once; None for the attribute itself.
      adopt: Makes the entry from one that `table[name] = entry` sets; None for that one itself.
    """

    def __init__(
        self,
        entries: Mapping[str, str | T],
        finish: Callable[[str, Any], T] | None = None,
        adopt: Callable[[Any], T] | None = None,
    ) -> None:
        self._places = {name: entry if isinstance(entry, str) else "" for name, entry in entries.items()}
        self._finish, self._adopt = finish, adopt
        self._entries: dict[str, T] = {name: x for name, x in entries.items() if not isinstance(x, str)}

    def __getitem__(self, name: str) -> T:
        """The entry of a name, imported now if it was not before. Raises KeyError for an unknown name."""
        if name not in self._entries:
            module, _, attribute = self._places[name].partition(":")
            value = getattr(importlib.import_module(module), attribute)
            self._entries[name] = self._finish(name, value) if self._finish else value
        return self._entries[name]

    def __setitem__(self, name: str, entry: T) -> None:
        self._places.setdefault(name, "")
        self._entries[name] = self._adopt(entry) if self._adopt else entry

    def __delitem__(self, name: str) -> None:
        del self._places[name]
        self._entries.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __repr__(self) -> str:
        return f"Table({', '.join(self._places)})"

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ior__(self, other: Mapping[str, T]) -> Table[T]:  # as of a dict; MutableMapping has none
        self.update(other)
        return self

    def read(self) -> Mapping[str, T]:
        """The entries that were imported or set so far.

        Returns:
          Name -> entry.
        """
        return dict(self._entries)


def exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Makes the `__getattr__` of a package whose names are imported when they are first read.

    A program then imports the modules that it uses, and not those of all names.

    Args:
      package: `__name__` of the package.
      modules: Name -> module of the package.

    Returns:
      The function.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return find
