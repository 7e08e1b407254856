"""The configs of labelled examples: one class per kind of example."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar

from hpnlp.data.config import check_folds, check_heldout
from hpnlp.data.examples.kind import Kind
from hpnlp.data.examples.kinds import Classification, Pairs, Seq2Seq, Tagging
from hpnlp.data.examples.kinds.bags import LabelledBags
from hpnlp.data.examples.kinds.hashed import HashedTexts
from hpnlp.data.examples.kinds.labelled_pairs import GradedPairs, LabelledPairs
from hpnlp.data.examples.kinds.trees import Trees
from hpnlp.data.examples.topics import parse_positives
from hpnlp.data.reading.fields import LABEL_FIELDS
from hpnlp.types import InputError, check_options, option

# Help on files of records.
FILES = (
    "a file, a directory or a glob; several are separated by commas. The extension of a file decides its format, which is "
    "JSONL, `.json` (an array of records), CSV, `.tsv` (tabs, no quotes, as in GLUE; with quotes, name it `.csv`), Parquet, "
    "or `.npz` (arrays with the names of fields, by numpy.savez). All but Parquet and `.npz` may be compressed, as `.gz` or "
    "`.zst`."
)

LABELLED_FIELDS = ("text_field", "pair_field", "texts_field", "words_field", "nodes_field", "parents_field")


@dataclasses.dataclass(frozen=True)
class ExampleConfig(abc.ABC):
    """Examples to read, and how they are split, tokenised and cut into batches: the fields that all kinds share.

    A subclass has a default of `path`, since the default config of its task is made before flags are read.
    """

    optional_fields: ClassVar[tuple[str, ...]] = ("group_field", "pair_field")  # names of fields that may be ""
    linear_baselines = True  # fit linear models for comparison, if the task has them; a field of some kinds

    path: str = option(
        "",
        f"Records: {FILES}",
    )
    tokenizer: str = option(
        "bytes",
        '"bytes", "pixels" (of images), "words(CAP)", "words(CAP, by=whitespace)", "bpe(SIZE)", "bpe(SIZE, by=digits)", '
        '"bpe(SIZE, by=identifiers)", or the path of a tokenizer.json.',
    )
    skip_bad_lines: bool = option(
        False,
        "Leave out, and count in the summary, records that are damaged, lack a field, or are held out with a label that "
        "no training example has. Otherwise these are errors.",
    )
    seq_len: int = option(
        256,
        "Tokens per sequence; longer texts are cut, and counted in the summary. As a flag, auto is the length that holds "
        "99.9 % of the training sequences, at most the number that the experiment has.",
        least=1,
    )
    batch_size: int = option(16, "Examples per optimizer step, over all processes.", least=1)
    buckets: int = option(
        1,
        "Widths of training batches: with N over 1, a batch has examples of similar lengths, padded to one of N widths up to "
        "seq_len, which leave the least padding. Held-out examples are sorted by length, and padded to these widths.",
        least=1,
    )
    heldout: float = option(
        0.1,
        "Fraction of examples held out, chosen by a hash of their names (file and number), or of their groups; one of them if "
        "the fraction leaves no example on one side.",
    )
    heldout_path: str = option(
        "", "Examples to hold out instead, all of them; files that are also under `path` are not trained on."
    )
    heldout_examples: int = option(
        2000,
        "Evaluate on a fixed sample of at most this many held-out examples; 0 takes all. Held-out examples over the limit are "
        "not trained on. Does not apply to `heldout_path`.",
        least=0,
    )
    folds: int = option(
        0,
        "Number of equal parts of the examples, or of their groups, for cross-validation, chosen by the same hash, of which "
        "one is held out in place of `heldout` and without the limit `heldout_examples`; 0 for none. hpnlp sweep --folds=K "
        "trains a run for each.",
    )
    fold: int = option(0, "The part that is held out, from 1 to `folds`; 0 without parts.")
    challenge_path: str = option(
        "",
        'Examples that are scored apart from the held-out ones, such as longer ones, and never trained on; "" for none, or '
        "for those that belong to a generated `path`.",
    )
    group_field: str = option(
        "",
        "Field with the name of an example's group, such as its source document. A group is held out as a whole, so that "
        'near duplicates are not on both sides; "" for no groups.',
    )
    fold_labels: bool = option(
        False,
        "Labels that differ only in case and blanks are of one class, which is named in lower case. Otherwise labels of "
        "another case are other classes, and a label that is written with and without blanks around it is an error.",
    )
    cache: str = option(
        "",
        'Directory of tokenised examples; "" is $HPNLP_CACHE, or hpnlp under $XDG_CACHE_HOME or ~/.cache.',
    )

    def __post_init__(self) -> None:
        check_options(self, "data")
        check_heldout(self)
        check_folds(self, "heldout_examples")
        for name in (field.name for field in dataclasses.fields(self) if field.name.endswith("_field")):
            if not getattr(self, name) and name not in self.optional_fields:
                raise InputError(f'data.{name}="": expected the name of a field')
        check_label_field(self)
        if not self.path:
            raise InputError(
                'data.path="": expected the path of labelled examples: pass --data.path=FILE (a config class of your own '
                "needs a default of `path`)"
            )
        if self.fold_labels and not self.kind().has_labels:
            raise InputError("data.fold_labels=True: these examples have no labels: set it to False")

    @abc.abstractmethod
    def kind(self) -> Kind:
        """The fields of an example and the arrays of a batch.

        Returns:
          The kind, with the options of this config.
        """


def check_label_field(config: ExampleConfig) -> None:
    """Raises InputError if labels come from the field of what is labelled."""
    columns = {name: getattr(config, name, "") for name in (*LABEL_FIELDS, *LABELLED_FIELDS)}
    for name in LABEL_FIELDS:
        for other in LABELLED_FIELDS:
            if columns[name] and columns[name] == columns[other]:
                raise InputError(
                    f"data.{name}={columns[name]!r} is data.{other}, too, so that the label is what it is predicted from: name "
                    "the field with the label"
                )


def check_pair(text_field: str, pair_field: str) -> None:
    """Raises InputError if the texts of a pair come from the same field."""
    if text_field == pair_field:
        raise InputError(
            f"data.pair_field={pair_field!r} is data.text_field, too, so that each text would be paired with itself: name the "
            "field with the second text"
        )


@dataclasses.dataclass(frozen=True)
class ClassificationConfig(ExampleConfig):
    """Texts, or pairs of texts, with one label each."""

    path: str = option(
        "stdlib_functions",
        '"stdlib_functions" (functions of the running Python\'s standard library, labelled with their package), another '
        f"entry of GENERATED, such as list_ops, pathfinder or imdb:DIRECTORY, or records: {FILES}",
    )
    text_field: str = option("text", "Field of records that holds the text.")
    pair_field: str = option("", 'Field that holds the second text of a pair; "" for single texts.')
    label_field: str = option("label", "Field that holds the label: a string, a whole number or a boolean.")
    linear_baselines: bool = option(
        True,
        "Fit linear models of words and of characters at the end of a run, for comparison; takes long on long texts.",
    )
    unlabelled: bool = option(
        False,
        "Read records without a label too (no field, null or empty): they are trained on by distill.teacher alone, are never "
        "scored, and all classes are those of the teacher.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pair(self.text_field, self.pair_field)

    def kind(self) -> Kind:
        return Classification(self.text_field, self.pair_field, self.label_field, unlabelled=self.unlabelled)


@dataclasses.dataclass(frozen=True)
class HashedTextsConfig(ClassificationConfig):
    """Texts with one label each, whose words are hashes."""

    tokenizer: str = option(
        "hashed_words",
        '"hashed_words" (split at whitespace), "hashed_words(by=letters)", with runs of letters and digits and single '
        'punctuation marks, or "hashed_words(by=characters)"; all in lower case.',
    )
    seq_len: int = option(
        128, "Words of a text that are read, the first ones; longer texts are counted in the summary."
    )
    pair_field: str = option("", "Not supported: texts are single.")
    unlabelled: bool = option(False, "Not supported: projection networks have no teacher.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unlabelled:
            raise InputError(
                "data.unlabelled=True: projection networks have no teacher that could label texts: set it to False, or choose "
                "task='classification'"
            )
        if self.pair_field:
            raise InputError(
                f"data.pair_field={self.pair_field!r}: projection networks read single texts: set it to '', or choose "
                "task='classification'"
            )

    def kind(self) -> Kind:
        return HashedTexts(self.text_field, "", self.label_field)


@dataclasses.dataclass(frozen=True)
class TreesConfig(ExampleConfig):
    """Trees with one label each."""

    path: str = option(
        "stdlib_trees",
        '"stdlib_trees" (abstract syntax trees of functions of the running Python\'s standard library, labelled with their '
        f"package), or records: {FILES}",
    )
    tokenizer: str = option(
        "words(8192, by=whitespace)",
        '"words(CAP, by=whitespace)", which has one id for each label of a node and for numbers of children, or the path of a '
        "tokenizer.json.",
    )
    seq_len: int = option(128, "Nodes of a tree; of a larger tree the first ones in preorder are kept.")
    nodes_field: str = option(
        "nodes", "Field of records with the labels of the nodes: a list of strings without spaces."
    )
    parents_field: str = option(
        "parents", "Field with the number of the parent of each node, from 0 on; -1 for the root."
    )
    label_field: str = option("label", "Field that holds the label: a string, a whole number or a boolean.")
    max_children: int = option(8, "Largest number of children of a node.", least=1)
    linear_baselines: bool = option(True, "Fit linear models of labels of nodes at the end of a run, for comparison.")

    def kind(self) -> Kind:
        return Trees(self.nodes_field, self.parents_field, self.label_field, self.max_children)


@dataclasses.dataclass(frozen=True)
class BagsConfig(ExampleConfig):
    """Bags of texts with one label each."""

    path: str = option(
        "stdlib_titles",
        '"stdlib_titles" (titles of docstrings of the running Python\'s standard library, labelled with their module), '
        f"or records: {FILES}",
    )
    tokenizer: str = option(
        "words(8192)",
        '"words(CAP)", "words(CAP, by=whitespace)", "bytes", "bpe(SIZE)", "bpe(SIZE, by=identifiers)", or the path of a '
        "tokenizer.json.",
    )
    seq_len: int = option(128, "Tokens of all texts of a bag; longer texts are cut, and counted in the summary.")
    texts_field: str = option(
        "texts", "Field of records that holds the texts: a list of strings, or a string with one text in each line."
    )
    label_field: str = option("label", "Field that holds the label: a string, a whole number or a boolean.")
    max_texts: int = option(16, "Largest number of texts of a bag, of which one is left out.", least=2)
    distinct: bool = option(True, "Keep each token of a text once, so that frequent tokens do not dominate.")
    positives: str = option(
        "labels",
        '"labels": the texts of a bag belong together, and to the label of the record. "topics(20)": records have no labels, '
        "and each bag belongs to one of 20 topics, which are found by non-negative matrix factorisation of the training bags "
        "(extra sklearn); topics(20,seed=1) for another start.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_positives(self.positives)

    def kind(self) -> Kind:
        has_labels = parse_positives(self.positives) is None
        return LabelledBags(self.texts_field, self.label_field, self.max_texts, self.distinct, has_labels)


@dataclasses.dataclass(frozen=True)
class TaggingConfig(ExampleConfig):
    """Sequences of words with one label each."""

    path: str = option(
        "stdlib_tokens",
        '"stdlib_tokens" (tokens of lines of the running Python\'s standard library, labelled with their kind), '
        f"or records: {FILES}",
    )
    words_field: str = option(
        "words", "Field of records that holds the words: a list of strings, or a string that is split at whitespace."
    )
    labels_field: str = option(
        "labels", "Field that holds as many labels: a list, or a string that is split at whitespace."
    )
    unlabelled: bool = option(
        False,
        "Read records without labels too (no field, null or empty): they are trained on by distill.teacher alone, are never "
        "scored, and all classes are those of the teacher.",
    )

    def kind(self) -> Kind:
        return Tagging(self.words_field, self.labels_field, unlabelled=self.unlabelled)


@dataclasses.dataclass(frozen=True)
class Seq2SeqConfig(ExampleConfig):
    """Source texts with the target texts to produce."""

    path: str = option(
        "number_words",
        f'"number_words" (whole numbers in digits and in English words, in both directions), or records: {FILES}',
    )
    source_field: str = option("source", "Field of records that holds the source.")
    target_field: str = option("target", "Field that holds the target.")
    seq_len: int = option(128, "Tokens per source; longer sources are cut, and counted in the summary.")
    target_len: int = option(128, "Tokens per target; longer targets are cut, and counted in the summary.", least=1)

    def kind(self) -> Kind:
        return Seq2Seq(self.source_field, self.target_field, self.target_len)


@dataclasses.dataclass(frozen=True)
class PairsConfig(ExampleConfig):
    """Pairs of texts that belong together, or have a label or a grade."""

    optional_fields: ClassVar[tuple[str, ...]] = ("group_field", "pair_field", "label_field")

    path: str = option(
        "stdlib_docstrings",
        "\"stdlib_docstrings\" (docstrings of functions of the running Python's standard library, with the functions' code), "
        f"or records: {FILES}",
    )
    heldout: float = option(
        0.2,
        "Fraction of examples held out, chosen by a hash of their names (file and number), or of their groups; one of them if "
        "the fraction leaves no example on one side.",
    )
    heldout_examples: int = option(
        1000,
        "Evaluate on a fixed sample of at most this many held-out examples; 0 takes all. Held-out examples over the limit are "
        "not trained on. Does not apply to `heldout_path`.",
    )
    text_field: str = option("text", "Field of records that holds the first text, such as a query.")
    pair_field: str = option("pair", "Field that holds the second text, which belongs to the first.")
    negative_fields: str = option(
        "",
        "Fields, separated by commas, that hold texts which do not belong to the first (hard negatives), as in "
        "negative_1,negative_2; '' for none.",
    )
    label_field: str = option(
        "",
        "Field of a label of the pair (a string, a whole number or a boolean), for model.loss=softmax; or, with label_range, "
        "of a number, for model.loss=cosine. '' for the other losses.",
    )
    label_range: str = option(
        "",
        "The lowest and the highest number in label_field, separated by a comma, as 0,5: similarities of 0 and 1, and numbers "
        "between them in proportion. '' for labels.",
    )
    graded_path: str = option(
        "",
        "Records of pairs with grades of their similarity, in the fields text_field, pair_field and grade_field: the report "
        f"has Spearman's correlation of grades and similarities. '' for none. {FILES[0].upper()}{FILES[1:]}",
    )
    grade_field: str = option("score", "Field of the records of graded_path that holds the grade, a number.")
    distinct: bool = option(
        False,
        "Keep each token of a text once, at its first occurrence, so that frequent tokens do not dominate: for models without "
        "layers.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pair_field:
            raise InputError('data.pair_field="": expected the name of the field with the second text of a pair')
        check_pair(self.text_field, self.pair_field)
        names = [self.text_field, self.pair_field, *self.negatives()]
        if not all(names) or len(set(names)) < len(names):
            raise InputError(
                f"data.negative_fields={self.negative_fields!r}: expected names of different fields, separated by commas, and "
                "none of data.text_field and data.pair_field"
            )
        if self.label_range and not self.label_field:
            raise InputError(
                f"data.label_range={self.label_range!r}, and data.label_field='' names no field with numbers: set it, or leave "
                "out data.label_range"
            )
        if self.label_field and self.negative_fields:
            raise InputError(
                f"data.negative_fields={self.negative_fields!r}, data.label_field={self.label_field!r}: pairs with labels or "
                "grades have no hard negatives: leave out one of the two"
            )
        self.grade_range()

    def negatives(self) -> tuple[str, ...]:
        """Names of the fields of hard negatives, those in `negative_fields`."""
        return tuple(name.strip() for name in self.negative_fields.split(",")) if self.negative_fields else ()

    def grade_range(self) -> tuple[float, float] | None:
        """The numbers of `label_range`, which are similarities of 0 and 1; None if it is ""."""
        if not self.label_range:
            return None
        try:
            least, most = map(float, self.label_range.split(","))
        except ValueError:
            least = most = math.nan
        if not -math.inf < least < most < math.inf:
            raise InputError(f"data.label_range={self.label_range!r}: expected two ascending numbers, as 0,5")
        return least, most

    def kind(self) -> Kind:
        if not self.label_field:
            return Pairs(self.text_field, self.pair_field, self.distinct, self.negatives())
        if (grades := self.grade_range()) is not None:
            texts = (self.text_field, self.pair_field, self.distinct)
            return GradedPairs(*texts, grade_field=self.label_field, grade_range=grades)
        return LabelledPairs(self.text_field, self.pair_field, self.distinct, label_field=self.label_field)
