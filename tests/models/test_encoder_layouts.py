"""The encoder over eight devices: loss, metrics and first gradients of one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from hpnlp.models.encoder import Encoder
from hpnlp.models.variables import axes_and_shapes
from hpnlp.parallel.plan import Plan
from hpnlp.training.optimizers.over_devices import OverDevices
from hpnlp.types import InputError
from tests.contracts import ONCE
from tests.models.test_encoder import MOBILE, SEQUENCES, make, make_batch
from tests.training.test_step import assert_leaves_close

B, T = 8, 16
SIZES = {"layers": 2, "max_len": T, "dropout": 0.3, "unroll": 1}
# 6 classes divide over 2 stages, and not over 2 stages x 2 devices of the axis `tensor`.
HEADS = {
    "sequences": SEQUENCES | {"classes": 6},
    # Without norms, these parameters saturate the attention, and its gradients are differences of nearly equal numbers.
    "mobile": MOBILE | {"norm": "layer"},
    "attention": {"pooling": "attention", "classes": 3},
    # Without centred norms, also of keys, Nystrom's inverse multiplies rounding errors, which depend on the processor.
    "summaries": {
        "norm": "layer",
        "pooling": "mean",
        "classes": 3,
        "mixer": "linformer(8,share=none),nystrom(8,5)",
        "qk_norm": True,
        "layers": 4,
        "heads": 2,
        "kv_heads": 2,
    },
    "synthesized": {
        "pooling": "mean",
        "classes": 3,
        "mixer": "mixture(dense,random,factorized_random),synthesizer_factorized_dense",
        "heads": 4,
        "kv_heads": 2,
    },
    "fourier": {"pooling": "mean", "classes": 3, "mixer": "fnet"},
    "sampled": {"pooling": "max", "classes": 40, "output": "sampled(7,uniform)"},
}
LAYOUTS = {
    "zero3 4 x tensor 2": Plan("zero3", tensor=2),
    "3d": Plan("3d"),
    "pipeline 2 x zero3 2 x tensor 2": Plan("zero3", pipeline=2, tensor=2),
    "data 2 x sequence 4": Plan(sequence=4),
    "data 4 x sequence 2, by heads": Plan(sequence=2, exchange="heads"),
}
# Heads that no task of `tests/tasks/test_contracts.py` has; every layout with some of them.
CASES = {
    "mobile": ("zero3 4 x tensor 2", "data 4 x sequence 2, by heads"),
    "attention": ("data 2 x sequence 4",),
    "summaries": ("pipeline 2 x zero3 2 x tensor 2",),
    "fourier": ("3d",),
    "synthesized": ("zero3 4 x tensor 2",),
    "sampled": ("3d",),
}


@functools.cache
def model_of(head, ring):
    model, params = make(**SIZES | HEADS[head] | ({"dropout": 0.0} if ring else {}))
    return model, params, make_batch(model.config, B, T)


@functools.cache
def results(head, plan, devices, ring):
    """`(gradients, [{name: (sum, weight)}])` of a training loss and of its evaluation."""
    model, params, batch = model_of(head, ring)
    layout = plan.layout(model.config.sizes(), jax.devices()[:devices])
    axes, shapes = axes_and_shapes(model)
    if devices > 1:
        model = model.clone(model_parallel=OverDevices(layout).model_parallel(model.config, None))
    specs = layout.state_specs(axes, shapes, divided=layout.zero == 3)
    params = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(layout.mesh, spec)), params, specs)
    batch = {name: jax.device_put(x, layout.sharding(*model.batch_axes()[name])) for name, x in batch.items()}

    def loss(params, batch, key):
        rngs = {"dropout": key, "output": key}
        outs = [model.apply({"params": params}, batch, *args, rngs=rngs, method="loss") for args in ((False,), ())]
        return outs[0].sum, [{"loss": (out.sum, out.weight), **out.aux} for out in outs]

    with jax.set_mesh(layout.mesh):
        return jax.device_get(
            jax.jit(jax.grad(loss, has_aux=True), compiler_options=ONCE)(params, batch, jax.random.key(7))
        )


@pytest.mark.slow  # `tests/tasks/test_contracts.py` trains under a plan
@pytest.mark.parametrize(("head", "layout"), [(head, layout) for head, layouts in CASES.items() for layout in layouts])
def test_layouts_match_one_device(head, layout):
    """With dropout, except on a ring, which refuses it."""
    plan = LAYOUTS[layout]
    ring = layout == "data 2 x sequence 4"
    gradients, metrics = results(head, plan, 8, ring)
    expected_gradients, expected = results(head, Plan(), 1, ring)
    for actual, pairs in zip(metrics, expected, strict=True):
        assert actual.keys() == pairs.keys()
        for name, pair in pairs.items():
            for x, y in zip(actual[name], pair, strict=True):  # sums may be arrays
                np.testing.assert_allclose(x, y, rtol=1e-5, err_msg=name)
    for tree in (gradients, expected_gradients):
        if "bias" in tree["layers"].get("attention", {}).get("k", {}):
            # A bias of keys shifts all scores of a query equally: its gradient is 0 up to rounding.
            tree["layers"]["attention"]["k"] = dict(tree["layers"]["attention"]["k"], bias=np.zeros(1))
    assert_leaves_close(gradients, expected_gradients, 1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_sizes_that_do_not_divide_raise():
    model, _, batch = model_of("sequences", False)
    layout = Plan().layout(model.config.sizes(), jax.devices())
    parallel = model.clone(model_parallel=OverDevices(layout).model_parallel(model.config, None))
    batch = {name: x[:6] for name, x in batch.items()}
    with pytest.raises(InputError, match="6 sequences do not divide over plan.data=8"), jax.set_mesh(layout.mesh):
        jax.eval_shape(
            lambda p: parallel.apply(p, batch, method="loss"), jax.eval_shape(model.init, jax.random.key(0), batch)
        )


def test_classes_are_replicated_if_they_do_not_divide():
    model, _, _ = model_of("sequences", False)
    for classes, axes in ((6, ("pipeline",)), (8, ("pipeline", "tensor")), (3, ())):
        config = dataclasses.replace(model.config, classes=classes)
        assert Plan("3d").layout(config.sizes(), 8).rules["labels"] == axes
    assert isinstance(model, Encoder)


def test_trigrams_are_not_divided_over_a_ring():
    model, _, batch = model_of("mobile", True)
    layout = Plan(sequence=4).layout(model.config.sizes(), jax.devices())
    parallel = model.clone(model_parallel=OverDevices(layout).model_parallel(model.config, None))
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch)
    with pytest.raises(InputError, match="set plan.exchange=heads, or plan.sequence=1"), jax.set_mesh(layout.mesh):
        jax.eval_shape(lambda p: parallel.apply(p, batch, method="loss"), shapes)
