"""Texts with hidden spans: batches, documents, generated keys and values, and errors."""

import collections
import itertools
import json

import numpy as np
import pytest

from hpnlp.data.examples import prepare_examples
from hpnlp.data.examples.generated import key_values
from hpnlp.data.examples.kinds.spans import ExamplesWithDocuments, HiddenSpansConfig
from hpnlp.tasks.realm import RetrievalLanguageModel
from hpnlp.training import config as configs
from hpnlp.types import InputError
from tests.messages import raises

RECORDS = [
    {"text": "the capital of France is Paris .", "answer": "Paris", "document": "Paris is the capital of France"},
    {"text": "Rome lies in Italy", "answer": "Rome", "document": "Italy has Rome"},
    {"text": "it is the New York Times", "answer": "New York", "document": "Paris is the capital of France"},
    {"text": "more and more", "answer": "more", "document": "more words"},
]


@pytest.fixture
def open_records(tmp_path):
    def prepare(records=RECORDS, **fields):
        path = tmp_path / "records.jsonl"
        path.write_text("\n".join(map(json.dumps, records * 6)))
        options = {
            "path": str(path),
            "tokenizer": "words(40, by=whitespace)",
            "seq_len": 9,
            "document_len": 8,
            "heldout": 0.3,
        }
        config = HiddenSpansConfig(
            **options | {"answer_len": 2, "batch_size": 24, "cache": str(tmp_path / "cache")} | fields
        )
        return prepare_examples(config, opened_as=ExamplesWithDocuments)

    return prepare


def test_batches_hide_the_first_occurrence_of_the_answer_and_name_the_document(open_records):
    examples = open_records()
    batch, tokenizer = next(examples.train(seed=0)), examples.tokenizer
    assert len(examples.documents) == 3 and "blanks" not in examples.summary
    assert "depend on chance: add examples" in examples.summary  # the primary metric is a loss
    seen = set()
    for row in range(24):
        targets = batch["targets"][row][batch["weights"][row] > 0]
        assert set(batch["tokens"][row][targets]) == {tokenizer.find_mask_id()}
        tokens = batch["tokens"][row].copy()
        tokens[targets] = batch["labels"][row][: len(targets)]
        text = tokenizer.decode(tokens[batch["segment_ids"][row] > 0]).decode()
        record = next(record for record in RECORDS if record["text"] == text)
        assert tokenizer.decode(batch["labels"][row][: len(targets)]).decode() == record["answer"]
        first = len(record["text"].partition(record["answer"])[0].split()) + (tokenizer.bos_id is not None)
        assert targets[0] == first
        assert tokenizer.decode(examples.documents[batch["gold"][row]]).decode() == record["document"]
        seen.add(text)
    assert len(seen) == 4 and (batch["source"] == -1).all()


def test_sources_take_the_place_of_gold_ones(open_records):
    batch = next(open_records(document_role="source").heldout(batch_size=24))
    count = int(batch["weights"].any(axis=1).sum())
    assert (
        (batch["source"][:count] >= 0).all() and (batch["source"][count:] == -1).all() and (batch["gold"] == -1).all()
    )


@pytest.mark.parametrize("role", ["gold", "source"])
def test_documents_of_scored_records_are_numbered_as_those_of_a_run(open_records, tmp_path, role):
    """An evaluation does not read the training records, whose documents the run may lack."""
    (tmp_path / "heldout.jsonl").write_text(json.dumps(RECORDS[1]))

    def numbers(*documents):
        examples = open_records(document_role=role, heldout_path=str(tmp_path / "heldout.jsonl"))
        examples.number_as([examples.documents[0][:2], *(examples.documents[number] for number in documents)])
        return next(examples.heldout(batch_size=2))[role].tolist()

    first = open_records(document_role=role, heldout_path=str(tmp_path / "heldout.jsonl"))
    document = next(first.heldout(batch_size=2))[role][0]
    assert numbers(document) == [1, -1]
    if role == "source":  # a document that is not searched need not be left out of the search
        assert numbers() == [-1, -1]
        return
    raises("1 of 1 documents of held-out records .* the 1 that the run searches", numbers)


def test_answers_are_hidden_at_borders_of_words():
    for text, answer, before in (
        ("the Iranian president of Iran", "Iran", "the Iranian president of "),
        ("Iranians and Iranian", "Iran", ""),  # no match at borders of words
        ("café cafés cafeteria caf.", "caf", "café cafés cafeteria "),
        ("US$5 or $5", "$5", "US"),
        ("a+b c+ c", "c+", "a+b "),
    ):
        values = {"text_field": text, "answer_field": answer, "document_field": "a document"}
        kind = HiddenSpansConfig().kind()
        assert kind.pieces(values) == [before, answer, text[len(before) + len(answer) :], "a document"]
        assert kind.texts(values)[1] == before + answer


def test_invalid_data_raise(open_records):
    for record, fields, message in (
        ({"answer": "Berlin"}, {}, "field 'answer' is 'Berlin', which is no part of field 'text'"),
        ({"document": ""}, {}, "field 'document' is empty"),
        ({"answer": "Rome lies in"}, {}, "field 'answer' has 3 tokens, more than data.answer_len=2: raise it"),
        ({}, {"seq_len": 4}, "data.seq_len=4: the longest text has .* tokens: raise it"),
        ({}, {"document_len": 3}, "data.document_len=3: the longest document has .* tokens: raise it"),
    ):
        raises(message, open_records, [RECORDS[0], RECORDS[1] | record], **fields)


@pytest.mark.parametrize(("role", "enough"), [("gold", 3), ("source", 2)])
def test_fewer_documents_than_candidates_raise(open_records, role, enough):
    task, examples = RetrievalLanguageModel(), open_records(document_role=role)
    values = configs.default("realm")
    values.data.update(path=examples.config.path, document_role=role, seq_len=9, document_len=8)
    for candidates in (enough, enough + 1):
        values.model.candidates = candidates
        config = configs.resolve(values)
        if candidates == enough:
            assert len(task.model(config, task.vocabulary(examples).sizes).documents) == 3
            continue
        with pytest.raises(
            InputError, match=f"model.candidates={candidates}: the data have 3 documents, .*add documents"
        ):
            task.model(config, task.vocabulary(examples).sizes)


def test_two_words_of_a_key_belong_to_one_document():
    records = list(key_values.examples(()))
    documents = collections.defaultdict(set)
    for record in records:
        document = record["document"].split()
        keys = [word for word in document if word.startswith("key")]
        assert len(keys) == 3 and document[-1] == record["answer"]
        for pair in itertools.combinations(sorted(keys), 2):
            documents[pair].add(record["document"])
    assert len(records) == 3000 and len(documents) == 3000 and all(len(found) == 1 for found in documents.values())
    for record in records:
        pair = tuple(sorted(word for word in record["text"].split() if word.startswith("key")))
        assert documents[pair] == {record["document"]} and record["text"].endswith(f" {record['answer']}")
    counts = collections.Counter(record["answer"] for record in records)
    assert len(counts) == 20 and np.ptp(list(counts.values())) < 150
