"""Language models with neighbours from their training text: order, causality, and scores that agree with those of the run."""

import dataclasses
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.data.reading.files import ignore_progress
from hpnlp.data.reading.token_store import Tokens
from hpnlp.jobs.retrieval import gate as gates
from hpnlp.jobs.retrieval import mix as mixes
from hpnlp.jobs.retrieval.gate import DynamicEvaluation, GateDocuments
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.mixtures.bit_gate import BitGate
from hpnlp.retrieval.datastore import Datastore, Record
from hpnlp.retrieval.index import Index
from hpnlp.retrieval.suffix import SuffixNeighbours
from hpnlp.types import InputError
from tests.messages import raises
from tests.traces import TRACES

VOCAB = 20


@pytest.fixture(scope="module")
def documents():
    draw = np.random.default_rng(0)
    sizes = [30, 1, 50, 2, 40, 33]
    return GateDocuments(
        draw.integers(0, VOCAB, sum(sizes)).astype(np.int32), np.cumsum(sizes), np.array([1, 1, 1, 2, 1, 5]), 3, 4
    )


@pytest.fixture(scope="module")
def model():
    model = LM(LMConfig(layers=1, dim=16, heads=2, vocab=VOCAB, mlp_dim=16, position="rope"))
    return model, {"params": jax.jit(model.init)(jax.random.key(0), model.example_batch(1, 8))["params"]}


@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (16, 1), (64, 64)])
def test_windows_predict_every_position_once(documents, context, stride):
    parts = list(gates.windows(documents, 0, 6, context, stride))
    predicted = np.concatenate([np.arange(w.first, w.end) for w in parts])
    np.testing.assert_array_equal(predicted, documents.positions(0, 6))
    begins = np.array([documents.start(i) for i in range(6)])
    for window in parts:
        begin = begins[begins <= window.first - 1].max()
        assert begin <= window.start < window.first and window.end - 1 - window.start <= context
        assert window.start == begin or window.end - 1 - window.start == context


def test_log_odds_are_those_of_whole_documents(documents, model):
    module, variables = model
    odds = gates.model_log_odds(module, variables, documents, list(gates.windows(documents, 4, 6, 64, 64)), 64)
    nll = gates.model_nll(odds, documents.tokens[documents.positions(4, 6)], VOCAB)
    expected = []
    for first, end, skip in zip(documents.ends[3:5], documents.ends[4:6], documents.skips[4:6], strict=True):
        text = documents.tokens[first:end]
        log_probs = jax.nn.log_softmax(module.apply(variables, jnp.asarray(text[None, :-1]), method="logits")[0])
        expected.append(-np.take_along_axis(np.asarray(log_probs), text[1:, None], 1)[skip - 1 :, 0])
    np.testing.assert_allclose(nll, np.concatenate(expected), rtol=2e-5)


@pytest.mark.parametrize("kind", ["model", "dynamic"])
def test_later_text_changes_no_earlier_log_odds(documents, model, kind):
    module, variables = model
    positions = documents.positions(4, 6)

    def log_odds(text):
        parts = list(gates.windows(text, 4, 6, 16, 8))
        if kind == "model":
            return gates.model_log_odds(module, variables, text, parts, 16)
        return DynamicEvaluation(learning_rate=0.1).log_odds(module, variables, text, parts, 16, lambda *_: None)

    before = log_odds(documents)
    for cut in np.random.default_rng(1).choice(positions, 12, replace=False):
        tokens = documents.tokens.copy()
        tokens[cut:] = (tokens[cut:] + 1 + np.arange(len(tokens) - cut) % 7) % VOCAB
        after = log_odds(dataclasses.replace(documents, tokens=tokens))
        earlier = positions < cut
        np.testing.assert_array_equal(after[earlier], before[earlier])
        assert (after[~earlier] != before[~earlier]).any()


class Stored(Tokens):
    """Documents in memory."""

    def __init__(self, texts):
        self.texts, self.ends = texts, np.cumsum([len(text) for text in texts])
        self.skips = np.ones(len(texts), np.int32)

    def document(self, index):
        return self.texts[index]


def test_the_gate_is_trained_on_the_last_training_documents():
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 9, 10 + i).astype(np.uint16) for i in range(20)]
    held = [np.full(3, 7, np.uint16)]
    ordered = GateDocuments.of(Stored(texts), Stored(held), 40, 0)
    assert (ordered.heldout, len(ordered.ends), len(ordered.tokens)) == (20, 21, sum(map(len, texts)) + 3)
    assert ordered.ends[19] - ordered.start(ordered.gate) >= 40 > ordered.ends[19] - ordered.start(ordered.gate + 1)
    assert ordered.tokens[-3:].tolist() == [7, 7, 7]
    raises(
        "2 training documents, of which the last 1", lambda: GateDocuments.of(Stored(texts[:2]), Stored(held), 40, 0)
    )
    raises("0 training documents", lambda: GateDocuments.of(Stored([]), Stored(held), 40, 0))
    with pytest.raises(InputError, match="no token of the last 1 held-out documents is predicted"):
        GateDocuments.of(Stored(texts), Stored([np.zeros(1, np.uint16)]), 40, 0)
    with pytest.raises(InputError, match="no token of the first 18 training documents is predicted"):
        GateDocuments.of(Stored([np.zeros(1, np.uint16)] * 20), Stored(held), 2, 0)


def test_a_number_of_positions_leaves_out_the_documents_between(monkeypatch):
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 9, 10 + i).astype(np.uint16) for i in range(20)]
    every, some = (GateDocuments.of(Stored(texts), None, 40, 0, keys) for keys in (None, 50))
    assert len(every.positions(0, some.gate - 1)) < 50 <= len(every.positions(0, some.gate))
    np.testing.assert_array_equal(some.tokens[: some.ends[some.gate - 1]], every.tokens[: every.ends[some.gate - 1]])
    np.testing.assert_array_equal(some.tokens[some.start(some.gate) :], every.tokens[every.start(every.gate) :])
    assert (some.heldout - some.gate, len(some.ends)) == (every.heldout - every.gate, some.heldout)
    monkeypatch.setattr(gates, "MOST_TOKENS", 200)
    assert len(GateDocuments.of(Stored(texts), None, 40, 0, 50).tokens) == len(some.tokens) <= 200
    raises(
        "390 tokens of text: expected at most 200, which are kept", lambda: GateDocuments.of(Stored(texts), None, 40, 0)
    )


def test_datastores_of_documents_of_the_gate_are_refused(documents):
    def check(digests):
        record = Record("words", "run", 1, "w", "t", "s", 0, 1, 9, 4, digests, index="exact")
        mixes._check_stored(Datastore(Path("store"), record, Index()), documents)

    check(documents.digests(0, 2))
    check(documents.digests(0, documents.gate))
    for digests in (documents.digests(0, documents.gate + 1), documents.digests(1, 3)):
        raises("which would find themselves: build it with the same --seed", check, digests)


def test_gates_are_compiled_once():
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 5, 40).astype(np.int32)
    near = SuffixNeighbours(
        draw.integers(-1, 5, (40, 2, 3)).astype(np.int16), draw.integers(0, 9, (40, 2)).astype(np.int32)
    )
    inputs, gate = gates.Inputs(draw.normal(size=(40, 3)).astype(np.float32), near, ids), BitGate(5)
    names = [program.__name__ for program in (gates._gate_step, gates._gate_nll)]
    before = TRACES.copy()
    results = [gates.gate_nll(gate, gates.fit_gate(gate, inputs, 2, 0), inputs) for _ in range(2)]
    np.testing.assert_array_equal(*results)
    assert [TRACES[name] - before[name] for name in names] == [1, 1]


class Scaled:
    """A model whose losses depend on a buffer alone."""

    def apply(self, variables, argument, deterministic=True, *, method):
        if method == "token_states":
            return jax.nn.one_hot(argument["tokens"], VOCAB) + 0.0 * variables["params"]["w"], None
        return argument * variables["buffers"]["factor"]


def test_an_error_beside_is_raised_by_the_next_progress_of_the_block():
    def fail(progress):
        raise InputError("no room")

    with pytest.raises(InputError, match="no room"), mixes._beside(fail, ignore_progress) as (_, progress):
        for _ in range(10_000):
            progress("work", 0, 1)
            time.sleep(0.001)
        pytest.fail("the block went on")


def test_dynamic_evaluation_changes_no_buffers(documents):
    model, parts = Scaled(), list(gates.windows(documents, 4, 6, 16, 8))
    variables = {"params": {"w": jnp.float32(1.0)}, "buffers": {"factor": jnp.float32(3.0)}}
    static = gates.model_log_odds(model, variables, documents, parts, 16)
    dynamic = DynamicEvaluation(learning_rate=0.1).log_odds(model, variables, documents, parts, 16, lambda *_: None)
    np.testing.assert_allclose(dynamic, static, rtol=1e-6)
