"""Nystrom attention with its convolution against Nystromformer of transformers: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.low_rank.nystrom import nystrom_attend
from hpnlp.ops.attention.low_rank.value_conv import value_conv
from tests.contracts import once

pytestmark = pytest.mark.oracle


def test_matches_transformers():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.nystromformer.modeling_nystromformer")
    torch.manual_seed(0)
    config = modeling.NystromformerConfig(
        hidden_size=16, num_attention_heads=2, num_landmarks=4, segment_means_seq_len=16, conv_kernel_size=5
    )
    theirs = modeling.NystromformerSelfAttention(config).eval()
    # The start of the inverse by the largest column sum of each matrix, in place of all matrices of the batch.
    theirs.init_option = "exact"
    x = torch.randn(2, 16, 16, requires_grad=True)
    expected = theirs(x)[0]
    signs = torch.randn(expected.shape)
    (expected * signs).sum().backward()
    weights = {name: jnp.asarray(value.detach().numpy()) for name, value in theirs.named_parameters()}

    def run(x, taps):
        q, k, v = (
            (x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]).reshape(2, 16, 2, 8)
            for name in ("query", "key", "value")
        )
        o = (nystrom_attend(q, k, v, 4) + value_conv(v, taps)).reshape(2, 16, 16)
        return jnp.sum(o * signs.numpy()), o

    taps = weights["conv.weight"][:, 0, :, 0].T
    with jax.numpy_rank_promotion("allow"):
        gradients, o = once(jax.grad(run, (0, 1), has_aux=True), jnp.asarray(x.detach().numpy()), taps)
    np.testing.assert_allclose(o, expected.detach().numpy(), atol=2e-5)
    np.testing.assert_allclose(gradients[0], x.grad.numpy(), atol=2e-5)
    np.testing.assert_allclose(gradients[1], theirs.conv.weight.grad.numpy()[:, 0, :, 0].T, atol=2e-5)
