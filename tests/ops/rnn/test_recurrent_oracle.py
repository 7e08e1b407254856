"""Recurrent layers equal those of torch, of flax and of `jax.experimental.rnn` with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import rnn

from hpnlp.ops.rnn import gru, lstm
from hpnlp.ops.rnn.cudnn import flat_weights
from tests.contracts import assert_close
from tests.ops.rnn.cases import B, D, H, T

pytestmark = pytest.mark.oracle
LENGTHS = np.array([7, 4, 2], np.int32)


def weights_of(layer, suffix):
    """`(w, u, b of the inputs, b of the state)` of a torch layer."""
    names = (f"{name}_{suffix}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    w, u, b, c = (getattr(layer, name).detach().numpy() for name in names)
    return w.T, u.T, b, c


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_torch_layers_of_both_directions_with_lengths(kind):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = getattr(torch.nn, kind)(D, H, batch_first=True, bidirectional=True)
    x = torch.randn(B, T, D, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.as_tensor(LENGTHS), batch_first=True)
    y, last = layer(packed)
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=T)
    signs = torch.randn(y.shape)
    (y * signs).sum().backward()
    parts = [weights_of(layer, suffix) for suffix in ("l0", "l0_reverse")]

    def run(x, parts):
        outputs = []
        for (w, u, b, c), reverse in zip(parts, (False, True), strict=True):
            if kind == "LSTM":
                outputs.append(lstm(x, w, u, b + c, lengths=LENGTHS, reverse=reverse))
                continue
            rows = (
                np.arange(3 * H) < 2 * H
            )  # the biases of r and z are added; that of n stands within the product with r
            outputs.append(gru(x, w, u, b + jnp.where(rows, c, 0), c[2 * H :], lengths=LENGTHS, reverse=reverse))
        return jnp.concatenate([y for y, _ in outputs], axis=-1), [state for _, state in outputs]

    def loss(x, parts):
        y, states = run(x, parts)
        return (y * signs.numpy()).sum(), (y, states)

    (_, (found, states)), (dx, d_parts) = jax.value_and_grad(loss, (0, 1), has_aux=True)(x.detach().numpy(), parts)
    assert_close(found, y.detach().numpy())
    last = last if kind == "LSTM" else (last,)
    for direction, state in enumerate(states):
        assert_close(state, tuple(s[direction].detach().numpy() for s in last))
    assert_close(dx, x.grad.numpy())
    for suffix, (dw, du, *_) in zip(("l0", "l0_reverse"), d_parts, strict=True):
        for d, name in ((dw, "weight_ih"), (du, "weight_hh")):
            expected = getattr(layer, f"{name}_{suffix}").grad.numpy().T
            assert_close(np.asarray(d) / 8, expected / 8)


def test_jax_reference_of_cudnn():
    rng = np.random.default_rng(0)
    x, w, u, b = (rng.standard_normal(s).astype(np.float32) for s in ((B, T, D), (D, 4 * H), (H, 4 * H), (4 * H,)))
    h, c = (rng.standard_normal((B, H)).astype(np.float32) for _ in range(2))
    arrays = rnn.unpack_lstm_weights(flat_weights(jnp.asarray(w), jnp.asarray(u), jnp.asarray(b)), D, H, 1, False)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        y, h_last, c_last = rnn.lstm_ref(
            x, h[None], c[None], *arrays, np.full(B, T, np.int32), D, H, 1, 0.0, False
        )  # fmt: skip
    found, state = lstm(x, w, u, b, (h, c))
    assert_close((found, state), (y, (h_last[0], c_last[0])))
