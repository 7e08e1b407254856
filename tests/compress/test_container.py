"""The container: arrays of every dtype and encoding return equal, and damage raises an error with the file and the tensor."""

import json
import struct
import subprocess
import sys
import zlib

import ml_dtypes
import numpy as np
import pytest

from hpnlp.compress import container
from hpnlp.compress.storage import array_encodings, huffman, sparse_codes
from hpnlp.compress.storage.array_encodings import Encoding
from hpnlp.errors import InputError

DRAW = np.random.default_rng(0)
CLUSTERS = DRAW.normal(size=32).astype(np.float32)
PRUNED = np.where(DRAW.random((40, 50)) < 0.1, CLUSTERS[DRAW.integers(0, 32, (40, 50))], np.float32(0))
TREE = {
    "table": PRUNED,
    "layers": {"query": {"codes": DRAW.integers(-1, 2, (33, 7)).astype(np.int8), "scale": np.float32(0.5)}},
    "int4": DRAW.integers(-8, 8, (5, 9)).astype(ml_dtypes.int4),
    "empty": np.zeros((3, 0), np.float16),
}
METADATA = {"model": {"layers": 2}, "note": "text that tests replace by longer numbers"}
ENCODINGS = {
    "table": "sparse",
    "layers/query/codes": "packed(1.6)",
    "int4": "packed(4)",
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.bin"


@pytest.fixture
def written(path):
    container.write(path, TREE, METADATA, encodings=ENCODINGS)
    return path


def assert_same(x, y):
    assert x.dtype == y.dtype and x.shape == y.shape
    np.testing.assert_array_equal(np.asarray(x).reshape(-1).view(np.uint8), np.asarray(y).reshape(-1).view(np.uint8))


def test_trees_round_trip(written):
    tensors, metadata = container.read(written)
    assert metadata == METADATA
    assert list(tensors) == list(TREE) and list(tensors["layers"]["query"]) == ["codes", "scale"]
    file = container.Container(written)
    for name, x in (("table", PRUNED), ("int4", TREE["int4"]), ("empty", TREE["empty"])):
        assert_same(tensors[name], x)
        assert_same(file[name], x)
    for name, x in TREE["layers"]["query"].items():
        assert_same(tensors["layers"]["query"][name], np.asarray(x))
        assert_same(file[f"layers/query/{name}"], np.asarray(x))
    assert file.entries["int4"].size == 16 + 23  # a palette of 16 elements, and 45 codes
    assert [path.name for path in written.parent.iterdir()] == [written.name]


@pytest.mark.parametrize("encoding", ["raw", "huffman", "sparse", "sparse(3)", "packed(5)", "nonzeros"])
def test_every_dtype_round_trips(path, encoding):
    rng = np.random.default_rng(1)
    arrays = {}
    for name, dtype in container.DTYPES.items():
        if dtype.itemsize <= 8 or encoding == "raw":
            values = rng.integers(0, 2, 20).astype(np.float32).astype(dtype)
            arrays[name] = values[rng.integers(0, 20, (6, 11))]
    container.write(path, arrays, encodings=encoding)
    tensors, _ = container.read(path)
    for name, x in arrays.items():
        assert_same(tensors[name], x)


def test_special_values_are_exact(path):
    x = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45], np.float32)
    for encoding in ("raw", "huffman", "sparse", "packed(3)", "nonzeros"):
        container.write(path, {"x": x}, encodings=encoding)
        assert_same(container.read(path)[0]["x"], x)


@pytest.mark.parametrize("encoding", ["raw", "huffman", "sparse", "packed(8)", "nonzeros"])
def test_all_bit_patterns_and_memory_orders_are_exact(path, encoding):
    rng = np.random.default_rng(1)
    arrays = {"0-d": np.array(-0.0, ">f4"), "empty": np.zeros((3, 0, 2)), "equal": np.full(700, np.nan, ">f8")}
    for name, dtype in container.DTYPES.items():
        if dtype.itemsize <= 8 or encoding == "raw":
            bits = rng.integers(
                0, 256, (6, 5, dtype.itemsize), np.uint8
            )  # NaN payloads, signed zeros, subnormal numbers
            bits &= array_encodings._USED_BITS.get(name, 1 if name == "bool" else 255)
            x = bits.reshape(-1).view(dtype).reshape(6, 5)
            arrays |= {name: x, f"{name} by columns": np.asfortranarray(x), f"{name} strided": x[::-2, 1::2]}
            if dtype.isbuiltin:
                arrays[f"{name} swapped"] = x.astype(dtype.newbyteorder(">"))
    container.write(path, arrays, encodings=encoding)
    tensors, _ = container.read(path)
    for name, x in arrays.items():
        assert_same(tensors[name], x.astype(x.dtype.newbyteorder("=")) if not x.dtype.isnative else x)


def test_damaged_places_of_non_zeros_raise():
    x = np.where(np.arange(64) % 3, 0, np.arange(64.0))
    count, block = array_encodings.encode(x, Encoding.parse("nonzeros"))
    decoded = array_encodings.decoding(block, Encoding.parse("nonzeros"), x.dtype, x.shape, count)
    np.testing.assert_array_equal(decoded.finish(huffman.decode_all(decoded.streams)), x)
    with pytest.raises(InputError, match="21 non-zeros for 20 places"):
        decoded.finish([np.arange(64) < 20])


def test_raw_arrays_are_aligned_views_of_the_file(path):
    container.write(path, {"a": np.arange(3, dtype=np.uint8), "b": np.arange(5.0)})
    b = container.read(path)[0]["b"]
    assert b.ctypes.data % container.ALIGNMENT == 0 and not b.flags.writeable and not b.flags.owndata


def test_reading_needs_no_jax(written):
    program = f"""
import sys
from hpnlp.compress import container
container.read({str(written)!r})
print(*{{"jax", "flax"}} & set(sys.modules))"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.split() == []


def test_every_flipped_byte_of_the_file_raises(written):
    data = written.read_bytes()
    expected = container.Container(written).arrays()
    covered = np.zeros(len(data), bool)
    covered[: struct.calcsize("<8sIIQ") + struct.unpack("<Q", data[16:24])[0]] = True
    for entry in container.Container(written).entries.values():
        covered[entry.offset : entry.offset + entry.size] = True
    for byte in range(0, len(data), 3):
        flipped = bytearray(data)
        flipped[byte] ^= 1 << byte % 8
        written.write_bytes(flipped)
        if covered[byte]:
            with pytest.raises(InputError, match="model.bin"):
                container.read(written)
        else:  # padding
            for name, x in container.Container(written).arrays().items():
                assert_same(x, expected[name])


def test_truncated_and_longer_files_raise(written):
    data = written.read_bytes()
    for content in (b"", data[:3], data[:20], data[:100], data[:-1], data + b"x"):
        written.write_bytes(content)
        with pytest.raises(InputError, match="model.bin"):
            container.read(written)


def edit(path, change):
    """Changes the header of a file, and makes its checksum fit. `change` gets the tensors' entries."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[16:24])[0]
    header = json.loads(zlib.decompressobj().decompress(data[24 : 24 + size]))
    header["metadata"] = None
    header = change(header) or header
    text = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), 9).ljust(size, b"\0")
    assert len(text) == size, "the header must not grow"
    checksum = container._block_sum(np.frombuffer(text, np.uint8))
    path.write_bytes(data[:12] + struct.pack("<I", checksum) + data[16:24] + text + data[24 + size :])


def replace(number, **values):
    return lambda header: header["tensors"][number].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: [1], "no metadata and tensors"),
        (lambda header: header.update(tensors=[{"name": "x"}]), "has an entry"),
        (replace(1, name="table"), "two tensors have the name 'table'"),
        (replace(0, dtype="float99"), "tensor 'table' of .* dtype is 'float99'"),
        (replace(0, dtype="float16"), "tensor 'table' of .*damaged"),
        (replace(0, shape=[50, 41]), "tensor 'table' of .*sparse array of 2000 elements for 2050"),
        (replace(0, shape=[-1, 5]), "tensor 'table' of .* shape is"),
        (replace(0, shape=[2**40, 2**40]), "tensor 'table' of .* shape is"),
        (replace(0, encoding="zip"), "tensor 'table' of .* encoding 'zip'"),
        (replace(2, shape=[2]), "tensor 'layers/query/scale' of .* 4 bytes for float32"),
        (replace(0, encoding="huffman"), "tensor 'table' of .*symbols for 2000 elements"),
        (replace(0, palette=1), "tensor 'table' of .*damaged"),
        (replace(0, palette=2**20), "tensor 'table' of .* elements of float32"),
        (replace(0, offset=8), "tensor 'table' of .* its block takes bytes"),
        (replace(0, encoding="nonzeros"), "tensor 'table' of .*damaged"),
        (replace(0, size=2**40), "tensor 'table' of .* its block takes bytes"),
        (replace(0, size=1.5), "tensor 'table' of .* size is 1.5"),
        (replace(0, shape=[[[]]]), "tensor 'table' of .* shape is"),
        (replace(0, shape=[1] * 65), "tensor 'table' of .* shape is"),
        (replace(4, shape=[0, 2**47, 2**47]), "tensor 'empty' of .* shape is"),
        (replace(4, name="int4/x"), "the name 'int4/x' begins with that of another tensor"),
        (replace(0, name="int4/x"), "the name 'int4' is that of another tensor, or begins the name of one"),
        (replace(0, name="a//b"), "tensor 'a//b' of .* its name has 3 parts, expected up to 100 that are not empty"),
        (replace(0, name="a" + 100 * "/a"), "its name has 101 parts, expected up to 100"),
        (replace(1, shape=[33, 8]), "tensor 'layers/query/codes' of .*47 bytes for 264 codes of 1.6 bits"),
    ],
)
def test_wrong_headers_raise(written, change, message):
    edit(written, change)
    with pytest.raises(InputError, match=message):
        container.read(written)


def test_deep_values_in_headers_raise(written):
    for depth in (100, 100_000):
        text = f'{{"metadata":0,"tensors":[{"[" * depth}{"]" * depth}]}}'
        header = np.frombuffer(zlib.compress(text.encode()), np.uint8)
        prefix = container._PREFIX.pack(container.MAGIC, 1, container._block_sum(header), len(header))
        written.write_bytes(prefix + header.tobytes())
        with pytest.raises(InputError, match=r"model.bin.*its header"):
            container.read(written)


def test_arrays_larger_than_memory_raise(written, monkeypatch):
    def merge(*_):
        raise MemoryError

    monkeypatch.setattr(sparse_codes, "merge", merge)
    for read in (container.read, lambda path: container.Container(path)["table"]):
        with pytest.raises(
            InputError, match=r"tensor 'table' of .*model.bin' has 2000 elements, more than memory holds"
        ):
            read(written)


def test_few_arrays_are_decoded_together(path, monkeypatch):
    """The tables of many small streams would take 10,000 times the size of the file."""
    monkeypatch.setattr(container, "_DECODED_TOGETHER", 2)
    counts, run = [], array_encodings.Decoding.run
    monkeypatch.setattr(
        array_encodings.Decoding, "run", lambda decodings: counts.append(len(decodings)) or run(decodings)
    )
    arrays = {str(i): np.arange(i + 1) for i in range(5)}
    container.write(path, arrays, encodings="huffman")
    tensors, _ = container.read(path)
    assert counts == [2, 2, 1]
    for name, x in arrays.items():
        assert_same(tensors[name], x)


def test_deep_mappings_and_large_metadata_raise(path, monkeypatch):
    tree = x = np.arange(3)
    for _ in range(100):
        tree = {"a": tree}
    container.write(path, tree)
    assert_same(container.Container(path)["/".join("a" * 100)], x)
    cycle = {}
    cycle["a"] = cycle
    for deep in ({"a": tree}, cycle):
        with pytest.raises(InputError, match="nested more than 100 deep"):
            container.write(path, deep)
    monkeypatch.setattr(container, "_MAX_HEADER", 1000)
    with pytest.raises(InputError, match="expected at most 1000: store large metadata as an array"):
        container.write(path, {"a": x}, "x" * 1000)


def test_other_files_and_versions_raise(written):
    data = written.read_bytes()
    for content, message in (
        (b"rubbish" * 10, "no container of hpnlp"),
        (data[:8] + b"\2" + data[9:], "has version 2, this hpnlp reads version 1"),
    ):
        written.write_bytes(content)
        with pytest.raises(InputError, match=message):
            container.Container(written)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"a/b": np.zeros(3)},), "the name 'a/b'"),
        (({"a": np.zeros(3, "datetime64[s]")},), "tensor 'a' is datetime64"),
        (({"a": np.arange(5)}, None, "packed(2)"), r"tensor 'a': 5 distinct elements: packed\(2\) holds 4"),
        (({"a": np.arange(70_000)}, None, "huffman"), "tensor 'a': 70000 distinct elements: huffman holds 65536"),
        (({"a": np.zeros(2, complex)}, None, "sparse"), "tensor 'a': dtype complex128"),
        (({"a": np.zeros(2)}, None, {"b": "raw"}), "encodings has 'b'"),
        (({"a": np.zeros(2)}, None, "packed"), "encoding 'packed': expected"),
        (({"a": np.zeros(2)}, None, "packed(17)"), "encoding"),
        (({"a": np.zeros(2)}, None, "packed(2.5)"), "encoding"),
        (({"a": np.zeros(2)}, None, "raw(3)"), "encoding"),
        (({"a": np.zeros(2)}, {"x": np.zeros(2)}), "metadata cannot be stored as JSON"),
    ],
)
def test_invalid_arguments_raise(path, arguments, message):
    tensors, metadata, encodings = (*arguments, *(None, "raw")[len(arguments) - 1 :])
    with pytest.raises(InputError, match=message):
        container.write(path, tensors, metadata, encodings=encodings)
    assert not path.exists()


def test_missing_files_and_directories_raise(path):
    with pytest.raises(InputError, match="there is no file"):
        container.Container(path)
    with pytest.raises(InputError, match="cannot write"):
        container.write(path / "x", {"a": np.zeros(3)})
    with pytest.raises(InputError, match="cannot read"):
        container.Container(path.parent)


def test_encodings_print_as_they_are_written():
    for spec in ("raw", "huffman", "nonzeros", "sparse", "sparse(5)", "packed(4)", "packed(1.6)"):
        assert str(Encoding.parse(spec)) == spec
