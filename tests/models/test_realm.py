"""REALM: the loss against enumeration over documents, the search, the schedule of the index, and errors."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.data.tokenizers import ByteTokenizer
from hpnlp.models.encoder import Encoder
from hpnlp.models.pairs.documents import Documents
from hpnlp.models.pairs.marginal import log_marginal
from hpnlp.models.pairs.realm import Realm, RealmConfig
from hpnlp.models.pairs.tower import Tower
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training.starts import warm_start
from hpnlp.types import InputError, Model
from tests.drawn import drawn_params
from tests.messages import raises

B, T, U, N, M = 4, 6, 5, 10, 2
SIZES = {"dim": 16, "heads": 4, "layers": 1, "vocab": 24, "mlp_dim": 24, "temperature": 0.5, "documents_per_step": 4}
RNG = np.random.default_rng(0)
DOCUMENTS = Documents(RNG.integers(0, 24, (N, U)), RNG.integers(2, U + 1, N))
BATCH = {
    "tokens": RNG.integers(0, 24, (B, T)).astype(np.int32),
    "segment_ids": (np.arange(T) < np.array([[6], [4], [5], [6]])).astype(np.int32),
    "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
    "targets": np.array([[1, 2], [0, 0], [3, 1], [0, 0]], np.int32),
    "labels": RNG.integers(0, 24, (B, M)).astype(np.int32),
    "weights": np.array([[1, 1], [1, 0], [1, 1], [0, 0]], np.float32),
    "source": np.array([3, -1, 0, -1], np.int32),
    "gold": np.array([-1, 2, -1, 4], np.int32),
}


def make(documents=DOCUMENTS, **fields):
    return Realm(RealmConfig(**SIZES | fields), documents)


@functools.cache
def params():
    return drawn_params(make(refresh="every"), 0.4)


@functools.partial(jax.jit, static_argnums=0)
def run(model, params, buffers, batch):
    """`(loss and gradient, LossOut, next buffers)`."""
    variables = {"params": params} | ({"buffers": buffers} if buffers else {})

    def loss(params):
        out = model.apply(variables | {"params": params}, batch, method="loss")
        return out.sum, out

    (value, out), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return (
        (value, gradient),
        out,
        model.advance(buffers, out.statistics, jnp.int32(0), jax.random.key(0)) if buffers else None,
    )


def first_buffers(**fields):
    zeros = {"index": np.zeros((N, 16), np.float32), "age": np.full(1, -1, np.float32)}
    return zeros | {"back": zeros["index"], "position": np.zeros(1, np.float32)} if "refresh" not in fields else zeros


def texts(numbers):
    """Documents as inputs of a tower; an empty one for -1."""
    lengths = np.where(numbers < 0, 0, DOCUMENTS.lengths[numbers])
    places = np.tile(np.arange(U, dtype=np.int32), (len(numbers), 1))
    tokens = np.where(numbers[:, None] < 0, 0, DOCUMENTS.tokens[numbers])
    return {"tokens": tokens, "segment_ids": (places < lengths[:, None]).astype(np.int32), "positions": places}


def inputs(batch):
    return {name: batch[name] for name in ("tokens", "segment_ids", "positions")}


@functools.partial(jax.jit, static_argnums=0)
def vectors(config, params, batch):
    return Tower(config.tower()).apply(
        {"params": params["tower"]}, batch, jnp.arange(len(batch["tokens"])), True, method="vectors"
    )[0]


def by_enumeration(config, params, numbers):
    """The loss with the documents `[B, K]` for the texts, from an Encoder and a Tower, and log p with the first document."""
    count = numbers.shape[1]
    queries, documents = vectors(config, params, inputs(BATCH)), vectors(config, params, texts(numbers.reshape(-1)))
    similarities = jnp.einsum("bd,bkd->bk", queries, documents.reshape(B, count, -1))
    scores = jnp.where(numbers < 0, params["empty_similarity"], similarities) / config.temperature
    repeated = {name: np.repeat(x, count, axis=0) for name, x in BATCH.items()}
    pairs = {name: np.concatenate([repeated[name], x], 1) for name, x in texts(numbers.reshape(-1)).items()}
    pairs["positions"] = np.tile(np.arange(T + U, dtype=np.int32), (B * count, 1))
    pairs["token_types"] = (pairs["positions"] >= T).astype(np.int32)
    logits = Encoder(config.reader()).apply(
        {"params": params["reader"]}, jax.tree.map(jnp.asarray, pairs), method="logits"
    )
    rows = np.arange(B * count)[:, None]
    log_probs = jax.nn.log_softmax(logits)[rows, repeated["targets"], repeated["labels"]].reshape(B, count, M)
    values, weights = log_marginal(scores, log_probs, jnp.asarray(BATCH["weights"]), config.marginal)
    return -(values * weights).sum(), (log_probs[:, 0] * BATCH["weights"]).sum()


@pytest.mark.parametrize("marginal", ["token", "sequence"])
def test_loss_and_gradients_match_enumeration_over_the_corpus(marginal):
    """All documents but the source of the text are candidates."""
    model = make(refresh="every", candidates=N - 1, marginal=marginal)
    assert isinstance(model, Model)
    batch = BATCH | {"source": np.array([3, 1, 0, 9], np.int32)}
    numbers = np.array([[-1, *(n for n in range(N) if n != source)] for source in batch["source"]])
    (loss, gradient), out, _ = run(model, params(), None, batch)
    expect = functools.partial(by_enumeration, model.config, numbers=numbers)
    (expected, null), expected_gradient = jax.jit(jax.value_and_grad(expect, has_aux=True))(params())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for actual, value in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(actual, value, atol=2e-5)
    utility, count = out.aux["utility"]
    np.testing.assert_allclose(-loss - utility, null, rtol=1e-5)  # the loss of an Encoder that reads the text alone
    assert count == BATCH["weights"].sum() and out.weight == (count if marginal == "token" else 3)


def test_model_without_candidates_has_the_loss_of_the_empty_document():
    numbers = np.full((B, 1), -1)
    (loss, gradient), out, _ = run(make(refresh="every", candidates=0), params(), None, BATCH)
    expected, null = by_enumeration(make(candidates=0).config, params(), numbers)
    np.testing.assert_allclose([loss, loss], [expected, -null], rtol=1e-5)
    assert out.aux["utility"][0] == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(gradient["tower"]))


def test_candidates_are_the_most_similar_documents_without_the_source():
    model = make(refresh="every", candidates=4)
    queries, documents = (vectors(model.config, params(), batch) for batch in (inputs(BATCH), texts(np.arange(N))))
    retrieve = jax.jit(lambda p, batch: model.apply({"params": p}, batch, method="retrieve"))
    ids = np.asarray(retrieve(params(), BATCH))
    for text, scores in enumerate(np.array(queries @ documents.T)):
        scores[BATCH["source"][text]] = -np.inf if BATCH["source"][text] >= 0 else scores[BATCH["source"][text]]
        assert ids[text].tolist() == np.argsort(-scores)[:4].tolist()
    golds = [(ids[:, 0], 3, 3), (ids[:, 1], 0, 3), (np.where(np.arange(B) == 2, -1, ids[:, 0]), 2, 2)]
    for gold, hits, count in golds:  # the last text has no hidden token
        assert run(model, params(), None, BATCH | {"gold": gold})[1].aux["retrieval_at_1"] == (hits, count)


def test_batch_without_hidden_tokens_has_loss_0():
    (loss, gradient), out, _ = run(
        make(refresh="every", candidates=4), params(), None, BATCH | {"weights": np.zeros((B, M), np.float32)}
    )
    assert loss == 0 and out.weight == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_index_is_refreshed_by_parts_and_replaced_when_complete():
    """Parameters of step s are those of the first step, times 1 + s / 10 in the embedding of one token."""
    model, buffers = make(candidates=4), first_buffers()

    def params_of(step):
        tree = jax.tree.map(jnp.asarray, params())
        table = tree["tower"]["embed"]["table"].at[3].mul(1 + step / 10)
        return tree | {"tower": tree["tower"] | {"embed": {"table": table}}}

    @functools.cache
    def vectors_of(step):
        return vectors(model.config, params_of(step), texts(np.arange(N)))

    # Three parts: 0 to 3, 4 to 7, and 6 to 9, which overlaps.
    made_at = np.zeros(N, int)
    for step in range(8):
        _, out, new = run(model, params_of(step), buffers, BATCH)
        of_two_parts = jax.tree.map(lambda x: 2 * x, out.statistics)  # of an accumulated batch
        for name, x in model.advance(buffers, of_two_parts, jnp.int32(step), jax.random.key(0)).items():
            np.testing.assert_allclose(x, new[name], rtol=1e-6)
        assert out.aux["staleness"][0] == (step if step < 3 else 3 + step % 3)
        if step and step % 3 == 0:
            made_at = np.array([step - 3] * 4 + [step - 2] * 2 + [step - 1] * 4)
        expected = np.stack([vectors_of(made_at[n])[n] for n in range(N)])
        if step:
            np.testing.assert_allclose(buffers["index"], expected, atol=1e-5)
        buffers = new
    synchronous = run(make(candidates=4, refresh="every"), params(), None, BATCH)[0][0]
    np.testing.assert_allclose(run(model, params(), first_buffers(), BATCH)[0][0], synchronous, rtol=1e-6)


def test_index_that_is_never_refreshed_stays_that_of_the_first_step():
    model = make(candidates=3, refresh="never")
    _, _, first = run(model, params(), first_buffers(refresh="never"), BATCH)
    changed = jax.tree.map(lambda x: x + 0.1, params())
    _, out, second = run(model, changed, first, BATCH)
    np.testing.assert_array_equal(first["index"], second["index"])
    assert out.aux["staleness"][0] == 1 and second["age"] == 2


def test_towers_that_are_not_shared_train_both_and_the_document_tower_makes_the_index():
    model = make(refresh="never", candidates=3, shared=False, learn_temperature=True)
    variables = drawn_params(model, 0.4)
    (_, gradient), out, new = run(model, variables, first_buffers(refresh="never"), BATCH)
    assert {"tower", "document_tower", "reader", "log_scale", "empty_similarity"} == set(gradient)
    assert all(any(np.any(leaf) for leaf in jax.tree.leaves(gradient[name])) for name in gradient)
    assert "temperature" in out.aux
    expected = vectors(model.config, {"tower": variables["document_tower"]}, texts(np.arange(N)))
    np.testing.assert_allclose(new["index"], expected, atol=1e-5)


def test_fields_of_the_search_are_free_in_warm_starts():
    source = warm_start.StartSource(
        Path("runs/source"), "realm", make().config, Vocabulary(ByteTokenizer()), "bytes", True
    )
    tuned = make(candidates=3, marginal="sequence", refresh="never", documents_per_step=2).config
    assert source.check_model(tuned) == ""
    raises("model.temperature is 1.0", lambda: source.check_model(make(temperature=1.0).config))


def test_invalid_fields_raise():
    raises("model.marginal='tokens'", RealmConfig, **SIZES, marginal="tokens")


def test_parts_that_do_not_divide_over_devices_raise():
    config = dataclasses.replace(make().config, documents_per_step=6)
    with pytest.raises(InputError, match="model.documents_per_step=6 does not divide over 4 devices"):
        config.check_layout(Plan(tensor=2).layout(config.sizes(), jax.devices()[:8]))


def test_documents_are_read_back(tmp_path):
    DOCUMENTS.save(tmp_path)
    assert Documents.load(tmp_path) == DOCUMENTS and hash(Documents.load(tmp_path)) == hash(DOCUMENTS)
    (tmp_path / "documents.npz").write_bytes(b"PK")
    raises("is absent or damaged", Documents.load, tmp_path)
