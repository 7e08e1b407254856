"""Reads the documents of a source, for tests."""

from hpnlp.data.reading import sources
from hpnlp.data.reading.documents import Document, DocumentReader
from hpnlp.data.reading.sources import LeftOut


def read(path, text_field="text", prompt_field="", eos_id=None, skip_bad_lines=False) -> tuple[list[Document], LeftOut]:
    """All documents of one source, and everything that was left out of it."""
    (source,) = sources.find(str(path), "data.path")
    left_out = LeftOut(source.left_out)
    reader = DocumentReader(text_field, prompt_field, left_out, eos_id, skip_bad_lines)
    return list(reader.read(source)), left_out
