"""Runs each mask with each feature of attention, and writes what is refused to docs/guide/attention.md.

    python experiments/bench/features.py

Each pair is run: the block-sparse executor against `reference`, output and log-sum-exp; or decoding with a cache, token by
token, against the full pass. An InputError is a refusal; any other difference or error ends the run. What the kernels of other
devices refuse is read from their checks, without a run; their tests cover the rest.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.ops.attention import Causal, Mask, Operands, PerHead, flash, reference
from hpnlp.ops.attention.block_sparse.operands import Form
from hpnlp.ops.attention.decoding.kv_cache import extend_cache, start_cache
from hpnlp.ops.attention.kernels import cudnn, pallas_gpu, splash_tpu
from hpnlp.ops.attention.masks.table import MASKS
from hpnlp.types import InputError

sys.path.insert(0, str(Path(__file__).parent))
from results import replace_section  # noqa: E402

ROOT = Path(__file__).parents[2]
LENGTH = 37


def arrays(kv_heads: int = 4, dtype: Any = jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((2, LENGTH, heads, 8)), dtype) for heads in (4, kv_heads, kv_heads)]


def assert_equals_reference(mask: Any, qkv: list[jax.Array], tolerance: float = 1e-5, **options: Any) -> None:
    """Raises AssertionError if outputs or log-sum-exps differ from those of the reference."""

    def run(function: Callable[..., Any]) -> Any:
        def call(qkv: list[jax.Array]) -> Any:
            return function(*qkv, mask, return_lse=True, **options)

        return jax.jit(call, compiler_options={"xla_backend_optimization_level": 0})(qkv)

    def block_sparse(*qkv_mask: Any, **operands: Any) -> Any:
        return flash(*qkv_mask, Operands(**operands), form=Form.PERMUTED, block_size=8)

    actual, expected = run(block_sparse), run(reference)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=tolerance, rtol=tolerance)


def assert_decoding_equals_reference(mask: Any) -> None:
    """Compares prompts of 20 and 13 tokens and four more tokens, one by one, with the full pass."""
    mask, (q, k, v), lengths = mask & Causal(), arrays(), np.array([20, 13])
    full, rows = np.asarray(reference(q, k, v, mask)), np.arange(2)
    cache = start_cache(k[:, :20], v[:, :20], jnp.asarray(lengths, jnp.int32), mask, 30)
    step = jax.jit(lambda q, k, v, cache: extend_cache(q, k, v, mask, cache))
    for _ in range(4):
        o, cache = step(*(x[rows, lengths][:, None] for x in (q, k, v)), cache)
        np.testing.assert_allclose(o[:, 0], full[rows, lengths], atol=1e-5)
        lengths = lengths + 1


def int32(values: Any) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def with_option(**options: Any) -> Callable[[Any], None]:
    """A feature that is an option of attention."""
    return lambda mask: assert_equals_reference(mask, arrays(), **options)


def features() -> dict[str, Callable[[Any], None]]:
    """Name of the feature -> a function of a mask that raises InputError if the feature is refused."""
    rng = np.random.default_rng(1)
    segments = int32(np.sort(rng.integers(0, 3, (2, LENGTH)), 1))
    positions = int32(rng.permuted(np.tile(np.arange(LENGTH), (2, 1)), axis=1))
    bias = jnp.asarray(rng.standard_normal((4, LENGTH, LENGTH)), jnp.float32)
    dense = jnp.asarray(rng.random((2, 1, LENGTH, LENGTH)) < 0.7)
    return {
        "odd length": with_option(),
        "causal": lambda mask: assert_equals_reference(mask & Causal(), arrays()),
        "grouped heads": lambda mask: assert_equals_reference(mask, arrays(kv_heads=2)),
        "segments": with_option(segment_ids=segments),
        "lengths": with_option(kv_lengths=int32([28, 0])),
        "positions": with_option(positions=positions),
        "dense mask": with_option(dense_mask=dense),
        "global tokens": with_option(global_tokens=int32([[3, -1], [0, 30]])),
        "bias": with_option(bias=bias),
        "soft cap": with_option(soft_cap=2.0),
        "sinks": with_option(sinks=jnp.arange(4.0)),
        "dropout": with_option(dropout_rate=0.3, rng=jax.random.key(0)),
        "bf16": lambda mask: assert_equals_reference(mask, arrays(dtype=jnp.bfloat16), tolerance=6e-2),
        "decode": assert_decoding_equals_reference,
    }


def refusal(feature: Callable[[Any], None], mask: Mask | PerHead) -> str:
    """The reason why a feature is refused for a mask; empty if the results agree."""
    try:
        feature(mask)
    except InputError as error:
        return str(error)
    return ""


# The reason why a kernel refuses masks.
WHY = {
    "cudnn": "its kernels compute all pairs, causal pairs and causal windows, `Causal() & Window(n)`",
    "pallas": "the mask must be computed from the two positions by operations on elements, and indices are an array; the same "
    "holds for functions of `Where`",
    "splash": "",
}


def kernels() -> str:
    """Markdown table of the masks and operands that each kernel refuses, for bfloat16 arrays of head size 64."""
    x, none = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16), Operands()
    array = jnp.zeros(x.shape, x.dtype)
    limits = {
        "cudnn": lambda mask: cudnn.limits(x, x, x, mask, none),
        "pallas": lambda mask: pallas_gpu.limits(x, x, x, mask, none, interpret=True),
        "splash": lambda mask: splash_tpu.limits(array, x, x, mask, none),
    }
    supports = {"cudnn": cudnn.SUPPORTS, "pallas": pallas_gpu.SUPPORTS, "splash": splash_tpu.SUPPORTS}
    lines = ["| `impl` | refuses the masks | because | refuses the operands |", "|---|---|---|---|"]
    for impl, accepts in limits.items():
        refused = [f"`{name}`" for name, pattern in MASKS.items() if accepts(pattern.examples[0])]
        accepted = [f"`{name}`" for name in MASKS if f"`{name}`" not in refused]
        masks = f"all but {', '.join(accepted)}" if len(refused) > len(accepted) else ", ".join(refused) or "none"
        operands = [field.name for field in dataclasses.fields(Operands) if field.name not in ("rng", "streams")]
        missing = [f"`{name}`" for name in operands if name not in supports[impl]]
        lines.append(f"| `{impl}` | {masks} | {WHY[impl]} | {', '.join(missing)} |")
    return "\n".join(lines)


def section(features: Sequence[str], refused: Sequence[str]) -> str:
    """Markdown of the features that work together, and of what is refused. refused: rows of a table."""
    together = f"The {len(MASKS)} patterns above work with each of these {len(features)} features"
    table = ["| mask | refused with | because |", "|---|---|---|", *refused]
    parts = [f"{together}{', but for the pairs in the table' if refused else ''}: {', '.join(features)}."]
    parts += ["\n".join(table)] if refused else []
    return "\n\n".join([*parts, "The kernels of other devices refuse:", kernels()])


def main() -> None:
    columns, refused = features(), []
    for name, pattern in MASKS.items():
        mask = pattern.examples[0]
        reasons = {feature: refusal(run, mask) for feature, run in columns.items()}
        rows = [f"| `{name}` | {feature} | {reason} |" for feature, reason in reasons.items() if reason]
        print("\n".join(rows) or f"{name} works with all", flush=True)
        refused += rows
    replace_section(ROOT / "docs" / "guide" / "attention.md", "features", section(list(columns), refused))


if __name__ == "__main__":
    main()
