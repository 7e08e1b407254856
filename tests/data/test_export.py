"""Exported tokenizers, read by the `tokenizers` package and by `transformers`."""

import json
import random

import pytest
import tokenizers as hf

from hpnlp.data.tokenizers import build, load
from hpnlp.data.tokenizers.export import export

TEXTS = [
    b"the cat sat on the mat, twice. \n\n  the dog: x_1 = 12 + caf\xc3\xa9\n",
    "naïve \xbd cup e\u0301 中文 \x1c tab\t end\u2028x  y <eos> <unk> <bos>\n".encode(),
]
# Characters on which Python, Unicode and regular expressions disagree about words and spaces.
ODD = "\t\n\r\x1c\x1f\x85\xa0\xb2\xbd\xe9\u0301\u2028\u3000\u0661\u200d\u203f\u2160\u3007\U0001f600 .'"
SPECS = ("bytes", "words(400)", "words(400, by=whitespace)", "bpe(300)")


def texts():
    draw = random.Random(0)
    fixed = ["", "the", "the cat", "<bos>the", "<special bos> the", "zzz cat", "the  cat", *(t.decode() for t in TEXTS)]
    return fixed + ["".join(draw.choices(ODD + "theca_1", k=20)) for _ in range(60)]


@pytest.fixture(scope="module", params=SPECS)
def exported(request, tmp_path_factory):
    """(tokenizer, directory of its export)."""
    directory = tmp_path_factory.mktemp("exported")
    tokenizer = build(request.param, TEXTS)
    export(tokenizer, str(directory))
    return tokenizer, directory


def text_of(tokenizer, ids):
    return tokenizer.decode(ids).decode("utf-8", "replace")


def test_ids_and_texts_equal_those_of_hpnlp(exported):
    tokenizer, directory = exported
    exported_tokenizer = hf.Tokenizer.from_file(str(directory / "tokenizer.json"))
    exported_tokenizer.encode_special_tokens = json.loads((directory / "tokenizer_config.json").read_text())[
        "split_special_tokens"
    ]
    for text in texts():
        ids = tokenizer.encode(text.encode()).tolist()
        assert exported_tokenizer.encode(text, add_special_tokens=False).ids == ids, repr(text)
        assert exported_tokenizer.encode(text).ids == [tokenizer.bos_id, *ids]
        assert exported_tokenizer.decode(ids) == text_of(tokenizer, ids)


def test_bytes_and_special_ids_round_trip(tmp_path):
    tokenizer = build("bytes")
    export(tokenizer, str(tmp_path))
    exported_tokenizer = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert exported_tokenizer.get_vocab_size() == tokenizer.vocab_size
    for i in range(tokenizer.vocab_size):
        assert exported_tokenizer.decode([i]) == text_of(tokenizer, [i])
    everything = bytes(range(256))
    back = load(str(tmp_path))
    assert back.decode(back.encode(b"x" + everything[:128])) == b"x" + everything[:128]
    assert back.decode(range(tokenizer.vocab_size)) == everything


def test_exported_tokenizer_loads_as_the_same(exported):
    tokenizer, directory = exported
    back = load(str(directory))
    ids = (back.vocab_size, back.bos_id, back.eos_id, back.pad_id)
    assert ids == (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    for text in ("the cat", ""):
        assert back.encode_prompt(text).tolist() == tokenizer.encode_prompt(text).tolist()


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "gemma2", "gpt2", "roberta"])
def test_autotokenizer_gives_the_same_ids(exported, model_type):
    transformers = pytest.importorskip("transformers")
    tokenizer, directory = exported
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    exported_tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = (
        exported_tokenizer.bos_token_id,
        exported_tokenizer.eos_token_id,
        exported_tokenizer.pad_token_id,
        len(exported_tokenizer),
    )
    assert ids == (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size)
    for text in texts():
        ids = tokenizer.encode(text.encode()).tolist()
        assert exported_tokenizer(text)["input_ids"] == [tokenizer.bos_id, *ids], repr(text)
        assert exported_tokenizer.decode(ids, skip_special_tokens=True) == text_of(tokenizer, ids)


@pytest.mark.oracle
def test_fast_class_gives_the_same_ids_where_autotokenizer_differs(exported):
    transformers = pytest.importorskip("transformers")
    tokenizer, directory = exported
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    exported_tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    for text in texts():
        assert exported_tokenizer(text)["input_ids"] == [tokenizer.bos_id, *tokenizer.encode(text.encode()).tolist()], (
            repr(text)
        )
    auto = transformers.AutoTokenizer.from_pretrained(directory)
    assert any(
        auto(text)["input_ids"] != exported_tokenizer(text)["input_ids"] for text in texts()
    )  # otherwise `hpnlp convert` need not mention it
