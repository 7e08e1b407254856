"""The body of a BERT of transformers in a classifier: tokens, padding and hidden states are those of transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp import tasks
from hpnlp.cli import experiment
from hpnlp.models import variables
from hpnlp.training import config as configs
from hpnlp.training import run_directory
from hpnlp.training.starts import warm_start
from hpnlp.training.trainer import make_trainer

pytestmark = pytest.mark.oracle

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "lazy", "dog", "sleeps", "and", "##s", "."]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 56, "max_position_embeddings": 16}
TEXTS = ["a lazy dog sleeps.", "dogs", "a dog and a dog and a lazy cat", "sleeps and sleeps."]


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM"])
def test_hidden_states_of_a_classifier_are_those_of_bert(architecture, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    source = tmp_path / "bert"
    model = getattr(transformers, architecture)(transformers.BertConfig(**SIZES, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases are 0 and norms 1, which would hide mistakes
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(source)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"), model_max_length=16)
    tokenizer.save_pretrained(source)

    fields = {"train.init_from": source, "data.seq_len": 12}
    for field, end in (("data.path", " and"), ("data.heldout_path", "")):
        fields[field] = tmp_path / f"{field}.jsonl"
        lines = [json.dumps({"text": text + end, "label": text[:1]}) for text in TEXTS]
        fields[field].write_text("\n".join(lines))
    fields |= {"data.batch_size": len(TEXTS), "plan.name": "single"}
    overrides = [f"--{name}={value}" for name, value in fields.items()]
    config = configs.resolve(experiment.read("classification/texts", overrides))
    found, task = warm_start.find_first(config), tasks.find("classification")
    dataset = task.dataset(config.data, found.vocabulary_for("classification"))
    classifier = run_directory.make_model(config, task.vocabulary(dataset))
    assert found.check_model(classifier.config, task="classification") == ""
    trainer = make_trainer(classifier, config.optimizer, config.plan, steps=1, batch_size=len(TEXTS))
    weights, _ = found.load_params(trainer, config.plan, "classification", jax.random.key(0), classifier.config)

    batch = next(dataset.heldout(batch_size=len(TEXTS)))
    expected = tokenizer(TEXTS, return_tensors="np", padding="max_length", max_length=12, truncation=True)
    order = [expected["input_ids"].tolist().index(row) for row in batch["tokens"].tolist()]
    np.testing.assert_array_equal(batch["segment_ids"], expected["attention_mask"][order])
    with torch.no_grad():
        inputs = {name: torch.from_numpy(np.asarray(array[order])) for name, array in expected.items()}
        states = getattr(model, "bert", model)(**inputs).last_hidden_state.numpy()
    inputs = {name: jnp.asarray(batch[name]) for name in ("tokens", "segment_ids", "positions")}
    actual = classifier.apply(variables.collections(weights), inputs, True, method="states")[0]
    real = batch["segment_ids"] > 0
    np.testing.assert_allclose(actual[real], states[real], rtol=1e-4, atol=1e-5)
