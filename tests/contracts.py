"""Cases and helpers of `test_contracts.py`, which runs the same tests on every mask, mixer and output layer.

A new entry of OUTPUTS is tested without further code. If its arguments have no defaults, it needs an entry in EXAMPLES. A new
entry of MIXERS needs a reference, in the file of its family in `tests/mixer_cases`.
"""

import contextlib
import dataclasses
import functools
import importlib
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.nn.output import OUTPUTS
from hpnlp.ops import attention
from hpnlp.ops.attention import Causal, Full
from hpnlp.ops.attention.block_sparse.decomposition import decompose
from hpnlp.ops.attention.block_sparse.flash import _backward, _forward, _traced_once
from hpnlp.ops.attention.masks.table import MASKS as PATTERN_TABLE
from hpnlp.spec import build, parse_one
from hpnlp.types import MixerInputs, WithCarry, WordStats
from tests.fixed_and_drawing_mixers import noisy_keys
from tests.mixer_cases.memories import WITHOUT_FULL_PASS

# Absolute and relative tolerance between two forms of one result whose values are of order 1.
TOLERANCE = {jnp.dtype("float32"): 5e-6, jnp.dtype("float16"): 8e-3, jnp.dtype("bfloat16"): 6e-2}
# Compiler options of programs that run once, for which LLVM's optimizations take longer than they save.
ONCE = {"xla_backend_optimization_level": 0}

# Mixers that are compared with their references in bfloat16 in the first tier.
BFLOAT16 = ("full", "linear(8)", "linformer(5)", "conv")

# Tokens of the sequences in most tests of mixers, of their prefixes, and of prompts.
LENGTH, PREFIX, PROMPT = 37, 23, 7

# Every pattern of the table with small arguments, and combinations of patterns.
PATTERNS = (
    *(mask for pattern in PATTERN_TABLE.values() for mask in pattern.examples if mask.heads is None),
    ~attention.Window(4),
    attention.Strided(5).shift(2),
)

# Modules of cases, one for each family of mixers.
MIXER_CASES = sorted((Path(__file__).parent / "mixer_cases").glob("*.py"))
FAMILIES = [importlib.import_module(f"tests.mixer_cases.{path.stem}") for path in MIXER_CASES]
# Mixers whose tokens do not attend to themselves, unless they see no other token.
HIDES_SELF = frozenset().union(*(getattr(family, "HIDES_SELF", ()) for family in FAMILIES))

# Table entry -> its spec strings in tests. Entries that are missing here are tested by their bare names.
EXAMPLES: dict[str, tuple[str, ...]] = {
    name: specs for family in FAMILIES for name, specs in family.EXAMPLES.items()
} | {
    "sampled": (
        "sampled(2)",
        "sampled(2,unigram,1.0,correct_label=True)",
        "sampled(5,uniform,per_token=True,unique=False)",
    ),
    "importance": ("importance(256)", "importance(256,effective=64.0,block=64)"),
    "nce": ("nce(5)", "nce(5,partition=learned)"),
    "negative_sampling": ("negative_sampling(5)",),
    "margin": ("margin(2,40,20)", "margin(3,0,20)"),
    "vmf": ("vmf", "vmf(0.02,0.9)"),
    "adaptive": ("adaptive(div_value=2)", "adaptive((3,5),2)"),
    "class": ("class", "class(3,mass)", "class(3,similar)"),
    "hierarchical": ("hierarchical", "hierarchical(balanced)", "hierarchical(similar)"),
    "binary": ("binary", "binary(objective=logistic)"),
    "binary_hybrid": ("binary_hybrid(4)",),
    "binary_ecc": ("binary_ecc", "binary_ecc(3,normalized)"),
}
# Mixers that no model has, with traits that no entry of MIXERS claims.
EXTRA_MIXERS = {"noisy": noisy_keys}
MIXER_SPECS = tuple(spec for name in MIXERS for spec in EXAMPLES.get(name, (name,)))
OUTPUT_SPECS = (
    *(spec for name in OUTPUTS for spec in EXAMPLES.get(name, (name,))),
    "full(use_bias=True,label_smoothing=0.1)",  # not in EXAMPLES, where "full" is a mixer, too
)


def assert_close(actual, expected, dtype="float32", name=""):
    """Compares two trees leaf by leaf, in dtype, shape and value. name: what differs, for the message of a failure."""
    tolerance = TOLERANCE[jnp.dtype(dtype)]
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b), name)
        a, b = (np.nan_to_num(x, posinf=0, neginf=0) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance, err_msg=name)


@contextlib.contextmanager
def executor_with(*changes):
    """Replaces constants of the attention executor's modules, each given as (module, name, value).

    Its caches of schedules and traces are cleared before and after, since calls of the same shapes would reuse them.
    """
    traces = (_traced_once(function).clear_cache for function in (_forward, _backward))
    clear_functions = (decompose.decompose.cache_clear, decompose._best_tiles.cache_clear, *traces)
    with pytest.MonkeyPatch.context() as patch:
        for change in changes:
            patch.setattr(*change)
        for clear in clear_functions:
            clear()
        try:
            yield
        finally:
            for clear in clear_functions:
                clear()


def assert_float16_has_gradients(loss, h, table):
    """Compares gradients of `loss(h, table)`, a sum of many small terms, for float16 h with those for float32 h by rows."""
    h = h.astype(jnp.float16)
    gradient = jax.grad(loss, (0, 1))
    actual, expected = once(gradient, h, table), once(gradient, h.astype(jnp.float32), table)
    assert [x.dtype for x in actual] == [jnp.float16, table.dtype]
    for a, b in zip(actual, expected, strict=True):
        error, size = (np.linalg.norm(x, axis=1) for x in (np.asarray(a, np.float32) - b, b))
        least = float(jnp.finfo(jnp.float16).smallest_subnormal) if a.dtype == jnp.float16 else 0.0
        assert (error <= 0.02 * size + least).all() and size.any()


def once(function, *args):
    """Compiles without optimizations and calls."""
    return jax.jit(function, compiler_options=ONCE)(*args)


@functools.cache
class Mixing:
    """A mixer with random inputs: B 2, N 4, K 2, H 8, D 16, sequences of three segments.

    Tests share the instances, with their compiled programs, and must not modify them.
    """

    def __init__(self, spec, length=LENGTH, dtype="float32", seed=0, mask=None):
        self.module = build(parse_one(spec, "mixer"), MIXERS | EXTRA_MIXERS, "mixer", name=None)
        self.spec, self.length, rng = spec, length, np.random.default_rng(seed)
        shapes = {"x": (16,), "q": (4, 8), "k": (2, 8), "v": (2, 8)} | {
            name: ({"heads": 4, "kv_heads": 2}[projection.axis], projection.width or 8)
            for name, projection in self.module.needs.items()
        }
        self.arrays = {
            name: jnp.asarray(rng.standard_normal((2, length, *shape)).astype(dtype)) for name, shape in shapes.items()
        }
        heads = {"heads": 4, "kv_heads": 2}
        for name, need in self.module.needs.items():
            shape = 2, length, heads[need.axis], need.width or 8
            self.arrays.setdefault(
                name, jnp.asarray(np.random.default_rng(seed + 1).standard_normal(shape).astype(dtype))
            )
        segments = np.sort(rng.integers(0, 3, (2, length)), axis=1)
        starts = np.array([[np.argmax(row == number) for number in row] for row in segments])
        self.segment_ids = jnp.asarray(segments, jnp.int32)
        self.positions = jnp.asarray(np.arange(length) - starts, jnp.int32)
        causal = self.module.traits.causal
        self.mask = mask if mask is not None else Causal() if causal else Full()
        # Compiled, because a program without the unused pass over the inputs takes less time than its operations one by one.
        # Mixers of any length have the same variables for all lengths and dtypes.
        is_other = self.module.traits.any_length and length != LENGTH
        self.params = Mixing(spec).params if is_other else once(self.initial)

    def initial(self):
        """Initial variables."""
        return nn.meta.unbox(self.module.init(jax.random.key(0), self.inputs(self.arrays), self.mask))

    @functools.cached_property
    def prefix(self):
        """A compiled `(arrays, key) -> o` of the first PREFIX tokens without segments, for which draws use the key."""

        def run(arrays, key):
            draws = {"draws": key} if self.module.traits.draws else {}
            return self(self.inputs({name: array[:, :PREFIX] for name, array in arrays.items()}, **draws))

        return jax.jit(run, compiler_options=ONCE)

    @functools.cached_property
    def gradients(self):
        """A compiled `(arrays, params, ids, signs) -> (gradients of the sum of o * signs by arrays and params, o)`."""
        return jax.jit(
            gradients_and_output(lambda arrays, params, ids: self(self.packed(arrays, ids), params=params)),
            compiler_options=ONCE,
        )

    def output(self, arrays, ids=None):
        """The output for these arrays and segments, by the program of `gradients`."""
        return np.asarray(self.gradients(arrays, self.params, self.segment_ids if ids is None else ids, self.signs)[1])

    def alone(self, arrays):
        """`output` where all tokens are of one segment."""
        return self.output(arrays, jnp.ones((2, self.length), jnp.int32))

    @functools.cached_property
    def signs(self):
        """Random factors of the outputs, float32."""
        shape = (4, 8) if self.module.needs else (16,)
        return jnp.asarray(np.random.default_rng(1).standard_normal((2, self.length, *shape)).astype(jnp.float32))

    @functools.cached_property
    def start(self):
        """A compiled `inputs -> cache`, of prompts."""
        return jax.jit(lambda inputs: self.module.apply(self.params, inputs, Causal()).cache, compiler_options=ONCE)

    @functools.cached_property
    def extend(self):
        """A compiled `(inputs, cache) -> (o, cache)`."""

        def run(inputs, cache):
            return self.module.apply(self.params, inputs, Causal(), cache, method="extend")

        return jax.jit(run, compiler_options=ONCE)

    def at(self, columns, positions=None):
        """`inputs` of the tokens `[2, n]` of the two sequences, at these positions or their own ones."""
        rows, columns = np.arange(2)[:, None], np.asarray(columns)
        positions = jnp.asarray(columns if positions is None else positions, jnp.int32)
        return self.inputs({name: array[rows, columns] for name, array in self.arrays.items()}, positions=positions)

    def cache_of(self, lengths):
        """The cache of the first tokens of each sequence, at most PROMPT, with room for PROMPT + 5."""
        prompt = np.tile(np.arange(PROMPT), (2, 1))
        filled = jnp.asarray(prompt < np.asarray(lengths)[:, None], jnp.int32)
        return self.start(dataclasses.replace(self.at(prompt), segment_ids=filled, capacity=PROMPT + 5))

    def inputs(self, arrays, **fields):
        """The inputs of the mixer: x, and the projections that it declares to need."""
        declared = {name: arrays[name] for name in ("x", "q", "k", "v") if name == "x" or name in self.module.needs}
        fields["projections"] = {name: arrays[name] for name in self.module.needs if name not in declared}
        draws = {"draws": jax.random.key(4)} if self.module.traits.draws else {}
        return MixerInputs(**declared, **draws | fields)

    def packed(self, arrays, ids=None):
        """`inputs` with segment ids, by default those of the instance, and the positions within segments of sorted ids."""
        ids = self.segment_ids if ids is None else ids
        first = jnp.argmax(ids[:, :, None] == ids[:, None], axis=2).astype(jnp.int32)
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] - first
        return self.inputs(arrays, segment_ids=ids, kv_segment_ids=ids, positions=positions, kv_positions=positions)

    def __call__(self, inputs, mask=None, params=None):
        """The output; `mask` is Causal() by default, or Full() if the mixer is not causal."""
        mask = self.mask if mask is None else mask
        return self.module.apply(self.params if params is None else params, inputs, mask).o


def with_large(arrays, tokens):
    """The arrays with values of 1e4 at the tokens that bool `tokens [2, T]` marks."""
    return {
        name: jnp.where(np.expand_dims(tokens, tuple(range(2, x.ndim))), jnp.asarray(1e4, x.dtype), x)
        for name, x in arrays.items()
    }


def gradients_and_output(function):
    """`(arrays, params, ids, signs) -> (gradients by arrays and params, o)` of `function(arrays, variables, ids)`."""

    def score(arrays, params, variables, ids, signs):
        o = function(arrays, variables | {"params": params}, ids)
        return jnp.sum(o.astype(jnp.float32) * signs), o

    gradient = jax.grad(score, (0, 1), has_aux=True)
    return lambda arrays, variables, ids, signs: gradient(arrays, variables.get("params", {}), variables, ids, signs)


# Name of a mixer -> its reference: (mixing, arrays, params, mask, segment ids) -> o.
REFERENCES = {name: function for family in FAMILIES for name, function in family.REFERENCES.items()}


def reference_output(mixing, arrays, params, mask):
    return REFERENCES[parse_one(mixing.spec, "mixer").name](mixing, arrays, params, mask, mixing.segment_ids)


def mixers_by_spec():
    return {spec: build(parse_one(spec, "mixer"), MIXERS, "mixer", name=None) for spec in MIXER_SPECS}


def claiming(trait):
    """The specs of the mixers that claim a trait."""
    return [spec for spec, mixer in mixers_by_spec().items() if getattr(mixer.traits, trait)]


def in_both_directions(trait):
    """The specs of the mixers of any length that claim a trait, and mix with earlier and later tokens, as encoders do."""
    traits = {spec: mixer.traits for spec, mixer in mixers_by_spec().items()}
    return [spec for spec in claiming(trait) if traits[spec].bidirectional and traits[spec].any_length]


def mixing_segments():
    """A spec of each class of mixers that keep padding out, and do not keep segments apart."""
    mixers = mixers_by_spec()
    return [spec for spec in claiming("excludes_padding") if not mixers[spec].traits.isolates_segments]


def one_of_each_kind(specs):
    """The first spec of each class of mixers and each kind of mask that they have; entries of another file are kinds apart."""
    first = {}
    for spec in specs:
        parsed = parse_one(spec, "mixer")
        mixer = build(parsed, MIXERS, "mixer", name=None)
        mask = mixer.within(Causal() if mixer.traits.causal else Full())
        file = MIXERS[parsed.name].__module__  # of a registered entry, the user's
        first.setdefault((file, type(mixer), mask.heads is None, mask.relative), spec)
    return list(first.values())


def by_tier(specs):
    """The specs as parameters of a test; all but one of each kind are slow."""
    first = one_of_each_kind(specs)
    return [pytest.param(spec, marks=[] if spec in first else [pytest.mark.slow]) for spec in specs]


def reference_cases():
    """Cases of comparisons with references: a spec and further arguments of `Mixing`.

    In the first tier, each kind of mixers in float32, and some in bfloat16. Mixers that are masks have the code of `full`.
    """
    first, cases = one_of_each_kind(MIXER_SPECS), []
    for spec, mixer in mixers_by_spec().items():
        is_first, traits = spec in first, mixer.traits
        cases.append(((spec,), is_first))
        cases += [((spec, 13, "bfloat16"), spec in BFLOAT16)] if is_first else []
        if traits.causal and traits.bidirectional:
            is_mask = isinstance(mixer, ExactMixer) and spec != "full"
            cases.append(((spec, 13, "float32", 0, Full()), is_first and not is_mask))
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(case, marks=marks[is_first], id=str(case)) for case, is_first in cases]


def decoding():
    """A spec of each class of mixers that decode; in the first tier, one with a KV cache, two with states, one with more."""
    classes = {type(mixers_by_spec()[spec]): spec for spec in claiming("decodes")}
    first = ("ExactMixer", "GatedDeltaMixer", "DynamicConvMixer", "MobaMixer")
    return [
        pytest.param(spec, marks=[] if kind.__name__ in first else [pytest.mark.slow]) for kind, spec in classes.items()
    ]


def carrying():
    """The specs of the mixers that carry state from one part of a sequence to the next, and lose nothing by it."""
    specs = [spec for spec, mixer in mixers_by_spec().items() if isinstance(mixer, WithCarry)]
    specs = [spec for spec in specs if parse_one(spec, "mixer").name not in WITHOUT_FULL_PASS]
    return [pytest.param(spec, marks=[] if spec.startswith("transformer_xl") else [pytest.mark.slow]) for spec in specs]


DRAWING = (*claiming("draws"), *EXTRA_MIXERS)


@functools.cache
class Output:
    """An output layer with a random table and hidden states of order 1. Tests share the instances and must not modify them."""

    def __init__(self, spec, count=11, vocab=13, dim=8, dtype="float32"):
        rng = np.random.default_rng(0)
        stats = WordStats(np.arange(vocab, 0, -1), rng.permutation(vocab))
        extra = {"vocab": vocab, "dim": dim, "stats": stats}
        self.module = build(parse_one(spec, "output layer"), OUTPUTS, "output layer", name=None, **extra)
        self.table = (
            jnp.asarray(rng.standard_normal((vocab, dim)).astype(jnp.float32)) if self.module.rows_are else None
        )
        self.h = jnp.asarray(rng.standard_normal((count, dim)).astype(dtype))
        self.labels = jnp.asarray(rng.integers(0, vocab, count).astype(jnp.int32))
        self.weights = jnp.asarray(rng.integers(0, 3, count).astype(jnp.float32))
        self.rng = jax.random.key(3)
        if dtype != "float32":  # parameters do not depend on the states
            self.params = Output(spec, count, vocab, dim).params
            return
        operands = (self.table, self.h, self.labels, self.weights)
        boxed = jax.jit(lambda key: self.module.init(key, *operands, method="loss"), compiler_options=ONCE)(self.rng)
        self.params = nn.meta.unbox(boxed)

    @functools.cached_property
    def evaluated(self):
        """A compiled `(h, labels, weights) -> (loss without rng, (logits, top k, best ids), (log_prob, nll) or None)`."""

        def run(h, labels, weights):
            best = self.call("sample", self.table, h, self.rng, temperature=0.0), self.call("best", self.table, h)[1]
            results = self.call("logits", self.table, h), self.call("top_k", self.table, h, 3), best
            loss = self.call("loss", self.table, h, labels, weights)
            if not self.module.is_normalized:
                return loss, results, None
            return loss, results, (self.call("log_prob", self.table, h), self.call("nll", self.table, h, labels))

        return jax.jit(run, compiler_options=ONCE)

    @functools.cached_property
    def gradients(self):
        """A compiled `(trained, h, labels, weights, rng) -> ((sum, (weight, aux)), gradients by trained and h)`."""

        def loss(trained, h, labels, weights, rng):
            table, params = trained
            out = self.call("loss", table, h, labels, weights, rng, params=params)
            return out.sum, (out.weight, out.aux)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), compiler_options=ONCE)

    @property
    def trained(self):
        """Table and parameters."""
        return self.table, self.params

    def call(self, method, *args, params=None, **kwargs):
        return self.module.apply(self.params if params is None else params, *args, method=method, **kwargs)
