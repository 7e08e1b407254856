"""Loss and embedding lookup over a mesh: values and gradients of one device, and the collectives."""

import collections
import functools
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.nn.output import OUTPUTS
from hpnlp.ops.softmax import linear_cross_entropy
from hpnlp.parallel import vocab_parallel
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from tests.contracts import ONCE, once
from tests.messages import raises

B, T, V, D = 16, 16, 2048, 8
N = B * T
SIZES = {"vocab": (V, "words")}
FULL = OUTPUTS["full"](vocab=V, dim=D)
KEY = jax.random.key(3)
LAYOUTS = {
    "data 8": Plan(),
    "tensor 8": Plan("tensor"),
    "zero1 8": Plan("zero1"),
    "zero3 8": Plan("zero3"),
    "data 2 x tensor 4": Plan(data=2, tensor=4),
    "data 2 x fsdp 2 x tensor 2": Plan(data=2, fsdp=2, tensor=2),
    "pipeline 2 x fsdp 2 x tensor 2": Plan(pipeline=2, fsdp=2, tensor=2, data=1),
}
over_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(autouse=True)
def in_loops(monkeypatch):
    """Chunks of 8 tokens and blocks of about 32 words, so that each device runs several."""
    module = sys.modules[linear_cross_entropy.__module__]
    for name, size in {
        "MAX_CHUNK_LOGITS": 8 * V,
        "MIN_CHUNK_TOKENS": 8,
        "BLOCK_LOGITS": 32 * N,
        "MIN_BLOCK_WORDS": 32,
    }.items():
        monkeypatch.setattr(module, name, size)


def arrays(dtype=jnp.float32):
    """(table, h, labels, weights). A third of the tokens have weight 0, with NaN hidden states or invalid labels."""
    draw = np.random.default_rng(0)
    # Logits of order 1: rounding a logit of 16 changes its exponential by 1e-6, whatever the order of summation.
    table, h = draw.normal(size=(V, D), scale=0.25), draw.normal(size=(N, D))
    labels = draw.integers(0, V, N)
    labels[: 2 * 8] = np.concatenate(
        [np.arange(8) * V // 8, (np.arange(8) + 1) * V // 8 - 1]
    )  # the first and last word of each slice
    weights = np.where(np.arange(N) % 3 == 2, 0.0, draw.uniform(0.5, 1.5, N))
    h[5::6], labels[2::6] = np.nan, -1
    return (
        jnp.asarray(table.astype(np.float32)),
        jnp.asarray(h.astype(dtype)),
        jnp.asarray(labels.astype(np.int32)),
        jnp.asarray(weights.astype(np.float32)),
    )


@functools.cache
def layout_of(name):
    return LAYOUTS[name].layout(SIZES)


def placed(layout, table, h, *token_arrays):
    """The arrays on the mesh, with tokens as `[B, T]`."""
    h, *token_arrays = (x.reshape(B, T, *x.shape[1:]) for x in (h, *token_arrays))
    table_spec = layout.state_spec(("vocab", "embed"), table.shape, divided=layout.zero == 3)
    specs = table_spec, layout.activations(T), *[layout.spec("batch", "length")] * len(token_arrays)
    arrays = zip((table, h, *token_arrays), specs, strict=True)
    return [jax.device_put(x, NamedSharding(layout.mesh, spec)) for x, spec in arrays]


def in_rows(gradients):
    """Gradients of one device, with tokens as in `placed`."""
    by_table, by_h = gradients
    return by_table, by_h.reshape(B, T, D)


def mean_with_gradients(loss):
    """((mean loss, weight), (gradient by table, gradient by h))."""

    def mean(table, h, labels, weights):
        out = loss(table, h, labels, weights)
        return out.sum / out.weight, out.weight

    return jax.value_and_grad(mean, (0, 1), has_aux=True)


def assert_close(actual, expected, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert a.shape == b.shape and np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@functools.cache
def one_device(dtype=jnp.float32):
    value, gradients = jax.device_get(once(mean_with_gradients(FULL.loss), *arrays(dtype)))
    return value, in_rows(gradients)


@functools.cache
def compiled(layout, dtype=jnp.float32):
    """`(program, arguments)` of the loss with its gradients."""
    layout = layout_of(layout)
    args = placed(layout, *arrays(dtype))
    run = jax.jit(mean_with_gradients(functools.partial(vocab_parallel.loss, layout, FULL)), compiler_options=ONCE)
    return run.lower(*args).compile(), args


@over_layouts
def test_loss_and_gradients_equal_those_of_one_device(layout):
    """NaN and invalid labels have no effect where the weight is 0."""
    run, args = compiled(layout)
    results = run(*args)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results))
    assert_close(results, one_device())


def test_bfloat16_matches_one_device():
    run, args = compiled("data 2 x fsdp 2 x tensor 2", jnp.bfloat16)
    (loss, weight), (by_table, by_h) = run(*args)
    assert (loss.dtype, by_table.dtype, by_h.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    assert_close(((loss, weight), (by_table, by_h)), one_device(jnp.bfloat16), 1e-2)


@pytest.mark.parametrize("layout", ["data 8", "data 2 x fsdp 2 x tensor 2"])
def test_invalid_labels_give_nan(layout):
    """The losses of their tokens are NaN, other tokens' are not; the sum is NaN if they have weight."""
    layout = layout_of(layout)
    table, h, labels, _ = arrays()
    table, h, labels = table, jnp.nan_to_num(h), jnp.abs(labels)
    expected = np.array(once(FULL.nll, table, h, labels))
    expected[100:102] = np.nan
    labels = labels.at[100].set(-1).at[101].set(V)

    def run(table, h, labels):
        loss = functools.partial(vocab_parallel.loss, layout, FULL, table, h, labels)
        ones = jnp.ones((B, T))
        sums = [loss(ones.at[6, i].set(0.0)).sum for i in (4, 5)]
        none = loss(ones.at[6, 4:6].set(0.0))
        return sums, none.sum

    sums, none = once(run, *placed(layout, table, h, labels))
    assert np.isnan(sums).all()
    assert float(none) == pytest.approx(np.nansum(expected), rel=1e-6)


def test_sampled_softmax_is_divided_in_evaluation():
    """In training it draws samples of all words, and its loss is not divided."""
    layout, layer = layout_of("data 2 x tensor 4"), OUTPUTS["sampled"](vocab=V, dim=D, samples=16, unique=False)
    args = placed(layout, *arrays())
    results = [once(functools.partial(vocab_parallel.loss, layout, layer), *args, rng) for rng in (None, KEY)]
    assert_close(results[0].sum / results[0].weight, one_device()[0][0])
    assert_close(results[1], once(layer.loss, *arrays(), KEY))


def test_bias_is_sliced_like_the_table():
    layout, layer = layout_of("data 2 x tensor 4"), OUTPUTS["nce"](vocab=V, dim=D, samples=16)
    args = arrays()
    params = {"params": {"bias": jnp.asarray(np.random.default_rng(1).standard_normal(V).astype(np.float32))}}

    def run(*args):
        return layer.apply(params, *args, method=functools.partial(vocab_parallel.loss, layout))

    expected = once(functools.partial(layer.apply, params, method="loss"), *args)
    assert_close(once(run, *placed(layout, *args)).sum, expected.sum)


def collectives(text):
    """(operation, shape, whether it is in a loop) of each collective of an HLO program."""
    bodies, body = {}, []
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line)
        if head:
            body = bodies[head[1]] = []
        body.append(line)
    called = {
        name: re.findall(r"(?:body|condition|calls|to_apply)=%?([\w.-]+)", "\n".join(bodies[name])) for name in bodies
    }
    reached, left = set(), re.findall(r"(?:body|condition)=%?([\w.-]+)", text)
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += called[name]
    kinds = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
    results = []
    for name, lines in bodies.items():
        for line in lines:
            sent = re.search(rf" = (.*?) ({kinds})(-start)?\(", line)
            for shape in re.findall(r"\w+\[([\d,]*)\]", sent[1]) if sent else ():
                results.append((sent[2], tuple(map(int, shape.split(","))) if shape else (), name in reached))
    return results


def test_collectives_are_found_inside_and_outside_of_loops():
    mesh = Plan().mesh()

    def body(x):
        def step(carry, _):
            return jax.lax.pcast(jax.lax.psum(jnp.sin(carry), "data"), "data", to="varying"), None

        return jax.lax.psum(jax.lax.scan(step, x, None, length=3)[0][0], "data")

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()))
    results = collectives(run.lower(jnp.ones((8, 7))).compile().as_text())
    assert sorted(results) == [("all-reduce", (1, 7), True), ("all-reduce", (7,), False)]


@over_layouts
def test_collectives_match_the_documentation(layout):
    """Each sum is made once, outside of loops, and no array is as large as the logits."""
    held, text = layout_of(layout), compiled(layout)[0].as_text()
    shapes = re.findall(r"\w+\[([\d,]+)\]", text)
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) < N * V // 8

    sizes = held.mesh.shape
    rows, words = B // held.size("batch"), V // held.size("vocab")
    expected = collections.Counter()
    if held.size("vocab") > 1:  # the largest lse, the sum of their exp and the label's logit
        expected += {("all-reduce", (rows * T,)): 3}
        # h and the gradient by it, of which each device of "tensor" has its tokens.
        expected += {("all-gather", (rows, T, D)): 1, ("reduce-scatter", (rows, T // sizes["tensor"], D)): 1}
    if sizes["pipeline"] > 1:
        expected += {("all-reduce", (rows, T // sizes["tensor"], D)): 1}
    if held.zero == 3:
        expected += {("all-gather", (words, D)): 1, ("reduce-scatter", (words, D // sizes["fsdp"])): 1}
    elif held.zero == 1:
        expected += {("all-reduce", (words, D)): 1}
    if sizes["data"] > 1:
        expected += {("all-reduce", (words, D // (sizes["fsdp"] if held.zero == 3 else 1))): 1}
    results = collectives(text)
    assert not any(in_loop for _, _, in_loop in results)
    assert collections.Counter((kind, shape) for kind, shape, _ in results if shape) == expected


@pytest.mark.parametrize("devices", [1, 8])
def test_trainers_use_shard_map_over_several_devices(devices):
    trainer = make_trainer(
        LM(LMConfig(layers=1, dim=16, heads=2, vocab=64, max_len=8)),
        OptimizerConfig(),
        Plan(),
        steps=2,
        devices=jax.devices()[:devices],
    )
    batch = jax.eval_shape(lambda: example_batch(8, 8))
    key = jax.eval_shape(lambda: KEY)
    step = jax.make_jaxpr(trainer.step.jitted)(trainer.state_shapes, batch, key)
    evaluate = jax.make_jaxpr(trainer.evaluate_next.jitted)(trainer.state_shapes.params, batch, None)
    assert ("shard_map" in str(step)) == ("shard_map" in str(evaluate)) == (devices > 1)


@pytest.mark.parametrize(
    ("plan", "shape", "message"),
    [
        (Plan(), (12, T), "12 sequences do not divide over plan.data=8: make them a multiple of 8"),
        (Plan("zero3", data=2), (12, T), "12 sequences do not divide over plan.data=2 x plan.fsdp=4: make them"),
    ],
    ids=str,
)
def test_indivisible_batches_raise(plan, shape, message):
    layout, ids = plan.layout(SIZES), jnp.zeros(shape, jnp.int32)
    raises(message, vocab_parallel.loss, layout, FULL, jnp.ones((V, D)), jnp.ones((*shape, D)), ids, jnp.ones(shape))
    raises(message, vocab_parallel.lookup, layout, jnp.ones((V, D)), ids, jnp.float32)


@pytest.mark.parametrize(("v", "plan"), [(V - 4, Plan("tensor")), (263, Plan("zero3"))], ids=["tensor", "zero3"])
def test_indivisible_tables_are_replicated(v, plan):
    """ZeRO divides another axis where the model dimension does not divide, or none."""
    layer = OUTPUTS["full"](vocab=v, dim=7)
    draw = np.random.default_rng(1)
    table, h = (jnp.asarray(draw.standard_normal((n, 7)).astype(np.float32)) for n in (v, N))
    args = table, h, jnp.asarray(draw.integers(0, v, N).astype(np.int32)), jnp.ones(N)
    value, gradients = jax.device_get(once(mean_with_gradients(layer.loss), *args))
    layout = plan.layout({"vocab": (v, "words"), "mlp": (64, "mlp")})
    assert layout.size("vocab") == 1
    run = mean_with_gradients(functools.partial(vocab_parallel.loss, layout, layer))
    assert_close(once(run, *placed(layout, *args)), (value, (gradients[0], gradients[1].reshape(B, T, 7))))


@over_layouts
def test_lookups_equal_those_of_one_device(layout):
    layout, (table, *_) = layout_of(layout), arrays()
    ids = jnp.asarray(np.random.default_rng(2).integers(0, V, (B, T)).astype(jnp.int32)).at[0, 0].set(V - 1)
    held = NamedSharding(layout.mesh, layout.state_spec(("vocab", "embed"), table.shape, divided=layout.zero == 3))

    def run(look):
        return jax.value_and_grad(lambda table: (look(table) ** 2).sum())

    results = once(
        run(lambda table: vocab_parallel.lookup(layout, table, ids, jnp.float32)), jax.device_put(table, held)
    )
    assert_close(results, once(run(lambda table: table[ids]), table))
