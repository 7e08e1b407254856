"""Fixtures of the block-sparse executor."""

import functools

import pytest

from hpnlp.ops.attention.block_sparse.operands import Form
from tests.ops.attention.forms import attend_in_form


@pytest.fixture(params=[Form.UNROLLED, Form.PERMUTED], ids=lambda form: form.value)
def form(request):
    """Forms of the executor. The permuted one runs scans, over all tokens where no sub-mask can have an order of its own."""
    return request.param


@pytest.fixture
def blockwise(form):
    """`attend` in blocks of 16, in each `form` of the executor."""
    return functools.partial(attend_in_form, form, block_size=16)
