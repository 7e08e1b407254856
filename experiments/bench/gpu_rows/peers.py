"""Peers in torch. torch is imported by calls only, since a machine may lack it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gpu_rows.rows import AbsentPeerError, Context
from hpnlp.ops.attention import Mask
from hpnlp.ops.attention.block_sparse.block_mask import active_tiles


@dataclasses.dataclass(frozen=True)
class Pending:
    """Tensors that the device may still be computing; `jax.block_until_ready` waits for them."""

    tensors: tuple[Any, ...]

    def block_until_ready(self) -> Pending:
        if self.tensors[0].is_cuda:
            import torch

            torch.cuda.synchronize()
        return self

    def arrays(self) -> list[np.ndarray]:
        """The tensors in float32."""
        return [tensor.detach().float().cpu().numpy() for tensor in self.tensors]


def load_torch(context: Context) -> Any:
    """torch with CUDA; in a rehearsal, torch on the CPU."""
    try:
        import torch
    except ImportError:
        raise AbsentPeerError("torch is not installed") from None
    if not context.rehearse and not torch.cuda.is_available():
        raise AbsentPeerError("torch does not see a CUDA device")
    return torch


def compiled(context: Context, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile`; in a rehearsal the function itself, since compiling for a CPU takes half a minute."""
    torch = load_torch(context)
    if context.rehearse:
        return function
    torch._dynamo.reset()  # torch limits how often a function is compiled again
    return torch.compile(function, **options)


def tensor(context: Context, x: jax.Array) -> Any:
    """The array as a tensor of its own."""
    return load_torch(context).from_dlpack(x).clone()


def forward_or_gradients(
    context: Context, function: Callable[..., Any], inputs: list[Any], cotangent: Any | None
) -> Callable[[], Pending]:
    """A call of a function of tensors: its result, or with a cotangent the result and the gradients of all inputs."""
    torch = load_torch(context)

    def forward() -> Pending:
        with torch.no_grad():
            return Pending((function(*inputs),))

    def both() -> Pending:
        out = function(*inputs)
        return Pending((out.detach(), *torch.autograd.grad(out, inputs, cotangent)))

    if cotangent is None:
        return forward
    inputs = [x.requires_grad_() for x in inputs]
    return both


def attention(
    context: Context, operands: tuple[jax.Array, ...], gradients: bool, call: Callable[..., Any]
) -> Callable[[], Pending]:
    """A call of attention over arrays [B, T, N, H], which torch holds as [B, N, T, H]."""
    q, k, v, do = (tensor(context, x).transpose(1, 2).contiguous() for x in operands)
    return forward_or_gradients(context, call, [q, k, v], do if gradients else None)


def causal_attention(context: Context, operands: tuple[jax.Array, ...], gradients: bool) -> Callable[[], Pending]:
    """`scaled_dot_product_attention` by cuDNN, causal."""
    torch = load_torch(context)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = SDPBackend.MATH if context.rehearse else SDPBackend.CUDNN_ATTENTION

    def call(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention(context, operands, gradients, call)


def flex_attention(
    context: Context, operands: tuple[jax.Array, ...], gradients: bool, mask: Mask, block: int
) -> Callable[[], Pending]:
    """Compiled FlexAttention over a causal mask of blocks, or a causal window.

    The block mask is made of the tiles that hpnlp finds, since `create_block_mask` evaluates every pair.
    """
    torch = load_torch(context)
    from torch.nn.attention.flex_attention import BlockMask
    from torch.nn.attention.flex_attention import flex_attention as flex

    length = operands[0].shape[1]
    device = "cpu" if context.rehearse else "cuda"
    left, _ = mask.band() or (None, None)

    def is_visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        # Only called within tiles that are not wholly visible: those on the diagonal, and at the edge of a window.
        return (j <= i) if left is None else (j <= i) & (i - j <= left)

    lists = [torch.from_numpy(x).to(device) for x in tile_lists(mask, length, block)]
    blocks = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=is_visible)
    if context.rehearse:  # FlexAttention has no gradients on a CPU
        pairs = blocks.to_dense().bool().repeat_interleave(block, 2).repeat_interleave(block, 3)
        pairs &= is_visible(None, None, torch.arange(length)[:, None], torch.arange(length))
        dense = torch.nn.functional.scaled_dot_product_attention
        return attention(context, operands, gradients, lambda q, k, v: dense(q, k, v, attn_mask=pairs))
    run = compiled(context, flex)
    return attention(context, operands, gradients, lambda q, k, v: run(q, k, v, block_mask=blocks))


def tile_lists(mask: Mask, length: int, block: int) -> list[np.ndarray]:
    """Numbers and indices of the partial tiles of each query block, then those of its wholly visible tiles."""
    tiles, blocks = active_tiles(mask, length, length, block, block), -(-length // block)
    lists = []
    for chosen in (tiles.select(~tiles.every), tiles.select(tiles.every)):
        counts = np.bincount(chosen.rows, minlength=blocks).astype(np.int32)
        indices = np.zeros((blocks, blocks), np.int32)
        starts = np.cumsum(counts) - counts
        indices[chosen.rows, np.arange(len(chosen.rows)) - starts[chosen.rows]] = chosen.columns
        lists += [counts[None, None], indices[None, None]]
    return lists


def naive_loss(context: Context, h: jax.Array, w: jax.Array, labels: jax.Array) -> tuple[Callable[[], Pending], float]:
    """Compiled cross-entropy of h w^T with its gradients, which keeps the logits; and its temporary megabytes, NaN on a CPU."""
    torch = load_torch(context)
    inputs = [tensor(context, x).requires_grad_() for x in (h, w)]
    ids = tensor(context, labels).long()

    def loss(h: Any, w: Any) -> Any:
        return torch.nn.functional.cross_entropy((h @ w.T).float(), ids)

    run = compiled(context, loss)

    def call() -> Pending:
        value = run(*inputs)
        return Pending((value.detach(), *torch.autograd.grad(value, inputs)))

    call().block_until_ready()
    if context.rehearse:
        return call, float("nan")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = sum(x.nbytes for x in call().block_until_ready().tensors)
    return call, (torch.cuda.max_memory_allocated() - before - gradients) / 1e6


def lstm(context: Context, x: jax.Array, layers: list[tuple[Any, Any, Any]]) -> Callable[[], Pending]:
    """Mean square of the outputs of cuDNN's LSTM with the gradients of inputs and weights. layers: (w, u, b) of each."""
    torch = load_torch(context)
    features = layers[0][1].shape[0]
    module = torch.nn.LSTM(x.shape[-1], features, num_layers=len(layers), batch_first=True)
    module = module.to("cpu" if context.rehearse else "cuda")
    with torch.no_grad():
        for index, (w, u, b) in enumerate(layers):
            for name, value in (("weight_ih", w.T), ("weight_hh", u.T), ("bias_ih", b)):
                getattr(module, f"{name}_l{index}").copy_(tensor(context, value))
            getattr(module, f"bias_hh_l{index}").zero_()
    inputs = tensor(context, x).requires_grad_()
    weights = [inputs, *module.parameters()]

    def call() -> Pending:
        loss = module(inputs)[0].square().mean()
        return Pending((loss.detach(), *torch.autograd.grad(loss, weights)))

    return call
