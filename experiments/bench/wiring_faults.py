"""Seeded faults between operations and the modules that call them: keys, padding, scales, options, states over many steps."""

from __future__ import annotations

from fault import Fault

WIRING_FAULTS = (
    Fault(
        "zoneout_expectation",
        "zoneout leaves nothing as it was in evaluation, in place of its expectation",
        "hpnlp/nn/rnn.py",
        "masks[name] = jnp.full((1, 1, size), rate, jnp.float32)",
        "masks[name] = jnp.full((1, 1, size), 0.0, jnp.float32)",
        "tests/nn/test_recurrent_layers.py tests/models/test_rnn.py tests/ops/rnn",
    ),
    Fault(
        "hidden_dropout",
        "dropout of the hidden state has a mask for each token in place of one for a sequence",
        "hpnlp/nn/rnn.py",
        'dropout_factors(self.make_rng("dropout"), ids[:, :1], size, r.hidden_dropout)',
        'dropout_factors(self.make_rng("dropout"), ids, size, r.hidden_dropout)',
        "tests/nn/test_recurrent_layers.py tests/models/test_rnn.py tests/ops/rnn",
    ),
    Fault(
        "accumulation_key",
        "all parts of an accumulated batch have the same key for dropout",
        "hpnlp/training/gradients.py",
        "jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers)",
        "jax.vmap(lambda i: jax.random.fold_in(key, 0 * i))(numbers)",
        "tests/training/test_draws.py tests/training/test_iterations.py tests/training",
    ),
    Fault(
        "advance_key",
        "all layers draw the same new features",
        "hpnlp/models/stacks/layer_statistics.py",
        "jax.vmap(functools.partial(jax.random.fold_in, key))(members)",
        "jax.vmap(functools.partial(jax.random.fold_in, key))(0 * members)",
        "tests/training/test_draws.py tests/training/test_statistics_of_stacks.py tests/nn tests/training",
    ),
    Fault(
        "unit_scores",
        "scores of units are compared across layers without the norm of their layer",
        "hpnlp/compress/stages/structure.py",
        "layer / max(np.linalg.norm(layer), 1e-30) for layer in scores",
        "layer / 1.0 for layer in scores",
        "tests/compress/test_structure.py tests/compress",
    ),
    Fault(
        "distilled_padding",
        "padding counts in the divergence of logits of all tokens",
        "hpnlp/compress/distilling/distillation_losses.py",
        'weights = (self.batch["segment_ids"] > 0).astype(jnp.float32)',
        "weights = jnp.ones(weights.shape, jnp.float32)",
        "tests/compress/test_distillation.py",
    ),
    Fault(
        "mistral_heads",
        "Mistral has no default number of key heads",
        "hpnlp/models/huggingface/architectures/llama.py",
        '"num_key_value_heads": 8, "sliding_window": 4096',
        '"sliding_window": 4096',
        "tests/models/huggingface/test_families.py tests/models/huggingface/test_convert_oracle.py",
    ),
    Fault(
        "onnx_cumulative_sum",
        "an exported cumulative sum runs forward always",
        "hpnlp/models/export/onnx_rules.py",
        'reverse=int(eqn.params["reverse"])',
        "reverse=0",
        "tests/models/export",
    ),
)
