"""The block-sparse executor in a form of the test's choice, and its inputs."""

import jax.numpy as jnp
import numpy as np

from hpnlp.ops.attention import Full, Operands, flash


def attend_in_form(form, q, k, v, mask=Full(), *, block_size=None, **operands):  # noqa: B008  (frozen)
    """`attend(..., impl="xla")` in one form of the executor, whatever the call costs there."""
    return flash(q, k, v, mask, Operands(**operands), form=form, block_size=block_size)


def arrays(t=37, s=None, n=4, k=2, dtype=jnp.float32, seed=0):
    """Random q, k and v: B 2, H 8, values of 6 features."""
    rng = np.random.default_rng(seed)
    s = t if s is None else s
    return [jnp.asarray(rng.standard_normal(x).astype(dtype)) for x in ((2, t, n, 8), (2, s, k, 8), (2, s, k, 6))]
