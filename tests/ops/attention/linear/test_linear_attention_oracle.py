"""Linear attention against the gated delta rule of transformers, and loops in torch by the equations of the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention.linear import linear_attention, linear_attention_step

pytestmark = pytest.mark.oracle

B, T, N, H = 2, 70, 3, 16


@pytest.fixture(scope="module", autouse=True)
def torch():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return torch


def arrays():
    """q, keys of length 1, v, a cotangent, decays by token and by feature, and step sizes, float32."""
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, B, T, N, H))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = -rng.random((B, T, N)), -rng.random((B, T, N, H)) / 4, rng.random((B, T, N))
    return [x.astype(np.float32) for x in (q, k, v, do, *gates)]


def retention(torch, q, k, v):
    """Sun et al. 2023, eq. 6: S_n = gamma S_{n-1} + K_n^T V_n."""
    gamma = 1 - 2.0 ** (-5 - torch.arange(N, dtype=torch.float64))
    state, outputs = 0, []
    for t in range(T):
        state = gamma[:, None, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bnm,bnmh->bnh", q[:, t], state))
    return torch.stack(outputs, 1)


def gla(torch, q, k, v, log_decay):
    """Yang et al. 2023, eq. 3: S_t = diag(a_t) S_{t-1} + k_t^T v_t."""
    state, outputs = 0, []
    for t in range(T):
        state = log_decay[:, t].exp()[..., None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bnm,bnmh->bnh", q[:, t], state))
    return torch.stack(outputs, 1)


def gated_delta(form):
    def call(torch, q, k, v, log_decay, beta):
        qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
        rule = getattr(qwen, f"torch_{form}_gated_delta_rule")
        more = {"initial_state": None, "output_final_state": False} if form == "recurrent" else {}
        return rule(q * H**0.5, k, v, log_decay, beta, **more)[0]

    return call


CASES = {
    "retention": (retention, (), np.float64),
    "gla": (gla, (5,), np.float64),
    "gated_delta, chunk": (gated_delta("chunk"), (4, 6), np.float32),
    "gated_delta, recurrent": (gated_delta("recurrent"), (4, 6), np.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_match(name, torch):
    function, places, dtype = CASES[name]
    values = arrays()
    qkv, do, gates = values[:3], values[3], [values[i] for i in places]
    theirs = [torch.from_numpy(x.astype(dtype)).requires_grad_() for x in (*qkv, *gates)]
    o = function(torch, *theirs)
    expected = o, *torch.autograd.grad(o, theirs, torch.from_numpy(do.astype(dtype)))

    def ours(q, k, v, *gates):
        log_decay = gates[0] if gates else jnp.log1p(-(2.0 ** (-5 - jnp.arange(N, dtype=jnp.float32))))
        return linear_attention(q, k, v, log_decay=log_decay, beta=gates[1] if len(gates) > 1 else None, chunk=32)

    def run(*operands):
        o, pull = jax.vjp(ours, *operands)
        return o, *pull(jnp.asarray(do))

    for a, b in zip(jax.jit(run)(*qkv, *gates), expected, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), atol=1e-4, rtol=1e-4)


def test_states_match(torch):
    """The state after the sequence, and a further token, are those of transformers."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    values = arrays()
    q, k, v, log_decay, beta = (values[i] for i in (0, 1, 2, 4, 6))
    theirs = [torch.from_numpy(x) for x in (q * H**0.5, k, v, log_decay, beta)]
    o, expected = qwen.torch_recurrent_gated_delta_rule(*theirs, initial_state=None, output_final_state=True)

    def ours(q, k, v, log_decay, beta):
        before = (x[:, :-1] for x in (q, k, v))
        options = {"log_decay": log_decay[:, :-1], "beta": beta[:, :-1], "return_state": True}
        _, state = linear_attention(*before, **options)
        last = (x[:, -1] for x in (q, k, v))
        return linear_attention_step(*last, state, log_decay=log_decay[:, -1], beta=beta[:, -1])

    last, state = jax.jit(ours)(q, k, v, log_decay, beta)
    np.testing.assert_allclose(state.s, expected.numpy(), atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(last, o[:, -1].numpy(), atol=1e-4, rtol=1e-4)
