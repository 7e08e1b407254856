"""Recurrent language models: states across batches and prompts, packed sequences, dropout, layouts and errors."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.data.tokenizers import ByteTokenizer
from hpnlp.models import variables
from hpnlp.models.rnn import RNN, RNNConfig
from hpnlp.nn.rnn import CELLS, RecurrentInputs
from hpnlp.nn.rnn_stack import RecurrentStack
from hpnlp.ops.rnn import segment_resets
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.starts import warm_start
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests.contracts import ONCE, assert_close, once
from tests.drawn import drawn_params
from tests.messages import raises
from tests.models.test_lm import assert_greedy_ids

V, B, T = 12, 4, 6
# One stack with every cell and every form, of several widths.
EVERY = (
    "lstm(6),lstm(5, norm=True),gru(4),gru(5, form=original),mgu(5),mgu(5, form=cudnn),qrnn(8, width=3),sru(8),sru(6)"
)


def make(cells="lstm(6),gru(8)", keeps_state=False, **fields):
    return RNN(RNNConfig(cells=cells, vocab=V, **fields), keeps_state=keeps_state)


params_of = functools.cache(functools.partial(drawn_params, deviation=0.5, means={"scale": 0.0}))


def make_batch(seed=0, length=T):
    """Rows of two segments each."""
    rng = np.random.default_rng(seed)
    segments = np.tile(1 + (np.arange(length) >= length // 2), (B, 1)).astype(np.int32)
    tokens, labels = rng.integers(0, V, (2, B, length)).astype(np.int32)
    weights = rng.integers(0, 2, (B, length)).astype(np.float32)
    arrays = {"tokens": tokens, "labels": labels, "segment_ids": segments, "positions": segments, "weights": weights}
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def loss_of(model, batch, carry=None, rng=None):
    return losses_of(model)(variables.collections(params_of(model), carry), batch, rng)


@functools.cache
def losses_of(model: Any):
    """The compiled loss of a model, in training if there is a key."""

    def loss(variables, batch, rng):
        rngs = {} if rng is None else {"dropout": rng, "output": rng}
        return model.apply(variables, batch, rng is None, method="loss", rngs=rngs)

    return jax.jit(loss, compiler_options=ONCE)


def test_prompts_and_further_tokens_equal_the_whole_sequence():
    model = make(EVERY)
    tokens, lengths = make_batch(length=9)["tokens"], jnp.int32([9, 5, 3, 1])
    variables = {"params": params_of(model)}

    def decode(variables, tokens, lengths):
        whole = model.apply(variables, tokens, method="logits")
        h, states = model.apply(variables, tokens, lengths, 12, method="prefill")
        logits = [model.apply(variables, h, method="next_logits")]
        for _ in range(2):
            following = jnp.take_along_axis(tokens, jnp.minimum(lengths, 8)[:, None], axis=1)
            h, states = model.apply(variables, following, lengths[:, None], states, method="extend")
            logits.append(model.apply(variables, h[:, 0], method="next_logits"))
            lengths = lengths + 1
        return jnp.stack(logits, axis=1), whole

    found, whole = once(decode, variables, tokens, lengths)
    for row, length in enumerate(lengths):
        count = min(3, 9 - int(length) + 1)
        assert_close(found[row, :count], whole[row, int(length) - 1 : int(length) - 1 + count])


@pytest.mark.parametrize("resets", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_carried_batches_equal_one_long_sequence(resets):
    model = make(EVERY.replace("lstm(6),", "lstm(6)*2,"), keeps_state=True, resets=resets)
    # The second segment of a sequence begins before, with, after or never in the second part.
    first = jnp.arange(2 * T)[None] < jnp.array([T - 2, T, T + 2, 2 * T])[:, None]
    batch = {**make_batch(length=2 * T), "segment_ids": 2 - first.astype(jnp.int32)}
    whole = loss_of(model, batch, model.initial_carry(B))
    carry, sums = model.initial_carry(B), 0.0
    for part in range(2):
        piece = {name: array[:, part * T : (part + 1) * T] for name, array in batch.items()}
        out = loss_of(model, piece, carry)
        carry, sums = out.carry, sums + out.sum
    assert_close(sums / whole.sum, jnp.ones(()))
    assert_close(carry, whole.carry)


def test_packed_segments_equal_separate_sequences():
    model = make(EVERY)
    batch = make_batch()
    packed = loss_of(model, batch)
    halves = [{name: array[:, i * T // 2 : (i + 1) * T // 2] for name, array in batch.items()} for i in range(2)]
    parts = [loss_of(model, half) for half in halves]
    assert_close(packed.sum / sum(part.sum for part in parts), jnp.ones(()))


def test_first_tokens_of_a_stream_begin_with_learned_states():
    model = make(initial="learned", keeps_state=True)
    batch = make_batch()
    plain = make(keeps_state=True)
    params = {**params_of(model)}
    zeros = jax.tree.map_with_path(lambda path, x: x * 0 if path[-1].key in ("h0", "c0") else x, params)
    stack = {name: {k: v for k, v in layer.items() if k not in ("h0", "c0")} for name, layer in params["stack"].items()}

    def run(params, zeros, plain_params):
        loss = lambda params: model.apply({"params": params}, batch, method="loss").sum  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(params)
        carried = model.apply(variables.collections(params, model.initial_carry(B)), batch, method="loss").sum
        without = plain.apply({"params": plain_params}, batch, method="loss").sum
        return (carried / value, loss(zeros) / without), gradient

    ratios, gradient = once(run, params, zeros, {**params, "stack": stack})
    assert_close(ratios, (jnp.ones(()), jnp.ones(())))
    assert all(np.abs(gradient["stack"][layer]["h0"]).max() > 0 for layer in ("layer_0", "layer_1"))


DROPPED = {
    "input_dropout": 0.5, "layer_dropout": 0.5, "output_dropout": 0.5, "embedding_dropout": 0.5, "hidden_dropout": 0.5,
    "candidate_dropout": 0.5, "zoneout": 0.5, "weight_drop": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_acts_in_training_only_and_differs_between_steps(name):
    cells = "gru(8)*2" if name == "layer_dropout" else "gru(8)"
    model, plain, batch = make(cells, **{name: 0.5}), make(cells), make_batch()
    params = {"params": params_of(model)}

    def run(keys):
        train = lambda key: model.apply(params, batch, False, method="loss", rngs={"dropout": key, "output": key})  # noqa: E731
        return jax.lax.map(lambda key: train(key).sum, keys)

    losses = once(run, jax.random.split(jax.random.key(0), 2)[np.array([0, 0, 1])])
    assert losses[0] == losses[1] != losses[2]
    # Both models evaluate the same, but for zoneout, which takes its expectation.
    program, expected = (
        str(jax.make_jaxpr(lambda params, m=m: m.apply(params, batch, method="loss").sum)(params))
        for m in (model, plain)
    )
    assert (program == expected) == (name != "zoneout")


def test_variational_dropout_has_one_mask_for_all_tokens():
    config = RNNConfig(cells="sru(8)", vocab=V, input_dropout=0.5, output_dropout=0.5, variational=True)
    ids = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    stack = RecurrentStack(dataclasses.replace(config, input_dropout=0.0))
    x = jnp.ones((B, T, 8))
    inputs = RecurrentInputs(ids=ids, deterministic=False)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    (y, _, _), _ = once(stack.init_with_output, rngs, x, inputs)
    is_dropped = np.asarray(y) == 0
    assert (is_dropped == is_dropped[:, :1]).all() and 0.2 < is_dropped.mean() < 0.8
    assert len(np.unique(is_dropped[:, 0], axis=0)) > 1


def test_penalties_are_means_over_tokens():
    model = make("lstm(8)", activation_penalty=2.0, temporal_penalty=3.0)
    batch = make_batch()
    params = {"params": params_of(model)}
    inputs = RecurrentInputs(reset=segment_resets(batch["segment_ids"]))

    def outputs(module):
        return module.stack(module._embedded(batch["tokens"], inputs), inputs)[0]

    h = np.asarray(once(nn.apply(outputs, model), params))
    aux = loss_of(model, batch, rng=jax.random.key(0)).aux
    steps = np.delete(np.diff(h, axis=1), T // 2 - 1, axis=1)
    for name, expected in (("activation_loss", 2 * (h**2).mean()), ("temporal_loss", 3 * (steps**2).mean())):
        assert_close(np.float32(aux[name][0] / aux[name][1]), np.float32(expected))


def test_sum_of_layers_is_returned():
    fields = {"cells": "gru(8)*2", "vocab": V}
    one, both = RecurrentStack(RNNConfig(**fields)), RecurrentStack(RNNConfig(**fields, outputs="sum"))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, 8)).astype(jnp.float32))
    first = RecurrentStack(RNNConfig(cells="gru(8)", vocab=V))

    def run(x):
        params = one.init(jax.random.key(0), x, RecurrentInputs())
        return [stack.apply(params, x, RecurrentInputs())[0] for stack in (first, one, both)]

    outputs = once(run, x)
    assert_close(outputs[0] + outputs[1], outputs[2])


def test_bidirectional_stack_reads_backwards_within_segments():
    stack = RecurrentStack(RNNConfig(cells="lstm(5),gru(4)", vocab=V, initial="learned"), bidirectional=True)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((B, T, 3)).astype(jnp.float32))
    reset = segment_resets(jnp.asarray([[1, 1, 2, 2, 2, 2]] * B, jnp.int32))

    def run(x, reset):
        params = nn.meta.unbox(stack.init(jax.random.key(0), x, RecurrentInputs()))
        packed = stack.apply(params, x, RecurrentInputs(reset=reset))[0]
        return packed, [stack.apply(params, part, RecurrentInputs())[0] for part in jnp.split(x, [2], axis=1)]

    packed, parts = once(run, x, reset)
    assert packed.shape == (B, T, 8)
    assert_close(packed, jnp.concatenate(parts, axis=1))


def test_a_cell_that_reads_forwards_only_has_no_second_direction():
    stack = RecurrentStack(RNNConfig(cells="sru(4)", vocab=V), bidirectional=True)
    with pytest.raises(InputError, match="model.cells: sru reads forwards"):
        jax.eval_shape(stack.init, jax.random.key(0), jnp.zeros((1, 2, 4)), RecurrentInputs())


def test_generation_continues_prompts():
    model = make("lstm(8)*2")
    params = params_of(model)
    prompts = [np.array([1, 2, 3]), np.array([4])]
    assert_greedy_ids(model, params, prompts, 3)


def test_invalid_configs_raise():
    for fields, message in (
        ({"cells": "lstn(8)"}, "lstm"),
        ({"cells": "lstm(0)"}, "expected 1 to"),
        ({"cells": "lstm(4),lstm(8)", "outputs": "sum"}, "several widths"),
        ({"cells": "sru(8)", "zoneout": 0.1}, "SRU does not support it"),
        ({"cells": "gru(8)", "zoneout_cell": 0.1}, "GRU does not support it"),
        ({"cells": "qrnn(8)", "initial": "learned"}, "choose another cell"),
        ({"cells": "gru(8, form=torch)"}, "expected 'cudnn' or 'original'"),
        ({"cells": "gru(8, reset_bias=low)"}, "reset_bias='low': expected int | float"),
        ({"cells": "gru(8)", "impl": "cudnn", "resets": False}, "no such implementation"),
        ({"impl": "cudnn"}, "model.resets=False"),
        ({"cells": "lstm(8)", "embed_dim": 4}, "tied=False"),
    ):
        raises(message, RNNConfig, **fields)


def test_fine_tuning_may_change_dropout_but_not_what_the_parameters_compute():
    vocabulary = Vocabulary(ByteTokenizer())
    source = warm_start.StartSource(Path("runs/source"), "rnn_lm", RNNConfig(vocab=V), vocabulary, "bytes", is_run=True)
    tuned = RNNConfig(vocab=V, **dict.fromkeys(set(DROPPED) - {"zoneout"}, 0.5), activation_penalty=1.0)
    assert source.check_model(tuned) == ""
    for fields in ({"zoneout": 0.5}, {"cells": "lstm(256)"}, {"resets": False}):
        raises(f"model.{next(iter(fields))} is", source.check_model, RNNConfig(vocab=V, **fields))


def test_gates_begin_with_the_biases_of_the_papers():
    biases = {"lstm": (0, 1, 0, 0), "gru": (-1, 0, 0), "mgu": (-1, 0), "qrnn": (0, 1, 0), "sru": None}
    assert set(biases) == set(CELLS)
    for name, of_gates in biases.items():
        if of_gates is not None:
            bias = CELLS[name](features=3).bias_init(jax.random.key(0), (3 * len(of_gates),), jnp.float32)
            np.testing.assert_array_equal(bias, np.repeat(of_gates, 3))


def test_initial_biases_of_gates_are_options():
    lstms = "lstm(2, forget_bias=0),lstm(2, forget_bias=2.5)"
    cells = f"{lstms},gru(2, reset_bias=0.5),mgu(2, reset_bias=3),qrnn(2, forget_bias=-1)"
    params = nn.meta.unbox(jax.jit(make(cells).init)(jax.random.key(0), make_batch()))["params"]["stack"]
    expected = [(0, 0, 0, 0), (0, 2.5, 0, 0), (0.5, 0, 0), (3, 0), (0, -1, 0)]
    for i, of_gates in enumerate(expected):
        np.testing.assert_array_equal(params[f"layer_{i}"]["bias"], np.repeat(np.float32(of_gates), 2))


def test_every_cell_is_in_the_tested_stack():
    assert set(CELLS) == {entry.split("(")[0] for entry in EVERY.replace(" ", "").split("),")}


def test_unsupported_plans_raise():
    for plan in (Plan(pipeline=2), Plan(sequence=2)):
        raises(
            "the model is a recurrent network", make_trainer, make(), OptimizerConfig("sgd"), plan, steps=2, devices=2
        )
    raises(
        "set plan.remat='none'", make_trainer, make(), OptimizerConfig("sgd"), Plan(remat="full"), steps=2, devices=1
    )
