"""The GPU kernels in Pallas' interpreter on the CPU, their schedules, and their programs lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops import attention
from hpnlp.ops.attention import Causal, Full, GlobalAt, Operands, PerHead, Where
from hpnlp.ops.attention.dispatch import require_supported, unsupported
from hpnlp.ops.attention.kernels import hopper, pallas_gpu
from hpnlp.ops.attention.kernels.pallas_gpu import SUPPORTS, limits, pallas
from tests.contracts import PATTERNS
from tests.messages import raises
from tests.ops.interpreted import run_interpreted

pytestmark = pytest.mark.slow


def test_interpreted_kernels_match_the_reference():
    run_interpreted(__file__)


@pytest.mark.parametrize("mask", PATTERNS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_schedule_has_every_allowed_pair_once_and_tests_partial_tiles(mask, transposed):
    length, keys = 300, 210
    options = hopper.KernelOptions(mask, 1.0, None, length, keys, False, True)
    (order, first, tested, last), entries = hopper.schedule(options, 128, 64, transposed)
    dense = mask.to_dense(length, keys)
    dense = np.pad(dense, [(0, -length % 128), (0, -keys % 128)])
    inside = np.zeros_like(dense)
    inside[:, :keys] = True  # padded queries may see anything; padded keys must be tested
    dense[length:] = inside[length:]
    dense = dense.T if transposed else dense
    seen = np.zeros_like(dense)
    counts = (last - first)[order]
    assert sorted(order) == list(range(len(order))) and (counts[:-1] >= counts[1:]).all()
    real = slice(None, keys if transposed else length), slice(None, length if transposed else keys)
    for row in range(len(order)):
        columns = entries[first[row] : last[row]]
        assert len(set(columns)) == len(columns)
        for at, column in enumerate(columns):
            place = slice(row * 128, row * 128 + 128), slice(column * 64, column * 64 + 64)
            seen[place] = True
            if at < tested[row] - first[row]:
                assert dense[place].all()
    assert not (dense & ~seen)[real].any()


def test_patterns_lower_for_a_gpu_or_are_refused(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "hopper_limits", list)
    q = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
    for mask in (Full(), attention.bigbird(16, causal=True), attention.longformer(8, 3), attention.Dilated(3, 4)):
        lowered = jax.jit(lambda q, mask=mask: pallas(q, q, q, mask)).trace(q).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" in lowered.as_text()
    small = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
    refused = [mask for mask in PATTERNS if limits(small, small, small, mask, Operands())]
    assert refused == [GlobalAt((2, 11, 30))]


@pytest.mark.parametrize("options", [{}, {"soft_cap": 3.0}], ids=str)
def test_backward_pass_lowers_for_a_gpu(monkeypatch, options):
    monkeypatch.setattr(pallas_gpu, "hopper_limits", list)
    q, k = (jax.ShapeDtypeStruct((2, 256, heads, 128), jnp.bfloat16) for heads in (4, 2))
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def loss(q, k, v, ids):
        return pallas(q, k, v, Causal(), Operands(segment_ids=ids, **options)).astype(jnp.float32).sum()

    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k, ids).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 3


def test_unsupported_calls_are_named(monkeypatch):
    q = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    assert limits(q, q, q, Causal(), Operands()) == ["platform cpu"]
    wide = jnp.zeros((1, 128, 2, 160), jnp.float32)

    def reasons(q, k, v, mask=Full(), **options):  # noqa: B008  (frozen)
        operands = Operands(**options)
        return sorted(operands.features() - SUPPORTS) + limits(q, k, v, mask, operands, interpret=True)

    assert reasons(wide, wide, wide) == ["dtype float32", "head size 160"]
    assert reasons(q, q, q, Causal(), scale=2.0, soft_cap=3.0, segment_ids=q, dropout_rate=0.0, bias=None) == []
    named = reasons(q, q, q, Causal(), dropout_rate=0.1, positions=q, bias=q)
    assert named == ["bias", "dropout_rate", "kv_positions", "positions"]
    heads = PerHead((Causal(), GlobalAt((3,)), Full()))
    searched = Where(lambda i, j: jnp.cumsum(i + j, axis=1) > 3)
    assert reasons(q, q, q, heads) == ["mask GlobalAt(indices=(3,))", "3 masks for 2 heads"]
    assert reasons(q, q, q, searched) == [f"mask {searched}"]
    assert reasons(q, q, q, Where(lambda i, j: (i * j) % 3 == 0)) == []
    # On another platform the platform is the reason, and the kernels are not imported.
    assert unsupported("pallas", wide, wide, wide, Full(), Operands()) == []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    raises("platform cpu, dtype float32", lambda: require_supported("pallas", wide, wide, wide, Full(), Operands()))
