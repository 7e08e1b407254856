"""The dual encoder: loss and gradients against torch, layouts, accumulation, rows and errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpnlp.models.pairs.dual_encoder import DualEncoder, DualEncoderConfig, text_hashes
from hpnlp.models.pairs.grad_cache import ComparingModel, Encoded
from hpnlp.parallel.plan import Plan
from hpnlp.training.gradients import loss
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import Model
from tests.contracts import ONCE, once
from tests.drawn import drawn_params
from tests.messages import raises
from tests.training.test_step import assert_leaves_close

B, T = 8, 8
SIZES = {"dim": 16, "heads": 4, "layers": 2, "vocab": 24, "max_len": T, "mlp_dim": 24}
SEPARATE = {"shared": False, "learn_temperature": True, "temperature": 0.2, "pooling": "attention", "token_types": 2}
FIELDS = {"shared": {"symmetric": False}, "separate": SEPARATE}
HARD_FIELDS = {f"{name}, hard": {**fields, "negative_texts": 2} for name, fields in FIELDS.items()}


def make(deviation=0.4, **fields):
    """A small model with random parameters."""
    model = DualEncoder(DualEncoderConfig(**SIZES | fields))
    return model, drawn_params(model, deviation, means={"scale": 1.0, "log_scale": 1.5})


def make_batch(padding=2, seed=1, negatives=0):
    """Pairs of texts of several lengths, of which the last ones are padding, with hard negatives."""
    rng, batch = np.random.default_rng(seed), {}
    for prefix in ("", "pair_", *(f"negative_{number}_" for number in range(1, negatives + 1))):
        is_token = np.arange(T)[None] < rng.integers(2, T + 1, (B, 1))
        batch |= {
            f"{prefix}tokens": rng.integers(0, 24, (B, T)).astype(np.int32),
            f"{prefix}segment_ids": is_token.astype(np.int32),
            f"{prefix}positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        }
    return batch | {"weights": (np.arange(B) < B - padding).astype(np.float32)}


def results(name):
    """`(gradients, metrics)` of a batch whose last pairs are padding."""
    model, params = make(**(FIELDS | HARD_FIELDS)[name])
    batch = jax.tree.map(jnp.asarray, make_batch(negatives=model.config.negative_texts))

    def loss(params, batch):
        out = model.apply({"params": params}, batch, method="loss")
        return out.sum, {"loss": (out.sum, out.weight), **out.aux}

    return jax.device_get(once(jax.grad(loss, has_aux=True), params, batch))


@pytest.mark.oracle
@pytest.mark.parametrize("name", FIELDS)
def test_loss_and_gradients_match_torch(name):
    """The cross-entropy of torch over the scaled similarities of the pairs, without padding, as in
    MultipleNegativesRankingLoss of sentence-transformers; gradients enter the towers as cotangents of their vectors."""
    torch = pytest.importorskip("torch")
    model, params = make(**FIELDS[name])
    batch = make_batch()

    def embed(params):
        return model.apply({"params": params}, batch, method="embed")

    vectors, pull = jax.vjp(embed, params)
    for x in vectors:
        np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, rtol=1e-6)
    texts, partners = (torch.tensor(np.asarray(x), requires_grad=True) for x in vectors)
    start = float(params["log_scale"][0]) if "log_scale" in params else -np.log(model.config.temperature)
    log_scale = torch.tensor(start, dtype=torch.float32, requires_grad=True)
    count = int(batch["weights"].sum())
    scores = texts[:count] @ partners[:count].T * torch.exp(log_scale)
    entropy, labels = torch.nn.functional.cross_entropy, torch.arange(count)
    total = entropy(scores, labels, reduction="sum")
    if model.config.symmetric:
        total = (total + entropy(scores.T, labels, reduction="sum")) / 2
    total.backward()
    gradients, metrics = results(name)
    np.testing.assert_allclose(metrics["loss"], (total.item(), count), rtol=1e-5)
    hits = (scores.argmax(dim=1) == labels).sum().item()
    np.testing.assert_allclose(metrics["accuracy"], (hits, count))
    (expected,) = pull(tuple(jnp.asarray(x.grad.numpy()) for x in (texts, partners)))
    if "log_scale" in params:
        np.testing.assert_allclose(gradients["log_scale"][0], log_scale.grad.item(), rtol=1e-4)
        np.testing.assert_allclose(metrics["temperature"][0], np.exp(-start), rtol=1e-5)
        expected = expected | {"log_scale": gradients["log_scale"]}
    assert_leaves_close(gradients, jax.device_get(expected), 1e-5)


def looped_loss(texts, partners, batch, scale, symmetric=True, hard=()):
    """`(loss, hits, compared texts)` by loops over the pairs of weight 1. Equal tokens are no negatives.

    hard: vectors of the hard negatives, an array for each of them."""

    def text(prefix, i):
        return tuple(batch[f"{prefix}tokens"][i][batch[f"{prefix}segment_ids"][i] > 0])

    def entropy(own, others):
        return np.log(np.sum(np.exp([score - own for score in (own, *others)])))

    pairs = [i for i in range(len(texts)) if batch["weights"][i]]
    total, hits, compared = 0.0, 0, 0
    for i in pairs:
        others = [j for j in pairs if text("", i) != text("", j) and text("pair_", i) != text("pair_", j)]
        own, scores = scale * texts[i] @ partners[i], [scale * texts[i] @ partners[j] for j in others]
        reverse = [scale * texts[j] @ partners[i] for j in others]
        scores += [
            scale * texts[i] @ vectors[j]
            for number, vectors in enumerate(hard, 1)
            for j in pairs
            if text(f"negative_{number}_", j) != text("pair_", i)
        ]
        total += (entropy(own, scores) + entropy(own, reverse)) / 2 if symmetric else entropy(own, scores)
        hits, compared = hits + bool(scores and own > max(scores)), compared + bool(scores)
    return total, hits, compared


def test_duplicates_are_no_negatives():
    model, params = make()
    batch = make_batch()
    for prefix, i, j in (("", 0, 3), ("pair_", 1, 4), ("pair_", 3, 7)):  # 7 is padding
        for name in ("tokens", "segment_ids"):
            batch[f"{prefix}{name}"][j] = batch[f"{prefix}{name}"][i]
    batch["tokens"][3, batch["segment_ids"][3] == 0] = 7  # padding is not compared
    apply = functools.partial(model.apply, {"params": params})
    out, vectors = once(lambda batch: (apply(batch, method="loss"), apply(batch, method="embed")), batch)
    expected, *hits = looped_loss(*np.asarray(vectors, np.float64), batch, 1 / model.config.temperature)
    np.testing.assert_allclose(out.sum, expected, rtol=1e-5)
    assert [float(x) for x in out.aux["accuracy"]] == hits
    equal = jax.tree.map(lambda x: np.repeat(x[:1], B, axis=0), batch)
    out = once(lambda batch: apply(batch, method="loss"), equal)
    assert [float(x) for x in (out.sum, out.weight, *out.aux["accuracy"])] == [0, B, 0, 0]


HARD = {"negative_texts": 2, "symmetric": False}


@pytest.mark.parametrize("fields", [HARD, {"negative_texts": 2}], ids=["one direction", "both directions"])
def test_hard_negatives_of_all_examples_are_negatives(fields):
    """Against loops. A hard negative with the tokens of a text's partner is none of that text."""
    model = DualEncoder(DualEncoderConfig(**SIZES | fields))
    batch, draw = make_batch(negatives=2), np.random.default_rng(5)
    for i, j in ((0, 3), (1, 1), (2, 6)):  # pairs 6 and 7 are padding
        for name in ("tokens", "segment_ids"):
            batch[f"negative_2_{name}"][j] = batch[f"pair_{name}"][i]
    texts, candidates = (draw.normal(size=(B, *shape)).astype(np.float32) for shape in ((16,), (3, 16)))
    texts, candidates = (0.5 * x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (texts, candidates))
    out = once(
        lambda vectors: model.apply({}, Encoded(vectors), jax.tree.map(jnp.asarray, batch), method="compare"),
        (texts, candidates),
    )
    partners, *hard = np.moveaxis(candidates.astype(np.float64), 1, 0)
    expected, *hits = looped_loss(texts.astype(np.float64), partners, batch, 20, model.config.symmetric, hard)
    np.testing.assert_allclose(out.sum, expected, rtol=1e-5)
    assert [float(x) for x in out.aux["accuracy"]] == hits


def test_triplets_are_those_of_an_example():
    """Against loops; a hard negative with the tokens of the partner does not count, and equal vectors have a gradient."""
    model = DualEncoder(DualEncoderConfig(**SIZES, negative_texts=2, loss="triplet", margin=0.5))
    batch, draw = make_batch(negatives=2), np.random.default_rng(5)
    for name in ("tokens", "segment_ids"):
        batch[f"negative_2_{name}"][1] = batch[f"pair_{name}"][1]
    texts, candidates = (draw.normal(size=shape).astype(np.float32) for shape in ((B, 16), (B, 3, 16)))
    texts, candidates = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (texts, candidates))
    candidates[2, 0] = texts[2]
    expected = 0.0
    for i in range(B - 2):  # the last two are padding
        near, *far = np.linalg.norm(texts[i].astype(np.float64) - candidates[i], axis=1)
        expected += np.mean([max(0, near - x + 0.5) for x in (far[:1] if i == 1 else far)])

    def loss(vectors):
        return model.apply({}, Encoded(vectors), jax.tree.map(jnp.asarray, batch), method="compare").sum

    total, gradients = once(jax.value_and_grad(loss), (texts, candidates))
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0 for x in gradients)
    assert not model.config.compares_examples and not model.is_normalized
    raises("model.loss='triplet' needs hard negatives", jax.eval_shape, lambda: make(loss="triplet"))


@pytest.mark.oracle
def test_triplets_match_torch():
    """TripletMarginLoss, which the triplet loss of sentence-transformers computes from the same distances."""
    torch = pytest.importorskip("torch")
    model = DualEncoder(DualEncoderConfig(**SIZES, negative_texts=1, loss="triplet"))
    batch, draw = make_batch(padding=0, negatives=1), np.random.default_rng(5)
    vectors = tuple(draw.normal(size=shape).astype(np.float32) for shape in ((B, 16), (B, 2, 16)))
    vectors = tuple(x / np.linalg.norm(x, axis=-1, keepdims=True) for x in vectors)

    def loss(vectors):
        return model.apply({}, Encoded(vectors), jax.tree.map(jnp.asarray, batch), method="compare").sum

    total, gradients = once(jax.value_and_grad(loss), vectors)
    texts, candidates = (torch.tensor(x, requires_grad=True) for x in vectors)
    expected = torch.nn.TripletMarginLoss(1.0, eps=0.0, reduction="sum")(texts, candidates[:, 0], candidates[:, 1])
    expected.backward()
    np.testing.assert_allclose(total, expected.item(), rtol=1e-6)
    assert_leaves_close(gradients, [texts.grad.numpy(), candidates.grad.numpy()], 1e-6)


def test_hashes_distinguish_the_order_of_tokens():
    tokens = np.array([[1, 2, 0], [2, 1, 0], [1, 2, 5], [1, 1, 0], [1, 2, 2]], np.int32)
    segments = np.array([[1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1]], np.int32)
    hashes = np.asarray(text_hashes(jnp.asarray(tokens), jnp.asarray(segments)))
    np.testing.assert_array_equal(hashes[0], hashes[2])
    assert all(len(set(column[[0, 1, 3, 4]].tolist())) == 4 for column in hashes.T)


def test_padding_has_no_effect():
    model, params = make()
    batch = make_batch()
    other = {key: x.copy() for key, x in batch.items()}
    for prefix in ("", "pair_"):
        other[f"{prefix}tokens"][-2:] = 3  # texts of padding pairs
        other[f"{prefix}tokens"][other[f"{prefix}segment_ids"] == 0] = 5
    loss = jax.jit(functools.partial(model.apply, method="loss"), compiler_options=ONCE)
    assert_leaves_close(loss({"params": params}, batch), loss({"params": params}, other), 1e-6)


def test_every_token_has_the_first_token_type():
    model, params = make(position="learned", token_types=2)
    batch = jax.tree.map(jnp.asarray, make_batch())
    plain = DualEncoder(dataclasses.replace(model.config, token_types=0))
    tower = {name: leaf for name, leaf in params["tower"].items() if name != "token_types"}
    table = params["tower"]["positions"]["table"] + params["tower"]["token_types"]["table"][:1]
    first = {name: batch[name] for name in ("tokens", "segment_ids", "positions")}

    def run(params, tower):
        both = model.apply({"params": params}, batch, method="embed")
        vectors = model.apply({"params": params}, first, method="vectors")
        return both, vectors, plain.apply({"params": {"tower": tower}}, batch, method="embed")

    both, vectors, expected = jax.jit(run)(params, {**tower, "positions": {"table": table}})
    np.testing.assert_allclose(both, expected, atol=1e-6)
    np.testing.assert_allclose(vectors, expected[0], atol=1e-6)


def test_parts_of_a_batch_are_sets_of_negatives_if_asked_for():
    """Accumulated gradients are those of the parts, each of which has its own negatives."""
    model, params = make(negatives="part")
    batch = make_batch(padding=0)
    loss = jax.jit(functools.partial(model.apply, method="loss"), compiler_options=ONCE)
    halves = [loss({"params": params}, {key: x[part::2] for key, x in batch.items()}) for part in range(2)]
    trainer = make_trainer(
        model, OptimizerConfig(accumulate=2, warmup=0), Plan("single"), steps=2, devices=jax.devices()[:1]
    )
    _, metrics = trainer.step(trainer.init(jax.random.key(0), params), batch, jax.random.key(1))
    np.testing.assert_allclose(metrics["loss"], sum(float(half.sum) for half in halves) / B, rtol=1e-5)


def distance(actual, expected):
    """Norm of the difference of two trees, relative to that of `expected`."""
    squares = [np.sum(np.square(x)) for x in jax.tree.leaves(jax.tree.map(np.subtract, actual, expected))]
    return np.sqrt(sum(squares) / sum(np.sum(np.square(x)) for x in jax.tree.leaves(expected)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIELDS, "shared, hard"])
def test_encoding_in_parts_has_the_gradients_of_the_whole_batch(name):
    """Whatever the number of parts, with dropout, which differs with another key."""
    # With a deviation of 0.4, gradients of two compilations of the same function differ by 1.1e-6.
    model, params = make(0.2, dropout=0.3, **(FIELDS | HARD_FIELDS)[name])
    batch = jax.tree.map(jnp.asarray, make_batch(negatives=model.config.negative_texts))

    def gradients(params, parts, key):
        def total(params):
            out = loss(model, params, batch, key, count=parts)
            return out.sum, out

        return jax.grad(total, has_aux=True)(params)

    key, other = jax.random.split(jax.random.key(3))
    cases = [(1, key), (2, key), (4, key), (B, key), (2, other)]
    (expected, expected_out), *in_parts, (other, _) = once(lambda p: [gradients(p, *case) for case in cases], params)
    for actual, out in in_parts:
        assert distance(actual, expected) < 1e-6
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), out, expected_out)
    assert distance(other, expected) > 0.1


def first_gradients(model, params, plan, devices, parts, batch):
    """`(gradients, metrics)` of the first step of a trainer."""
    optimizer = OptimizerConfig("sgd", momentum=0.9, weight_decay=0.0, clip_norm=0.0, warmup=0, accumulate=parts)
    trainer = make_trainer(model, optimizer, plan, steps=2, devices=jax.devices()[:devices])
    state = trainer.init(jax.random.key(0), params)
    state, metrics = trainer.step(state, jax.device_put(batch, trainer.batch_sharding), jax.random.key(1))
    return jax.device_get(optax.tree.get(state.opt_state, "trace")), jax.device_get(metrics)


def test_accumulation_compares_all_texts_of_a_batch():
    model, params = make(layers=1, dropout=0.3)
    assert isinstance(model, ComparingModel)
    gradients, metrics = first_gradients(model, params, Plan("single"), 1, 4, make_batch())
    key = jax.random.fold_in(jax.random.key(1), 0)
    out, expected = once(
        jax.value_and_grad(lambda p: loss(model, p, jax.tree.map(jnp.asarray, make_batch()), key).sum), params
    )
    count = make_batch()["weights"].sum()
    np.testing.assert_allclose(metrics["loss"], out / count, rtol=1e-6)
    assert distance(jax.tree.map(lambda x: x * count, gradients), expected) < 1e-6


def test_evaluation_encodes_the_parts_of_a_batch_in_turn():
    """Otherwise the first evaluation of a run would need the memory that `optimizer.accumulate` saves."""
    model, params = make(layers=1)
    batch = jax.tree.map(lambda *x: np.concatenate(x), *(make_batch(seed=seed) for seed in range(8)))
    results, sizes = [], []
    for parts in (1, 8):
        optimizer = OptimizerConfig("sgd", clip_norm=0.0, warmup=0, accumulate=parts)
        trainer = make_trainer(model, optimizer, Plan("single"), steps=2, devices=jax.devices()[:1])
        sums, _ = trainer.evaluate_next(params, batch, None)
        results.append(jax.device_get(sums))
        with trainer.evaluate_next.in_mesh():
            program = trainer.evaluate_next.jitted.lower(params, batch, None).compile()
        sizes.append(program.memory_analysis().temp_size_in_bytes)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), *results)
    assert sizes[1] < 0.5 * sizes[0]


BY_HEADS = Plan(sequence=4, exchange="heads")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plans"),
    [
        ("shared", ((Plan("zero2"), 4),)),
        ("separate", ((Plan("3d"), 2),)),
        ("separate, hard", ((Plan("zero3", tensor=2), 2), (BY_HEADS, 4))),
    ],
)
def test_accumulation_on_devices_has_the_gradients_of_the_whole_batch(name, plans):
    """Negatives come from the texts of all devices, and gradients reach them there."""
    # With a deviation of 0.4, parameters that differ in the last bit move the gradients by 3e-6 to 5e-6.
    model, params = make(0.2, dropout=0.2, **(FIELDS | HARD_FIELDS)[name])
    parts = [make_batch(seed=seed, negatives=model.config.negative_texts) for seed in range(4)]
    batch = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    expected, expected_metrics = first_gradients(model, params, Plan("single"), 1, 1, batch)
    for plan, parts in plans:
        gradients, metrics = first_gradients(model, params, plan, 8, parts, batch)
        assert distance(gradients, expected) < 2e-6
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), metrics, expected_metrics)


@pytest.mark.slow
def test_rows_are_those_of_all_texts():
    for name, fields in (FIELDS | HARD_FIELDS).items():
        model, params = make(**fields)
        batch = jax.tree.map(jnp.asarray, make_batch(negatives=model.config.negative_texts))
        assert isinstance(model, Model)
        rows = model.apply({"params": params}, batch, method="rows")
        gradients, _ = results(name)
        for (tower, *_), ids in rows.items():
            touched = np.abs(gradients[tower]["embed"]["table"]).max(axis=1) > 0
            assert set(np.flatnonzero(touched)) <= set(np.asarray(ids).tolist())


def test_invalid_configs_raise():
    for fields, message in (
        ({"loss": "triplet", "learn_temperature": True}, "model.loss='triplet' has no temperature"),
        ({"loss": "cosine", "learn_temperature": True}, "model.loss='cosine' has no temperature"),
        ({"loss": "cosine", "classes": 3}, "model.classes=3, and model.loss='cosine' has no labels"),
        ({"loss": "softmax", "negative_texts": 1}, "model.negative_texts=1, and model.loss='softmax' has no negatives"),
        ({"mixer": "conv"}, "choose a bidirectional mixer"),
        ({"memory_dim": 8}, "model.memory_dim=8"),
    ):
        raises(message, DualEncoderConfig, **SIZES | fields)
