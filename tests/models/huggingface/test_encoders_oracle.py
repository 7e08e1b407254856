"""Encoders of transformers: logits of their checkpoints, their tokenizers, and checkpoints that transformers reads."""

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
DISTILBERT = {"vocab_size": V, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 56, "max_position_embeddings": 16}
# Class of transformers -> settings of config.json.
ARCHITECTURES = {
    "BertForMaskedLM": SIZES,
    "BertForSequenceClassification": SIZES | {"num_labels": 3, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    "BertForTokenClassification": SIZES | {"num_labels": 5, "type_vocab_size": 1},
    "RobertaForMaskedLM": SIZES | {"hidden_act": "relu", "pad_token_id": 0},
    "RobertaForSequenceClassification": SIZES | {"num_labels": 3, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "RobertaForTokenClassification": SIZES | {"num_labels": 5, "max_position_embeddings": 14},
    "DistilBertForMaskedLM": DISTILBERT,
    "DistilBertForSequenceClassification": DISTILBERT | {"num_labels": 3, "activation": "relu"},
    "DistilBertForTokenClassification": DISTILBERT | {"num_labels": 5, "sinusoidal_pos_embds": True},
}
MOBILEBERT = SIZES | {"embedding_size": 12, "intra_bottleneck_size": 16, "num_feedforward_networks": 3}
ARCHITECTURES |= {
    "MobileBertForMaskedLM": MOBILEBERT,
    "MobileBertForSequenceClassification": MOBILEBERT
    | {"num_labels": 3, "normalization_type": "layer_norm", "layer_norm_eps": 1e-5, "hidden_act": "gelu"},
    "MobileBertForTokenClassification": MOBILEBERT
    | {"num_labels": 5, "use_bottleneck_attention": True, "key_query_shared_bottleneck": False, "trigram_input": False},
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
    kind = getattr(transformers, architecture)
    config = kind.config_class(**ARCHITECTURES[architecture], attn_implementation="eager")
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases are 0 and norms 1, which would hide mistakes
            parameter += 0.1 * torch.randn(parameter.shape)
        # MobileBERT's last token of a text also reads the embedding of padding.
        model.get_input_embeddings().weight[config.pad_token_id] = 0.0
    model.save_pretrained(tmp_path / "theirs")

    rng, types = np.random.default_rng(0), getattr(config, "type_vocab_size", 0)
    real = (np.arange(T)[None] < LENGTHS[:, None]).astype(np.int32)
    batch = {
        "tokens": np.where(real, rng.integers(2, V, (B, T)), config.pad_token_id).astype(np.int32),
        "segment_ids": real,
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "token_types": (np.arange(T)[None] >= LENGTHS[:, None] // 2).astype(np.int32) * real,
    }
    batch["token_types"] = batch["token_types"] % max(types, 1)
    names = {"input_ids": "tokens", "attention_mask": "segment_ids"} | (
        {"token_type_ids": "token_types"} if types else {}
    )
    inputs = {name: torch.from_numpy(batch[ours].astype(np.int64)) for name, ours in names.items()}

    def logits_of(model):
        with torch.no_grad():
            logits = model(**inputs).logits.numpy()
        return logits if logits.ndim == 2 else logits[real > 0]

    ours, params = convert.load(tmp_path / "theirs")
    run = jax.jit(lambda p: Encoder(ours).apply({"params": p}, batch, method="logits"), compiler_options=ONCE)
    logits = np.asarray(run(params))
    np.testing.assert_allclose(logits if logits.ndim == 2 else logits[real > 0], logits_of(model), atol=2e-5, rtol=2e-5)

    convert.save(
        ours, params, tmp_path / "back", texts=convert.TextSettings(labels=convert.labels(tmp_path / "theirs"))
    )
    here, there = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "theirs"))
    assert here.keys() <= there.keys()
    for name, value in here.items():
        assert value.dtype == there[name].dtype and value.tobytes() == there[name].tobytes(), name
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


def test_byte_level_tokenizer_of_roberta(transformers, tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(["the fox jumps over the dog"] * 10, trainer)
    trained.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    theirs = transformers.RobertaTokenizerFast(tokenizer_object=trained)
    theirs.save_pretrained(tmp_path)
    tokenizer = tokenizers.load(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id) == (0, 2, 4) and tokenizer.pad_id == 1
    text = "The fox jumps\u2026 <mask> the dog"
    ids = tokenizer.encode(text.encode())
    assert [tokenizer.bos_id, *ids.tolist(), tokenizer.eos_id] == theirs(text)["input_ids"]
