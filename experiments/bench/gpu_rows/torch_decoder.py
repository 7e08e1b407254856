"""A language model of hpnlp in torch, with a static KV cache and a compiled step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F

from gpu_rows import peers
from gpu_rows.rows import Context
from hpnlp.models.lm import LMConfig
from hpnlp.ops.attention.positions.rope import frequencies


class TorchDecoder:
    """RMSNorm, RoPE, a GELU MLP and a tied head. Step and cache have fixed shapes, so that the step is one CUDA graph."""

    def __init__(self, context: Context, params: Any, config: LMConfig, prompts: int, capacity: int) -> None:
        """Copies the weights.

        Args:
          context: Settings.
          params: Float32 parameters of the model.
          config: Its config.
          prompts: Number of sequences.
          capacity: Tokens of a sequence.
        """
        self.config, self.device = config, "cpu" if context.rehearse else "cuda"

        def weight(leaf: Any) -> torch.Tensor:
            return torch.from_numpy(np.array(leaf)).to(self.device, torch.bfloat16)

        self.table, self.final_scale = weight(params["embed"]["table"]), weight(params["final_norm"]["scale"])
        self.layers = []
        for i in range(config.layers):
            layer = jax.tree.map(lambda leaf: np.array(leaf[i]), params["layers"])  # noqa: B023
            attention, mlp = layer["attention"], layer["mlp"]
            qkv = np.concatenate([attention[n]["kernel"] for n in "qkv"], axis=-1)  # torch users fuse the projections
            kernels = (qkv, attention["out"]["kernel"], mlp["up"]["kernel"], mlp["down"]["kernel"])
            scales = (layer["mix_norm"]["scale"], layer["feed_norm"]["scale"])
            self.layers.append(([weight(s) for s in scales], [weight(k.T.copy()) for k in kernels]))
        angles = np.arange(capacity)[:, None] * frequencies(config.head_size)[None]
        rotations = np.concatenate([np.cos(angles)] * 2, -1), np.concatenate([-np.sin(angles), np.sin(angles)], -1)
        self.cos, self.sin = (weight(x) for x in rotations)
        shape = config.layers, 2, prompts, config.heads, capacity, config.head_size
        self.cache = torch.zeros(shape, device=self.device, dtype=torch.bfloat16)
        self.key_positions = torch.arange(capacity, device=self.device)
        arrays = [self.cache, self.table, self.final_scale, self.cos, self.sin, self.key_positions]
        arrays += [array for scales, kernels in self.layers for array in (*scales, *kernels)]
        for array in [] if context.rehearse else arrays:
            torch._dynamo.mark_static_address(array)  # a CUDA graph reads and writes it in place
        self.run_prefill = peers.compiled(context, self._forward)
        self.run_step = peers.compiled(context, self._step, mode="reduce-overhead")

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits of the last token; writes keys and values to the cache at `positions`."""
        c, (rows, length) = self.config, tokens.shape
        x = F.embedding(tokens, self.table)
        cos, sin, half = self.cos[positions][:, None], self.sin[positions][:, None], c.head_size // 2
        visible = (self.key_positions[None] <= positions[:, None])[None, None]
        for i, ((mix, feed), (qkv, out, up, down)) in enumerate(self.layers):
            heads = F.linear(self._norm(x, mix), qkv).view(rows, length, 3, c.heads, -1)
            q, k, v = heads.unbind(2)
            q, k = (y * cos + torch.cat([y[..., half:], y[..., :half]], -1) * sin for y in (q, k))
            self.cache[i, 0].index_copy_(2, positions, k.transpose(1, 2))
            self.cache[i, 1].index_copy_(2, positions, v.transpose(1, 2))
            o = F.scaled_dot_product_attention(q.transpose(1, 2), self.cache[i, 0], self.cache[i, 1], attn_mask=visible)
            x = x + F.linear(o.transpose(1, 2).reshape(rows, length, -1), out)
            x = x + F.linear(F.gelu(F.linear(self._norm(x, feed), up), approximate="tanh"), down)
        return F.linear(self._norm(x[:, -1], self.final_scale), self.table)

    def _step(self, tokens: torch.Tensor, position: torch.Tensor, temperature: float) -> torch.Tensor:
        """The next token of each sequence, drawn by exponential noise, which needs no synchronisation."""
        return self._draw(self._forward(tokens, position), temperature)

    def _draw(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        probabilities = F.softmax(logits.float() / temperature, -1)
        return torch.argmax(probabilities / torch.empty_like(probabilities).exponential_(1), -1, keepdim=True)

    def _norm(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), scale, self.config.norm_eps)

    @torch.no_grad()
    def prompt_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after the prompts."""
        return self.run_prefill(tokens, torch.arange(tokens.shape[1], device=self.device))

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, count: int, temperature: float) -> torch.Tensor:
        """`count` new tokens of each sequence, [B, count]."""
        length = tokens.shape[1]
        token, out = self._draw(self.prompt_logits(tokens), temperature), []
        for i in range(count):
            out.append(token)
            if i + 1 < count:
                position = self.key_positions[length + i : length + i + 1].clone()  # without a copy from the host
                token = self.run_step(token, position, temperature).clone()
        return torch.cat(out, 1)
