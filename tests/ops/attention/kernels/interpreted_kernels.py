"""The GPU kernels in Pallas' interpreter on the CPU, against the reference.

`test_pallas_gpu.py` runs these tests in a process of its own. Alone: python -m pytest -m slow PATH_OF_THIS_FILE
"""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops import attention
from hpnlp.ops.attention import Causal, Full, Global, Operands, PerHead, RandomBlocks, Window
from hpnlp.ops.attention.kernels.pallas_gpu import pallas
from hpnlp.ops.attention.reference import reference
from tests.contracts import ONCE, assert_close

pytestmark = pytest.mark.slow  # the interpreter is slow
thread_map = pytest.importorskip("jax._src.pallas.mosaic.interpret.thread_map")


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    """The interpreter compiles a kernel for each thread of each tile; this compiles it once, without optimizations."""
    compiled, lock = {}, threading.Lock()

    def run(jaxpr, consts, *args):
        with lock:
            if id(jaxpr) not in compiled:
                call = jax.jit(lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args))
                compiled[id(jaxpr)] = jaxpr, call.trace(consts, *args).lower().compile(ONCE)
        compiled[id(jaxpr)][1](consts, *args)

    assert hasattr(thread_map, "_run_jaxpr")
    monkeypatch.setattr(thread_map, "_run_jaxpr", run)


def arrays(length, keys, heads=2, dim=64, value_dim=64, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    shapes = (length, heads, dim), (keys, 1, dim), (keys, 1, value_dim), (length, heads, value_dim)
    q, k, v, do = (jnp.asarray(rng.standard_normal((1, *shape)).astype(dtype)) for shape in shapes)
    return q, k, v, do, jnp.asarray(rng.standard_normal((1, length, heads)).astype(jnp.float32))


def interpreted(q, k, v, mask=Full(), **options):  # noqa: B008  (frozen)
    return pallas(q, k, v, mask, Operands(**options), interpret=True)


def pulled(function, q, k, v, do, dlse, *args, **kwargs):
    """(o, lse) and the gradients of both."""
    call = functools.partial(function, return_lse=True, **kwargs)
    out, pull = jax.vjp(lambda q, k, v: call(q, k, v, *args), q, k, v)
    return out, pull((do, dlse))


@pytest.mark.parametrize(
    "mask",
    [
        Window(40, 3),
        Causal() & RandomBlocks(16, 2, seed=1),
        # the first tile of queries sees nothing at all, the second less and less
        Causal().shift(140),
        attention.Blockwise(50) | Global(3),
        attention.sparse_transformer_strided(33),
    ],
    ids=str,
)
def test_results_match_reference(mask):
    q, k, v, *_ = arrays(200, 200)
    results = interpreted(q, k, v, mask, return_lse=True)
    assert_close(results, reference(q, k, v, mask, return_lse=True), "bfloat16")


def test_per_head_masks_match_reference():
    q, k, v, *_ = arrays(100, 100, heads=3)
    masks = Causal(), Window(9), Causal()
    expected = [reference(q[:, :, [n]], k, v, mask, return_lse=True) for n, mask in enumerate(masks)]
    expected = tuple(jnp.concatenate(parts, axis=2) for parts in zip(*expected, strict=True))
    assert_close(interpreted(q, k, v, PerHead(masks), return_lse=True), expected, "bfloat16")


def test_gradients_match_reference():
    """Further tests have the gradients of Causal()."""
    mask, arguments = Causal().shift(70) & Window(90), arrays(200, 200)
    assert_close(pulled(interpreted, *arguments, mask), pulled(reference, *arguments, mask), "bfloat16")


def test_odd_lengths_head_sizes_scales_and_float16_match_reference():
    arguments = arrays(70, 150, heads=1, dim=72, value_dim=40, dtype="float16")
    mask = Window(60, 90)
    operands = {"scale": -0.2}
    assert_close(
        pulled(interpreted, *arguments, mask, **operands), pulled(reference, *arguments, mask, **operands), "float16"
    )


def test_segments_and_lengths_hide_nan():
    q, k, v, do, dlse = arrays(200, 200)
    ids = jnp.asarray(np.repeat([4, 2, 4], [60, 90, 50])[None], jnp.int32)
    kv_ids = jnp.where(jnp.arange(200)[None] < 20, 7, ids)  # no query is in segment 7
    operands = {"segment_ids": ids, "kv_segment_ids": kv_ids, "kv_lengths": jnp.array([180])}
    hidden = ((jnp.arange(200) < 20) | (jnp.arange(200) >= 180))[None, :, None, None]
    k, v = (jnp.where(hidden, jnp.asarray(jnp.nan, x.dtype), x) for x in (k, v))
    results = pulled(interpreted, q, k, v, do, dlse, Causal(), **operands)
    assert_close(results, pulled(reference, q, k, v, do, dlse, Causal(), **operands), "bfloat16")


def test_nan_in_blocks_without_visible_pairs_is_not_read():
    q, k, v, do, dlse = arrays(100, 300, heads=1)
    mask = Window(20)  # hides the last block of keys from all queries
    expected = pulled(reference, q, k, v, do, dlse, mask)
    k, v = (x.at[:, 256:].set(jnp.nan) for x in (k, v))
    assert_close(pulled(interpreted, q, k, v, do, dlse, mask), expected, "bfloat16")


def test_queries_that_see_nothing_have_zero_gradients():
    """Also where the query and the cotangent of its lse are NaN."""
    q, k, v, do, dlse = arrays(128, 128, heads=1)
    blind = slice(0, 5)

    def gradients(value):
        return pulled(
            interpreted, q.at[:, blind].set(value), k, v, do, dlse.at[:, blind].set(value), Causal().shift(-5)
        )[1]

    for clean, dirty in zip(gradients(0.5), gradients(jnp.nan), strict=True):
        np.testing.assert_array_equal(clean, dirty)


def test_soft_cap_matches_plain_softmax():
    q, k, v, do, dlse = arrays(128, 128, heads=1)

    def capped(q, k, v, mask, return_lse):
        q, k, v = (x.astype(jnp.float32)[:, :, 0] for x in (q, k, v))
        scores = 2.0 * jnp.tanh(jnp.einsum("bth,bsh->bts", q, k) / 8 / 2.0)
        scores = jnp.where(mask.to_dense(128)[None], scores, -jnp.inf)
        o = jnp.einsum("bts,bsh->bth", jax.nn.softmax(scores, axis=-1), v)
        return o.astype("bfloat16")[:, :, None], jax.nn.logsumexp(scores, axis=-1)[:, :, None]

    arguments = q, k, v, do, dlse, Causal()
    assert_close(
        pulled(functools.partial(interpreted, soft_cap=2.0), *arguments), pulled(capped, *arguments), "bfloat16"
    )
