"""Tokenizers in the Hugging Face layout: tokenizer.json and tokenizer_config.json that `AutoTokenizer` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from hpnlp.data.huggingface import TOKENIZER_CONFIG, HFTokenizer, byte_of_character
from hpnlp.data.tokenizers import ByteTokenizer, WordTokenizer
from hpnlp.types import InputError, Tokenizer

# Python's \w and \s in the regular expressions of the tokenizers package, whose own differ for marks and separators.
_WORD, _SPACE = r"[\p{L}\p{N}_]", r"[\s\x1c-\x1f]"
# Unicode's noncharacters. One that no word of the vocabulary holds stands after each word while a text is decoded.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


def export(tokenizer: Tokenizer, directory: str) -> None:
    """Writes a tokenizer as `transformers` reads it, with the same ids and texts.

    Prompts get bos before them, as `encode_prompt` does; the names of special tokens inside a text are text.

    Args:
        tokenizer: as `hpnlp.data.tokenizers.build` or `load` makes it.
        directory: must exist.

    Raises:
        InputError: The tokenizer is of a kind that has no such form.
    """
    if isinstance(tokenizer, HFTokenizer):
        tokenizer.save(os.path.join(directory, "tokenizer.json"))
        return
    if isinstance(tokenizer, ByteTokenizer):
        form = _bytes(tokenizer)
    elif isinstance(tokenizer, WordTokenizer):
        form = _words(tokenizer)
    else:
        raise InputError(
            f"{type(tokenizer).__name__} has no Hugging Face form: train with bytes, words(...) or bpe(...)"
        )
    names = {token["id"]: token["content"] for token in form["added_tokens"]}
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    roles = {f"{role}_token": names[i] for role, i in ids.items()}
    _write(directory, "tokenizer.json", form)
    _write(directory, "tokenizer_config.json", {**TOKENIZER_CONFIG, **roles})


def _bytes(tokenizer: ByteTokenizer) -> dict[str, Any]:
    names = {tokenizer.bos_id: "<bos>", tokenizer.eos_id: "<eos>", tokenizer.pad_id: "<pad>"}
    special = {names.get(i, f"<reserved_{i}>"): i for i in range(256, tokenizer.vocab_size)}
    model = {"type": "BPE", "vocab": {**byte_of_character(), **special}, "merges": []}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return _form(model, level, level, special, "<bos>")


def _words(tokenizer: WordTokenizer) -> dict[str, Any]:
    # Names that no split of a text gives, because they hold a space.
    special = {f"<special {name[1:-1]}>": i for i, name in enumerate(tokenizer.SPECIAL) if i != tokenizer.unk_id}
    words = {word: len(tokenizer.SPECIAL) + i for i, word in enumerate(tokenizer.words)}
    vocab = {**special, "<unk>": tokenizer.unk_id, **words}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    bos = next(name for name, i in special.items() if i == tokenizer.bos_id)
    if tokenizer.by == "whitespace":
        # Without a decoder, the package joins words by a space.
        return _form(model, _split(rf"{_SPACE}+", "Removed"), None, special, bos)
    # A space between two words is left out, and comes back between words whose ends meet.
    split = [
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
    splits = {"type": "Sequence", "pretokenizers": split}
    return _form(model, splits, {"type": "Sequence", "decoders": decoders}, special, bos)


def _split(pattern: str, behavior: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def _form(model: Any, pre_tokenizer: Any, decoder: Any, special: Mapping[str, int], bos: str) -> dict[str, Any]:
    """The content of tokenizer.json. special: special tokens and their ids, among them `bos`, with which texts begin."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    start = {"SpecialToken": {"id": bos, "type_id": 0}}
    texts = [{"Sequence": {"id": which, "type_id": 0}} for which in "AB"]
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
    with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=True, indent=1)
