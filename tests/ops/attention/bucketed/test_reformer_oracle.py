"""Shared queries and keys, and the hash, against the Reformer of transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.bucketed import BucketSettings, bucketed_attention, lsh_buckets, unit_vectors

torch = pytest.importorskip("torch")
reformer = pytest.importorskip("transformers.models.reformer.modeling_reformer")

pytestmark = pytest.mark.oracle


def layer(**fields):
    config = reformer.ReformerConfig(
        attn_layers=["lsh"], hidden_size=16, num_attention_heads=1, attention_head_size=16, num_hashes=3, num_buckets=8,
        hash_seed=0, lsh_attention_probs_dropout_prob=0.0, **fields,
    )  # fmt: skip
    torch.manual_seed(1)
    return reformer.LSHSelfAttention(config).eval()


@pytest.mark.parametrize("causal", [True, False])
def test_one_bucket_matches_attention_with_shared_queries_and_keys(causal):
    """transformers attends to all tokens where a chunk holds the sequence, with the same scores and self mask."""
    module = layer(lsh_attn_chunk_length=64, is_decoder=causal)
    x = torch.randn(2, 21, 16)
    with torch.no_grad():
        expected = module(x).hidden_states
        q, v = (jnp.asarray(project(x).numpy())[:, :, None] for project in (module.query_key, module.value))
    buckets = jnp.zeros((2, 21, 1, 1), jnp.int32)
    o = bucketed_attention(q, unit_vectors(q), v, buckets, BucketSettings(21, causal, hides_self=True, scale=1.0))
    np.testing.assert_allclose(o[:, :, 0], expected.numpy(), atol=2e-5)


def test_hash_matches_with_the_same_rotations():
    module, x = layer(lsh_attn_chunk_length=8), torch.randn(2, 1, 50, 16)
    numbered = module._hash_vectors(x, 3, None).reshape(2, 3, 50).numpy()
    torch.manual_seed(0)
    rotations = torch.randn(1, 16, 3, 4)[0].permute(1, 0, 2).numpy()
    buckets = lsh_buckets(x[:, 0].numpy(), rotations)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(buckets), 2, 1), numbered % 8)
