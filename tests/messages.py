"""Expectations of errors in one line; wording is checked as far as it names the argument, its value and what was expected."""

import pytest

from hpnlp.types import InputError


def raises(message, function, /, *args, **kwargs):
    """Checks that `function(*args, **kwargs)` raises InputError with a message that matches."""
    with pytest.raises(InputError, match=message):
        function(*args, **kwargs)
