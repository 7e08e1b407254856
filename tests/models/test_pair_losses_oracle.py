"""The losses of labels and grades of pairs against those of Sentence-BERT, written with torch.

`SoftmaxLoss` of sentence-transformers is a dense layer over [u; v; |u - v|] of the pooled vectors and the cross-entropy, and
`CosineSimilarityLoss` the mean squared error of torch's cosine similarity and the grade.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.pairs.dual_encoder import DualEncoder
from tests.contracts import once
from tests.models.test_dual_encoder import B, make
from tests.models.test_pair_losses import COSINE, GRADES, LABELS, SOFTMAX, labelled_batch
from tests.training.test_step import assert_leaves_close

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("fields", [SOFTMAX, COSINE], ids=["softmax", "cosine"])
def test_loss_and_gradients_match_torch(fields, is_shared):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    model, params = make(shared=is_shared, **fields)
    batch = jax.tree.map(jnp.asarray, labelled_batch(model, padding=0))
    # Its vectors are the pooled states.
    pooling = DualEncoder(dataclasses.replace(model.config, loss="softmax", classes=3))

    def states(params):
        encoded = pooling.apply({"params": params}, batch, jnp.arange(B), True, method="encode")
        return encoded.vectors[0], encoded.vectors[1][:, 0]

    vectors, pull = jax.vjp(states, params)
    u, v = (torch.tensor(np.asarray(x), requires_grad=True) for x in vectors)
    expected_classifier = {}
    if fields is SOFTMAX:
        arrays = (np.asarray(params["classifier"][name]).T for name in ("kernel", "bias"))
        weight, bias = (torch.tensor(x, requires_grad=True) for x in arrays)
        logits = functional.linear(torch.cat([u, v, torch.abs(u - v)], dim=1), weight, bias)
        total = functional.cross_entropy(logits, torch.tensor(LABELS, dtype=torch.int64), reduction="sum")
        total.backward()
        expected_classifier = {"classifier": {"kernel": weight.grad.numpy().T, "bias": bias.grad.numpy()}}
    else:
        total = functional.mse_loss(torch.cosine_similarity(u, v), torch.tensor(GRADES), reduction="sum")
        total.backward()
    (expected,) = pull(tuple(jnp.asarray(x.grad.numpy()) for x in (u, v)))
    actual, gradients = once(jax.value_and_grad(lambda p: model.apply({"params": p}, batch, method="loss").sum), params)
    np.testing.assert_allclose(actual, total.item(), rtol=1e-5)
    assert_leaves_close(gradients, jax.device_get(expected) | expected_classifier, 1e-5)
