"""An output layer's loss over a mesh: what one device gives, and no more between devices than its docstring says."""

import collections
import functools
import math
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.nn.output import OUTPUTS
from hpnlp.ops.softmax import linear_cross_entropy
from hpnlp.parallel import vocabulary
from hpnlp.parallel.plan import Plan, sharding
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.step import make_trainer
from hpnlp.types import InputError
from tests.contracts import ONCE, once

N, V, D = 256, 2048, 8
FULL = OUTPUTS["full"](vocab=V, dim=D)
KEY = jax.random.key(3)
LAYOUTS = {
    "data 8": Plan(),
    "tensor 8": Plan("tensor"),
    "fsdp 8": Plan("fsdp"),
    "data 2 x tensor 4": Plan(data=2, tensor=4),
    "data 2 x fsdp 2 x tensor 2": Plan(data=2, fsdp=2, tensor=2),
}
over_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(autouse=True)
def in_loops(monkeypatch):
    """Chunks of 8 tokens and blocks of 32 words or so, so that each device goes through several."""
    module = sys.modules[linear_cross_entropy.__module__]
    for name, size in {"CHUNK": 8 * V, "FEWEST": 8, "LOGITS": 32 * N, "SMALLEST": 32}.items():
        monkeypatch.setattr(module, name, size)


def arrays(dtype=jnp.float32):
    """(table, h, labels, weights). A third of the tokens have weight 0, and NaN and no word to show for it."""
    draw = np.random.default_rng(0)
    table, h = draw.normal(size=(V, D)), draw.normal(size=(N, D))
    labels = draw.integers(0, V, N)
    labels[: 2 * 8] = np.concatenate(
        [np.arange(8) * V // 8, (np.arange(8) + 1) * V // 8 - 1]
    )  # a slice's first and last
    weights = np.where(np.arange(N) % 3 == 2, 0.0, draw.uniform(0.5, 1.5, N))
    h[5::6], labels[2::6] = np.nan, -1
    return (
        jnp.asarray(table, jnp.float32),
        jnp.asarray(h, dtype),
        jnp.asarray(labels, jnp.int32),
        jnp.asarray(weights, jnp.float32),
    )


def placed(mesh, table, h, *of_tokens):
    names = ("vocab", "embed"), ("batch", None), *[("batch",)] * len(of_tokens)
    return [jax.device_put(x, sharding(mesh, *axes)) for x, axes in zip((table, h, *of_tokens), names, strict=True)]


def mean_with_gradients(loss):
    """(mean loss, weight) and the gradients by table and h."""

    def mean(table, h, labels, weights):
        out = loss(table, h, labels, weights)
        return out.sum / out.weight, out.weight

    return jax.value_and_grad(mean, (0, 1), has_aux=True)


def assert_close(found, expected, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert a.shape == b.shape and np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@functools.cache
def of_one_device(dtype=jnp.float32):
    return jax.device_get(once(mean_with_gradients(FULL.loss), *arrays(dtype)))


@functools.cache
def compiled(layout, dtype=jnp.float32):
    """The program of the loss with its gradients, and what it is of."""
    mesh = LAYOUTS[layout].mesh()
    given = placed(mesh, *arrays(dtype))
    run = jax.jit(mean_with_gradients(functools.partial(vocabulary.loss, mesh, FULL)), compiler_options=ONCE)
    return run.lower(*given).compile(), given


@over_layouts
def test_is_the_loss_of_one_device(layout):
    """With its gradients; NaN and what is no word have none where the weight is 0."""
    run, given = compiled(layout)
    found = run(*given)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert_close(found, of_one_device())


def test_in_half_precision():
    run, given = compiled("data 2 x fsdp 2 x tensor 2", jnp.bfloat16)
    (loss, weight), (by_table, by_h) = run(*given)
    assert (loss.dtype, by_table.dtype, by_h.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    assert_close(((loss, weight), (by_table, by_h)), of_one_device(jnp.bfloat16), 1e-2)


@pytest.mark.parametrize("layout", ["data 8", "data 2 x fsdp 2 x tensor 2"])
def test_labels_that_are_no_words(layout):
    """Their tokens' losses are NaN, and the others' are not; so is the sum, where they count."""
    mesh = LAYOUTS[layout].mesh()
    table, h, labels, _ = arrays()
    table, h, labels = table, jnp.nan_to_num(h), jnp.abs(labels)
    expected = np.array(once(FULL.nll, table, h, labels))
    expected[100:102] = np.nan
    labels = labels.at[100].set(-1).at[101].set(V)

    def run(table, h, labels):
        sums = [vocabulary.loss(mesh, FULL, table, h, labels, jnp.ones(N).at[i].set(0.0)).sum for i in (100, 101)]
        none = vocabulary.loss(mesh, FULL, table, h, labels, jnp.ones(N).at[100:102].set(0.0))
        return sums, none.sum

    sums, none = once(run, *placed(mesh, table, h, labels))
    assert np.isnan(sums).all()
    assert float(none) == pytest.approx(np.nansum(expected), rel=1e-6)


def test_sampled_softmax_is_divided_where_it_reports():
    """Trained, it draws samples of all words, and its loss is left as it is."""
    mesh, layer = LAYOUTS["data 2 x tensor 4"].mesh(), OUTPUTS["sampled"](vocab=V, dim=D, samples=16, unique=False)
    given = placed(mesh, *arrays())
    found = [once(functools.partial(vocabulary.loss, mesh, layer), *given, rng) for rng in (None, KEY)]
    assert_close(found[0].sum / found[0].weight, of_one_device()[0][0])
    assert_close(found[1], once(layer.loss, *arrays(), KEY))


def test_a_bias_is_sliced_as_the_table_is():
    mesh, layer = LAYOUTS["data 2 x tensor 4"].mesh(), OUTPUTS["nce"](vocab=V, dim=D, samples=16)
    given = arrays()
    params = nn.meta.unbox(layer.init(KEY, *given, method="loss"))
    params["params"]["bias"] = jnp.asarray(np.random.default_rng(1).standard_normal(V), jnp.float32)
    run = lambda *given: layer.apply(params, *given, method=functools.partial(vocabulary.loss, mesh))  # noqa: E731
    assert_close(once(run, *placed(mesh, *given)).sum, layer.apply(params, *given, method="loss").sum)


def collectives(text):
    """(operation, shape, whether a loop runs it) of all that an HLO program sends between devices."""
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
    found = []
    for name, lines in bodies.items():
        for line in lines:
            sent = re.search(rf" = (.*?) ({kinds})(-start)?\(", line)
            for shape in re.findall(r"\w+\[([\d,]*)\]", sent[1]) if sent else ():
                found.append((sent[2], tuple(map(int, shape.split(","))) if shape else (), name in reached))
    return found


def test_collectives_are_seen():
    """In loops and out of them, for the tests that follow."""
    mesh = Plan().mesh()

    def body(x):
        step = lambda carry, _: (jax.lax.pcast(jax.lax.psum(jnp.sin(carry), "data"), "data", to="varying"), None)  # noqa: E731
        return jax.lax.psum(jax.lax.scan(step, x, None, length=3)[0][0], "data")

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()))
    found = collectives(run.lower(jnp.ones((8, 7))).compile().as_text())
    assert sorted(found) == [("all-reduce", (1, 7), True), ("all-reduce", (7,), False)]


@over_layouts
def test_what_travels(layout):
    """Each sum once, outside of loops; no logits, neither on a device nor between devices."""
    sizes, text = LAYOUTS[layout].sizes(8), compiled(layout)[0].as_text()
    shapes = re.findall(r"\w+\[([\d,]+)\]", text)
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) < N * V // 8

    tokens, words, features = N // (sizes["data"] * sizes["fsdp"]), V // sizes["tensor"], D // sizes["fsdp"]
    expected = collections.Counter()
    if sizes["tensor"] > 1:  # the largest lse, the sum of their exp and the label's logit; and the gradient by h
        expected += {("all-reduce", (tokens,)): 3, ("all-reduce", (tokens, D)): 1}
    if sizes["fsdp"] > 1:
        expected += {("all-gather", (words, D)): 1, ("reduce-scatter", (words, features)): 1}
    if sizes["data"] > 1:
        expected += {("all-reduce", (words, features)): 1}
    found = collectives(text)
    assert not any(in_loop for _, _, in_loop in found)
    assert collections.Counter((kind, shape) for kind, shape, _ in found if shape) == expected


@pytest.mark.parametrize("devices", [1, 8])
def test_trainers_use_it(devices):
    trainer = make_trainer(
        LM(LMConfig(layers=1, dim=16, heads=2, vocab=64, max_len=8)),
        OptimizerConfig(),
        Plan().mesh(jax.devices()[:devices]),
        steps=2,
    )
    batch = jax.eval_shape(lambda: example_batch(8, 8))
    key = jax.eval_shape(lambda: KEY)
    step = jax.make_jaxpr(trainer.step.jitted)(trainer.state_shapes, batch, key)
    evaluate = jax.make_jaxpr(trainer.evaluate.jitted)(trainer.state_shapes.params, batch)
    assert ("shard_map" in str(step)) == ("shard_map" in str(evaluate)) == (devices > 1)


@pytest.mark.parametrize(
    ("plan", "sizes", "told"),
    [
        (
            Plan(),
            (N - 4, V, D),
            "tokens=252 does not divide over plan.data=8 x plan.fsdp=1: make tokens a multiple of 8",
        ),
        (Plan("tensor"), (N, V - 4, D), "words=2044 does not divide over plan.tensor=8"),
        (Plan("fsdp"), (N, V, D - 4), "features=4 does not divide over plan.fsdp=8"),
    ],
    ids=str,
)
def test_what_does_not_divide_is_said(plan, sizes, told):
    n, v, d = sizes
    with pytest.raises(InputError, match=told):
        vocabulary.loss(plan.mesh(), FULL, jnp.ones((v, d)), jnp.ones((n, d)), jnp.zeros(n, jnp.int32), jnp.ones(n))
