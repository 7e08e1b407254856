"""Predicts the labels of texts: python predict.py "a text", or python predict.py < texts.txt (one text in each line).

A tab, or a second argument, separates the texts of a pair. Blank lines are left out; -- stands before texts that begin with a
hyphen. Prints a line of JSON with each text and its prediction, and to stderr the number of texts that were cut. Needs numpy,
onnxruntime or jax, and tokenizers where words are not hashed by word_hashes.py; nothing else.
"""

import argparse
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent


class Words:
    """The hashes of the words of a text, in place of the ids of its tokens."""

    def __init__(self, ids: Any, max_len: int) -> None:
        self.ids, self.overflowing = ids[:max_len], ids[max_len:]


class Hashes:
    """The hash of words, in place of a tokenizer."""

    def __init__(self, directory: Path, max_len: int) -> None:
        self.by, self.max_len = json.loads((directory / "tokenizer.json").read_text("utf-8"))["by"], max_len
        self.hash: Any = runpy.run_path(str(directory / "word_hashes.py"))["encode"]

    def encode(self, text: str) -> Words:
        ids = self.hash(text, self.by).view(np.int32)
        if not len(ids):
            raise ValueError(f"{text!r:.60} has no words: leave it out")
        return Words(ids, self.max_len)


def hugging_face(directory: Path, max_len: int) -> Any:
    """The tokenizer of a directory."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # names of special tokens in a text are text
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_len)
    return tokenizer


class ServedModel:
    """A classifier or a tagger, read from the directory of this file."""

    def __init__(self, directory: Path = HERE) -> None:
        self.record: dict[str, Any] = json.loads((directory / "export.json").read_text("utf-8"))
        has_hashes = self.record.get("tokenizer") == "hashes"
        self.tokenizer: Any = (Hashes if has_hashes else hugging_face)(directory, self.record["max_len"])
        path = directory / self.record["model"]
        if self.record["format"] == "onnx":
            import onnxruntime

            session: Any = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            self.logits: Any = lambda feeds: session.run(["logits"], feeds)[0]
        else:
            import jax.export

            call = jax.export.deserialize(bytearray(path.read_bytes())).call
            self.logits = lambda feeds: np.asarray(call(*feeds.values()))

    def predict(self, texts: Any, batch_size: int = 32) -> list[Any]:
        """Predicts texts, or pairs of texts: a {"label", "probability"} for each, or for each word (with "word")."""
        pairs = len(self.record["texts"]) == 2
        if isinstance(texts, str | bytes):
            raise ValueError(f"{texts!r:.40} is one text: pass a list of texts, [{texts!r:.40}]")
        for text in texts:
            if not text or (not isinstance(text, str) and not all(text)):
                raise ValueError("a text is empty: leave it out")
            if pairs is isinstance(text, str) or (pairs and len(text) != 2):
                raise ValueError(f"{text!r:.60}: expected {'two texts' if pairs else 'one text'}")
        encoded = [self._encode(text) for text in texts]
        batch_size = self.record["batch"] or batch_size
        order = sorted(range(len(texts)), key=lambda number: len(encoded[number].ids))
        results: list[Any] = [None] * len(texts)
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            rows = self._probabilities([encoded[number] for number in numbers])
            for number, row in zip(numbers, rows, strict=True):
                is_tagger = row.ndim == 2
                results[number] = self._tags(texts[number], encoded[number], row) if is_tagger else self._label(row)
        return results

    def count_cut(self, texts: Any) -> int:
        """Number of texts that are longer than the model reads, and are cut."""
        return sum(len(self._encode(text).overflowing) > 0 for text in texts)

    def _encode(self, text: Any) -> Any:
        """Token ids of a text or a pair."""
        return self.tokenizer.encode(text) if isinstance(text, str) else self.tokenizer.encode(*text)

    def _probabilities(self, encoded: Any) -> Any:
        """Probabilities of the labels for one batch of texts."""
        count = self.record["batch"] or len(encoded)
        width = self.record["length"] or max(len(text.ids) for text in encoded)
        feeds = {name: np.zeros((count, width), np.int32) for name in self.record["inputs"]}
        feeds["tokens"] = np.full((count, width, *np.shape(encoded[0].ids)[1:]), self.record["pad_id"], np.int32)
        if "segment_ids" in feeds:
            feeds["segment_ids"][len(encoded) :, 0] = 1  # rows after the texts are read as one token
        for row, text in enumerate(encoded):
            size = len(text.ids)
            feeds["tokens"][row, :size] = text.ids
            if "segment_ids" in feeds:
                feeds["segment_ids"][row, :size] = 1
            if "token_types" in feeds:
                feeds["token_types"][row, :size] = text.type_ids
        logits: Any = self.logits(feeds)[: len(encoded)]
        exp = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return exp / exp.sum(axis=-1, keepdims=True)

    def _label(self, row: Any) -> dict[str, Any]:
        """The most probable label."""
        return {"label": self.record["labels"][row.argmax()], "probability": float(row.max())}

    def _tags(self, text: str, encoded: Any, rows: Any) -> list[dict[str, Any]]:
        """The most probable label of each word: that of the first token that holds a character of it."""
        tags, place = [], 0
        tokens = [(*span, index) for index, span in enumerate(encoded.offsets) if span[1] > span[0]]
        for word in text.split():
            start = text.index(word, place)
            place = start + len(word)
            index = next((index for first, last, index in tokens if first < place and start < last), None)
            if index is not None:  # else the word is after the last token that is read
                tags.append({"word": word, **self._label(rows[index])})
        return tags


Model = ServedModel  # the name in earlier exports


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", help="texts; without any, the lines of stdin")
    arguments = parser.parse_args().texts
    model = ServedModel()
    pairs = len(model.record["texts"]) == 2
    lines = ["\t".join(arguments)] if pairs and arguments[1:] else arguments
    lines = lines or [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
    texts = [tuple(line.split("\t", 1)) if pairs else line for line in lines]
    try:
        results = model.predict(texts)
    except ValueError as error:
        sys.exit(str(error))
    for line, result in zip(lines, results, strict=True):
        print(json.dumps({"text": line, "prediction": result}, ensure_ascii=False))
    if cut := model.count_cut(texts):
        print(f"{cut} of {len(texts)} texts were cut after {model.record['max_len']} tokens", file=sys.stderr)
