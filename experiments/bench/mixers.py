"""Measures every mixer against exact attention: time and memory of the forward and backward pass, interleaved in one process.

    python experiments/bench/mixers.py [--mixers=linear,performer] [--lengths=4096] [--rounds=5]

B 1, N 8, H 64, D 512, float32, one segment. A mixer gets the projections that it needs as arrays, so that only mixing is
measured, with the gradients of all its inputs and of its own parameters. Bidirectional mixers are compared with exact attention
over all pairs, and causal ones with causal exact attention: `full` of this library, which visits tiles of keys and keeps no
scores. Memory is that of the compiled program's temporary buffers, also relative to `jax.nn.dot_product_attention`, which keeps
all scores. About 20 minutes for all mixers at one length on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from mixer_pass import MixerPass, make_mixer

from hpnlp import cli, measure
from hpnlp.nn.mixers import MIXERS
from hpnlp.ops.attention import Causal, Full
from hpnlp.training.processes.allocator import keep_freed_memory

RESULTS = Path(__file__).parents[1] / "results"
HEADS, HEAD_DIM = 8, 64
# Specs of entries whose bare name has no arguments, or too few, for a comparison at several thousand tokens.
SPECS = {"longformer": "longformer(512,16)", "window": "window(256)"}
MASKS = {"full": Full(), "causal": Causal()}

FLAGS = flags.FLAGS
flags.DEFINE_list("mixers", [], "Entries of MIXERS, or specs without commas; empty for all entries.")
flags.DEFINE_list("lengths", ["4096"], "Tokens of the sequence.")
flags.DEFINE_list("masks", list(MASKS), "Masks: full, causal.")
flags.DEFINE_integer("rounds", 5, "Measurements of each program; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def pass_of(spec: str, mask: Any, length: int) -> MixerPass:
    """The compiled pass of a mixer at the size of this benchmark."""
    return MixerPass(spec, mask, length, HEADS, HEAD_DIM)


def dense_bytes(length: int, causal: bool) -> int:
    """Bytes of temporary buffers of `jax.nn.dot_product_attention`, forward and backward."""

    def score(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=causal))

    shape = jax.ShapeDtypeStruct((1, length, HEADS, HEAD_DIM), jnp.float32)
    return measure.compile(jax.grad(score, (0, 1, 2)), shape, shape, shape).memory.temp


def bench(length: int, mask_name: str) -> Iterator[dict[str, Any]]:
    """A row for each mixer that can mix under a mask."""
    mask, trait = MASKS[mask_name], {"full": "bidirectional", "causal": "causal"}[mask_name]
    exact, dense = pass_of("full", mask, length), dense_bytes(length, mask_name == "causal")
    for spec in [SPECS.get(name, name) for name in FLAGS.mixers or MIXERS]:
        if not getattr(make_mixer(spec).traits, trait):
            continue
        case = exact if spec == "full" else pass_of(spec, mask, length)
        times = measure.timeit({"ours": case, "exact": exact}, rounds=FLAGS.rounds)
        yield {
            "mixer": spec,
            "mask": mask_name,
            "length": length,
            "ms": 1e3 * times["ours"].median,
            "exact_ms": 1e3 * times["exact"].median,
            "time_over_exact": times["ours"].over(times["exact"]),
            "temp_bytes": case.program.memory.temp,
            "temp_over_exact": case.program.memory.temp / exact.program.memory.temp,
            "temp_over_jax_nn": case.program.memory.temp / dense,
            "matmul_gflops": case.program.flops / 1e9,
            "all_ms": {name: [1e3 * seconds for seconds in times[name].all] for name in times},
        }


def main(_: Any) -> None:
    cli.prepare_jax()
    keep_freed_memory()
    rows = []
    for length in map(int, FLAGS.lengths):
        for mask in FLAGS.masks:
            for row in bench(length, mask):
                rows.append(row)
                print({name: value for name, value in row.items() if name != "all_ms"}, flush=True)
    print(measure.write_result("mixers", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
