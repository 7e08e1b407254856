"""Language models whose layers differ in mixers, heads and widths: parameters, gradients, decoding and layouts."""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.decoding.decoding_weights import separate_layers
from hpnlp.models.huggingface.families import config_json
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.models.variables import axes_and_shapes
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig, is_matrix
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests.messages import raises
from tests.models.test_lm import SMALL, assert_greedy_ids, make, make_batch, run
from tests.training.test_step import MODEL, ONE, Run, assert_leaves_close, batch_of, initialised_state, trainer_of

# A period of convolution, full attention of fewer heads, and convolution, and two more layers.
HYBRID = {"mixer": "conv(3),full,conv(3)", "form": "block,block(heads=2,mlp_dim=32),block", "layers": 5}
STACKS = ["0_conv", "1_full"]


def kinds(form):
    return form.mixer, form.heads, form.mlp_dim


def test_forms_are_the_model_with_the_changes_of_each_layer():
    forms = LMConfig(**SMALL | HYBRID).forms()
    assert [kinds(form) for form in forms] == [("conv(3)", 4, 24), ("full", 2, 32), ("conv(3)", 4, 24)]
    by_position = LMConfig(
        mixer="window(3,0),full", form="block,block(rope_theta=1e6),block(mlp=gelu)", layers=6
    ).forms()
    assert [form.mixer for form in by_position] == ["window(3, 0)", "full"] * 3
    assert [form.rope_theta for form in by_position] == [1e4, 1e6, 1e4] * 2
    assert [form.mlp for form in by_position] == ["swiglu", "swiglu", "gelu"] * 2


def initial(**fields):
    model = LM(LMConfig(**SMALL | fields))
    return nn.meta.unbox(run(model.init, jax.random.key(0), example_batch(1, 2)))["params"]


def test_initial_values_do_not_depend_on_the_stacks():
    """A layer has the values that it has in a model of such layers alone."""
    hybrid = initial(**HYBRID)["layers"]
    assert list(hybrid) == STACKS
    alike = {"0_conv": {"mixer": "conv(3)"}, "1_full": {"heads": 2, "mlp_dim": 32}}
    members = {"0_conv": [0, 2, 3], "1_full": [1, 4]}
    for name, fields in alike.items():
        stack = initial(**fields, layers=5)["layers"]
        assert jax.tree.structure(stack) == jax.tree.structure(hybrid[name])
        jax.tree.map(
            lambda a, b, i=members[name]: np.testing.assert_array_equal(a, np.asarray(b)[i]), hybrid[name], stack
        )


@pytest.mark.parametrize(
    ("fields", "stacks"),
    [
        (HYBRID, STACKS),
        ({"mixer": "conv,window(3,0)*2,full", "layers": 4}, ["0_conv", "1_window"]),
        ({"mixer": "conv(3),conv(4)"}, ["0_conv", "1_conv"]),
        ({"form": "block,block(qk_norm=True)"}, ["0_full", "1_full"]),
        ({"form": "block*11,block(mlp_dim=8)", "layers": 12}, ["00_full", "11_full"]),
        ({"form": "block,block(rope_theta=1e6)"}, None),
        ({"form": "block(heads=2)"}, None),
    ],
)
def test_layers_with_equal_parameters_share_a_stack(fields, stacks):
    axes, shapes = axes_and_shapes(LM(LMConfig(**SMALL | fields)))
    plain = ["attention", "feed_norm", "mix_norm", "mlp"]
    assert list(shapes["layers"]) == (stacks or plain)
    assert all(list(shapes["layers"][name]) == plain for name in stacks or ())
    names = jax.tree.leaves(axes["layers"], is_leaf=lambda node: isinstance(node, tuple))
    assert {name[0] for name in names} == {"layers"}
    kernels = [leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(shapes) if path[-1].key == "kernel"]
    assert LMConfig(**SMALL | fields).non_embedding_parameters() == sum(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["plain", "reversible"])
def test_gradients_equal_those_layer_by_layer(residual):
    """In the loop over periods and after it, with rematerialisation, and recomputed from the end of reversible layers."""
    model, params = make(**HYBRID, dropout=0.3, residual=residual)
    batch, key = make_batch(2, 9), jax.random.key(3)
    stacked = model if residual == "reversible" else LM(model.config, remat="dots")

    def loss(params, model):
        return model.apply({"params": params}, batch, False, rngs={"dropout": key, "output": key}, method=LM.loss).sum

    expected, actual = jax.device_get(
        run(
            lambda p: (
                jax.value_and_grad(lambda p: loss(separate_layers(p, model.config), model))(p),
                jax.value_and_grad(loss)(p, stacked),
            ),
            params,
        )
    )
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    assert_leaves_close(actual[1], expected[1], 2e-6)


@pytest.mark.parametrize("residual", ["plain", pytest.param("reversible", marks=pytest.mark.slow)])
def test_greedy_ids_equal_the_argmax_of_the_full_pass(residual):
    model, params = make(**HYBRID, max_len=64, residual=residual)
    assert_greedy_ids(model, params, [np.arange(length) % 11 for length in (1, 2, 9)], 6)


def test_filters_are_no_matrix():
    """Neither muon nor weight decay applies to the filters of convolutions."""
    layers = is_matrix(axes_and_shapes(LM(LMConfig(**SMALL | HYBRID)))[1])["layers"]
    assert not layers["0_conv"]["attention"]["mixer"]["taps"] and layers["0_conv"]["mlp"]["up"]["kernel"]


@pytest.mark.slow
def test_prefill_and_extend_of_stacks_equal_separate_layers():
    model, params = make(**HYBRID)
    tokens, lengths = make_batch(2, 12)["tokens"], jnp.asarray([3, 9], jnp.int32)

    def decode(params):
        variables = {"params": params}
        h, caches = model.apply(variables, tokens[:, :9], lengths, 12, method=LM.prefill)
        new = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
        return h, model.apply(variables, new, lengths[:, None], caches, method=LM.extend)[0]

    actual, expected = run(lambda p: [decode(p), decode(separate_layers(p, model.config))], params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected)


# Layouts. Heads 4 and 2 and columns 64 and 96 divide by 2, and stages hold complete periods. A period of three stacks,
# one of which has two layers of each period.
PARALLEL = dataclasses.replace(
    MODEL, mixer="conv,full", form="block,block(mlp=gelu),block,block(heads=4,mlp_dim=96)", layers=8, dropout=0.3
)
# A period of two layers, whose programs take half as long to compile.
SHORT = {"form": "block,block(heads=4,mlp_dim=96)", "layers": 4}
LAYOUTS = {
    "pipeline x zero2, rounds": (Plan("zero2", pipeline=2, rounds=2), SHORT | {"layers": 8}),
    "3d, reversible": (Plan("3d"), SHORT | {"residual": "reversible"}),
    "pipeline x zero3 x tensor, rematerialised": (
        Plan("zero3", pipeline=2, tensor=2, remat="full", recompute_stages=True),
        {},
    ),
    "ring": (Plan("sequence", pipeline=2), SHORT | {"mixer": "window(3,0),full", "dropout": 0.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_match_one_device(name):
    """Losses of several steps, and the gradients of the first, each leaf."""
    plan, fields = LAYOUTS[name]
    model = dataclasses.replace(PARALLEL, **fields)
    single, parallel = (Run(trainer_of(*where, model), model, make=initialised_state) for where in (ONE, (plan, 8)))
    for seed in range(3):
        expected, actual = single.step(batch_of(seed)), parallel.step(batch_of(seed))
        assert actual == pytest.approx(expected, rel=1e-5)
        if seed == 0:
            assert_leaves_close(parallel.gradients(), single.gradients(), 1e-5)
    assert parallel.heldout(batch_of(99)) == pytest.approx(single.heldout(batch_of(99)), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_optimizers_treat_each_stack_like_one_device(optimizer):
    model = dataclasses.replace(PARALLEL, **SHORT)
    trainers = [trainer_of(*where, model, name=optimizer) for where in (ONE, (Plan("zero3", tensor=2), 8))]
    state = jax.device_get(trainers[0].init(jax.random.key(0)))
    single, parallel = (Run(trainer, model, make=lambda _: state) for trainer in trainers)
    for seed in range(3):
        assert parallel.step(batch_of(seed)) == pytest.approx(single.step(batch_of(seed)), rel=1e-5)


# Errors.


def test_invalid_forms_raise():
    for fields, message in (
        ({"form": "blok"}, "unknown layer form 'blok': did you mean 'block'"),
        ({"form": "block(head=2)"}, "layer form 'block' has no argument 'head': did you mean 'heads'"),
        ({"form": "block(heads=2.5)"}, "layer form 'block' has heads=2.5: expected int"),
        ({"form": "block(dim=8)"}, "model.form='block(dim=8)' sets dim, but branches of all layers are added to one"),
        ({"form": "block(mixer=conv)"}, "sets mixer, but model.mixer names the mixer of each layer: set model.mixer"),
        ({"form": "block,block(heads=3)"}, "model.form 'block(heads=3)': model.dim=16 is not a multiple"),
        ({"form": "block,block(mlp_dim=-1)"}, "model.form 'block(mlp_dim=-1)': model.mlp_dim=-1: expected at least 0"),
        ({"form": "block,block(mlp=swigl)"}, "unknown model.mlp 'swigl': did you mean 'swiglu'"),
        ({"form": "block,block(position=learned)"}, "model.position='rope': learned positions are added"),
        ({"form": "block,block(heads=2)", "mixer": "full,conv"}, "heads of 'block(heads=2)' has no effect, because"),
        ({"form": "block*2,block(heads=2)"}, "model.form='block*2,block(heads=2)' repeats after 3 layers"),
        (
            {"form": "block*2,block(heads=2)", "mixer": "conv,full", "layers": 4},
            "model.mixer='conv,full' and model.form='block*2,block(heads=2)' repeat after 6 layers, and model.layers=4",
        ),
        ({"form": "block*5000"}, "model.form='block*5000' names 5000 layers: expected at most 4096"),
    ):
        raises(re.escape(message), make, **fields)


def test_unsupported_plans_raise():
    for plan, fields, message in (
        (Plan(pipeline=4), {}, "periods of model.mixer and model.form=2 does not divide into plan.pipeline=4 stages"),
        (Plan(tensor=4), {"mlp_dim": 66, "vocab": 261}, "divides none of common divisor of heads in model.form=2, "),
        (Plan(sequence=2), {"dropout": 0.0}, "a mixer without heads needs whole ones"),
        (Plan(sequence=4, exchange="heads"), {"mixer": "full", "dropout": 0.0}, "deals model.heads=2 out over"),
        (Plan("zero3", offload_parameters=True), {}, "fetches one layer at a time, and model.mixer='conv,full'"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            make_trainer(LM(dataclasses.replace(PARALLEL, **fields)), OptimizerConfig(), plan, steps=1, devices=8)


def test_conversion_raises():
    config = LMConfig(**SMALL | {"form": "block,block(heads=2)", "tied": False})
    raises("layers of different widths: heads is 4 in layers 0, 2 in layers 1", config_json, config)
    assert config_json(dataclasses.replace(config, form="block*2")) == config_json(
        dataclasses.replace(config, form="block")
    )
