"""Linear attention: the reference of each mixer, with a matrix of all pairs of tokens."""

import jax
import jax.numpy as jnp

from hpnlp.ops.attention import Causal
from hpnlp.ops.attention.linear import reference_linear_attention


def linear(mixing, arrays, params, mask, segment_ids):
    """Weights (elu(q) + 1)^T (elu(k) + 1) over their sum."""
    q, k, v = (arrays[name].astype(jnp.float32) for name in "qkv")
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    options = {"causal": mask == Causal(), "normalize": True, "segment_ids": segment_ids}
    return reference_linear_attention(q, k, v, **options).astype(arrays["v"].dtype)


EXAMPLES = {"linear": ("linear(8)",)}
REFERENCES = {"linear": linear}
