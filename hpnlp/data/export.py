"""Writes tokenizers in the Hugging Face layout: tokenizer.json and tokenizer_config.json, which `AutoTokenizer` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from hpnlp.data.huggingface import TOKENIZER_CONFIG, HFTokenizer, byte_of_character
from hpnlp.data.tokenizers import ByteTokenizer, WordTokenizer
from hpnlp.types import InputError, Tokenizer

# Python's \w and \s in the syntax of the tokenizers package, whose own \w and \s differ for marks and separators.
_WORD, _SPACE = r"[\p{L}\p{N}_]", r"[\s\x1c-\x1f]"
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
    if isinstance(tokenizer, ByteTokenizer):
        form = _byte_form(tokenizer)
    elif isinstance(tokenizer, WordTokenizer):
        form = _word_form(tokenizer)
    else:
        raise InputError(
            f"{type(tokenizer).__name__} has no Hugging Face form: train with bytes, words(...) or bpe(...)"
        )
    names = {token["id"]: token["content"] for token in form["added_tokens"]}
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    roles = {f"{role}_token": names[i] for role, i in ids.items()}
    _write(directory, "tokenizer.json", form)
    _write(directory, "tokenizer_config.json", {**TOKENIZER_CONFIG, **roles})


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


def _split(pattern: str, behavior: str) -> dict[str, Any]:
    """A pre-tokenizer that splits at `pattern`; `behavior` decides what becomes of the matches."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def _form(model: Any, pre_tokenizer: Any, decoder: Any, special: Mapping[str, int], bos: str) -> dict[str, Any]:
    """The content of tokenizer.json. `special` maps special tokens to ids; texts begin with the special token `bos`."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
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


def _write(directory: str, name: str, value: Any) -> None:
    """Writes a JSON file of ASCII characters."""
    with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=True, indent=1)
