"""Measures products with sparse matrices against dense ones, interleaved: layouts and numbers of zeros that save time.

    python experiments/bench/sparse_products.py [--rows=1,32,128,1024] [--measurements=9]

"balanced" is `BalancedWeight` (equally many numbers in each column), "blocks" `BlockSparseWeight` (blocks of 64), both through
`linear` within jit. Peers: `jax.experimental.sparse` (BCSR; up to 128 rows, since it is slow) and torch's CSR products (MKL),
where torch is installed. All but the blocks multiply the same matrix. At least one block of each column of blocks stays, so
that "blocks" may have fewer zeros than the other matrices: `zeros` holds the shares. About two minutes on two cores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.experimental import sparse

from hpnlp import measure
from hpnlp.ops import weights
from hpnlp.ops.linear import linear

RESULTS = Path(__file__).parents[1] / "results"
SHAPES = ((1024, 1024), (384, 1536), (1536, 384))
SHARES = (0.5, 0.2, 0.1, 0.05, 0.02)
BCSR_ROWS = 128

Programs = dict[str, Callable[[], Any]]

FLAGS = flags.FLAGS


def torch_product(matrix: np.ndarray, x: np.ndarray) -> Callable[[], Any]:
    """torch's product of the transposes, as its CSR matrices are on the left."""
    import torch

    left, right = torch.from_numpy(matrix.T.copy()).to_sparse_csr(), torch.from_numpy(x.T.copy())
    return lambda: left @ right


def programs(balanced: weights.BalancedWeight, blocks: weights.BlockSparseWeight, x: np.ndarray) -> Programs:
    """Name -> product of x, checked against numpy."""
    matrix = np.asarray(balanced.dense())
    product, transposed = jax.jit(linear), jax.jit(lambda matrix, x: (matrix @ x.T).T)
    inputs, dense = jnp.asarray(x), jnp.asarray(matrix)
    calls: Programs = {
        "dense": lambda: product(inputs, dense),
        "balanced": lambda: product(inputs, balanced),
        "blocks": lambda: product(inputs, blocks),
    }
    if len(x) <= BCSR_ROWS:
        compressed = sparse.BCSR.fromdense(jnp.asarray(matrix.T))
        calls["BCSR"] = lambda: transposed(compressed, inputs)
    for name, call in calls.items():
        expected = x @ (np.asarray(blocks.dense()) if name == "blocks" else matrix)
        np.testing.assert_allclose(call(), expected, atol=1e-3, err_msg=name)
    if importlib.util.find_spec("torch"):
        calls["torch CSR"] = torch_product(matrix, x)
        np.testing.assert_allclose(calls["torch CSR"]().numpy().T, x @ matrix, atol=1e-3)
    return calls


def main(_: Any) -> None:
    rng, rows = np.random.default_rng(0), []
    for d, f in SHAPES:
        w = jnp.asarray(rng.normal(size=(d, f)), jnp.float32)
        for count in map(int, FLAGS.rows):
            x = rng.normal(size=(count, d)).astype(np.float32)
            for share in SHARES:
                balanced, blocks = weights.keep_balanced(w, share), weights.keep_blocks(w, share)
                times = measure.timeit(programs(balanced, blocks, x), rounds=FLAGS.measurements)
                intervals = {name: time.interval(times["dense"]) for name, time in times.items() if name != "dense"}
                rows.append(
                    {
                        "shape": [d, f],
                        "rows": count,
                        "share": share,
                        "zeros": {
                            "balanced": 1 - balanced.values.size / w.size,
                            "blocks": 1 - blocks.blocks.size / w.size,
                        },
                        "ms": {name: 1000 * time.median for name, time in times.items()},
                        "over_dense": {name: times[name].over(times["dense"]) for name in intervals},
                        "intervals": intervals,
                    }
                )
                ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in rows[-1]["over_dense"].items())
                print(f"{d} x {f}, {count} rows, {share:.0%} of the numbers, over dense: {ratios}", flush=True)
    print(measure.write_result("sparse_products", rows, FLAGS.out))


if __name__ == "__main__":
    flags.DEFINE_list("rows", ["1", "32", "128", "1024"], "Numbers of rows of x.")
    flags.DEFINE_integer("measurements", 9, "Measurements of each product.")
    flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")
    app.run(main)
