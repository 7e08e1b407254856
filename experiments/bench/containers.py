"""Measures files of compressed models: bytes relative to float32 and xz, time to load relative to the library safetensors.

    python experiments/bench/containers.py

The weights are Gaussian, with the shapes of an encoder. They are stored pruned with 5-bit shared weights (Deep Compression),
ternary, and in int4. xz compresses the same quantized arrays, as dense codes of one byte, and as gaps and codes of the
non-zeros where the array is sparse. safetensors loads the original weights in float32, and the same quantized arrays. What the
container returns is first compared with what was written.

The first load is timed in new processes, as when a model is started. Repeated loads in one process reuse memory that the
operating system has already provided, so that safetensors only copies from the page cache; both are reported. About three
minutes on two cores.
"""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from absl import app, flags

from hpnlp import measure
from hpnlp.compress import container
from hpnlp.compress.storage import deflate, sparse_codes

# Prints the seconds of the first load in a process.
LOAD = """
import sys, time
import safetensors.numpy
from hpnlp.compress import container
load = {"container": container.read}.get(sys.argv[1], safetensors.numpy.load_file)
start = time.perf_counter()
arrays = load(sys.argv[2])
print(time.perf_counter() - start)
"""
RESULTS = Path(__file__).parents[1] / "results"
LEFT, CLUSTERS = 0.1, 31  # with zero 32 values: 5 bits

FLAGS = flags.FLAGS
flags.DEFINE_integer("layers", 6, "Layers of the encoder.")
flags.DEFINE_integer("dim", 384, "Width of the encoder.")
flags.DEFINE_integer("rounds", 7, "Measurements of each time; the least counts.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def weights() -> dict[str, np.ndarray]:
    """The linear layers of an encoder, float32."""
    draw, d = np.random.default_rng(0), FLAGS.dim
    shapes = {"query": (d, d), "key": (d, d), "value": (d, d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    return {
        f"layer_{i}.{name}": draw.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
        for i in range(FLAGS.layers)
        for name, shape in shapes.items()
    }


def cluster(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Prunes the smallest weights and clusters the others by k-means from evenly spaced centroids (Han et al. 2016).

    Returns:
      (uint8 codes of the shape of w, float32 values of the codes, 0 first).
    """
    threshold = np.quantile(np.abs(w), 1 - LEFT)
    kept = np.abs(w) > threshold
    x = w[kept]
    centroids = np.linspace(x.min(), x.max(), CLUSTERS)
    for _ in range(30):
        nearest = np.searchsorted((centroids[1:] + centroids[:-1]) / 2, x)
        counts = np.bincount(nearest, minlength=CLUSTERS)
        sums = np.bincount(nearest, x, minlength=CLUSTERS)
        centroids = np.sort(np.where(counts > 0, sums / np.maximum(counts, 1), centroids))
    codes = np.zeros(w.shape, np.uint8)
    codes[kept] = 1 + np.searchsorted((centroids[1:] + centroids[:-1]) / 2, x)
    return codes, np.concatenate([[0], centroids]).astype(np.float32)


def ternary(w: np.ndarray) -> np.ndarray:
    """Ternary weights of TernaryBERT without their scale: the sign where |w| exceeds 0.7 of its mean."""
    return (np.sign(w) * (np.abs(w) > 0.7 * np.abs(w).mean())).astype(np.int8)


def int4(w: np.ndarray) -> np.ndarray:
    """Symmetric int4 of the largest weight in each column."""
    return np.round(w * (7 / np.abs(w).max(axis=0))).astype(ml_dtypes.int4)


def xz_bytes(codes: dict[str, np.ndarray], sparse: bool) -> dict[str, int]:
    """Bytes of xz for dense codes, and for gaps of 8 bits and codes of the non-zeros; all arrays in one stream."""
    forms = {"dense codes": [x.view(np.uint8).reshape(-1) for x in codes.values()]}
    if sparse:
        gaps, entries = zip(*(sparse_codes.split(x.reshape(-1), 8) for x in codes.values()), strict=True)
        forms["gaps and codes"] = [*gaps, *entries]
    return {name: len(lzma.compress(np.concatenate(arrays).tobytes(), preset=9)) for name, arrays in forms.items()}


def check(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Exits unless the container returns the arrays that were written."""
    tensors, _ = container.read(path)
    for name, x in arrays.items():
        if tensors[name].dtype != x.dtype or tensors[name].tobytes() != x.tobytes():
            sys.exit(f"{path.name}: {name} differs from what was written: nothing is reported")


def first_loads(files: dict[str, Path]) -> dict[str, list[float]]:
    """Seconds of the first load of each file in a process of its own, interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in files}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for _ in range(FLAGS.rounds):
        for name, path in files.items():
            command = [sys.executable, "-c", LOAD, name, str(path)]
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            seconds[name].append(float(result.stdout))
    return seconds


def bench(
    label: str,
    dense: Path,
    arrays: dict[str, np.ndarray],
    encoding: str,
    codes: dict[str, np.ndarray] | None,
    directory: Path,
) -> dict[str, Any]:
    """Bytes and times of arrays in one encoding. `dense` is the safetensors file of the float32 weights."""
    path, same = directory / "arrays.bin", directory / "same.safetensors"
    container.write(path, arrays, {"weights": label}, encodings=encoding)
    check(path, arrays)
    # safetensors has no int4: one byte for each element
    safetensors.numpy.save_file(
        {name: x.astype(np.int8) if x.dtype == ml_dtypes.int4 else x for name, x in arrays.items()}, same
    )
    files = {"container": path, "float32": dense, "same arrays": same}
    first = first_loads(files)
    calls = {name: lambda file=file: safetensors.numpy.load_file(file) for name, file in files.items()}
    repeated = measure.timeit(calls | {"container": lambda: container.read(path)}, rounds=FLAGS.rounds)
    size, elements = path.stat().st_size, sum(x.size for x in arrays.values())
    xz = xz_bytes(codes, encoding.startswith("sparse")) if codes else {}
    ratios = {
        "bytes over float32": size / (4 * elements),
        **{f"bytes over xz of {form}": size / bytes_ for form, bytes_ in xz.items()},
        "time of the first load over safetensors in float32": min(first["container"]) / min(first["float32"]),
        "time of the first load over safetensors of the same arrays": min(first["container"])
        / min(first["same arrays"]),
        "time of repeated loads over safetensors in float32": repeated["container"].min / repeated["float32"].min,
    }
    what = f"container, {label}, {encoding}, {elements / 1e6:.1f} million weights"
    print(f"{what}: 1/{1 / ratios['bytes over float32']:.1f} of float32, " + str(ratios), flush=True)
    return {
        "what": what,
        "ratios": ratios,
        "bytes": size,
        "bits_per_weight": 8 * size / elements,
        "xz_bytes": xz,
        "first_load_s": first,
        "repeated_load_s": {name: list(x.all) for name, x in repeated.items()},
    }


def decoding_speed() -> dict[str, Any]:
    """Symbols that are decoded in a second, of 4 million symbols in one array."""
    draw, n = np.random.default_rng(0), 1 << 22
    symbols = {
        "gaps": np.minimum(draw.geometric(LEFT, n) - 1, 255).astype(np.uint8),
        "5-bit codes": np.clip(draw.normal(16, 5, n), 0, 31).astype(np.uint8),
        "ternary": draw.choice(3, n, p=[0.3, 0.4, 0.3]).astype(np.uint8),
        "uniform bytes": draw.integers(0, 256, n).astype(np.uint8),
    }
    calls = {}
    for name, x in symbols.items():
        levels = int(x.max()) + 1
        blocks = deflate.encode(x, levels)
        calls[name] = lambda blocks=blocks, levels=levels: deflate.decode(blocks, levels, n)
    times = measure.timeit(calls, rounds=FLAGS.rounds)
    speeds = {f"{name}, million symbols per second": n / x.median / 1e6 for name, x in times.items()}
    print(speeds, flush=True)
    return {"what": "Huffman decoding by zlib", "ratios": speeds, "all_s": {n: list(x.all) for n, x in times.items()}}


def main(_: Any) -> None:
    w = weights()
    clustered = {name: cluster(x) for name, x in w.items()}
    codes = {name: x for name, (x, _) in clustered.items()}
    shared = {name: values[x] for name, (x, values) in clustered.items()}
    trits, nibbles = ({name: f(x) for name, x in w.items()} for f in (ternary, int4))
    rows = [decoding_speed()]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        dense = directory / "dense.safetensors"
        safetensors.numpy.save_file(w, dense)
        for label, arrays, encoding, symbols in (
            ("float32", w, "raw", None),
            ("10 % of the weights in 31 clusters, as float32", shared, "sparse", codes),
            ("10 % of the weights in 31 clusters, as codes", codes, "sparse", codes),
            ("ternary", trits, "packed(2)", trits),
            ("ternary", trits, "packed(1.6)", trits),
            ("ternary", trits, "huffman", trits),
            ("int4", nibbles, "packed(4)", nibbles),
            ("int4", nibbles, "huffman", nibbles),
        ):
            rows.append(bench(label, dense, arrays, encoding, symbols, directory))
    print(measure.write_result("containers", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
