"""Compares AdamW's update of 108M parameters array by array, as XLA fuses it, with one pass over flat state.

    python experiments/bench/adamw.py [--layers=12] [--dim=768] [--rounds=9]

"stacks" is the form that training uses: the layers' parameters are stacked, about ten arrays in all. "layers" has separate
arrays for each layer, about a hundred. "flat" stores each moment as one vector, and concatenates gradients and parameters for
the update. "all flat" has gradients and parameters as vectors from the start, which no model has: it is the limit for a kernel
that makes one pass. If the results differ, nothing is reported. Takes a minute on two cores; the same command runs on an
accelerator.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from jax.flatten_util import ravel_pytree

from hpnlp import cli, measure
from hpnlp.models.decoding.decoding_weights import separate_layers
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.training.optim import OptimizerConfig, is_matrix, make_optimizer

RESULTS = Path(__file__).parents[1] / "results"
CONFIG = OptimizerConfig(schedule="constant", warmup=0, clip_norm=0.0)

FLAGS = flags.FLAGS
flags.DEFINE_integer("layers", 12, "Layers.", lower_bound=1)
flags.DEFINE_integer("dim", 768, "Width.", lower_bound=64)
flags.DEFINE_integer("rounds", 9, "Measurements of each form; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def by_array(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    """The update of optax, one array at a time."""
    updates, state = make_optimizer(CONFIG, 1000).update(grads, state, params)
    return optax.apply_updates(params, updates), state


def flat(decays: jax.Array, params: jax.Array, state: Any, grads: jax.Array) -> tuple[jax.Array, Any]:
    """The same update (Loshchilov & Hutter 2019, algorithm 2) of vectors. decays: 1 where weights decay, 0 elsewhere."""
    c, (count, mu, nu) = CONFIG, state
    count = count + 1
    mu, nu = c.b1 * mu + (1 - c.b1) * grads, c.b2 * nu + (1 - c.b2) * grads**2
    step = (mu / (1 - c.b1**count)) / (jnp.sqrt(nu / (1 - c.b2**count)) + c.eps)
    return params - c.learning_rate * (step + c.weight_decay * decays * params), (count, mu, nu)


def with_flat_moments(decays: jax.Array, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    """Applies `flat` to trees of parameters and gradients, with a flat state."""
    vector, unravel = ravel_pytree(params)
    vector, state = flat(decays, vector, state, ravel_pytree(grads)[0])
    return unravel(vector), state


def stack_layers(params: Any) -> Any:
    """The inverse of `separate_layers`."""
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}


def main(_: Any) -> None:
    cli.prepare_jax()
    model = LM(
        LMConfig(layers=FLAGS.layers, dim=FLAGS.dim, heads=FLAGS.dim // 64, mlp="gelu", vocab=30528, max_len=512)
    )
    stacks = jax.jit(lambda key: nn.meta.unbox(model.init(key, example_batch(1, 8)))["params"])(jax.random.key(0))
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) / 100, stacks)
    layers, grads_of_layers = (separate_layers(tree, model.config) for tree in (stacks, grads))
    vector = ravel_pytree(stacks)[0]
    is_decayed = is_matrix(stacks)
    decays = ravel_pytree(jax.tree.map(lambda x, d: jnp.full(x.shape, float(d)), stacks, is_decayed))[0]
    zeros = jnp.zeros((), jnp.int32), jnp.zeros_like(vector), jnp.zeros_like(vector)
    optimizer = make_optimizer(CONFIG, 1000)
    forms = {
        "stacks": (by_array, stacks, optimizer.init(stacks), grads),
        "layers": (by_array, layers, optimizer.init(layers), grads_of_layers),
        "flat": (functools.partial(with_flat_moments, decays), stacks, zeros, grads),
        "all flat": (functools.partial(flat, decays), vector, zeros, ravel_pytree(grads)[0]),
    }

    steps, updated, memory = {}, {}, {}
    for name, (update, params, state, gradients) in forms.items():
        program = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, gradients).compile()
        stats = program.memory_analysis()
        memory[name] = stats.temp_size_in_bytes if stats else 0
        held = [jax.tree.map(jnp.copy, (params, state))]

        def step(program: Any = program, held: list[Any] = held, gradients: Any = gradients) -> Any:
            held[0] = program(*held[0], gradients)
            return held[0]

        step()
        updated[name] = ravel_pytree(stack_layers(held[0][0]) if name == "layers" else held[0][0])[0]
        steps[name] = step
    for name, params in updated.items():
        error = float(jnp.max(jnp.abs(params - updated["stacks"])))
        if error > 1e-6:
            sys.exit(f"{name}: parameters differ from those of stacks by {error:.1e}: nothing is reported")

    times = measure.timeit(steps, rounds=FLAGS.rounds)
    moved = 7 * 4 * vector.size  # reads parameters, gradients and moments, writes all but gradients
    rows = []
    for name, (_, params, _, _) in forms.items():
        row = {
            "form": name, "parameters": vector.size, "arrays": len(jax.tree.leaves(params)), "temp_bytes": memory[name],
            "ms": 1e3 * times[name].median, "time_over_stacks": times[name].over(times["stacks"]),
            "gb_per_second": moved / times[name].median / 1e9, "all_ms": [1e3 * s for s in times[name].all],
        }  # fmt: skip
        print({key: value for key, value in row.items() if key != "all_ms"}, flush=True)
        rows.append(row)
    print(measure.write_result("adamw", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
