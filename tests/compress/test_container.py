"""The container: arrays of every dtype and encoding return equal, and damage raises an error with the file and the tensor."""

import json
import subprocess
import sys
import zlib

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from hpnlp.compress import container
from hpnlp.compress.storage import array_encodings, deflate, sparse_codes
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
METADATA = {"model": {"layers": 2}, "note": "text"}
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


def test_special_values_are_exact(path):
    x = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45], np.float32)
    for encoding in ("raw", "huffman", "sparse", "packed(3)", "nonzeros"):
        container.write(path, {"x": x}, encodings=encoding)
        assert_same(container.read(path)[0]["x"], x)


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
    assert (
        sum(part.nbytes for part in file.entries["int4"].parts.values()) == len(np.unique(TREE["int4"])) + 23
    )  # and 45 codes
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


def test_files_are_safetensors(written):
    """The library reads raw arrays as they are, and the parts of others."""
    tensors = safetensors.numpy.load_file(written)
    assert_same(tensors["layers/query/scale"], np.asarray(np.float32(0.5)))
    assert_same(tensors["empty"], TREE["empty"])
    assert_same(
        tensors["int4//values"].view(ml_dtypes.int4), np.unique(TREE["int4"].view(np.uint8) & 15).view(ml_dtypes.int4)
    )
    with safe_open(written, "np") as file:
        assert file.metadata() == container.FORMAT
    container.write(written, {name: np.zeros(3, dtype) for name, dtype in container.DTYPES.items()})
    with safe_open(written, "np") as file:
        assert {file.get_slice(name).get_dtype() for name in container.DTYPES} == set(container._STORED.values())


def test_raw_arrays_are_aligned_views_of_the_file(path):
    container.write(path, {"a": np.arange(3, dtype=np.uint8), "b": np.arange(5.0)})
    b = container.read(path)[0]["b"]
    assert b.ctypes.data % 8 == 0 and not b.flags.writeable and not b.flags.owndata


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
    expected, head = container.read(written)[0]["layers"], 8 + int.from_bytes(data[:8], "little")
    for byte in range(0, len(data), 3):
        flipped = bytearray(data)
        flipped[byte] ^= 1 << byte % 8
        written.write_bytes(flipped)
        try:
            tensors = container.read(written)[0]
        except InputError as error:
            assert "model.bin" in str(error)
        else:  # padding, dtypes and shapes, which also stand in the compressed header, or unused bits before its Adler-32
            assert byte < head or byte == len(data) - 5
            assert_same(tensors["table"], PRUNED)
            assert_same(tensors["layers"]["query"]["codes"], expected["query"]["codes"])


def test_truncated_and_longer_files_raise(written):
    data = written.read_bytes()
    for content in (b"", data[:3], data[:20], data[:100], data[:-1], data + b"x"):
        written.write_bytes(content)
        with pytest.raises(InputError, match="model.bin"):
            container.read(written)


def write_by_library(path, header, checksum, **tensors):
    """A file of the library, with the header that `container.write` compresses."""
    text = header if isinstance(header, bytes) else zlib.compress(json.dumps(header).encode())
    stored = {name.replace("__", "//"): np.asarray(x) for name, x in tensors.items()}
    stored["//checksums"] = np.uint32([checksum])
    safetensors.numpy.save_file({**stored, "//header": np.frombuffer(text, np.uint8)}, path, container.FORMAT)


CODES = np.arange(6, dtype=np.uint8).reshape(2, 3)


def described(encoding="raw", dtype="uint8", shape=(2, 3), name="x"):
    return {"metadata": 5, "arrays": {name: [encoding, dtype, shape]}}


def test_files_of_the_library_are_read(path):
    write_by_library(path, described(), container._checksum({"": CODES}), x=CODES)
    tensors, metadata = container.read(path)
    assert_same(tensors["x"], CODES)
    assert metadata == 5
    write_by_library(path, described(), 6, x=CODES)
    with pytest.raises(InputError, match=r"tensor 'x' of .*model.bin' is damaged: its checksum differs"):
        container.read(path)


ONE_GAP = {"values": np.uint32([0, 7]), "gaps/0": deflate.encode(np.uint8([9]), 256)[0]}
ONE_GAP["codes/0"] = deflate.encode(np.uint8([1]), 2)[0]
THREE = {"values": np.uint8([1, 2]), "codes/0": deflate.encode(np.uint8([1, 0, 1, 1, 0, 0]), 2)[0]}


@pytest.mark.parametrize(
    ("header", "parts", "message"),
    [
        (b"rubbish", {}, "model.bin' is no container of hpnlp, or damaged: zlib cannot decode"),
        ({"metadata": 5}, {}, "or damaged: 'arrays'"),
        ({"arrays": described()["arrays"]}, {"": CODES}, "or damaged: 'metadata'"),
        (described(dtype="float99"), {"": CODES}, "'float99'"),
        (described(encoding="zip"), {"": CODES}, "encoding 'zip'"),
        (described(shape=(-1, 3)), {"": CODES}, r"has 'x' of shape \[-1, 3\]"),
        (described(name="x" + 101 * "/x"), {"": CODES}, "its header has 'x/x"),
        (described(shape=(2, 4)), {"": CODES}, "tensor 'x' of .*model.bin' is damaged: cannot reshape"),
        (described(encoding="huffman"), {"": CODES}, "tensor 'x' of .*'values'"),
        (described("huffman"), THREE, None),
        (described("huffman", shape=[9]), THREE, "1 bytes for 9 codes of 1 bits"),
        (described("nonzeros"), THREE, "2 non-zeros for 3 places"),
        (described("sparse(8)", "float32", [10]), ONE_GAP, None),
        (described("sparse(8)", "float32", [9]), ONE_GAP, "entry 9 is the last of a sparse array of 9"),
    ],
)
def test_wrong_headers_raise(path, header, parts, message):
    tensors = {f"x__{part}" if part else "x": x for part, x in parts.items()}
    write_by_library(path, header, container._checksum(parts), **tensors)
    if message is None:  # the other cases differ from one that is read
        assert container.read(path)[0]["x"].size in (6, 10)
        return
    with pytest.raises(InputError, match=message):
        container.read(path)


def test_arrays_larger_than_memory_raise(written, monkeypatch):
    def merge(*_):
        raise MemoryError

    monkeypatch.setattr(sparse_codes, "merge", merge)
    for read in (container.read, lambda path: container.Container(path)["table"]):
        with pytest.raises(InputError, match=r"tensor 'table' of .*model.bin' does not fit into memory"):
            read(written)


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


def test_other_files_raise(path):
    safetensors.numpy.save_file({"x": CODES}, path)
    for content in (path.read_bytes(), b"rubbish" * 10, b'\x04\0\0\0\0\0\0\0"no"', b"\x03\0\0\0\0\0\0\0[1]"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="model.bin' is no container of hpnlp, or damaged"):
            container.Container(path)


def test_invalid_arguments_raise(path):
    for arguments, message in (
        (({"a/b": np.zeros(3)},), "the name 'a/b'"),
        (({"a": np.zeros(3, "datetime64[s]")},), "tensor 'a' is datetime64"),
        (({"a": np.arange(5)}, None, "packed(2)"), r"tensor 'a': 5 distinct elements: packed\(2\) holds 4"),
        (({"a": np.arange(70_000)}, None, "huffman"), "tensor 'a': 70000 distinct elements: huffman holds 65536"),
        (({"a": np.zeros(2, complex)}, None, "sparse"), "tensor 'a': dtype complex128"),
        (({"a": np.zeros(2)}, None, {"b": "raw"}), "encodings has 'b'"),
        (({"a": np.zeros(2)}, None, "packed"), "encoding 'packed': expected"),
        (({"a": np.zeros(2)}, {"x": np.zeros(2)}), "metadata cannot be stored as JSON"),
    ):
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
