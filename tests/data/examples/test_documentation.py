"""Passages of docstrings: hidden names, and sentences of inverse cloze."""

from hpnlp.data.examples.generated import documentation
from hpnlp.data.reading.sources import File

SOURCE = '''
"""Reads TarInfo objects from archives. Writes no ZipFile at all, since archives are read only."""

class Reader:
    """Too short: TarInfo."""

    def find(self):
        """Return the TarInfo of a member_name, which is found in the archive by a search from its end."""

    def close(self):
        """{}."""
'''


def files(tmp_path):
    (tmp_path / "tar.py").write_text(SOURCE.format("Close " + "all " * 40 + "files"))
    (tmp_path / "bad.py").write_text("def f(:")
    return [File(str(path), path.name, path.stat().st_size) for path in sorted(tmp_path.iterdir())]


def test_hidden_names_are_those_that_another_passage_has(tmp_path):
    """ZipFile and member_name stand in one passage only; a passage of four words is left out."""
    rows = list(documentation.hidden_names(files(tmp_path)))
    assert [row["document"].split(":")[0] for row in rows] == ["tar", "tar.Reader.find"]
    for row in rows:
        assert row["answer"] == "TarInfo" and row["group"] == "tar.py"
        assert row["document"].endswith(f": {row['text']}") and row["answer"] in row["text"]


def test_sentences_are_hidden_in_the_remainders_of_their_passages(tmp_path):
    (row,) = documentation.inverse_cloze(files(tmp_path))
    sentences = "Reads TarInfo objects from archives.", "Writes no ZipFile at all, since archives are read only."
    assert {row["text"], row["pair"].removeprefix("tar: ")} == set(sentences)


def test_long_sentences_lose_their_end(tmp_path):
    passages = documentation._passages(files(tmp_path))
    assert max(len(passage.text.split()) for passage in passages) == documentation.ITEMS
