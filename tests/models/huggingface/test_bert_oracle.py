"""BERT of transformers: logits of its checkpoints, its tokenizer, and checkpoints that it reads."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from hpnlp.data import tokenizers
from hpnlp.models.encoder import Encoder
from hpnlp.models.huggingface import convert

pytestmark = pytest.mark.oracle

B, T, V = 3, 12, 40
SIZES = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56}
SIZES |= {"max_position_embeddings": 16}
ARCHITECTURES = {
    "BertForMaskedLM": {},
    "BertForSequenceClassification": {"num_labels": 3, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    "BertForTokenClassification": {"num_labels": 5, "type_vocab_size": 1},
}
LENGTHS = np.array([12, 7, 2])
ONCE = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module")
def torch():
    library = pytest.importorskip("torch")
    library.set_num_threads(1)
    library.manual_seed(0)
    return library


@pytest.fixture(scope="module")
def transformers(torch):
    library = pytest.importorskip("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_match_and_weights_return_as_they_were(architecture, torch, transformers, tmp_path):
    config = transformers.BertConfig(**SIZES | ARCHITECTURES[architecture], attn_implementation="eager")
    kind = getattr(transformers, architecture)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases are 0 and norms 1, which would hide mistakes
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path / "theirs")

    rng = np.random.default_rng(0)
    real = (np.arange(T)[None] < LENGTHS[:, None]).astype(np.int32)
    batch = {
        "tokens": rng.integers(1, V, (B, T)).astype(np.int32) * real,
        "segment_ids": real,
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "token_types": (np.arange(T)[None] >= LENGTHS[:, None] // 2).astype(np.int32) * real,
    }
    batch["token_types"] = batch["token_types"] % config.type_vocab_size
    names = {"input_ids": "tokens", "attention_mask": "segment_ids", "token_type_ids": "token_types"}
    inputs = {name: torch.from_numpy(batch[ours].astype(np.int64)) for name, ours in names.items()}

    def logits_of(model):
        with torch.no_grad():
            logits = model(**inputs).logits.numpy()
        return logits if logits.ndim == 2 else logits[real > 0]

    ours, params = convert.load(tmp_path / "theirs")
    run = jax.jit(lambda p: Encoder(ours).apply({"params": p}, batch, method="logits"), compiler_options=ONCE)
    logits = np.asarray(run(params))
    np.testing.assert_allclose(logits if logits.ndim == 2 else logits[real > 0], logits_of(model), atol=2e-5, rtol=2e-5)

    convert.save(ours, params, tmp_path / "back", labels=convert.labels(tmp_path / "theirs"))
    here, there = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "theirs"))
    assert here.keys() <= there.keys()
    for name, value in here.items():
        np.testing.assert_array_equal(value, there[name], name)
    back = getattr(transformers, convert.family_in(tmp_path / "back").loader).from_pretrained(
        tmp_path / "back", attn_implementation="eager"
    )
    assert type(back) is kind and back.config.id2label == model.config.id2label
    np.testing.assert_array_equal(logits_of(back), logits_of(model))


def test_examples_are_tokenised_as_by_transformers(transformers, tmp_path):
    """A text and a pair of texts, with bos before the first and eos after each, as `data.examples` lays them out."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "jump", "##s", "##ed", "over", ",", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    theirs = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    theirs.save_pretrained(tmp_path)
    tokenizer = tokenizers.load(str(tmp_path))
    assert tokenizer.mask_id == theirs.mask_token_id == 4 and tokenizer.pad_id == theirs.pad_token_id
    first, second = "The fox jumps, jumped", "over the dog"
    for parts in ((first,), (first, second)):
        expected = theirs(*parts)
        ids = [tokenizer.encode(part.encode()) for part in parts]
        rows = np.concatenate([[tokenizer.bos_id], *(np.append(part, tokenizer.eos_id) for part in ids)])
        assert rows.tolist() == expected["input_ids"]
