"""Published data sets are read from their directories, with the published split; errors name the file and the place."""

import numpy as np
import pytest

from hpnlp.data import tokenizers
from hpnlp.data.examples import ClassificationConfig, check_paths, prepare_examples
from hpnlp.data.examples.generated import published
from hpnlp.data.tokenizers import pixels
from hpnlp.types import InputError
from tests.messages import raises


@pytest.fixture
def directories(tmp_path):
    """Tiny directories in the published forms."""
    for split, count in (("train", 3), ("test", 2)):
        for label in ("pos", "neg"):
            (tmp_path / "imdb" / split / label).mkdir(parents=True)
            for i in range(count):
                (tmp_path / "imdb" / split / label / f"{i}_9.txt").write_text(f"{split} {label} {i}<br />é")
    (tmp_path / "imdb" / "train" / "unsup").mkdir()
    (tmp_path / "imdb" / "train" / "unsup" / "0_0.txt").write_text("unlabelled")
    (tmp_path / "imdb" / "README").write_text("read me")
    (tmp_path / "aan").mkdir()
    for split in ("train", "eval", "test"):
        lines = [f'{i % 2}{".0" * (i > 1)}\tA{i}\tB{i}\t{split} {i}\tother "{i}' for i in range(4)]
        (tmp_path / "aan" / f"new_aan_pairs.{split}.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "cifar10").mkdir()
    draw = np.random.default_rng(0)
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        images = draw.integers(0, 256, (3, 3073)).astype(np.uint8)
        images[:, 0] = (0, 3, 9)
        (tmp_path / "cifar10" / f"{name}.bin").write_bytes(images.tobytes())
    return tmp_path


def examples(path, cache, **options):
    return prepare_examples(ClassificationConfig(str(path), cache=str(cache), batch_size=2, **options))


def test_the_published_test_set_is_held_out(directories, cache):
    imdb = examples(f"imdb:{directories}/imdb", cache, tokenizer="bytes")
    assert (imdb.train_examples, imdb.heldout_examples, imdb.labels) == (6, 4, ("neg", "pos"))
    assert {text for (text,) in imdb.stored["heldout"].texts()} == {
        f"test {label} {i}<br />é".encode() for label in ("pos", "neg") for i in range(2)
    }
    aan = examples(f"aan:{directories}/aan", cache, tokenizer="bytes", pair_field="pair")
    assert (aan.train_examples, aan.heldout_examples, aan.labels) == (4, 4, ("0", "1"))
    assert next(iter(aan.stored["heldout"].texts())) == (b"test 0", b'other "0')
    cifar = examples(f"cifar10:{directories}/cifar10", cache, tokenizer="pixels", seq_len=1024)
    assert (cifar.train_examples, cifar.heldout_examples) == (6, 3)
    assert cifar.labels == ("airplane", "cat", "truck")
    planes = np.frombuffer((directories / "cifar10" / "test_batch.bin").read_bytes(), np.uint8)[1:3073].reshape(3, -1)
    grey = np.rint(0.2989 * planes[0] + 0.587 * planes[1] + 0.114 * planes[2])
    np.testing.assert_array_equal(cifar.stored["heldout"].part(0, 0), grey)


def test_invalid_paths_raise(directories, cache):
    for path, message in (
        ("imdb", "data.path='imdb': imdb is read from a path: write data.path=imdb:DIRECTORY"),
        ("imdb:/no/such", "'/no/such' does not exist: pass the directory of the published files"),
        ("list_ops:/tmp", "list_ops is generated, and reads no path: write data.path=list_ops"),
        ("list_opps", "is neither a file nor the name of generated examples: did you mean 'list_ops'"),
        ("imdb:{}/aan", "/aan/ holds no train/pos/*.txt and train/neg/*.txt: pass the directory of the unpacked"),
        ("aan:{}/imdb", "/imdb/ holds no *.train.tsv: pass"),
        ("cifar10:{}/aan", "/aan/ holds no data_batch_*.bin of the binary version: pass"),
    ):
        with pytest.raises(InputError) as error:
            check_paths(ClassificationConfig(path.format(directories)))
            examples(path.format(directories), cache)
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("aan/a.train.tsv", b"1\ta\tb\tx\ty\n1\ta\tb\tx\n", "a.train.tsv, line 2: 4 columns, expected 5 (label, id1,"),
        ("aan/a.train.tsv", b"label\ta\tb\tx\ty\n", "a.train.tsv, line 1: label 'label', expected 0 or 1: mend"),
        ("imdb/train/pos/z.txt", b"\xff", "train/pos/z.txt: not UTF-8 (byte 0xff at 0), to be converted by iconv"),
        ("cifar10/data_batch_3.bin", b"123", "data_batch_3.bin: 3 bytes, expected images of 3073 bytes, as the binary"),
        ("cifar10/test_batch.bin", bytes([10] * 3073), "test_batch.bin, image 0: class 10, expected 0 to 9: download"),
    ],
)
def test_malformed_files_raise(directories, cache, file, content, message):
    (directories / file).write_bytes(content)
    name = file.partition("/")[0]
    with pytest.raises(InputError) as error:
        examples(f"{name}:{directories}/{name}", cache)
    assert message in str(error.value)


def test_pixels_are_saved_decoded_and_checked(tmp_path):
    tokenizer = tokenizers.build("pixels")
    image = np.arange(256, dtype=np.uint8)
    text = pixels.to_text(image)
    assert len(text) == 256 and text[0] == " "
    np.testing.assert_array_equal(tokenizer.encode(text.encode()), image)
    assert tokenizer.decode([*map(int, image), tokenizer.pad_id]) == text.encode()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizers.load(str(tmp_path)).vocab_size == 264 and tokenizers.sizes("pixels") == (264, 264)
    raises(r"character 1 of a text has the code 10, expected 32 to 287", tokenizer.encode, b"a\n")
    raises("code 8364", lambda: tokenizer.encode("€".encode()))
    assert len(published.CIFAR10_CLASSES) == 10
