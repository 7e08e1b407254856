"""The implementation that impl="auto" takes, and the reasons against the others."""

import functools
import importlib
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Causal, Operands, Window, attend, explain, flash
from hpnlp.ops.attention.dispatch import KERNELS, PLATFORMS, choose, explain_choice, only_by_name, resolve
from tests.messages import raises

ALL = {impl: [] for impl in PLATFORMS}


@pytest.mark.parametrize(
    ("platform", "unsupported", "chosen"),
    [
        ("cpu", ALL, "xla"),
        ("gpu", ALL, "cudnn"),
        ("tpu", ALL, "splash"),
        ("gpu", ALL | {"cudnn": ["mask Window(left=1, right=1)"]}, "xla"),
        ("tpu", ALL | {"splash": ["dtype float16"]}, "xla"),
    ],
)
def test_first_supported_implementation_is_chosen(platform, unsupported, chosen):
    assert choose(platform, unsupported.__getitem__) == chosen
    lines = explain_choice(platform, unsupported.__getitem__).splitlines()
    assert [line.split()[0] for line in lines] == list(PLATFORMS)
    assert [line.split()[0] for line in lines if line.endswith("  chosen")] == [chosen]


@pytest.fixture(autouse=True)
def no_cuda_13(monkeypatch):
    """Without the plugin of CUDA 13, installed or not."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    only_by_name.cache_clear()
    yield
    only_by_name.cache_clear()


def test_pallas_is_chosen_before_xla_with_cuda_13_only(monkeypatch):
    unsupported = ALL | {"cudnn": ["mask Window(left=1, right=1)"]}
    assert choose("gpu", unsupported.__getitem__) == "xla"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    only_by_name.cache_clear()
    assert choose("gpu", unsupported.__getitem__) == "pallas"


def test_explanation_names_the_reasons():
    unsupported = ALL | {"cudnn": ["dtype float32", "return_lse"], "splash": ["positions"]}
    assert explain_choice("gpu", unsupported.__getitem__).splitlines() == [
        "splash     needs platform tpu, found gpu; does not support positions",
        "cudnn      does not support dtype float32, return_lse",
        "pallas     compared with CUDA 13 only, and some compilers of CUDA 12 are wrong: only by its name",
        "xla        chosen",
        "reference  dense and slow: only by its name",
    ]


def test_explain_takes_the_arguments_of_attend():
    q = jnp.ones((1, 8, 2, 8), jnp.bfloat16)
    lines = explain(
        q, q, q, Causal(), soft_cap=2.0, dropout_rate=0.0, segment_ids=jnp.zeros((1, 8), jnp.int32)
    ).splitlines()
    assert lines[1].endswith("does not support soft_cap") and lines[3] == "xla        chosen"
    for name in ("impl", "block_size", "mesh"):
        raises(f"explain has no argument '{name}'", explain, q, q, q, **{name: 1})


def test_absent_operands_are_no_features():
    absent = Operands(bias=None, scale=0.0, dropout_rate=0.0, return_lse=False)
    assert absent.features() == set()
    ids = jnp.zeros((1, 8), jnp.int32)
    used = Operands(segment_ids=ids, dropout_rate=0.1, rng=jax.random.key(0), streams=ids, sinks=(), return_lse=True)
    assert used.features() == {"segment_ids", "kv_segment_ids", "dropout_rate", "sinks", "return_lse"}


@pytest.mark.parametrize("impl", KERNELS)
def test_kernels_declare_names_of_operands(impl):
    module = importlib.import_module(f"hpnlp.ops.attention.kernels.{KERNELS[impl]}")
    assert {*vars(Operands())} >= module.SUPPORTS and callable(module.limits) and callable(getattr(module, impl))


def test_unsupported_calls_raise(monkeypatch):
    q = jnp.zeros((1, 8, 2, 8))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    raises("impl 'cudnn' does not support dtype float32", lambda: resolve("cudnn", None, q, q, q, Causal(), Operands()))


def test_attend_passes_every_operand():
    """The program of `attend` is that of the executor with the same operands in a record."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 12, heads, 4)).astype(jnp.float32)) for heads in (4, 2, 2))
    index = jnp.tile(jnp.arange(12, dtype=jnp.int32), (2, 1))
    operands = {
        "segment_ids": index // 5,
        "kv_segment_ids": index // 4,
        "positions": index + 1,
        "kv_positions": index + 2,
        "kv_lengths": jnp.asarray([12, 7], jnp.int32),
        "dense_mask": jnp.asarray(rng.random((2, 1, 12, 12)) < 0.7),
        "global_tokens": index == 3,
        "bias": jnp.asarray(rng.standard_normal((4, 12, 12)).astype(jnp.float32)),
        "scale": 0.3,
        "soft_cap": 2.0,
        "sinks": jnp.arange(4.0),
        "dropout_rate": 0.1,
        "rng": jax.random.key(0),
        "streams": index[:, :4],
        "return_lse": True,
    }
    assert operands.keys() == vars(Operands()).keys()

    def program(function, names):
        return str(
            jax.make_jaxpr(function)({name: operands[name] for name in names if hasattr(operands[name], "dtype")})
        )

    def by_keywords(arrays, static):
        return attend(q, k, v, Window(3), impl="xla", block_size=4, **static, **arrays)

    def by_record(arrays, static):
        return flash(q, k, v, Window(3), Operands(**static, **arrays), block_size=4)

    static = {name: value for name, value in operands.items() if not hasattr(value, "dtype")}
    programs = [program(functools.partial(f, static=static), operands) for f in (by_keywords, by_record)]
    assert programs[0] == programs[1]
