"""The block-sparse executor in a form of the test's choice."""

from hpnlp.ops.attention import Full, Operands, flash


def attend_in_form(form, q, k, v, mask=Full(), *, block_size=None, **operands):  # noqa: B008  (frozen)
    """`attend(..., impl="xla")` in one form of the executor, whatever the call costs there."""
    return flash(q, k, v, mask, Operands(**operands), form=form, block_size=block_size)
