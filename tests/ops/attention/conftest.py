"""Fixtures of the block-sparse executor."""

import functools

import pytest

from hpnlp.ops.attention.block_sparse.operands import Form
from tests.ops.attention.forms import attend_in_form


@pytest.fixture(params=Form, ids=lambda form: form.value)
def form(request):
    """Each form of the executor; in the permuted one, all sub-masks that can have an order of their own do."""
    return request.param


@pytest.fixture
def blockwise(form):
    """`attend` in blocks of 16, in each form of the executor."""
    return functools.partial(attend_in_form, form, block_size=16)
