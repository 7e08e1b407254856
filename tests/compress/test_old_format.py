"""Weights in a stored file that hpnlp wrote in its own format, before weights became safetensors."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from hpnlp.compress import container
from hpnlp.compress.files import file_content, read_outline, read_weights, write_weights
from hpnlp.errors import InputError
from hpnlp.ops.weights import IntegerWeight, LowRankWeight

FILE = Path(__file__).parent / "old_format.hpnlp"


def weights():
    """The weights of the file, in the encodings that stand beside them."""
    i = np.arange(3000)
    noise = i * i * 7919 % 10007  # no random numbers, whose streams may change
    pruned = np.where(noise < 900, noise % 15, 0)
    return {
        "groups": (noise % 3 - 1).reshape(30, 100).astype(np.int8),  # huffman
        "bytes": (noise // 50).astype(np.uint8),  # huffman
        "words": (noise[:700] // 20 / 7).astype(np.float32),  # huffman
        "equal": np.full(600, np.nan, np.float16),  # huffman
        "pruned": (pruned / 2).astype(np.float32).reshape(3, 1000),  # sparse
        "gaps": pruned.astype(np.int8),  # sparse(3)
        "few": np.where(noise < 400, noise / 7, 0).astype(np.float32),  # nonzeros
        "trits": (noise[:333] % 3).astype(np.uint8),  # packed(1.6)
        "raw": (noise[:50] / 7).astype(ml_dtypes.bfloat16),
        "layers": (
            # packed(5), raw
            IntegerWeight((noise[:84] % 21 - 10).astype(np.int8).reshape(12, 7), np.ones(7, np.float32)),
            # packed(4), raw
            LowRankWeight((noise[:30] % 16 - 8).astype(ml_dtypes.int4).reshape(10, 3), np.ones((3, 2), np.float32)),
        ),
    }


def test_old_files_are_read_and_written_anew(tmp_path):
    expected = weights()
    write_weights(tmp_path / "new", expected, {"step": 3})
    for path in (FILE, tmp_path / "new"):
        params, metadata = read_weights(path)
        assert metadata == {"step": 3}
        assert jax.tree.structure(params) == jax.tree.structure(expected) == jax.tree.structure(read_outline(path))
        arrays = container.Container(path).arrays()
        for name, x in file_content(expected, None)[0].items():
            assert arrays[name].dtype == x.dtype and arrays[name].shape == x.shape
            assert arrays[name].tobytes() == x.tobytes()


def test_damaged_old_files_raise(tmp_path):
    data = FILE.read_bytes()
    for byte in (20, 40, 1000, len(data) - 1):
        flipped = bytearray(data)
        flipped[byte] ^= 16
        (tmp_path / "x").write_bytes(flipped)
        with pytest.raises(InputError, match=r"x' is no container of hpnlp, or damaged"):
            read_weights(tmp_path / "x")
    (tmp_path / "x").write_bytes(data[:-40])
    with pytest.raises(InputError, match="or damaged: it has 8778 bytes, expected 8818"):
        read_weights(tmp_path / "x")
