"""Measures the exact loss over a large vocabulary in bfloat16 on one accelerator, against naive JAX if that fits.

    python experiments/bench/gpu_softmax.py [--tokens=16384] [--vocab=248320] [--dim=2048] [--rounds=7]

Time and temporary memory of one program with the loss and its gradients with respect to h and w. Loss and gradients are first
compared with those from float32 logits. Published for these sizes on an H100: Cut Cross-Entropy 92.6 ms and 3.09 GB, Liger
321 ms and 6.05 GB.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.ops.softmax import linear_cross_entropy

flags.DEFINE_integer("tokens", 16384, "Number of tokens N.", lower_bound=1)
flags.DEFINE_integer("vocab", 248320, "Vocabulary size V.", lower_bound=2)
flags.DEFINE_integer("dim", 2048, "Model size D.", lower_bound=1)
flags.DEFINE_integer("rounds", 7, "Measurements of each program; the median is reported.", lower_bound=1)
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")
FLAGS = flags.FLAGS


def naive(h: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.dot(h, w.T, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def arrays(tokens: int, vocab: int, dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    h, w = (jax.random.normal(key, (n, dim), jnp.bfloat16) for key, n in zip(keys, (tokens, vocab), strict=False))
    return h, w / dim**0.5, jax.random.randint(keys[2], (tokens,), 0, vocab, jnp.int32)


def main(_: Any) -> None:
    cli.prepare_jax()
    h, w, labels = arrays(min(FLAGS.tokens, 512), FLAGS.vocab, FLAGS.dim)
    ours, expected = (jax.jit(jax.value_and_grad(f, (0, 1)))(h, w, labels) for f in (linear_cross_entropy, naive))
    error = abs(float(ours[0]) - float(expected[0]))
    gradient_errors = [
        float(optax.tree.norm(a - b) / optax.tree.norm(b)) for a, b in zip(ours[1], expected[1], strict=True)
    ]
    if not (error < 1e-3 and max(gradient_errors) < 0.03):
        sys.exit(
            f"the loss differs by {error:.1e} and the gradients by {gradient_errors} from those of naive JAX: "
            "nothing is reported"
        )
    operands = arrays(FLAGS.tokens, FLAGS.vocab, FLAGS.dim)
    programs, failed = {}, {}
    for name, loss in (("ours", linear_cross_entropy), ("naive", naive)):
        try:
            program = measure.compile(jax.value_and_grad(loss, (0, 1)), *operands)
            jax.block_until_ready(program(*operands))
        except jax.errors.JaxRuntimeError as error:
            failed[name] = str(error).splitlines()[0][:200]
            print(f"{name} does not run: {failed[name]}", flush=True)
        else:
            programs[name] = program
    if "ours" not in programs:
        sys.exit(1)
    times = measure.timeit({name: lambda p=p: p(*operands) for name, p in programs.items()}, rounds=FLAGS.rounds)
    ratios = {"absolute error of the mean loss": error}
    if "naive" in programs:
        ratios["time over naive"] = times["ours"].over(times["naive"])
        ratios["temporary memory over naive"] = programs["ours"].memory.temp / programs["naive"].memory.temp
    label = f"exact, bfloat16, N {FLAGS.tokens:,}, V {FLAGS.vocab:,}, D {FLAGS.dim:,}"
    ms = {name: 1e3 * times[name].median for name in programs}
    megabytes = {name: program.memory.temp / 1e6 for name, program in programs.items()}
    print(f"{label}: {ms} ms, temporaries {megabytes} MB, {ratios}", flush=True)
    rows = [{"what": label, "ratios": ratios, "ms": ms, "megabytes": megabytes, "failed": failed}]
    print(measure.write_result("gpu_softmax", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
