"""The config of a corpus, and checks that it shares with the configs of labelled examples."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from hpnlp.data.packing import PACKINGS
from hpnlp.spec import lookup
from hpnlp.types import InputError, check_options, option

if TYPE_CHECKING:
    from hpnlp.data.examples.config import ExampleConfig


def check_heldout(config: DataConfig | ExampleConfig) -> None:
    """Raises InputError if `heldout` is no fraction between 0 and 1, and there is no `heldout_path`."""
    if not config.heldout_path and not 0 < config.heldout < 1:
        raise InputError(
            f"data.heldout={config.heldout}: expected a fraction between 0 and 1; to train on all of data.path, pass "
            "data.heldout_path=PATH with other text"
        )


def check_folds(config: DataConfig | ExampleConfig, limit: str) -> None:
    """Raises InputError unless there is a part `fold` of `folds`, and no other field decides what is held out.

    `limit` names the field with the largest amount that is held out, whose default value does not apply to parts.
    """
    folds, fold = config.folds, config.fold
    if not folds and not fold:
        return
    if folds < 2:
        fix = "" if folds else ": set data.folds to the number of parts, or leave out data.fold"
        raise InputError(f"data.folds={folds}, data.fold={fold}: expected at least 2 parts, or 0 for none{fix}")
    if not 1 <= fold <= folds:
        raise InputError(
            f"data.fold={fold}, data.folds={folds}: expected the part to hold out, 1 to {folds}; hpnlp sweep --folds={folds} "
            "trains on all parts"
        )
    if config.heldout_path:
        raise InputError(
            f"data.heldout_path={config.heldout_path!r}, data.folds={folds}: both decide what is held out: set "
            "data.heldout_path='' or data.folds=0"
        )
    default = next(field.default for field in dataclasses.fields(config) if field.name == limit)
    if (value := getattr(config, limit)) not in (0, default):
        raise InputError(
            f"data.{limit}={value}, data.folds={folds}: all of a part is held out, so that the parts cover the data: set "
            f"data.{limit}=0 or data.folds=0"
        )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text to read, and how it is split, tokenised and cut into batches."""

    group_field: ClassVar[str] = ""  # documents have no groups, as `ExampleConfig.group_field`

    path: str = option(
        "stdlib",
        '"stdlib" (source code of the running Python\'s standard library, without tests and site-packages; '
        '"stdlib+tests" with tests), a file, a directory or a glob. Several are separated by commas, and each '
        "file is read once. The extension of a file decides its format, which is JSONL, `.json` (an array of "
        "records or strings; other JSON is text), Parquet, `.npy` (token ids), or text. Text and JSON may be "
        "compressed, as `.gz` or `.zst`.",
    )
    weights: tuple[float, ...] = option(
        (),
        "Share of each source of `path` in the training tokens, to within 1 %; () reads every source once per epoch.",
    )
    tokenizer: str = option(
        "bytes",
        '"bytes", "words(CAP)", "words(CAP, by=whitespace)", "bpe(SIZE)", "bpe(SIZE, by=digits)", "bpe(SIZE, '
        'by=identifiers)", or the path of a tokenizer.json.',
    )
    text_field: str = option("text", "Field of records (JSONL, JSON arrays, Parquet) that holds the text.")
    prompt_field: str = option(
        "",
        'Field that holds a prompt, which stands before the text and carries no loss; "" for no prompt.',
    )
    skip_bad_lines: bool = option(
        False,
        "Leave out, and count in the summary, lines of text that are not UTF-8 and records that are not JSON or "
        "have no valid text. Otherwise these are errors, as far as the tokenizer needs UTF-8.",
    )
    seq_len: int = option(256, "Tokens per sequence.", least=1)
    batch_size: int = option(16, "Sequences per optimizer step, over all processes.", least=1)
    heldout: float = option(
        0.02,
        "Fraction of documents held out, chosen by a hash of their names; one document if the fraction leaves no "
        "text on one side. A single text file counts as many documents, because it is cut into pieces at line "
        "ends. Fewer than 50 documents are cut in the same way if the fraction of their number is less than one, "
        "as for 2 files, or for 49 files and 0.02.",
    )
    heldout_path: str = option(
        "",
        "Text to hold out instead, all of it; files that are also under `path` are not trained on.",
    )
    heldout_bytes: int = option(
        1_000_000,
        "Evaluate on a fixed sample of the held-out documents of at most this many bytes, but at least one "
        "document; 0 takes all. Documents over the limit are not trained on.",
        least=0,
    )
    folds: int = option(
        0,
        "Number of equal parts of the documents for cross-validation, chosen by the same hash, of which one is held out in "
        "place of `heldout` and without the limit `heldout_bytes`; 0 for none. hpnlp sweep --folds=K trains a run for each.",
    )
    fold: int = option(0, "The part that is held out, from 1 to `folds`; 0 without parts.")
    packing: str = option(
        "concat",
        '"concat" lays documents one after another and cuts sequences when they are full; "fit" keeps documents whole, '
        "or in pieces of seq_len, and fills sequences with documents that fit.",
    )
    order: str = option(
        "shuffle",
        '"shuffle" for sequences in random order; "stream" for batches in which each example continues the same example of the '
        "batch before, as mixers that carry state need.",
        among=("shuffle", "stream"),
    )
    length_deviation: float = option(
        0.0,
        "Standard deviation of the lengths of the batches of a stream: around seq_len for 95 % of them, half of it for the "
        "others, rounded to 6 values, each of which compiles a program (Merity et al. 2018); 0 for seq_len tokens.",
    )
    cache: str = option(
        "",
        'Directory of tokenised text; "" is $HPNLP_CACHE, or hpnlp under $XDG_CACHE_HOME or ~/.cache.',
    )

    def __post_init__(self) -> None:
        check_options(self, "data")
        if not all(isinstance(weight, int | float) and 1e-100 <= weight <= 1e100 for weight in self.weights):
            raise InputError(
                f"data.weights={self.weights}: expected numbers over 0, 1e-100 to 1e100; remove a source from data.path to "
                "give it no weight"
            )
        check_heldout(self)
        check_folds(self, "heldout_bytes")
        lookup(PACKINGS, self.packing, "data.packing")
        if self.prompt_field and self.prompt_field == self.text_field:
            raise InputError(
                f"data.prompt_field={self.prompt_field!r} is data.text_field, too, so that each text would be its own prompt: "
                "name the field with the prompt, or leave it out"
            )
        if self.order == "stream" and self.packing != "concat":
            raise InputError(
                f"data.order='stream', data.packing={self.packing!r}: documents go on in the next sequence only if they are "
                "laid one after another: set data.packing='concat'"
            )
        if not 0 <= self.length_deviation <= self.seq_len / 4:
            raise InputError(
                f"data.length_deviation={self.length_deviation}: expected 0 to a quarter of data.seq_len={self.seq_len}"
            )
        if self.length_deviation and self.order != "stream":
            raise InputError(
                f"data.length_deviation={self.length_deviation}: sequences of data.order={self.order!r} have one length: set "
                "data.order='stream', or data.length_deviation=0"
            )
        if self.order == "stream" and self.weights:
            raise InputError(
                f"data.order='stream', data.weights={self.weights}: a mixture takes sequences from its sources in turn: set "
                "data.weights=(), or data.order='shuffle'"
            )
