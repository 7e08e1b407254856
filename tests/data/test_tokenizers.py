"""Tokenizers: round trips, deterministic vocabularies, Hugging Face files, and errors."""

import errno
import json
import os
import re
import sys

import hypothesis
import numpy as np
import pytest
import tokenizers as hf
from hypothesis import strategies as st

from hpnlp.data import tokenizers
from hpnlp.data.tokenizers import build, load, save_whole
from hpnlp.data.tokenizers.huggingface import HFTokenizer
from hpnlp.data.tokenizers.word_tokenizer import WordTokenizer
from hpnlp.types import InputError, Tokenizer, WordStats
from tests.messages import raises

TEXTS = [
    b"the cat sat on the mat, the cat sat still\n\n    def cat(mat):\n        return mat\n",
    "naïve café — 日本語 \U0001f600 the the the".encode(),
]
SPECS = ("bytes", "words(40)", "words(40, by=whitespace)", "bpe(320)")


def make_bpe(**options) -> hf.Tokenizer:
    """A byte-level tokenizer like that of GPT-2, made by the tokenizers package alone."""
    inner = hf.Tokenizer(hf.models.BPE())
    inner.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    inner.decoder = hf.decoders.ByteLevel()
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    trainer = hf.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([text.decode() for text in TEXTS], trainer)
    return inner


def make_wordpiece() -> hf.Tokenizer:
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "##s"]
    inner = hf.Tokenizer(hf.models.WordPiece({word: i for i, word in enumerate(vocab)}, unk_token="[UNK]"))
    inner.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    inner.decoder = hf.decoders.WordPiece()
    inner.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return inner


@pytest.fixture(scope="module")
def trained() -> dict[str, Tokenizer]:
    return {spec: build(spec, TEXTS) for spec in SPECS}


def test_text_of_a_vocabulary_grows_with_it_within_bounds():
    sizes = {"bpe(300)": 32, "bpe(8192)": 32, "words(30000)": 30_000 / 256, "bpe(100000)": 256}
    assert {spec: tokenizers.training_bytes(spec) / (1 << 20) for spec in sizes} == pytest.approx(sizes, rel=1e-3)


@pytest.mark.parametrize("spec", SPECS)
def test_saved_tokenizer_loads_as_the_same(trained, spec, tmp_path):
    before = trained[spec]
    before.save(str(tmp_path / "tokenizer.json"))
    for after in (load(str(tmp_path / "tokenizer.json")), load(str(tmp_path)), build(str(tmp_path / "tokenizer.json"))):
        for name in ("vocab_size", "bos_id", "eos_id", "pad_id", "lossless"):
            assert getattr(after, name) == getattr(before, name)
        for text in TEXTS:
            np.testing.assert_array_equal(after.encode(text), before.encode(text))


def test_bpe_by_digits_has_a_token_for_each_digit():
    tokenizer = build("bpe(300, by=digits)", [b"there are 1024 of 1024 or 1024"])
    ids = tokenizer.encode(b"are 10241024")
    assert [tokenizer.decode([i]) for i in ids[-8:].tolist()] == [b"1", b"0", b"2", b"4"] * 2
    assert tokenizer.lossless and tokenizer.decode(ids) == b"are 10241024"


def test_bpe_by_identifiers_splits_names_and_drops_case_and_punctuation(tmp_path):
    tokenizer = build("bpe(300, by=identifiers)", TEXTS)
    ids = tokenizer.encode("readHTTPHeader(self.foo_bar2): É".encode())
    assert tokenizer.decode(ids) == " read http header self foo bar2 é".encode() and not tokenizer.lossless
    np.testing.assert_array_equal(tokenizer.encode("READ http headerSelf, foo bar2 é".encode()), ids)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    np.testing.assert_array_equal(load(str(tmp_path)).encode("readHTTPHeader(self.foo_bar2): É".encode()), ids)
    raises("unknown split of words by 'names'", build, "bpe(300, by=names)", TEXTS)


@pytest.mark.parametrize("spec", SPECS)
def test_tokenizers_follow_the_protocol(trained, spec):
    tokenizer = trained[spec]
    assert isinstance(tokenizer, Tokenizer)
    ids = tokenizer.encode(TEXTS[0])
    special = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    assert ids.dtype == np.int32 and ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    assert len(special) == 3 and not special & set(ids.tolist())
    np.testing.assert_array_equal(tokenizer.encode_prompt("the cat"), [tokenizer.bos_id, *tokenizer.encode(b"the cat")])
    np.testing.assert_array_equal(tokenizer.encode_prompt(""), [tokenizer.bos_id])
    kept = b" ".join(TEXTS[0].split()) if "whitespace" in spec else TEXTS[0]
    assert tokenizer.decode([tokenizer.bos_id, *ids.tolist(), tokenizer.eos_id, tokenizer.pad_id]) == kept
    assert tokenizer.decode([]) == b"" and len(tokenizer.encode(b"")) == 0
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == b""  # a model's table may have more rows


@hypothesis.given(st.binary())
def test_bytes_round_trip(text):
    tokenizer = tokenizers.ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).tolist() == list(text)


@hypothesis.given(text=st.text(max_size=60) | st.text(alphabet="the cat,\n<eos>bp", max_size=60))
def test_bpe_round_trip(trained, text):
    tokenizer = trained["bpe(320)"]
    assert tokenizer.lossless
    data = text.encode()
    ids = tokenizer.encode(data)
    assert tokenizer.decode(ids) == data
    # Single ids decode exactly as well, also within a character.
    assert b"".join(tokenizer.decode([i]) for i in ids.tolist()) == data


@hypothesis.given(st.text(max_size=60) | st.text(alphabet="ab ,.\n\t_é", max_size=60))
def test_words_round_trip_of_known_text(text):
    data = text.encode()
    tokenizer = WordTokenizer.train(1000, [data])
    assert tokenizer.decode(tokenizer.encode(data)) == data


def test_word_ids_follow_frequency():
    tokenizer = WordTokenizer.train(9, [b"a b, a b a  c d"])
    # By frequency, then by the alphabet, up to the cap. A single space between words is not a token.
    assert [tokenizer.decode([i]) for i in range(9)] == [b"", b"<unk>", b"", b"", b"a", b"b", b" ", b"  ", b","]
    assert tokenizer.vocab_size == 9
    ids = tokenizer.encode(b"b a, zebra b")
    assert ids.tolist() == [5, 4, 8, 6, 1, 5]
    assert tokenizer.decode(ids) == b"b a, <unk> b"


@hypothesis.given(st.text(max_size=60) | st.text(alphabet="ab,.\n\t\x0b\u2028_é ", max_size=60))
def test_words_by_whitespace_match_str_split(text):
    tokenizer = build("words(1000, by=whitespace)", [text.encode()])
    assert [tokenizer.decode([i]).decode() for i in tokenizer.encode(text.encode()).tolist()] == text.split()
    assert tokenizer.decode(tokenizer.encode(text.encode())).decode() == " ".join(text.split())


def test_text_never_encodes_to_special_ids():
    """As in corpora whose authors replaced rare words by <unk>."""
    text = b"the <unk> sat on <unk> <eos> mat"
    tokenizer = build("words(20, by=whitespace)", [text])
    ids = tokenizer.encode(text)
    assert [ids[i] == tokenizer.unk_id for i in range(7)] == [False, True, False, False, True, True, False]
    assert tokenizer.stats.counts[tokenizer.unk_id] == 3 and tokenizer.vocab_size == 8
    assert build("words(20, by=whitespace)", [b"the cat"]).encode(b"<eos> <pad> cat").tolist()[:2] == [1, 1]


def test_words_by_whitespace_are_counted():
    tokenizer = build("words(6, by=whitespace)", [b"x=f(a) b\n\t x=f(a) c b x=f(a)"])
    assert tokenizer.vocab_size == 6 and tokenizer.stats.counts.tolist() == [0, 1, 1, 1, 3, 2]
    assert tokenizer.decode(tokenizer.encode(b"b  c\nx=f(a)")) == b"b <unk> x=f(a)"


def test_word_stats_are_saved(tmp_path):
    tokenizer = WordTokenizer.train(9, [b"a b, a b a  c d", b"a"])
    # <pad>, <unk>, one bos and one eos per document, then the words
    assert tokenizer.stats.counts.tolist() == [0, 2, 2, 2, 4, 2, 1, 1, 1]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizers.load(str(tmp_path / "tokenizer.json")).stats
    assert loaded == tokenizer.stats and hash(loaded) == hash(tokenizer.stats)
    assert sorted(loaded.order) == list(range(9)) and loaded != WordStats(loaded.counts) != WordStats(loaded.counts + 1)
    wider = loaded.padded(11)
    assert wider.counts.tolist() == [0, 2, 2, 2, 4, 2, 1, 1, 1, 0, 0] and sorted(wider.order) == list(range(11))
    for older in (WordStats(np.arange(6)), None):
        WordTokenizer(["a", "b"], older).save(str(tmp_path / "tokenizer.json"))
        assert tokenizers.load(str(tmp_path / "tokenizer.json")).stats == older


def test_byte_tokenizer_has_264_ids():
    tokenizer = tokenizers.ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (264, 256, 257, 258)
    assert tokenizer.encode_prompt("\udcff").tolist() == [256, 255]  # bytes of a command line that are not UTF-8


def test_bpe_ids_match_the_package(trained, tmp_path):
    tokenizer = trained["bpe(320)"]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    oracle = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert oracle.get_vocab_size() == tokenizer.vocab_size <= 320
    for text in [*TEXTS, b"", b"<eos> <|endoftext|>", b"\n\n  x = 1\t"]:
        np.testing.assert_array_equal(
            tokenizer.encode(text), oracle.encode(text.decode(), add_special_tokens=False).ids
        )
        np.testing.assert_array_equal(tokenizer.encode_prompt(text.decode()), oracle.encode(text.decode()).ids)
    batch = tokenizer.encode_batch(TEXTS)
    for ids, text in zip(batch, TEXTS, strict=True):
        np.testing.assert_array_equal(ids, oracle.encode(text.decode(), add_special_tokens=False).ids)


def test_bpe_training_is_deterministic(tmp_path):
    # Many pairs have equal counts, and the package seeds its hash tables anew for every training.
    texts = [" ".join(f"{a}{b}" for a in "abcdefgh" for b in "stuvwxyz").encode()] * 2
    forms = set()
    for _ in range(2):
        build("bpe(330)", texts).save(str(tmp_path / "tokenizer.json"))
        forms.add((tmp_path / "tokenizer.json").read_text())
    assert len(forms) == 1


def test_bpe_reads_long_runs_in_pieces():
    """The package trains on a word of n equal characters in O(n^2): 200,000 of them took a minute."""
    text = b"x" * 50_000 + b" a word " + b"\n" * 50_000 + b"another"
    tokenizer = build("bpe(300)", [text])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) < 1000
    assert tokenizer.vocab_size < 300  # 10 merges of each: the longest pieces have 1,024 characters


def test_bpe_special_tokens_in_text_stay_text(trained):
    tokenizer = trained["bpe(320)"]
    ids = tokenizer.encode(b"<bos><eos><pad>")
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids.tolist())


def test_byte_level_tokenizer_loads(tmp_path):
    inner = make_bpe()
    inner.enable_truncation(4)  # tokenizers of sentence encoders have such limits
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(str(tmp_path))
    oracle = make_bpe()
    end = oracle.token_to_id("<|endoftext|>")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (end, end, oracle.get_vocab_size())
    assert tokenizer.lossless
    for text in TEXTS:
        np.testing.assert_array_equal(tokenizer.encode(text), oracle.encode(text.decode()).ids)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    np.testing.assert_array_equal(tokenizer.encode(b"a<|endoftext|>"), oracle.encode("a<|endoftext|>").ids)
    assert tokenizer.encode_prompt("<|endoftext|>a").tolist() == oracle.encode("<|endoftext|>a").ids  # one bos, not two


@pytest.mark.parametrize("add_prefix_space", [False, True])
def test_added_prefix_space_is_not_lossless(tmp_path, add_prefix_space):
    inner = make_bpe()
    split = hf.pre_tokenizers.Split(hf.Regex(r"\w+|\W+"), "isolated")
    last = hf.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    inner.pre_tokenizer = hf.pre_tokenizers.Sequence([split, last])
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load(str(tmp_path)).lossless == (not add_prefix_space)


def test_tokenizer_without_bos_and_eos_is_not_lossless(tmp_path):
    form = json.loads(make_bpe().to_str())
    form["added_tokens"] = []
    del form["model"]["vocab"]["<|endoftext|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(form))
    tokenizer = load(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.lossless) == (None, False)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def with_template(single: str) -> hf.Tokenizer:
    """`make_bpe` with special tokens, which a post-processor adds after the one of byte-level tokenizers, as in Llama 3."""
    inner = make_bpe()
    inner.add_special_tokens(["<s>", "</s>"])
    ids = [(name, inner.token_to_id(name)) for name in ("<s>", "</s>")]
    template = hf.processors.TemplateProcessing(single=single, special_tokens=ids)
    inner.post_processor = hf.processors.Sequence([hf.processors.ByteLevel(trim_offsets=False), template])
    return inner


PROMPTS = {  # name -> (tokenizer, tokenizer_config.json, special tokens before the prompt, special tokens after it)
    "no_post_processor": (make_bpe, {}, [], []),
    "no_post_processor_adding": (make_bpe, {"add_bos_token": True, "bos_token": "<|endoftext|>"}, [], []),
    "bos": (lambda: with_template("<s> $A"), {"bos_token": "<s>", "eos_token": "</s>"}, ["<s>"], []),
    "bos_not_adding": (lambda: with_template("<s> $A"), {"bos_token": "<s>", "add_bos_token": False}, ["<s>"], []),
    "both": (lambda: with_template("<s> $A </s>"), {"bos_token": "<s>", "eos_token": "</s>"}, ["<s>"], ["</s>"]),
    "eos": (lambda: with_template("$A </s>"), {"bos_token": "<s>", "eos_token": "</s>"}, [], ["</s>"]),
    "unknown_is_bos": (lambda: with_template("<s> $A"), {"bos_token": "<s>", "unk_token": "<s>"}, ["<s>"], []),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_post_processor_adds_special_tokens_to_prompts(name, tmp_path):
    make, config, before, after = PROMPTS[name]
    inner = make()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    load(str(tmp_path)).save(str(tmp_path / "tokenizer.json"))  # as a run saves it
    tokenizer = load(str(tmp_path))
    start, end = ([inner.token_to_id(token) for token in tokens] for tokens in (before, after))
    for text in ("the cat", "<s>the cat", "<|endoftext|>"):
        body = tokenizer.encode(text.encode()).tolist()
        assert tokenizer.encode_prompt(text).tolist() == [*start, *body, *end]
    assert tokenizer.encode_prompt("").tolist() == ([*start, *end] or [tokenizer.bos_id])
    assert tokenizer.encode(b"the cat").tolist() == make_bpe().encode("the cat").ids  # documents get no special tokens


@pytest.mark.parametrize(("settings", "expected"), [({"bos_token_id": 7}, 7), ({"bos_token_id": 10**6}, 0), ({}, 0)])
def test_empty_prompts_start_like_generate(settings, expected, tmp_path):
    """Without special tokens of a post-processor: with the bos of generation_config.json, or else of the tokenizer."""
    make_bpe().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    tokenizer = load(str(tmp_path))
    assert tokenizer.encode_prompt("").tolist() == [expected]
    assert tokenizer.encode_prompt("the").tolist() == tokenizer.encode(b"the").tolist()
    (tmp_path / "generation_config.json").write_text("[7]")
    raises("generation_config.json': it holds a list, not an object", load, str(tmp_path))


def test_bpe_of_older_versions_begins_prompts_with_bos(trained, tmp_path):
    tokenizer = trained["bpe(320)"]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    form = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(form | {"post_processor": None}))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    assert load(str(tmp_path)).encode_prompt("the cat").tolist() == tokenizer.encode_prompt("the cat").tolist()


def test_split_special_tokens_is_followed(tmp_path):
    make_bpe().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"split_special_tokens": true, "chat_template": "x"}')
    (tmp_path / "copy").mkdir()
    load(str(tmp_path)).save(str(tmp_path / "copy" / "tokenizer.json"))
    for tokenizer in (load(str(tmp_path)), load(str(tmp_path / "copy"))):
        assert tokenizer.eos_id not in tokenizer.encode(b"a<|endoftext|>").tolist()
    assert json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())["chat_template"] == "x"


def test_wordpiece_tokenizer_loads(tmp_path):
    make_wordpiece().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.lossless) == (2, 3, 0, False)
    assert tokenizer.encode(b"the cats zebra").tolist() == [4, 5, 7, 1]
    assert tokenizer.decode([2, 4, 5, 7, 3]) == b"the cats"
    raises("'zebra', 'yak'", tokenizer.encode_prompt, "the zebra sat yak zebra")


def test_roles_are_read_from_the_config_and_saved(tmp_path):
    inner = make_bpe()
    inner.add_special_tokens(["<one>", "<two>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<one>", "eos_token": {"content": "<two>", "special": True}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "copy").mkdir()
    load(str(tmp_path)).save(str(tmp_path / "copy" / "tokenizer.json"))
    for tokenizer in (load(str(tmp_path)), load(str(tmp_path / "copy"))):
        assert tokenizer.bos_id == inner.token_to_id("<one>")
        assert tokenizer.eos_id == tokenizer.pad_id == inner.token_to_id("<two>")


def test_added_tokens_of_the_config_are_added(tmp_path):
    """As in transformers, tokenizer_config.json may list added tokens that tokenizer.json lacks."""
    inner = make_bpe()
    size = inner.get_vocab_size()
    inner.save(str(tmp_path / "tokenizer.json"))
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    added = {str(size + i): {"content": f"<{i}>", "special": i == 1, **flags} for i in range(2)}
    added["0"] = {"content": "<|endoftext|>", "special": True, **flags}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "<1>", "added_tokens_decoder": added}))
    (tmp_path / "copy").mkdir()
    load(str(tmp_path)).save(str(tmp_path / "copy" / "tokenizer.json"))
    for tokenizer in (load(str(tmp_path)), load(str(tmp_path / "copy"))):
        assert (tokenizer.vocab_size, tokenizer.eos_id) == (size + 2, size + 1)
        ids = tokenizer.encode(b"<0><1>").tolist()
        assert ids == [size, size + 1] and tokenizer.decode(ids) == b"<0>"
    for wrong in ({str(size + 1): added[str(size)]}, {"x": added[str(size)]}, {str(size): {"text": "<0>"}}, {"1": 2}):
        config.write_text(json.dumps({"added_tokens_decoder": wrong}))
        with pytest.raises(
            InputError, match="of added_tokens_decoder, .* cannot be added .*: load the tokenizer"
        ) as caught:
            load(str(tmp_path))
        assert "\n" not in str(caught.value)


def test_roles_are_read_from_special_tokens_map(tmp_path):
    """As in transformers, only if tokenizer_config.json has no added_tokens_decoder."""
    inner = make_bpe()
    inner.add_special_tokens(["<one>", "<two>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<two>"}, "pad_token": "<one>"})
    )
    for config, eos in (({}, "<two>"), ({"added_tokens_decoder": {}}, "<|endoftext|>")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert load(str(tmp_path)).eos_id == inner.token_to_id(eos)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text("{")
    raises("special_tokens_map.json.*mend or remove", load, str(tmp_path))


def test_invalid_tokenizer_config_raises(tmp_path):
    make_bpe().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<nowhere>"}')
    raises("'<nowhere>' as bos_token", load, str(tmp_path))
    for content in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        raises("tokenizer_config.json.*mend or remove", load, str(tmp_path))
    for token in ("3", '{"content": [1]}'):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {token}}}')
        raises(r"tokenizer_config.json gives .* as eos_token: expected a text or null", load, str(tmp_path))


def test_invalid_specs_raise():
    for spec, message in (
        ("byts", "unknown tokenizer 'byts': did you mean 'bytes'?"),
        ("words", "takes"),
        ("words(4)", "4: expected a number of ids, 5 to 16777216, as in words(30000)"),
        ("words(40, by=line)", "unknown split of words by 'line': known: letters, whitespace"),
        ("bpe(100)", "100: expected a number of ids, 259 to 16777216, as in bpe(8192)"),
        ("bpe(size=300, x=1)", "no argument 'x'"),
        ("no/such/tokenizer.json", "cannot read the tokenizer 'no/such/tokenizer.json'"),
    ):
        raises(re.escape(message), build, spec, TEXTS)


def test_invalid_tokenizer_files_raise(tmp_path):
    for content, message in (
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"type": "chars", "version": 1}', "neither a model nor a known type"),
        ('{"type": "bytes", "version": 2}', "format version 2, expected 1"),
        ('{"type": "words", "version": 1, "words": [1]}', "not a list of strings"),
        ('{"type": "words", "version": 1, "words": ["a", "a"]}', "differ"),
        ('{"type": "words", "version": 1, "words": ["a"], "counts": [1, 2]}', "2 counts for 1 words"),
        (
            '{"type": "words", "version": 1, "words": ["a"], "counts": [0, 0, 0, 0, 1], "order": [0, 1, 2, 3, 3]}',
            "each of the ids 0 to 4 once",
        ),
        ('{"model": {"type": "Nonsense"}}', "that tokenizers"),
    ):
        path = tmp_path / "tokenizer.json"
        path.write_text(content, "utf-8", "surrogateescape")
        raises(message, load, str(path))


def test_invalid_tokenizer_paths_raise(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "directory" / "tokenizer.json").mkdir(parents=True)
    (tmp_path / "binary").write_bytes(b"\x89PNG\r\n\x1a\n\0\xff")
    for path, message in {
        tmp_path / "pipe": "is not a regular file: pass the path of a tokenizer.json",  # without waiting for a writer
        tmp_path / "directory": "is not a regular file",
        tmp_path / "loop": "cannot read the tokenizer .*: Too many levels of symbolic links: pass the path",
        tmp_path / "binary": "is no tokenizer.json: it is binary, not JSON: pass another path",
        tmp_path: "cannot read the tokenizer .*tokenizer.json': No such file",
    }.items():
        raises(message, load, str(path))


@pytest.mark.parametrize("spec", SPECS[1:])
def test_text_that_is_not_utf8_raises(trained, spec):
    raises(r"byte 3 \(0xff\) is not UTF-8.*data.tokenizer=bytes", trained[spec].encode, b"abc\xff")
    raises("byte 1 ", build, spec, [b"fine", b"a\xc3"])
    raises("byte 0 ", trained[spec].encode_prompt, "\udcff")


def test_prompt_with_unknown_words_raises(trained):
    raises("'zebra', '!'.*data.tokenizer=bytes", trained["words(40)"].encode_prompt, "the zebra sat! zebra")


def test_empty_prompt_without_bos_raises(tmp_path):
    inner = hf.Tokenizer(hf.models.WordLevel({"a": 0}, unk_token="a"))
    inner.save(str(tmp_path / "tokenizer.json"))
    raises("no bos to start from", lambda: load(str(tmp_path)).encode_prompt(""))


def test_missing_package_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    raises(re.escape("pip install tokenizers"), build, "bpe(320)", TEXTS)


class FullDisk(HFTokenizer):
    """A tokenizer whose files do not fit on the disk."""

    def save(self, path):
        super().save(path)
        os.truncate(path, 10)
        raise OSError(errno.ENOSPC, "No space left on device")


def test_save_whole_is_atomic(trained, tmp_path, monkeypatch):
    tokenizer = trained["bpe(320)"]
    order, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (order.append(target), replace(source, target)))
    (tmp_path / "tokenizer.tmp").mkdir()
    (tmp_path / "tokenizer.tmp" / "tokenizer.json").write_text("half of")  # as if a run was killed here
    with pytest.raises(OSError, match="No space left"):
        save_whole(FullDisk(tokenizer._inner, {}), str(tmp_path))
    assert os.listdir(tmp_path) == []
    save_whole(tokenizer, str(tmp_path))
    assert [os.path.basename(path) for path in order] == ["tokenizer_config.json", "tokenizer.json"]
    assert sorted(os.listdir(tmp_path)) == ["tokenizer.json", "tokenizer_config.json"]
    assert load(str(tmp_path)).vocab_size == tokenizer.vocab_size
