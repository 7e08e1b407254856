"""Cases of the tests of recurrent layers: kinds, arguments, and calls of the fast form and of the reference."""

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.ops.rnn import LSTMNorms, RNNWeights, Sequences, StepMasks, gru, lstm, minimal_gated_unit, reference_rnn

B, T, D, H = 3, 7, 5, 4
GATES = {"lstm": 4, "gru_cudnn": 3, "gru_original": 3, "minimal_cudnn": 2, "minimal_original": 2}
KINDS = (*GATES, "lstm_norms")


def arguments(kind, has_options):
    """The arguments of a kind, float64: those with gradients, and others."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    name = kind.removesuffix("_norms")
    gates = GATES[name] * H
    arrays = {"x": draw(B, T, D), "w": draw(D, gates), "u": draw(H, gates) / 2, "b": draw(gates)}
    if name.endswith("cudnn"):
        arrays["n_bias"] = draw(H)
    if kind != name:
        sizes = {"x": 4 * H, "u": 4 * H, "c": H}
        arrays["norms"] = LSTMNorms(
            **{f"{part}_{field}": draw(size) for part, size in sizes.items() for field in ("scale", "bias")}
        )
    if not has_options:
        return arrays, {}
    count = 2 if name == "lstm" else 1
    arrays["state"] = tuple(draw(B, H) for _ in range(count))
    arrays["initial"] = tuple(draw(H) for _ in range(count))
    masks = StepMasks(
        hidden=2.0 * (rng.random((B, 1, H)) < 0.5),
        candidate=2.0 * (rng.random((B, T, H)) < 0.5),
        hold_h=1.0 * (rng.random((B, T, H)) < 0.3),
        hold_c=np.full((B, 1, H), 0.3) if count == 2 else None,
    )
    return arrays, {"masks": masks, "reset": rng.random((B, T)) < 0.3, "lengths": np.array([7, 4, 1], np.int32)}


def fast(kind, arrays, **options):
    """The fast form of a kind."""
    if kind.startswith("lstm"):
        return lstm(**arrays, **options)
    function = gru if kind.startswith("gru") else minimal_gated_unit
    return function(**arrays, form=kind.split("_")[1], **options)


def reference(kind, arrays, **options):
    """The reference of a kind."""
    weights = RNNWeights(**{name: arrays[name] for name in ("w", "u", "b", "n_bias", "norms") if name in arrays})
    states = {name: arrays[name] for name in ("state", "initial") if name in arrays}
    return reference_rnn(kind.removesuffix("_norms"), arrays["x"], weights, Sequences(**states, **options))


def value_and_gradients(function, arrays):
    """Results, and gradients of their products with fixed numbers."""

    def loss(arrays):
        results = function(arrays)
        terms = [
            (jnp.sin(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape) * leaf).sum()
            for leaf in jax.tree.leaves(results)
        ]
        return sum(terms, jnp.zeros((), terms[0].dtype)), results

    (_, results), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
    return results, gradients


def as_float(tree, dtype):
    """The tree with floating-point leaves in a dtype."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if np.asarray(x).dtype.kind == "f" else jnp.asarray(x), tree)
