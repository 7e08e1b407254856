"""Masked language modelling with learned retrieval: hidden spans, from the text and documents that the model retrieves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from hpnlp.data.examples import prepare_examples
from hpnlp.data.examples.kind import Kind, padded
from hpnlp.data.examples.kinds.spans import ExamplesWithDocuments, HiddenSpansConfig
from hpnlp.data.reading.files import Progress
from hpnlp.models.pairs.documents import FILE, Documents, blank_documents
from hpnlp.models.pairs.realm import Realm, RealmConfig
from hpnlp.tasks import vocabulary as vocabularies
from hpnlp.tasks.labelled.examples import ExampleTask
from hpnlp.tasks.reports.realm_report import RealmReport
from hpnlp.tasks.task import RunConfig, Sums
from hpnlp.tasks.vocabulary import Sizes, Vocabulary
from hpnlp.types import InputError

PLANNED_DOCUMENTS = 1000  # number of documents that the planner expects of data that it does not read


@dataclasses.dataclass(frozen=True)
class DocumentSizes(Sizes):
    """Sizes of a vocabulary, and the documents.

    Attributes:
      documents: The documents; None for sizes of another task's run.
    """

    documents: Documents | None = None


@dataclasses.dataclass(frozen=True)
class DocumentVocabulary(Vocabulary):
    """The tokenizer of a run and its documents.

    Attributes:
      documents: The documents.
    """

    documents: Documents | None = None

    @property
    def sizes(self) -> DocumentSizes:
        sizes = super().sizes
        return DocumentSizes(sizes.ids, sizes.stats, sizes.classes, sizes.masked_ids, self.documents)

    def for_other_data(self) -> DocumentVocabulary:
        return dataclasses.replace(self, documents=None)

    def save(self, workdir: Path) -> None:
        assert self.documents is not None
        self.documents.save(workdir)
        super().save(workdir)


class RetrievalLanguageModel(ExampleTask):
    """Masked language modelling with learned retrieval: hidden spans, from the text and documents that the model retrieves.

    The documents are those of all records. The run directory holds their token ids beside the vocabulary.
    """

    name = "realm"
    model_config = RealmConfig
    data_config = HiddenSpansConfig
    report = RealmReport()
    vocabulary_files = ("tokenizer.json", FILE)

    def input_kind(self, data: object) -> Kind | None:
        return None

    def dataset(
        self, data: HiddenSpansConfig, vocabulary: Vocabulary | None, progress: Progress | None = None
    ) -> ExamplesWithDocuments:
        tokenizer = None if vocabulary is None else vocabulary.tokenizer
        examples = prepare_examples(data, None, tokenizer, progress, ExamplesWithDocuments)
        documents = vocabulary.documents if isinstance(vocabulary, DocumentVocabulary) else None
        if documents is not None:
            texts = zip(documents.tokens, documents.lengths, strict=True)
            examples.number_as([tokens[:length] for tokens, length in texts])
        return examples

    def vocabulary(self, dataset: ExamplesWithDocuments) -> DocumentVocabulary:
        texts = dataset.documents
        tokens = padded(texts, len(texts), dataset.config.document_len, dataset.tokenizer.pad_id)
        return DocumentVocabulary(dataset.tokenizer, documents=Documents(tokens, np.array([len(x) for x in texts])))

    def load_vocabulary(self, workdir: Path) -> DocumentVocabulary | None:
        vocabulary = vocabularies.load(workdir)
        if vocabulary is None or not (workdir / FILE).exists():
            return None
        return DocumentVocabulary(vocabulary.tokenizer, documents=Documents.load(workdir))

    def planned_sizes(self, config: RunConfig) -> DocumentSizes:
        limit = config.model.vocab - 1 if config.model.vocab else 0
        sizes = vocabularies.planned_sizes(config.data.tokenizer, limit)
        documents = blank_documents(max(PLANNED_DOCUMENTS, config.model.retrieved), config.data.document_len)
        return DocumentSizes(sizes.ids, documents=documents)

    def model(self, config: RunConfig, sizes: Sizes) -> Realm:
        self.check_no_stride(config)
        documents = sizes.documents if isinstance(sizes, DocumentSizes) else None
        if documents is None:
            raise InputError(
                f"task={self.name!r} needs documents, and the vocabulary has none: train in another directory"
            )
        candidates, has_source = config.model.retrieved, config.data.document_role == "source"
        if len(documents) < candidates + has_source:
            besides = ", beside the source of the text" if has_source else ""
            raise InputError(
                f"model.candidates={config.model.candidates}: the data have {len(documents)} documents, expected at "
                f"least as many as candidates{besides}: lower it, or add documents"
            )
        ids = sizes.masked_ids or sizes.ids + 1
        length = config.data.seq_len + config.data.document_len
        filled = vocabularies.fill_sizes(config.model, dataclasses.replace(sizes, ids=ids), length)
        return Realm(filled, documents)

    def scores(
        self,
        config: RunConfig,
        dataset: ExamplesWithDocuments,
        sums: Sums,
        *,
        is_complete: bool,
        gives_probabilities: bool,
    ) -> dict[str, float]:
        """Mean loss in nats, retrieval utility, and the share of texts that retrieve their gold document first."""
        names = ("loss", "utility", "retrieval_at_1") if sums["retrieval_at_1"][1] else ("loss", "utility")
        return {name: float(sums[name][0] / sums[name][1]) for name in names}
