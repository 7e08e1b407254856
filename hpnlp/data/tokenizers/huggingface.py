"""Tokenizers of the `tokenizers` package (extra `hf`): any `tokenizer.json`, and byte-level BPE trained by hpnlp.

The roles of special tokens are read from `tokenizer_config.json` in the same directory, as in `transformers`.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpnlp import spec as specs
from hpnlp.data.reading.files import to_text
from hpnlp.data.tokenizers.prompt import prompt_bytes, unknown_parts, with_bos
from hpnlp.data.tokenizers.tokenizer_file import check_size
from hpnlp.data.tokenizers.tokenizer_process import TokenizerProcess
from hpnlp.types import InputError, Tokenizer, WordStats

if TYPE_CHECKING:
    import tokenizers as hf

# tokenizer_config.json of hpnlp's tokenizers: `transformers` follows tokenizer.json, and text never encodes to special tokens.
TOKENIZER_CONFIG: Mapping[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "split_special_tokens": True,
    "clean_up_tokenization_spaces": False,
}


# The ends of words within an identifier such as readHTTPHeader, and words.
_CASE = r"(?<=[\p{Ll}\p{N}])(?=\p{Lu})|(?<=\p{Lu})(?=\p{Lu}\p{Ll})"
_WORD = r"[^\W_]+"
# Characters of a word, or of blanks in a row, that BPE is trained on: its time grows with the square of them.
_LONGEST_RUN = 1024
# Batches of at least so many texts or characters are encoded in a process of their own.
_MANY_TEXTS = 256
_MUCH_TEXT = 1 << 18


def _split_by_spaces(hf: ModuleType, inner: hf.Tokenizer) -> None:
    """Sets GPT-2's split of text into words, which keep the space before them."""
    inner.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)


def _split_by_digits(hf: ModuleType, inner: hf.Tokenizer) -> None:
    """Sets GPT-2's split, with each digit by itself, as in Llama: numbers of any length are made of the same ten tokens."""
    pre = hf.pre_tokenizers
    inner.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])


def _split_by_identifiers(hf: ModuleType, inner: hf.Tokenizer) -> None:
    """Sets a split of text into lower-case words and parts of identifiers, without punctuation."""
    normalizers, pre = hf.normalizers, hf.pre_tokenizers
    inner.normalizer = normalizers.Sequence([normalizers.Replace(hf.Regex(_CASE), " "), normalizers.Lowercase()])
    words = pre.Split(hf.Regex(_WORD), behavior="removed", invert=True)
    inner.pre_tokenizer = pre.Sequence([words, pre.ByteLevel(add_prefix_space=True, use_regex=False)])


class HFTokenizer(Tokenizer):
    """Any Hugging Face `tokenizer.json`.

    The names of special tokens inside a text stand for these tokens, as in `transformers`, unless tokenizer_config.json sets
    split_special_tokens; encode adds no other special tokens. Prompts get the special tokens that the post-processor of
    tokenizer.json adds, and no others: `transformers` ignores add_bos_token and add_eos_token of tokenizer_config.json if there
    is a tokenizer.json. If that leaves an empty prompt without tokens, it starts with the bos_token_id of a
    generation_config.json in the same directory, or else with bos.

    If a tokenizer has an eos but no bos, eos serves as bos (as in GPT-2), so that the first token of a document can be
    predicted from something in training. `lossless` holds for text without names of special tokens.
    """

    SPECIAL = ("<pad>", "<bos>", "<eos>")  # special tokens of tokenizers trained by `train`
    SMALLEST = 256 + len(SPECIAL)
    # Name -> function that sets how a tokenizer splits text into the words that it has tokens for.
    SPLITS: ClassVar[Mapping[str, Callable[[Any, Any], None]]] = {
        "spaces": _split_by_spaces,
        "digits": _split_by_digits,
        "identifiers": _split_by_identifiers,
    }

    # Role -> names of the special token in published tokenizers, for a tokenizer.json without its config.
    _ROLE_NAMES: Mapping[str, tuple[str, ...]] = {
        "bos": ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[CLS]"),
        "eos": ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>", "[SEP]"),
        "pad": ("<pad>", "[PAD]", "<|pad|>"),
    }
    _MASKS = ("[MASK]", "<mask>")  # names of the special token that hides a word

    def __init__(self, inner: Any, config: Mapping[str, Any], start_id: object = None):
        """Wraps a tokenizer of the `tokenizers` package, which it configures.

        Args:
          inner: A `tokenizers.Tokenizer`.
          config: Content of tokenizer_config.json. Special tokens whose roles are missing there are found by their names.
          start_id: Id with which an empty prompt without special tokens starts; bos if it is not an id.

        Raises:
          InputError: `config` names a special token that the tokenizer lacks.
        """
        # A file may set a maximum length, at which documents would be cut silently.
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = bool(config.get("split_special_tokens"))
        form = json.loads(inner.to_str())
        added = {token["content"] for token in form["added_tokens"]}
        # `train` makes plain entries of the special tokens, where other tokenizers have added tokens.
        self.is_trained_here: bool = all(
            inner.token_to_id(name) is not None and name not in added for name in self.SPECIAL
        )
        if self.is_trained_here:  # older versions of hpnlp saved no post-processor
            bos = self.SPECIAL[1]
            inner.post_processor = import_tokenizers().processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
            )
        self._inner = inner
        self._process: TokenizerProcess | None = None
        self._characters = 0  # number of characters that were encoded so far
        self._form = form
        self._config = {**config, **(TOKENIZER_CONFIG if self.is_trained_here else {})}
        self._roles = {
            role: next((name for name in names if inner.token_to_id(name) is not None), "")
            for role, names in self._ROLE_NAMES.items()
        } | _roles(config)
        # Ids may have gaps, and a table must have a row for the largest one.
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_id: int | None = self._role_id("eos")
        self.bos_id: int | None = _first(self._role_id("bos"), self.eos_id)
        is_id = type(start_id) is int and 0 <= start_id < self.vocab_size
        # pyright does not narrow the type of start_id by a condition that a variable holds.
        self._start_id: int | None = start_id if is_id else self.bos_id  # pyright: ignore[reportAttributeAccessIssue]
        self.pad_id: int = _first(self._role_id("pad"), self.eos_id, 0)
        self.mask_id: int | None = next((inner.token_to_id(name) for name in self._MASKS if name in added), None)
        is_exact = self._is_byte_level and self._form["normalizer"] is None and not self._adds_space
        self.lossless: bool = is_exact and self.bos_id is not None
        self.stats: WordStats | None = None

    @classmethod
    def train(cls, size: int, texts: Iterable[bytes], by: str = "spaces") -> HFTokenizer:
        """Trains byte-level BPE.

        Args:
          size: Maximum number of ids, special tokens included.
          texts: Documents, UTF-8, which are read once.
          by: An entry of SPLITS.

        Returns:
          The tokenizer. It is not lossless with by="identifiers": `decode` returns lower-case words with a space before each.

        Raises:
          InputError: `by` is unknown, or a text is not UTF-8.

        References: Sennrich et al. 2016, "Neural machine translation of rare words with subword units".
        """
        split = specs.lookup(cls.SPLITS, by, "split of words by")
        hf = import_tokenizers()
        inner = hf.Tokenizer(hf.models.BPE())
        split(hf, inner)
        inner.decoder = hf.decoders.ByteLevel()
        trainer = {
            "vocab_size": size - len(cls.SPECIAL),
            "min_frequency": 2,
            "show_progress": False,
            "initial_alphabet": sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
        }
        process = _start_process(inner, bpe=trainer)
        try:
            trained = process.train(_without_long_runs(to_text(text)) for text in texts)
        except InputError:  # raised by `texts`, such as a file that cannot be read
            raise
        except (ChildProcessError, ValueError) as error:
            raise InputError(f"cannot make the vocabulary: {error}") from error
        # The special tokens are plain entries that no merge produces, not added tokens: "<eos>" in a text stays text.
        form = json.loads(trained)
        vocab = form["model"]["vocab"]
        vocab.update({name: len(vocab) + i for i, name in enumerate(cls.SPECIAL)})
        return cls(hf.Tokenizer.from_str(json.dumps(form)), {})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None}

    def encode(self, text: bytes) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        strings = [to_text(text) for text in texts]
        size = sum(map(len, strings))
        self._characters += size
        # Not for some words alone, which are encoded before a process has started.
        if size >= _MUCH_TEXT or (len(strings) >= _MANY_TEXTS and self._characters >= _MUCH_TEXT):
            return self._encode_in_process(strings)
        encoded = self._inner.encode_batch_fast(strings, add_special_tokens=False)
        return [np.array(e.ids, np.int32) for e in encoded]

    def _encode_in_process(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes texts in another process, which is kept for later calls unless this one is interrupted."""
        process, self._process = (
            self._process,
            None,
        )  # an interrupted call leaves its reply in the pipe, so that its process is not used again
        if process is None or process.parent != os.getpid():
            process = _start_process(self._inner, self._inner.encode_special_tokens)
        try:
            ids = process.encode(texts)
        except (ChildProcessError, ValueError) as error:
            raise InputError(f"cannot encode the text: {error}") from error
        self._process = process
        return ids

    def encode_prompt(self, text: str) -> np.ndarray:
        text = to_text(prompt_bytes(text))
        encoded = self._inner.encode(text, add_special_tokens=True)
        unk = self._form["model"].get("unk_token")
        missing = [
            text[start:end]
            for token, (start, end), is_added in zip(
                encoded.tokens, encoded.offsets, encoded.special_tokens_mask, strict=True
            )
            if token == unk and not is_added and text[start:end] != unk
        ]
        if missing:
            raise unknown_parts(missing, self.vocab_size)
        ids = np.array(encoded.ids, np.int32)
        return ids if len(ids) else with_bos(ids, self._start_id)

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        values = np.asarray(ids, np.int64).tolist()
        if self._is_byte_level:
            # The package's decoder would replace a part of a character by U+FFFD.
            return b"".join(self._bytes_of_id.get(i, b"") for i in values)
        return self._inner.decode([i for i in values if i not in self._special]).encode()

    def save(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._inner.to_str(pretty=True))
        with open(_sibling(path, "tokenizer_config.json"), "w", encoding="utf-8") as file:
            json.dump(self._config | {f"{role}_token": name for role, name in self._roles.items() if name}, file)

    @classmethod
    def parse(cls, text: str, path: str) -> HFTokenizer:
        """Makes the tokenizer of a tokenizer.json, and reads the config files in the same directory.

        Args:
          text: Content of tokenizer.json.
          path: Path of tokenizer.json.

        Returns:
          The tokenizer.

        Raises:
          InputError: A file is damaged, or the files contradict each other.
        """
        hf = import_tokenizers()
        try:
            inner = hf.Tokenizer.from_str(text)
        except Exception as error:  # the package raises the class Exception itself
            raise InputError(
                f"{path!r} is no tokenizer.json that tokenizers {hf.__version__} reads: {error}"
            ) from error
        config = _read_config(_sibling(path, "tokenizer_config.json"))
        if "added_tokens_decoder" not in config:  # otherwise transformers does not read special_tokens_map.json
            special = _read_config(_sibling(path, "special_tokens_map.json"))
            config |= {
                name: token for name, token in special.items() if name in ("bos_token", "eos_token", "pad_token")
            }
        _add_tokens(inner, config)
        generation = _read_config(_sibling(path, "generation_config.json"))
        return cls(inner, config, generation.get("bos_token_id"))

    def drawable_ids(self) -> np.ndarray:
        # `transformers` draws special tokens as well, and decoding leaves them out.
        if self.is_trained_here:
            return super().drawable_ids()
        return np.isin(np.arange(self.vocab_size), self.ids)

    @property
    def ids(self) -> list[int]:
        """All ids that stand for a token, rising; a model's table may have rows for more ids."""
        return sorted(self._inner.get_vocab(with_added_tokens=True).values())

    def _role_id(self, role: str) -> int | None:
        """The id of the special token with a role, or None; raises InputError if the tokenizer lacks the token."""
        name = self._roles[role]
        if not name:
            return None
        token_id = self._inner.token_to_id(name)
        if token_id is None:
            raise InputError(
                f"tokenizer_config.json names {name!r} as {role}_token, which tokenizer.json lacks: mend it"
            )
        return token_id

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        """Ids of special tokens."""
        added = self._inner.get_added_tokens_decoder()
        roles = (self._inner.token_to_id(name) for name in self._roles.values() if name)
        return frozenset([*roles, *(i for i, token in added.items() if token.special)])

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return any(step["type"] == "ByteLevel" for step in _steps(self._form["decoder"], "decoders"))

    @functools.cached_property
    def _adds_space(self) -> bool:
        return any(step.get("add_prefix_space") for step in _steps(self._form["pre_tokenizer"], "pretokenizers"))

    @functools.cached_property
    def _bytes_of_id(self) -> dict[int, bytes]:
        """Id -> bytes for the ids of a byte-level tokenizer that are not special."""
        values = byte_of_character()
        added = {token.content for token in self._inner.get_added_tokens_decoder().values()}
        return {
            i: token.encode() if token in added or not values.keys() >= set(token) else bytes(values[c] for c in token)
            for token, i in self._inner.get_vocab(with_added_tokens=True).items()
            if i not in self._special
        }


def build(size: object, by: object = "spaces", *, texts: Iterable[bytes]) -> HFTokenizer:
    """The tokenizer of the spec bpe(size, by)."""
    return HFTokenizer.train(sizes(size, by)[1], texts, str(by))


def sizes(size: object, by: object = "spaces") -> tuple[int, int]:
    """The smallest and the largest possible number of ids of the spec bpe(size, by)."""
    specs.lookup(HFTokenizer.SPLITS, str(by), "split of words by")
    return HFTokenizer.SMALLEST, check_size(size, HFTokenizer.SMALLEST, "bpe(8192)")


def _steps(form: Mapping[str, Any] | None, key: str) -> Sequence[Mapping[str, Any]]:
    """The steps of a section of tokenizer.json, which holds null, one step, or a sequence of steps under `key`."""
    if form is None:
        return ()
    return form[key] if form["type"] == "Sequence" else (form,)


def byte_of_character() -> dict[str, int]:
    """Builds the table of the characters in which byte-level tokenizers write bytes.

    Returns:
      Character -> byte. Visible characters of Latin-1 stand for themselves, other bytes for characters from U+0100 on.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [value for value in range(256) if value not in set(visible)]
    return {chr(value): value for value in visible} | {chr(256 + i): value for i, value in enumerate(hidden)}


def _without_long_runs(text: str) -> str:
    """The text with spaces within words, and without blanks in runs of blanks, of more than _LONGEST_RUN characters."""
    if max(map(len, text.split()), default=0) > _LONGEST_RUN:
        text = re.sub(rf"\S{{{_LONGEST_RUN}}}(?=\S)", r"\g<0> ", text)
    if any(blank * _LONGEST_RUN in text for blank in " \t\n"):
        text = re.sub(rf"(\s{{{_LONGEST_RUN}}})\s+", r"\1", text)
    return text


def _first(*values: int | None) -> Any:
    """The first value that is not None, or None."""
    return next((value for value in values if value is not None), None)


def import_tokenizers() -> Any:
    """Imports the tokenizers package, late because it is an extra.

    Returns:
      The package.

    Raises:
      InputError: It is missing.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise InputError(
            "BPE tokenizers need the tokenizers package, which the extra `hf` installs: pip install tokenizers, or set "
            "data.tokenizer='bytes'"
        ) from error
    return tokenizers


def _start_process(
    inner: hf.Tokenizer, encode_special_tokens: bool = False, bpe: Mapping[str, Any] | None = None
) -> TokenizerProcess:
    """Starts a process for a tokenizer of the package, or raises an InputError."""
    try:
        return TokenizerProcess(inner.to_str(), encode_special_tokens, bpe)
    except OSError as error:
        raise InputError(f"cannot start a process for the tokenizer: {error}") from error


def _sibling(path: str, name: str) -> str:
    """The path of the file `name` in the directory of the file `path`."""
    return os.path.join(os.path.dirname(path), name)


def _add_tokens(inner: hf.Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds the tokens of a tokenizer_config.json that tokenizer.json does not list as added, as `transformers` does."""
    listed = {token.content for token in inner.get_added_tokens_decoder().values()}
    tokens = config.get("added_tokens_decoder")
    # Sorted by id; the ids are decimal strings.
    ordered = sorted(tokens.items(), key=lambda item: (len(item[0]), item[0])) if isinstance(tokens, dict) else []
    for number, form in ordered:
        try:
            token = import_tokenizers().AddedToken(**form)
            if token.content in listed:
                continue
            inner.add_tokens([token])
            if inner.token_to_id(token.content) != int(number):
                raise ValueError(f"in tokenizer.json its id would be {inner.token_to_id(token.content)}")
        except (TypeError, ValueError) as error:
            raise InputError(
                f"tokenizer_config.json: token {number} of added_tokens_decoder, {form!r:.80}, cannot be added ({error}): load "
                "the tokenizer with transformers and save it again"
            ) from error


def _read_config(path: str) -> dict[str, Any]:
    """The object in the JSON file at `path`, or {} if the file does not exist or holds another value."""
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path!r}: {error}: mend or remove it") from error
    if not isinstance(config, dict):
        raise InputError(f"cannot read {path!r}: it holds a {type(config).__name__}, not an object: mend or remove it")
    return config


def _roles(config: Mapping[str, Any]) -> dict[str, str]:
    """Role -> name of the special token, for the roles that a tokenizer_config.json sets."""
    tokens = {role: config.get(f"{role}_token") for role in ("bos", "eos", "pad")}
    names = {role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()}
    for role, name in names.items():
        if not isinstance(name, str | None):
            raise InputError(
                f"tokenizer_config.json gives {name!r:.40} as {role}_token: expected a text or null: mend it"
            )
    return {role: name for role, name in names.items() if name is not None}
