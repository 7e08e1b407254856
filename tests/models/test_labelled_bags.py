"""Labelled bags: equality with a loop over left-out texts, independence of padding, scaled gradients, memory, and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models import variables
from hpnlp.models.classifiers.labelled_bags import LabelledBagsConfig, LabelledBagsModel
from hpnlp.ops.embeddings import frequency_factors
from hpnlp.types import WordStats
from tests.contracts import ONCE, assert_close
from tests.messages import raises

VOCAB, CLASSES, B, T, M, D = 12, 4, 6, 9, 3, 5
COUNTS = WordStats(np.arange(VOCAB) ** 2 + 1)


def make(**fields):
    sizes = {"vocab": VOCAB, "classes": CLASSES, "dim": D, "max_texts": M}
    return LabelledBagsModel(LabelledBagsConfig(**sizes | fields), COUNTS)


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    segments = np.zeros((B, T), np.int32)
    for row in segments:
        lengths = rng.integers(1, 4, rng.integers(2, M + 1))
        row[: lengths.sum()] = np.repeat(1 + np.arange(len(lengths)), lengths)
    arrays = {
        "tokens": rng.integers(0, VOCAB, (B, T)).astype(np.int32),
        "segment_ids": segments,
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "labels": np.array([0, 1, 2, 0, 3, 1], np.int32),
        "weights": np.array([1, 1, 1, 1, 1, 0], np.float32),
    }
    return {name: jnp.asarray(array) for name, array in arrays.items()}


PARAMS = {
    "embed": {"table": jnp.asarray(np.random.default_rng(1).standard_normal((VOCAB, D)), jnp.float32)},
    "labels": jnp.asarray(np.random.default_rng(2).standard_normal((CLASSES, D)), jnp.float32),
}


def losses_by_loop(params, c, batch):
    """The summed loss in float64: each text and each label is left out, and compared with its negatives."""
    batch = {name: np.asarray(x) for name, x in batch.items()}
    table, labels = (np.asarray(x, np.float64) for x in (params["embed"]["table"], params["labels"]))

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True) if c.similarity == "cosine" else x

    bags = []
    for b in np.flatnonzero(batch["weights"]):
        segments = batch["segment_ids"][b]
        vectors = [table[batch["tokens"][b][segments == n]] for n in range(1, segments.max() + 1)]
        exponent = {"mean": 1, "sum": 0, "sqrt": 0.5}[c.mode]
        bags.append([batch["labels"][b], [unit(v.sum(axis=0) / len(v) ** exponent) for v in vectors]])

    def loss(context, target, negatives):
        scores = np.array([unit(context) @ x for x in negatives])
        if c.loss == "margin":
            return np.maximum(0, c.margin + np.sort(scores)[::-1][: c.hard_negatives] - unit(context) @ target).mean()
        scores = np.append(scores, unit(context) @ target) / c.temperature
        return np.log(np.exp(scores).sum()) - scores[-1]

    total, weight = 0.0, 0
    for label, texts in bags:
        own = unit(labels[label])
        others = [x for other, candidates in bags if other != label for x in candidates]
        for i, text in enumerate(texts):
            total += loss(sum(texts[:i] + texts[i + 1 :]) + own, text, others)
        total += loss(sum(texts), own, [unit(labels[k]) for k in range(CLASSES) if k != label])
        weight += len(texts) + 1
    return np.float32(total), weight


@functools.cache
def compiled(model):
    """`((loss, LossOut), gradients)`, logits and vectors as a function of parameters and a batch."""

    def apply(params, batch):
        def loss(params):
            out = model.apply(variables.collections(params), batch)
            return out.sum, out

        methods = [model.apply(variables.collections(params), batch, method=name) for name in ("logits", "embed_bags")]
        return jax.value_and_grad(loss, has_aux=True)(params), *methods

    return jax.jit(apply, compiler_options=ONCE)


def value_and_gradients(model, batch):
    return compiled(model)(PARAMS, batch)[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"margin": 0.3, "hard_negatives": 3},
        {"loss": "softmax", "similarity": "dot", "mode": "sqrt", "temperature": 0.7},
        {"loss": "softmax", "mode": "sum", "temperature": 0.2},
    ],
)
def test_losses_match_a_loop(fields):
    model, batch = make(**fields), make_batch()
    (total, out), gradients = value_and_gradients(model, batch)
    expected, weight = losses_by_loop(PARAMS, model.config, batch)
    assert_close(total, expected)
    assert int(out.weight) == weight
    rng = np.random.default_rng(3)
    step = jax.tree.map(lambda x: 1e-4 * rng.standard_normal(x.shape), PARAMS)
    ahead, behind = (
        float(losses_by_loop(jax.tree.map(lambda x, d, s=s: x + s * d, PARAMS, step), model.config, batch)[0])
        for s in (1, -1)
    )
    actual = sum(np.sum(g * d) for g, d in zip(jax.tree.leaves(gradients), jax.tree.leaves(step), strict=True))
    np.testing.assert_allclose(actual, (ahead - behind) / 2, rtol=2e-2)


def test_padding_changes_nothing():
    model, batch = make(), make_batch()
    other = dict(batch)
    is_token = (batch["segment_ids"] > 0) & (batch["weights"] > 0)[:, None]
    other["tokens"] = jnp.where(is_token, batch["tokens"], 3)
    assert np.any(other["tokens"] != batch["tokens"])
    first, second = (value_and_gradients(model, b) for b in (batch, other))
    assert_close(first[0][0], second[0][0])
    assert_close(first[1], second[1])


def test_gradients_of_words_are_scaled_by_their_frequency():
    batch = make_batch()
    plain, scaled = (value_and_gradients(make(frequency_power=power), batch) for power in (0.0, 1.0))
    assert_close(plain[0][0], scaled[0][0])
    factors = frequency_factors(COUNTS.counts, 1.0)[:, None]
    assert_close(scaled[1]["embed"]["table"], factors * plain[1]["embed"]["table"])
    assert_close(scaled[1]["labels"], plain[1]["labels"])


def test_accuracies_are_those_of_the_similarities():
    model, batch = make(), make_batch()
    ((_, out), _), logits, vectors = compiled(model)(PARAMS, batch)
    best = np.asarray(logits).argmax(axis=1)
    texts, contexts, exists = map(np.asarray, vectors)
    kept = np.asarray(batch["weights"]) > 0
    hits, count = out.aux["accuracy"]
    assert (float(hits), float(count)) == (np.sum((best == np.asarray(batch["labels"]))[kept]), kept.sum())
    of_text = np.repeat(np.asarray(batch["labels"]), M).reshape(B, M)[exists]
    scores = contexts[exists] @ texts[exists].T
    others = np.where(of_text[:, None] == of_text[None], -2, scores).max(axis=1)
    hits, count = out.aux["text_recall_at_1"]
    assert (float(hits), float(count)) == (np.sum(np.diag(scores) > others), exists.sum())


MEMORY = {**PARAMS, "labels": jnp.asarray(np.random.default_rng(4).standard_normal((CLASSES, 2 * D)), jnp.float32)}
BAGS = {**make_batch(), "bag": jnp.array([0, 7, 3, -1, 11, 5], jnp.int32)}


def memory_loss(model, entries):
    """`(LossOut, gradients, logits)` of a training step with these entries, and the entries after it."""

    def step(params, entries):
        def loss(params):
            weights = variables.collections(params | {"buffers": {"memory": entries}})
            out = model.apply(weights, BAGS, deterministic=False, rngs={"dropout": KEY}, method="loss")
            return out.sum, (out, model.apply(weights, BAGS, method="logits"))

        (_, (out, logits)), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        advanced = model.advance({"memory": entries}, out.statistics, jnp.int32(0), KEY)["memory"]
        return out, gradients, logits, advanced

    return jax.jit(step, compiler_options=ONCE)(MEMORY, entries)


KEY = jax.random.key(0)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_label_scores_are_those_of_the_sum_followed_by_its_nearest_entry():
    """The label loss of each bag, in numpy; a bag of the training data does not find its own entry, also if it is nearest."""
    model = make(memory="bags(8)", loss="softmax")
    plain = make(loss="softmax")
    texts, _, exists = compiled_vectors(plain)
    h = unit((texts * exists[..., None]).sum(axis=1))
    entries = np.random.default_rng(5).standard_normal((8, D)).astype(np.float32)
    entries[3], entries[7], entries[2] = 2 * h[2], h[1], 0  # own entries of bags 3 and 7, and an empty one
    found = []
    for row, bag in enumerate(np.asarray(BAGS["bag"])):
        known = [n for n in range(8) if n != 2 and (bag < 0 or n != bag % 8)]
        found.append(entries[max(known, key=lambda n: unit(entries[n]) @ h[row])])
    joined = unit(np.concatenate([h, np.array(found)], axis=1))
    labels = np.asarray(BAGS["labels"])
    scores = joined @ unit(MEMORY["labels"]).T
    out, _, logits, advanced = memory_loss(model, entries)
    assert_close(logits, scores / model.config.temperature)
    # The texts' losses are those without a memory, with the first half of the labels.
    halves = {**PARAMS, "labels": MEMORY["labels"][:, :D]}
    without = jax.jit(plain.apply)({"params": halves}, BAGS)
    nll = np.log(np.exp(scores / 0.1).sum(axis=1)) - scores[np.arange(B), labels] / 0.1
    plain_scores = h @ unit(halves["labels"]).T / 0.1
    plain_nll = np.log(np.exp(plain_scores).sum(axis=1)) - plain_scores[np.arange(B), labels]
    weights = np.asarray(BAGS["weights"])
    assert_close(out.sum, np.float32(without.sum + ((nll - plain_nll) * weights).sum()))
    # Bags 3 and 11 share an entry; the bag without a number, and the padding, are not written.
    expected = entries.copy()
    expected[0], expected[7], expected[3] = h[0], h[1], (h[2] + h[4]) / 2
    assert_close(advanced, expected)


def compiled_vectors(model):
    embed = jax.jit(functools.partial(model.apply, method="embed_bags"))
    texts, contexts, _ = embed({"params": PARAMS}, BAGS)
    exists = embed({"params": PARAMS}, {**BAGS, "weights": jnp.ones(B)})[2]
    return np.asarray(texts), np.asarray(contexts), np.asarray(exists)


def test_a_trained_table_has_gradients_and_an_empty_memory_none():
    entries = np.random.default_rng(7).standard_normal((5, D)).astype(np.float32)
    model = make(memory="table(5,k=3)", loss="softmax")

    def loss(entries):
        return model.apply({"params": {**MEMORY, "memory": entries}}, BAGS).sum

    gradient = jax.grad(loss)(entries)
    assert np.all(np.isfinite(gradient)) and np.count_nonzero(np.abs(gradient).sum(axis=1)) >= 3
    out, gradients, _, _ = memory_loss(make(memory="bags(8)"), np.zeros((8, D), np.float32))
    assert np.isfinite(out.sum) and all(np.all(np.isfinite(x)) for x in jax.tree.leaves(gradients))


def test_invalid_configs_raise():
    for fields, message in (
        ({"memory": "bag(9)"}, "model.memory .*'bag'.*did you mean 'bags'"),
        ({"memory": "bags(9,k=10)"}, "model.memory .*: k=10: expected at most entries=9"),
        ({"dtype": "bfloat16"}, "model.dtype='bfloat16': vectors of bags are small, and float32 only"),
    ):
        raises(message, LabelledBagsConfig, **fields)


def test_parts_of_a_batch_raise():
    raises("optimizer.accumulate=2 .*: set optimizer.accumulate=1", lambda: LabelledBagsConfig().check_accumulation(2))
