"""Parity checks: every kernel that the rows time, against an independent form on the CPU, forward and gradients.

A check has a group. Implementations of a group that differs are reported and not timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from gpu_rows.experts import IMPLS, expert_sums
from gpu_rows.rows import TOLERANCES, Case, Context, Record, Row, difference, reason
from gpu_rows.step import SIZES, packed_batch
from hpnlp.models.decode import GREEDY, Generation
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.ops import weights
from hpnlp.ops.attention import Blockwise, Causal, Full, Mask, RandomBlocks, Window, attend, bigbird, reference
from hpnlp.ops.attention.linear import linear_attention, reference_linear_attention
from hpnlp.ops.linear import linear
from hpnlp.ops.rnn.lstm import lstm
from hpnlp.ops.rnn.reference import RNNWeights, reference_rnn
from hpnlp.ops.rnn.sequence import Sequences
from hpnlp.ops.softmax import linear_cross_entropy
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer

THREADS = 8  # compilations side by side
LOSS_TOLERANCE = 1e-3  # of a training step in float32, whose products are of TF32 on a GPU
ROUNDED_TOLERANCES = {"int8": 2e-2, "fp8": 6e-2}  # of products whose inputs are rounded to 8 bits, over exact inputs

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Check:
    """A comparison.

    Attributes:
      group: Group of the check.
      name: Description.
      tolerance: Largest difference that agrees.
      run: Function that returns (actual, expected), two trees of arrays.
    """

    group: str
    name: str
    tolerance: float
    run: Callable[[], tuple[Any, Any]]


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """New arrays and programs are placed on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def with_gradients(function: Callable[..., Any], arrays: tuple[Any, ...], cotangent: Any) -> Any:
    """The result of a function and the gradients of its arrays, on the host."""

    def run(arrays: tuple[Any, ...], cotangent: Any) -> Any:
        o, pull = jax.vjp(function, *arrays)
        return o, *pull(cotangent.astype(o.dtype))

    return jax.device_get(jax.jit(run)(tuple(jnp.asarray(x) for x in arrays), jnp.asarray(cotangent)))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# name -> (mask, T, S, head size, dtype, names of operands, implementations beside "xla" and "auto")
ATTENTION: dict[str, tuple[Mask, int, int, int, str, tuple[str, ...], tuple[str, ...]]] = {
    "causal": (Causal(), 256, 256, 128, "bfloat16", (), ("cudnn", "pallas")),
    "all pairs, S below T": (Full(), 200, 136, 64, "bfloat16", (), ("cudnn", "pallas")),
    "lengths, one of 0": (Full(), 128, 192, 128, "bfloat16", ("kv_lengths",), ("cudnn", "pallas")),
    "causal, segments": (Causal(), 256, 256, 64, "bfloat16", ("segment_ids",), ("cudnn", "pallas")),
    "causal window, float16": (Causal() & Window(64), 256, 256, 64, "float16", (), ("cudnn", "pallas")),
    "BigBird": (bigbird(32, window=3, global_blocks=1, random=1, causal=True), 384, 384, 128, "bfloat16", (), ("pallas",)),
    "random blocks, segments": (
        Causal() & (RandomBlocks(64, 2, seed=1) | Blockwise(64)), 384, 384, 64, "bfloat16", ("segment_ids",), ("pallas",),
    ),
    "odd length": (Causal(), 201, 201, 64, "bfloat16", (), ("pallas",)),
    "float32": (Causal() & Window(48), 192, 192, 64, "float32", ("segment_ids",), ()),
}  # fmt: skip


REHEARSED = ("lengths, one of 0", "random blocks, segments", "float32")


def attention_checks(rehearse: bool) -> Iterator[Check]:
    """Checks of `attend` with two heads of keys for four of queries."""
    for name, (mask, length, keys, dim, dtype, operands, impls) in ATTENTION.items():
        if rehearse and name not in REHEARSED:
            continue
        q, do = (normal(seed, 2, length, 4, dim) for seed in (0, 3))
        k, v = (normal(seed, 2, keys, 2, dim) for seed in (1, 2))
        segments = np.sort(np.random.default_rng(4).integers(1, 5, (2, length)), axis=1).astype(np.int32)
        options = {"segment_ids": segments, "kv_lengths": np.array([0, keys - 70], np.int32)}
        options = {operand: options[operand] for operand in operands}

        def expected(mask: Mask = mask, arrays: Any = (q, k, v), do: Any = do, options: Any = options) -> Any:
            with on_cpu():
                return with_gradients(lambda *x: reference(*x, mask, **options), arrays, do)

        expected = functools.cache(expected)
        for impl in ("xla",) if rehearse else ("auto", "xla", *impls):

            def run(
                impl: str = impl, mask: Mask = mask, arrays: Any = (q, k, v), do: Any = do, options: Any = options,
                dtype: str = dtype, expected: Any = expected,
            ) -> tuple[Any, Any]:  # fmt: skip
                inputs = tuple(jnp.asarray(x, dtype) for x in arrays)
                return with_gradients(lambda *x: attend(*x, mask, impl=impl, **options), inputs, do), expected()

            yield Check(f"attention, {impl}", name, TOLERANCES[dtype], run)


# Name of a form -> (options of linear_attention, gates with the argument that each is).
LINEAR_FORMS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "linear": ({"normalize": True}, {}),
    "retention": ({}, {"head": "log_decay"}),
    "gla": ({}, {"feature": "log_decay"}),
    "gated_delta": ({}, {"token": "log_decay", "beta": "beta"}),
}


def linear_checks(rehearse: bool) -> Iterator[Check]:
    """Checks of linear attention; a rehearsal runs one form."""
    length, heads, dim = 200, 2, 32
    draw = np.random.default_rng(0)
    gates = {
        "head": np.log1p(-(2.0 ** (-5 - np.arange(heads)))),
        "token": -0.1 * draw.random((1, length, heads)),
        "feature": -0.1 * draw.random((1, length, heads, dim)),
        "beta": draw.random((1, length, heads)),
    }
    for name, (options, names) in list(LINEAR_FORMS.items())[: 1 if rehearse else None]:
        q, k, v, do = normal(1, 4, 1, length, heads, dim)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        if options:  # positive features
            q, k = np.abs(q), np.abs(k)
        arrays = (q, k, v, *(gates[gate].astype(np.float32) for gate in names))
        run = functools.partial(linear_pair, arrays, do, options, tuple(names.values()))
        yield Check("linear attention", name, 2e-2, run)  # long sums of products of TF32


def linear_pair(arrays: Any, do: np.ndarray, options: dict[str, Any], gates: tuple[str, ...]) -> tuple[Any, Any]:
    """Linear attention, and its reference on the CPU. gates: names of the arguments after q, k and v."""

    def call(function: Callable[..., Any]) -> Any:
        def of_arrays(q: Any, k: Any, v: Any, *values: Any) -> Any:
            return function(q, k, v, **options, **dict(zip(gates, values, strict=True)))

        return with_gradients(of_arrays, arrays, do)

    with on_cpu():
        expected = call(reference_linear_attention)
    return call(linear_attention), expected


def loss_checks(rehearse: bool) -> Iterator[Check]:
    """Checks of the exact loss in both dtypes; a rehearsal runs one."""
    h, w = normal(0, 256, 64), normal(1, 1009, 64) / 8
    labels = np.random.default_rng(2).integers(0, 1009, 256).astype(np.int32)

    def naive(h: jax.Array, w: jax.Array) -> jax.Array:
        logits = h @ w.T
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(256), labels])

    for dtype in ("float32", "bfloat16")[: 1 if rehearse else None]:

        def run(dtype: str = dtype) -> tuple[Any, Any]:
            one = np.ones((), np.float32)
            with on_cpu():
                expected = with_gradients(naive, (h, w), one)
            inputs = (jnp.asarray(h, dtype), jnp.asarray(w, dtype))
            return with_gradients(lambda h, w: linear_cross_entropy(h, w, labels), inputs, one), expected

        yield Check("exact loss", dtype, TOLERANCES[dtype], run)


def lstm_checks(rehearse: bool) -> Iterator[Check]:
    """Checks of the LSTM with sequences of different lengths against a plain loop."""
    x, w, u, b, do = (
        normal(0, 3, 9, 16),
        normal(1, 16, 64) / 4,
        normal(2, 16, 64) / 4,
        normal(3, 64),
        normal(4, 3, 9, 16),
    )
    lengths = np.array([9, 4, 1], np.int32)

    for impl in ("xla",) if rehearse else ("xla", "cudnn"):

        def run(impl: str = impl) -> tuple[Any, Any]:
            with on_cpu():
                expected = with_gradients(
                    lambda x, w, u, b: reference_rnn("lstm", x, RNNWeights(w, u, b), Sequences(lengths=lengths))[0],
                    (x, w, u, b),
                    do,
                )
            actual = with_gradients(
                lambda x, w, u, b: lstm(x, w, u, b, lengths=lengths, impl=impl)[0], (x, w, u, b), do
            )
            return actual, expected

        yield Check(f"LSTM, {impl}", "lengths", TOLERANCES["float32"], run)


def product_checks() -> Iterator[Check]:
    """Checks of 8-bit products against the product of exact inputs with the rounded matrix, as the CPU computes it."""
    x, w = normal(0, 48, 128), normal(1, 128, 256)
    kinds = {"int8": weights.quantize, "fp8": functools.partial(weights.to_floats, round_inputs=True)}
    for name, convert in kinds.items():

        def run(convert: Any = convert) -> tuple[Any, Any]:
            with on_cpu():
                expected = x @ np.asarray(convert(jnp.asarray(w)).dense())
            return jax.device_get(jax.jit(linear)(jnp.asarray(x), jax.jit(convert)(jnp.asarray(w)))), expected

        yield Check(f"products, {name}", "48 x 128 x 256", ROUNDED_TOLERANCES[name], run)


def expert_checks(rehearse: bool) -> Iterator[Check]:
    """Checks of experts against loops in float32 on the CPU: an expert without tokens, and more experts than tokens."""
    dim, columns = 128, 192
    for name, count, experts in (("an idle expert", 300, 8), ("more experts than tokens", 5, 64)):
        logits = normal(0, count, experts)
        logits[:, 1] = -1e9
        shapes = {"up": (dim, columns), "gate": (dim, columns), "down": (columns, dim)}
        stacks = {key: normal(1, experts, *shape) / 8 for key, shape in shapes.items()}
        x, dy = normal(2, count, dim), normal(3, count, dim)

        def call(impl: str, dtype: str, logits: Any = logits, arrays: Any = (x, stacks), dy: Any = dy) -> Any:
            x, stacks = jax.tree.map(lambda array: jnp.asarray(array, dtype), arrays)

            def sums(x: jax.Array, logits: jax.Array, *matrices: jax.Array) -> jax.Array:
                return expert_sums(x, logits, dict(zip(stacks, matrices, strict=True)), impl)

            return with_gradients(sums, (x, logits, *stacks.values()), dy)

        def expected(call: Any = call) -> Any:
            with on_cpu():
                return call("loops", "float32")

        expected = functools.cache(expected)
        for impl in ("auto",) if rehearse else ("auto", *IMPLS):
            for dtype in ("bfloat16", "float16"):

                def run(impl: str = impl, dtype: str = dtype, call: Any = call, expected: Any = expected) -> Any:
                    return call(impl, dtype), expected()

                yield Check(f"experts, {impl}", f"{name}, {dtype}", TOLERANCES[dtype], run)


def decoding_check() -> Check:
    """Greedy tokens of a cache: the logit of each in one pass over prompt and tokens, beside the largest logit."""

    def run() -> tuple[Any, Any]:
        config = LMConfig(layers=2, dim=64, heads=2, vocab=264, max_len=64, mlp="gelu")
        model, draw = LM(config), np.random.default_rng(0)
        params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), example_batch(1, 8)))["params"]
        prompts = [draw.integers(0, 264, length) for length in (20, 7)]
        ids = np.concatenate(list(Generation(model, params, prompts, tokens=24, sampling=GREEDY)), axis=1)
        chosen, largest = [], []
        pad = np.zeros(64, np.int64)
        tokens = np.stack([np.concatenate([p, t, pad])[:64] for p, t in zip(prompts, ids, strict=True)]).astype(
            np.int32
        )
        with on_cpu():
            logits = np.asarray(
                jax.jit(lambda p, t: model.apply({"params": p}, t, method="logits"))(jax.device_get(params), tokens)
            )
        for prompt, row, scores in zip(prompts, ids, logits, strict=True):
            scores = scores[len(prompt) - 1 :][: len(row)]
            chosen.append(scores[np.arange(len(row)), row])
            largest.append(scores.max(axis=-1))
        return chosen, largest

    return Check("decoding", "greedy tokens of two prompts", TOLERANCES["float32"], run)


def step_check() -> Check:
    """Losses of two training steps, of which the second depends on the gradients of the first."""

    def run() -> tuple[Any, Any]:
        layers, dim, heads = SIZES["tiny"]
        config = LMConfig(layers=layers, dim=dim, heads=heads, vocab=264, max_len=64, mlp="gelu")
        optimizer = OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup=0)
        batch, key, losses = packed_batch(4, 64, 264), jax.random.key(0), {}
        for device in (jax.devices()[0], jax.devices("cpu")[0]):
            trainer = make_trainer(LM(config), optimizer, Plan(), steps=10, devices=[device], batch_size=4)
            state, losses[device] = trainer.init(key), []
            data = jax.device_put(batch, trainer.batch_sharding)
            for _ in range(2):
                state, metrics = trainer.step(state, data, key)
                losses[device].append(float(metrics["loss"]))
        actual, *expected = losses.values()
        return actual, expected[0] if expected else actual  # a rehearsal has one device

    return Check("training step", "two steps of a small model in float32", LOSS_TOLERANCE, run)


# Name of a case, the beginning of its groups -> (seconds, function of whether it is a rehearsal that makes the checks).
CASES: dict[str, tuple[float, Callable[[bool], Iterable[Check]]]] = {
    "attention": (30, attention_checks),
    "linear attention": (12, linear_checks),
    "exact loss": (8, loss_checks),
    "LSTM": (8, lstm_checks),
    "products": (8, lambda rehearse: product_checks()),
    "experts": (20, expert_checks),
    "decoding": (12, lambda rehearse: [decoding_check()]),
    "training step": (15, lambda rehearse: [step_check()]),
}


def run_check(check: Check) -> Record:
    """The record of a check, with its difference or the reason why there is none."""
    record: Record = {"what": f"{check.group}: {check.name}", "group": check.group, "tolerance": check.tolerance}
    try:
        gap = difference(*check.run())
    except Exception as error:  # a device that is not known may raise anything
        return record | {"agrees": False, "failed": {"ours": reason(error)}}
    if gap is None:
        return record | {"agrees": False, "failed": {"ours": "shapes differ, or a number is not finite"}}
    return record | {"difference": gap, "agrees": gap <= check.tolerance}


def parity_case(name: str, seconds: float, make_checks: Callable[[bool], Iterable[Check]]) -> Case:
    """Runs checks in threads, since most of the time is compilation."""

    def run(context: Context) -> list[Record]:
        with ThreadPoolExecutor(2 if context.rehearse else THREADS) as pool:
            records = list(pool.map(run_check, make_checks(context.rehearse)))
        for record in records:
            if not record["agrees"]:
                gap = f"{record.get('difference', 0):.2g} over {record['tolerance']:.2g}"
                print(f"  differs: {record['what']}: {record.get('failed', {}).get('ours', gap)}", flush=True)
        return records

    return Case(name, seconds, run)


PARITY = Row(
    "parity",
    "differences from independent forms on the CPU",
    "",
    {},
    [parity_case(name, *case) for name, case in CASES.items()],
    alone=True,
)
