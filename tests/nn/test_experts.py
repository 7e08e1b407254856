"""Layers of experts: what they share with other layers of a model, for every router."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from hpnlp.models.lm import LM, LMConfig
from hpnlp.nn.feed_forward import FEED_FORWARDS, build_feed_forward
from hpnlp.nn.feed_forward.experts import ExpertLayer
from hpnlp.ops import moe
from hpnlp.parallel.memory.remat import policy
from hpnlp.types import MixerInputs
from tests.contracts import assert_close, once
from tests.messages import raises
from tests.ops.moe_kernels import replace_kernels

B, T, D, F = 2, 14, 8, 6
ROUTERS = sorted(name for name, entry in FEED_FORWARDS.items() if isinstance(entry, type))
SPECS = (
    *(f"{name}(4)" for name in ROUTERS),
    "top_k(4,2,shared=1,shared_gate=True,capacity=1.0)",
    "top_k(4,3,gates=sigmoid,normalize=True,kind=gelu)",
    "bias_balanced(8,3,groups=4,kept_groups=2)",
    "gshard(4,first_choices_first=True)",
    "hash(4,2)",
)
# Routers whose layers are tested in the first tier: with a capacity, with a buffer, and with the choice of the expert.
FIRST_TIER = ("switch(4)", "bias_balanced(4)", "expert_choice(4)")
BY_TIER = [pytest.param(spec, marks=() if spec in FIRST_TIER else pytest.mark.slow) for spec in SPECS]
MODES = [pytest.param(False, id="evaluation", marks=pytest.mark.slow), pytest.param(True, id="training")]
RNG = np.random.default_rng(0)


def make_inputs(x, segments, training=False, decoding=False):
    return MixerInputs(
        x=jnp.asarray(x),
        segment_ids=jnp.asarray(segments, jnp.int32),
        draws=jax.random.key(3),
        ids=jnp.arange(x.shape[0] * x.shape[1], dtype=jnp.int32).reshape(x.shape[:2]),
        tokens=jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32) * 7 % 19, x.shape[:2]),
        deterministic=not training,
        decoding=decoding,
    )


def drawn_variables(layer, inputs):
    """Parameters that spread tokens over experts, equal for leaves of equal sizes."""
    shapes = jax.eval_shape(layer.init, jax.random.key(0), inputs)
    shapes = jax.tree.map(lambda box: box.unbox(), shapes, is_leaf=lambda box: hasattr(box, "unbox"))
    return jax.tree.map(
        lambda v: jnp.asarray(np.random.default_rng(v.size).normal(size=v.shape).astype(np.float32) / 2), shapes
    )


class Case:
    """A layer with parameters that spread its tokens over experts, and its compiled functions."""

    def __init__(self, spec, training):
        self.layer = build_feed_forward(spec, hidden=F)
        self.training = training
        self.x = RNG.normal(size=(B, T, D)).astype(np.float32)
        self.segments = np.array([[1] * 6 + [2] * 5 + [0] * 3, [1] * 14])
        self.variables = drawn_variables(self.layer, make_inputs(self.x, self.segments))

    def __call__(self, x, segments, decoding=False):
        inputs = make_inputs(x, segments, self.training, decoding)
        return self.layer.apply(self.variables, inputs)

    def values_and_gradients(self, xs):
        """Outputs, statistics, and gradients of a weighted sum with the losses, for each x."""
        weights = np.sin(np.arange(B * T * D)).reshape(B, T, D).astype(np.float32)

        def total(params, x):
            out = self.layer.apply(self.variables | {"params": params}, make_inputs(x, self.segments, self.training))
            losses = self.layer.auxiliary_loss(out.statistics)
            added = sum((value for name, value in losses.items() if name.endswith("_loss")), jnp.zeros(()))
            real = self.segments[..., None] > 0
            return jnp.sum(jnp.where(real, out.o * weights, 0.0)) + added, (out.o, out.statistics)

        gradient = jax.value_and_grad(total, (0, 1), has_aux=True)
        return once(lambda xs: [gradient(self.variables["params"], x) for x in xs], xs)


@pytest.mark.parametrize("training", MODES)
@pytest.mark.parametrize("spec", BY_TIER)
def test_padding_changes_nothing_and_gets_nothing(spec, training):
    case = Case(spec, training)
    padding = (case.segments == 0)[..., None]
    # Shared experts are an MLP of all tokens, in which NaN times a gradient of 0 is NaN.
    other = np.where(padding, np.float32(9.0 if case.layer.shared else np.nan), case.x)
    ((value, (y, sums)), gradients), ((_, (_, sums_of_other)), gradients_of_other) = case.values_and_gradients(
        [case.x, other]
    )
    assert np.isfinite(value)
    jax.tree.map(np.testing.assert_array_equal, (sums, gradients), (sums_of_other, gradients_of_other))
    assert int(sums["tokens"]) == np.sum(case.segments > 0)
    if not case.layer.shared:
        np.testing.assert_array_equal(np.where(padding, y, 0.0), 0.0)
    if training or "noisy" not in spec:
        assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("spec", BY_TIER)
def test_traits_hold(spec):
    case = Case(spec, False)
    traits = case.layer.traits
    changed = case.x.copy()
    changed[:, 9:] = RNG.normal(size=changed[:, 9:].shape)
    other_document = case.x.copy()
    other_document[0, :6] = RNG.normal(size=(6, D))
    whole = np.ones((B, T), np.int32)

    def outputs(x, changed, other_document):
        full, later, other = (case(x, case.segments).o for x in (x, changed, other_document))
        prefix = case(x[:, :9], case.segments[:, :9]).o
        return full, later, other, prefix, case(x, whole, True).o, case(x[:, :1], whole[:, :1], True).o

    full, later, other, prefix, decoded, step = once(outputs, case.x, changed, other_document)
    if traits.causal:
        assert_close(later[1, :9], full[1, :9])
    if traits.isolates_segments:
        assert_close(other[0, 6:11], full[0, 6:11])
    assert_close(other[1], full[1])
    if traits.prefix_consistent and traits.causal:
        assert_close(prefix, full[:, :9])
    if traits.decodes:  # without drops
        assert_close(step, decoded[:, :1])


@pytest.mark.parametrize("spec", ["gshard(4,capacity=1.0)", "switch(4,capacity=1.0)", "base(4)"])
def test_examples_of_a_batch_are_independent_in_training(spec):
    """Trap: groups of tokens that span sequences (flaxformer, Mesh TensorFlow)."""
    case = Case(spec, True)
    changed = case.x.copy()
    changed[0] = RNG.normal(size=changed[0].shape)
    full, other = once(lambda *xs: [case(x, case.segments).o for x in xs], case.x, changed)
    assert_close(other[1], full[1])
    assert not np.allclose(other[0], full[0])


@pytest.mark.parametrize(
    "spec",
    [
        "top_k(8,2,capacity=1.0,impl=dense)",
        pytest.param("gshard(8,capacity=1.0,first_choices_first=True,impl=dense)", marks=pytest.mark.slow),
    ],
)
def test_capacity_of_a_document_ignores_any_number_of_others(spec):
    """12 documents in one sequence, whose tokens all choose the same experts: the drops of each are those of it alone."""
    layer = build_feed_forward(spec, hidden=F)
    x = np.tile(RNG.normal(size=D).astype(np.float32), (1, 60, 1))
    x += 0.01 * RNG.normal(size=x.shape).astype(np.float32)
    segments = np.repeat(np.arange(1, 13), 5)[None]
    variables = drawn_variables(layer, make_inputs(x, segments))

    def run(x, segments):
        packed = layer.apply(variables, make_inputs(x, segments)).o[0]
        alone = make_inputs(x.reshape(12, 5, D), np.ones((12, 5)))
        unpacked = layer.apply(variables, dataclasses.replace(alone, segment_ids=None))
        return packed, layer.apply(variables, alone).o.reshape(60, D), unpacked.o.reshape(60, D)

    packed, alone, unpacked = once(run, x, segments)
    assert_close(alone, packed)
    assert_close(unpacked, packed)
    assert 0 < np.sum(np.any(np.asarray(packed) != 0, axis=1)) < 60  # some tokens are dropped


def test_bounds_of_the_assignments_of_an_expert(monkeypatch):
    """`Routing.most` without slack: sequences of one document, sequences of several, and equal loads."""
    bounds = {}
    inputs = make_inputs(np.zeros((3, 20, D), np.float32), np.ones((3, 20)), training=True)
    for spec in ("switch(4)", "base(4)"):
        layer = build_feed_forward(spec, hidden=F)
        variables = drawn_variables(layer, inputs)
        for segment_ids in (None, inputs.segment_ids):

            def expert_mlp(x, routing, *args, case=(spec, segment_ids is not None)):
                bounds[case] = routing.most
                return x

            monkeypatch.setattr(moe, "expert_mlp", expert_mlp)
            jax.eval_shape(layer.apply, variables, dataclasses.replace(inputs, segment_ids=segment_ids))
    assert bounds == {("switch(4)", False): 21, ("switch(4)", True): 60, ("base(4)", False): 15, ("base(4)", True): 15}


def test_loads_count_all_choices_and_the_loss_of_gshard_counts_the_first():
    """Trap: counts of first choices alone (DeepSpeed#2551)."""
    layer, statistics = build_feed_forward("gshard(4)", hidden=F), {}
    values = {"tokens": 8.0, "assigned": 16.0, "kept": 12.0, "square_lse": 1.0, "entropy": 1.0, "largest": 1.0}
    vectors = {"load": [8, 8, 0, 0], "first": [8, 0, 0, 0], "importance": [4, 2, 1, 1]}
    statistics = {name: jnp.asarray(value, jnp.float32) for name, value in (values | vectors).items()}
    assert set(statistics) == set(layer.statistic_axes)
    losses = layer.auxiliary_loss(statistics)
    assert losses["balance"] == 4 * 4 / 8 and losses["balance_loss"] == np.float32(0.01) * losses["balance"]
    assert losses["load_max"] == 2 and losses["dead_experts"] == 2 and losses["dropped"] == 0.25

    case = Case("st_moe(4,threshold=0.01)", True)  # which keeps the second choice of nearly all tokens
    sums = once(lambda x: case(x, case.segments).statistics, case.x)
    count = int(np.sum(case.segments > 0))
    assert int(sums["first"].sum()) == count
    assert int(sums["load"].sum()) == int(sums["assigned"]) > 1.8 * count


def test_balance_losses_of_layers_are_not_pooled():
    """Trap: one layer's skew cancels that of another (transformers#28255): the pooled loss would be 2."""
    model = LM(LMConfig(layers=2, dim=8, heads=1, vocab=8, mlp_dim=4, mlp="top_k(4)"))
    skew = 8.0 * jnp.eye(2, 4)  # all tokens of each layer use one expert, another one in each layer
    sums = dict.fromkeys(moe.SUMS, jnp.full(2, 8.0)) | {"load": skew, "importance": skew}
    losses = model.auxiliary_loss({"layers": {"mlp": sums}})
    assert losses["balance"] == 4 and losses["load_max"] == 4 and losses["dead_experts"] == 3


def test_hash_reports_no_constants():
    case = Case("hash(4)", True)
    statistics = once(lambda x: case(x, case.segments).statistics, case.x)
    assert set(statistics) == set(case.layer.statistic_axes) == set(moe.LOAD_SUMS)
    assert set(case.layer.auxiliary_loss(statistics)) == {
        "load_max", "load_min", "load_variation", "load_entropy", "dropped", "dead_experts"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "experts", "others"),
    [
        ("top_k(4,2)", 2, 4 * D),
        ("hash(4,2)", 2, 0),
        ("noisy_top_k(4,2)", 2, 8 * D),
        ("top_k(4,2,shared=1,shared_gate=True)", 3, 5 * D),
    ],
)
def test_number_of_weights_of_a_token(spec, experts, others):
    assert build_feed_forward(spec, hidden=F).matrix_size(D) == experts * 3 * F * D + others


@pytest.mark.parametrize("spec", ["top_k(4)", "st_moe(4)", "noisy_top_k(4)"])
def test_router_has_a_gradient_from_its_losses_alone(spec):
    """Trap: losses that are computed and not added (transformers#44243)."""
    case = Case(spec, True)

    def loss(params):
        out = case.layer.apply({"params": params}, make_inputs(case.x, case.segments, training=True))
        losses = case.layer.auxiliary_loss(out.statistics)
        return sum(value for name, value in losses.items() if name.endswith("_loss"))

    gradients = once(jax.grad(loss), case.variables["params"])
    assert np.abs(gradients["router"]).max() > 1e-6
    assert all(not np.any(np.asarray(gradients[name])) for name in ("up", "down"))


def primitives(jaxpr):
    """Names of all operations."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in core.jaxprs_in_params(equation.params):
            yield from primitives(inner)


@pytest.mark.parametrize("router", ROUTERS)
def test_recomputed_layers_make_the_choice_once(router):
    """Trap: a recomputed router chooses otherwise (Automodel#2635): the choice is kept under every policy."""
    spec = {"switch": "switch(4,jitter=0.0)", "noisy_top_k": "noisy_top_k(4)"}.get(router, f"{router}(4)")
    layer = build_feed_forward(spec.replace(")", ",impl=dense)"), hidden=F)
    inputs = make_inputs(np.ones((B, T, D), np.float32), np.ones((B, T)), training=True)
    variables = jax.eval_shape(layer.init, jax.random.key(0), inputs)

    def loss(params, inputs):
        out = layer.apply(variables | {"params": params}, inputs)
        losses = layer.auxiliary_loss(out.statistics)
        return jnp.sum(out.o**2) + sum((v for name, v in losses.items() if name.endswith("_loss")), jnp.zeros(()))

    names = {"top_k", "while", "sort", "cumsum"}  # of choices, of the auction of `base`, and of places
    if router in ("gshard", "st_moe"):
        names.add("shift_right_logical")  # random numbers, by which second choices are kept

    def count(saved):
        gradient = jax.grad(jax.checkpoint(loss, policy=saved))
        jaxpr = jax.make_jaxpr(gradient)(variables["params"], inputs).jaxpr
        return sum(name in names for name in primitives(jaxpr))

    expected = count(jax.checkpoint_policies.everything_saveable)
    assert expected > 0
    for text in ("full", "dots", "names(mixed)"):
        assert count(policy(text)) == expected, text


@pytest.mark.parametrize(
    ("impl", "product"),
    [
        ("loops", "while"),
        ("ragged", "ragged_dot_general"),
        ("pallas", "ragged_dot_general"),
        ("batched", "dot_general"),
    ],
)
def test_policy_that_keeps_hidden_activations_runs_the_products_of_experts_once(monkeypatch, impl, product):
    if impl == "pallas":
        replace_kernels(monkeypatch)
    layer = build_feed_forward(f"top_k(4,impl={impl})", hidden=F)
    inputs = make_inputs(np.ones((B, T, D), np.float32), np.ones((B, T)))
    variables = jax.eval_shape(layer.init, jax.random.key(0), inputs)

    def count(saved):
        loss = jax.checkpoint(lambda *args: jnp.sum(layer.apply(*args).o ** 2), policy=saved)
        return list(primitives(jax.make_jaxpr(jax.grad(loss))(variables, inputs).jaxpr)).count(product)

    once_each = count(jax.checkpoint_policies.everything_saveable)
    router = impl == "batched"  # its product is recomputed, as it has no name
    assert count(policy("names(hidden)")) == once_each + router
    assert count(policy("full")) > once_each + router


def test_bias_moves_by_the_load_of_all_tokens():
    case = Case("bias_balanced(4)", True)
    sums = once(lambda x: case(x, case.segments).statistics, case.x)
    assert int(sums["load"].sum()) == 2 * np.sum(case.segments > 0)
    new = case.layer.advance({"bias": jnp.zeros(4)}, sums, jnp.int32(0), jax.random.key(0))["bias"]
    assert_close(new, moe.moved_bias(jnp.zeros(4), sums["load"], 0.001))


def test_invalid_arguments_raise():
    for spec, message in (
        ("top_k(2,3)", "k=3 of 2 experts"),
        ("top_k(4,0)", "k=0 of 4 experts"),
        ("top_k(4,1)", "no gradient"),
        ("top_k(4,1,gates=softmax,normalize=True)", "no gradient"),
        ("switch(4,2)", "uses 1 per token"),
        ("gshard(4,3)", "uses 2 per token"),
        ("noisy_top_k(2,2)", "noise does not change the choice"),
        ("bias_balanced(8,2,groups=3)", "does not divide 8 experts"),
        ("bias_balanced(8,4,groups=4,kept_groups=1)", "have fewer experts"),
        ("bias_balanced(8,groups=4,kept_groups=2,group_score=worst)", "group_score='worst'"),
        ("bias_balanced(8,group_score=best)", "no effect with one group"),
        ("base(4,2)", "uses 1 per token"),
        ("top_k(4,shared_gate=True)", "has no effect without shared experts"),
        ("top_k(4,scale=0.0)", "scale=0.0 of gates"),
        ("bias_balanced(4,scale=-1.0)", "scale=-1.0 of gates"),
        ("hash(4,balance=0.1)", "balance=0.1 has no effect"),
        ("hash(4,z=0.1)", "z=0.1 has no effect"),
        ("expert_choice(4,balance=0.1)", "balance=0.1 has no effect"),
        ("base(4,balance=0.1)", "balance=0.1 has no effect"),
    ):
        raises(message, build_feed_forward, spec, hidden=F)


def test_biases_of_experts_raise():
    raises(r"model\.mlp_bias=True", build_feed_forward, "top_k(4)", hidden=F, use_bias=True)


def test_policies_that_name_the_choice_of_experts_raise():
    raises("plan.remat: every policy keeps 'routing', the choice of experts: leave it", policy, "names(mixed,routing)")


def test_every_router_is_an_expert_layer():
    assert all(issubclass(FEED_FORWARDS[name], ExpertLayer) for name in ROUTERS) and len(ROUTERS) == 9
