"""Attention with random features against formulas of the papers in torch, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.linear.random_attention import random_feature_attention, rfa_attention
from hpnlp.ops.attention.linear.random_features import random_projections

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle


def operands(heads=2, length=17, dim=8):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, length, heads, dim)).astype(np.float32) for _ in range(3))
    w = np.asarray(random_projections(jax.random.key(0), 24, dim))
    return q, k, v, w, [torch.tensor(x, dtype=torch.float64) for x in (q, k, v, w)]


def mean_of_values(phi_q, phi_k, v, causal):
    weights = torch.einsum("btnm,bsnm->bnts", phi_q, phi_k)
    weights = weights.tril() if causal else weights
    return torch.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdim=True), v)


@pytest.mark.parametrize("causal", [True, False])
def test_favor_matches_its_formula(causal):
    """Choromanski et al. 2021, lemma 1 and eq. 4, where causal attention takes sums over preceding keys (eq. 14)."""
    q, k, v, w, (tq, tk, tv, tw) = operands()

    def phi(x):
        x = x / x.shape[-1] ** 0.25
        return torch.exp(x @ tw.T - (x**2).sum(-1, keepdim=True) / 2) / len(tw) ** 0.5

    expected = mean_of_values(phi(tq), phi(tk), tv, causal)
    actual = random_feature_attention(q, k, v, jnp.asarray(w), causal=causal)
    np.testing.assert_allclose(actual, expected.numpy(), atol=2e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_rfa_matches_its_formula(causal):
    """Peng et al. 2021, eq. 5: features of unit queries and keys, of which weights happen to be positive here."""
    q, k, v, w, (tq, tk, tv, tw) = operands()

    def phi(x):
        angles = torch.nn.functional.normalize(x, dim=-1) @ tw.T
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    expected = mean_of_values(phi(tq), phi(tk), tv, causal)
    actual = rfa_attention(q, k, v, jnp.asarray(w), causal=causal)
    np.testing.assert_allclose(actual, expected.numpy(), atol=2e-5)
