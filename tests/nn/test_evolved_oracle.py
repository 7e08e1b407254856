"""Cells of the Evolved Transformer against layers of torch, put together as So et al. 2019, fig. 3, and tensor2tensor do.

The feed-forward networks are those of any Block, with relu in both cells: the published decoder cell has a swish, and a norm
between its activation and its second matrix.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL
from hpnlp.nn.attention import Context, Memory
from hpnlp.nn.block import BlockConfig
from hpnlp.nn.blocks import block_kind
from hpnlp.ops.attention import Causal, Full
from hpnlp.spec import Spec
from tests.contracts import once
from tests.drawn import drawn
from tests.models.test_encoder_oracle import torch  # noqa: F401  (fixture)

pytestmark = pytest.mark.oracle

B, T, S, D, HEADS, HIDDEN, EPS = 2, 13, 5, 16, 2, 24, 1e-6


class Cell:
    """Layers of torch with the parameters of a Block."""

    def __init__(self, library, params):
        self.torch, self.params = library, params

    def norm(self, name, x):
        p = self.params["convolutions"]["inner_norm"] if name == "inner_norm" else self.params[name]
        return self.torch.nn.functional.layer_norm(x, x.shape[-1:], p["scale"], p["bias"], EPS)

    def conv(self, name, taps):
        return self.params["convolutions"][name]["kernel"].reshape(taps, -1, self.outputs(name))

    def outputs(self, name):
        return self.params["convolutions"][name]["kernel"].shape[1]

    def convolve(self, x, kernel, padding, groups=1):
        """kernel: [outputs, inputs / groups, taps], taps of earlier tokens first; padding: zeros before and after."""
        x = self.torch.nn.functional.pad(x.transpose(1, 2), padding)
        return self.torch.nn.functional.conv1d(x, kernel, groups=groups).transpose(1, 2)

    def separable(self, x, taps, pointwise, padding):
        taps = self.params["convolutions"][taps]
        depthwise = taps.flip(0).T[:, None]
        x = self.convolve(x, depthwise, padding, groups=x.shape[-1])
        return x @ self.params["convolutions"][pointwise]["kernel"]

    def attend(self, name, x, memory, mask, heads):
        """torch.nn.MultiheadAttention with the matrices of an Attention; mask is True where a token is hidden."""
        library, p = self.torch, self.params[name]
        width, depth = p["q"]["kernel"].shape[1], memory.shape[-1]
        layer = library.nn.MultiheadAttention(width, heads, bias=False, kdim=depth, vdim=depth, batch_first=True)
        matrices = {f"{part}_proj_weight": p[part]["kernel"].T for part in "qkv"}
        if depth == width:
            matrices = {"in_proj_weight": library.cat([p[part]["kernel"].T for part in "qkv"])}
        layer.load_state_dict({**matrices, "out_proj.weight": p["out"]["kernel"].T})
        return layer.double()(x, memory, memory, attn_mask=mask, need_weights=False)[0]

    def feed(self, x):
        p = self.params["mlp"]
        h = self.torch.relu(self.norm("feed_norm", x) @ p["up"]["kernel"])
        return x + h @ p["down"]["kernel"]

    def padded(self, x, features):
        return self.torch.nn.functional.pad(x, (0, features - x.shape[-1]))

    def sides(self, width, causal):
        """Zeros before and after a sequence, for a convolution that is causal or centred."""
        return (width - 1, 0) if causal else (width // 2, width // 2)

    def encoder(self, x, causal):
        f, p = self.torch.nn.functional, self.params
        h = self.norm("glu_norm", x)
        x = x + f.glu(self.torch.cat([h @ p["glu_value"]["kernel"], h @ p["glu_gate"]["kernel"]], -1), dim=-1)
        h = self.norm("conv_norm", x)
        kernel = self.conv("narrow", 3).flip(0).permute(2, 1, 0)
        right = f.relu(self.convolve(h, kernel, self.sides(3, causal)))
        h = f.relu(h @ p["convolutions"]["wide"]["kernel"]) + self.padded(right, 4 * D)
        h = self.separable(self.norm("inner_norm", h), "taps", "out", self.sides(9, causal))
        x = x + self.padded(h, D)
        h = self.norm("mix_norm", x)
        return self.feed(x + self.attend("attention", h, h, self.hidden(causal), HEADS))

    def decoder(self, x, causal, memory):
        f = self.torch.nn.functional
        h = self.norm("wide_norm", x)
        left = self.attend("wide_attention", h, h, self.hidden(causal), 2 * HEADS)
        x = x + left + self.attend("first_cross_attention", h, memory, None, HEADS)
        h = self.norm("conv_norm", x)
        left = f.relu(self.separable(h, "wide_taps", "wide", self.sides(11, causal)))
        right = self.separable(h, "narrow_taps", "narrow", self.sides(7, causal))
        h = self.norm("inner_norm", left + self.padded(right, 2 * D))
        x = x + self.separable(h, "taps", "out", self.sides(7, causal))
        h = self.norm("mix_norm", x)
        x = x + self.attend("attention", h, h, self.hidden(causal), HEADS)
        h = self.norm("read_norm", x)
        return self.feed(x + self.attend("cross_attention", h, memory, None, HEADS))

    def hidden(self, causal):
        return self.torch.ones(T, T).triu(1).bool() if causal else None


@pytest.mark.parametrize(
    ("block", "mask"),
    [("evolved_encoder", Full()), ("evolved_encoder", Causal()), ("evolved_decoder", Causal())],
    ids=str,
)
def test_cells_match_layers_of_torch(block, mask, torch):  # noqa: F811
    memory_dim = 6 if block == "evolved_decoder" else 0
    config = BlockConfig(
        dim=D, heads=HEADS, block=block, mlp="relu", mlp_dim=HIDDEN, position="none", norm="layer", norm_eps=EPS,
        memory_dim=memory_dim,
    )  # fmt: skip
    kind = block_kind(block)
    module = kind.make(kind.resolved(config), nn.initializers.normal(0.3), Spec("full"), NO_TENSOR_PARALLEL)
    rng = np.random.default_rng(0)
    x, states = (rng.standard_normal((B, n, d)).astype(np.float32) for n, d in ((T, D), (S, memory_dim)))
    segments = jnp.ones((B, T), jnp.int32)
    memory = Memory(jnp.asarray(states), segments[:, :S]) if memory_dim else None
    context = Context(jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)), segments, mask, memory=memory)
    shapes = nn.meta.unbox(jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.asarray(x), context)))
    params = drawn(shapes, 0.3)
    actual = once(lambda params, x: module.apply(params, x, context)[0], params, jnp.asarray(x))

    cell = Cell(torch, jax.tree.map(lambda leaf: torch.from_numpy(np.array(leaf, np.float64)), params["params"]))
    inputs, causal = torch.from_numpy(x).double(), mask == Causal()
    arguments = (inputs, causal, torch.from_numpy(states).double()) if memory_dim else (inputs, causal)
    expected = (cell.decoder if memory_dim else cell.encoder)(*arguments)
    np.testing.assert_allclose(actual, expected.detach().numpy(), atol=2e-5, rtol=2e-5)
