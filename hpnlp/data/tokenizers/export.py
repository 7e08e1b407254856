"""Writes tokenizers in the Hugging Face layout: tokenizer.json and tokenizer_config.json, which `AutoTokenizer` reads."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hpnlp.data.tokenizers import ByteTokenizer
from hpnlp.data.tokenizers.huggingface import TOKENIZER_CONFIG, HFTokenizer, byte_of_character, import_tokenizers
from hpnlp.data.tokenizers.word_tokenizer import WordTokenizer
from hpnlp.types import InputError, JSONValue, Tokenizer

if TYPE_CHECKING:
    import tokenizers as hf

# Python's \w and \s in the syntax of the tokenizers package, whose own \w and \s differ for marks and separators.
_WORD, _SPACE = r"[\p{L}\p{N}_]", r"[\s\x1c-\x1f]"
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
# Unicode's noncharacters. While a text is decoded, each word is followed by one that no word of the vocabulary holds.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


def export(tokenizer: Tokenizer, directory: str) -> None:
    """Writes a tokenizer as `transformers` reads it, with the same ids and texts.

    The exported tokenizer puts bos before prompts as `encode_prompt` does, and encodes the names of special tokens inside a
    text as text.

    Args:
      tokenizer: A tokenizer of `hpnlp.data.tokenizers.build` or `load`.
      directory: An existing directory.

    Raises:
      InputError: The tokenizer is of another class.
    """
    if isinstance(tokenizer, HFTokenizer):
        tokenizer.save(os.path.join(directory, "tokenizer.json"))
        return
    make_form = next((_FORMS[base] for base in type(tokenizer).__mro__ if base in _FORMS), None)
    if make_form is None:
        raise InputError(
            f"{type(tokenizer).__name__} has no Hugging Face form: train with bytes, words(...) or bpe(...)"
        )
    form = make_form(tokenizer)
    names = {token["id"]: token["content"] for token in form["added_tokens"]}
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    roles = {f"{role}_token": names[i] for role, i in ids.items()}
    _write(directory, "tokenizer.json", form)
    _write(directory, "tokenizer_config.json", {**TOKENIZER_CONFIG, **roles})


@dataclasses.dataclass(frozen=True)
class Framing:
    """Special tokens that an encoder reads around its texts: bos A eos, and bos A eos B eos for pairs.

    Attributes:
      max_len: Largest number of tokens, special ones included.
      pairs: Whether the model reads pairs of texts.
      token_types: Number of token types of the model; with at least 2, the second text and its eos have type 1.
      mask_id: Id of the token that hides a word, of a model of masked words; None for other models.
    """

    max_len: int
    pairs: bool = False
    token_types: int = 0
    mask_id: int | None = None

    def post_processor(self, inner: hf.Tokenizer, tokenizer: Tokenizer) -> dict[str, Any]:
        """The section post_processor of tokenizer.json.

        Args:
          inner: The tokenizer as the `tokenizers` package has read it, for the names of special tokens.
          tokenizer: The same tokenizer.

        Returns:
          The section.
        """
        ids = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]
        names = {i: inner.id_to_token(i) for i in ids}
        second = 1 if self.token_types > 1 else 0

        def special(i: int | None, kind: int) -> list[Any]:
            return [] if i is None else [{"SpecialToken": {"id": names[i], "type_id": kind}}]

        def text(name: str, kind: int) -> list[Any]:
            return [{"Sequence": {"id": name, "type_id": kind}}, *special(tokenizer.eos_id, kind)]

        single = [*special(tokenizer.bos_id, 0), *text("A", 0)]
        tokens = {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in names.items()}
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, *text("B", second)],
            "special_tokens": tokens,
        }


def frame(tokenizer: Tokenizer, directory: str, framing: Framing) -> bool:
    """Changes an exported tokenizer so that it frames texts as an encoder was trained on them.

    Args:
      tokenizer: The tokenizer.
      directory: Directory of its tokenizer.json and tokenizer_config.json, in the Hugging Face layout.
      framing: The special tokens.

    Returns:
      False if the tokenizer frames texts in this way already, and its files are left as they are.
    """
    path = os.path.join(directory, "tokenizer.json")
    inner = import_tokenizers().Tokenizer.from_file(path)
    with open(path, encoding="utf-8") as file:
        form = json.load(file)
    post_processor = framing.post_processor(inner, tokenizer)
    mask = None if framing.mask_id is None else inner.id_to_token(framing.mask_id)
    needs_mask = framing.mask_id is not None and mask is None
    if not needs_mask and _frames_alike(form, post_processor, framing.pairs):
        return False
    form["post_processor"] = post_processor
    roles = {"cls_token": tokenizer.bos_id, "sep_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    names = {role: inner.id_to_token(i) for role, i in roles.items() if i is not None}
    if needs_mask:
        mask = _unused_name("<mask>", inner.get_vocab(with_added_tokens=True))
        token = {"id": framing.mask_id, "content": mask, "special": True}
        form["added_tokens"].append(token | dict.fromkeys(_TOKEN_FLAGS, False))
    config_path = os.path.join(directory, "tokenizer_config.json")
    config: dict[str, Any] = {}
    if os.path.exists(config_path):
        with open(config_path, encoding="utf-8") as file:
            config = json.load(file)
    types = ["token_type_ids"] if framing.token_types else []
    config |= names | ({"mask_token": mask} if mask else {})
    config["tokenizer_class"] = TOKENIZER_CONFIG["tokenizer_class"]  # classes of families ignore post_processor
    if mask:
        config["split_special_tokens"] = False  # otherwise transformers does not find the mask in a text
    config["model_max_length"] = framing.max_len
    config["model_input_names"] = ["input_ids", *types, "attention_mask"]
    _write(directory, "tokenizer.json", form)
    _write(directory, "tokenizer_config.json", config)
    return True


def _frames_alike(form: Mapping[str, Any], post_processor: Mapping[str, Any], pairs: bool) -> bool:
    """Whether another post-processor adds the same special tokens."""
    texts = ("a", "b") if pairs else ("a",)
    framed = []
    for section in (form.get("post_processor"), post_processor):
        inner = import_tokenizers().Tokenizer.from_str(json.dumps({**form, "post_processor": section}))
        inner.no_truncation()
        inner.no_padding()
        encoded = inner.encode(*texts)
        framed.append((encoded.ids, encoded.type_ids))
    return framed[0] == framed[1]


def _unused_name(name: str, vocab: Mapping[str, int]) -> str:
    """A name that no token has."""
    while name in vocab:
        name = f"<{name}>"
    return name


def _byte_form(tokenizer: ByteTokenizer) -> dict[str, Any]:
    """The content of tokenizer.json for bytes: byte-level BPE without merges."""
    names = {tokenizer.bos_id: "<bos>", tokenizer.eos_id: "<eos>", tokenizer.pad_id: "<pad>"}
    special = {names.get(i, f"<reserved_{i}>"): i for i in range(256, tokenizer.vocab_size)}
    model = {"type": "BPE", "vocab": {**byte_of_character(), **special}, "merges": []}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return _form(model, byte_level, byte_level, special, "<bos>")


def _word_form(tokenizer: WordTokenizer) -> dict[str, Any]:
    """The content of tokenizer.json for words."""
    # Names of special tokens hold a space, so that no word of a text equals one.
    special = {f"<special {name[1:-1]}>": i for i, name in enumerate(tokenizer.SPECIAL) if i != tokenizer.unk_id}
    words = {word: len(tokenizer.SPECIAL) + i for i, word in enumerate(tokenizer.words)}
    vocab = {**special, "<unk>": tokenizer.unk_id, **words}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    bos = next(name for name, i in special.items() if i == tokenizer.bos_id)
    if tokenizer.by == "whitespace":
        # Without a decoder, the tokenizers package joins words by a space.
        return _form(model, _split(rf"{_SPACE}+", "Removed"), None, special, bos)
    # A single space between two words is removed by the splits, and the decoder inserts it again between adjacent words.
    splits = [
        _split(rf"(?<={_WORD}) (?={_WORD})", "Removed"),
        _split(rf"{_WORD}+|{_SPACE}+|(?!{_WORD}|{_SPACE})(?m:.)", "Isolated"),
    ]
    end = next(mark for mark in _NONCHARACTERS if not any(mark in word for word in tokenizer.words))
    decoders = [
        {"type": "Replace", "pattern": {"Regex": r"\z"}, "content": end},
        {"type": "Fuse"},
        {"type": "Replace", "pattern": {"Regex": rf"(?<={_WORD}|<unk>){end}(?={_WORD}|<unk>)"}, "content": " "},
        {"type": "Replace", "pattern": {"String": end}, "content": ""},
    ]
    pre_tokenizer = {"type": "Sequence", "pretokenizers": splits}
    return _form(model, pre_tokenizer, {"type": "Sequence", "decoders": decoders}, special, bos)


_FORMS: dict[type, Callable[..., dict[str, Any]]] = {ByteTokenizer: _byte_form, WordTokenizer: _word_form}


def _split(pattern: str, behavior: str) -> dict[str, Any]:
    """A pre-tokenizer that splits at `pattern`; `behavior` decides what becomes of the matches."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def _form(
    model: Mapping[str, Any],
    pre_tokenizer: Mapping[str, Any] | None,
    decoder: Mapping[str, Any] | None,
    special: Mapping[str, int],
    bos: str,
) -> dict[str, Any]:
    """The content of tokenizer.json. `special` maps special tokens to ids; texts begin with the special token `bos`."""
    flags = dict.fromkeys(_TOKEN_FLAGS, False)
    start = {"SpecialToken": {"id": bos, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags, "special": True} for name, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, texts[0]],
            "pair": [start, texts[0], start, texts[1]],
            "special_tokens": {bos: {"id": bos, "ids": [special[bos]], "tokens": [bos]}},
        },
        "decoder": decoder,
        "model": model,
    }


def _write(directory: str, name: str, value: JSONValue) -> None:
    """Writes a JSON file of ASCII characters."""
    with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=True, indent=1)
