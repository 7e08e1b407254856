"""Tests that every mask, mixer and output layer must pass; the cases are in contracts.py."""

import copy
import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpnlp.models.beam_search import _for_beams, _has_beams, _is_reordered, _reordered
from hpnlp.nn.attention import Attention, Context
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.exact import exact_mixer
from hpnlp.nn.output import OUTPUTS, OutputLayer
from hpnlp.ops import attention
from hpnlp.ops.attention import Causal, Full
from hpnlp.ops.attention.block_sparse.block_mask import density
from hpnlp.ops.table_rows import TableRows
from hpnlp.spec import parse_one
from hpnlp.training.sparse_rows import distinct
from hpnlp.types import InputError, LossOut
from tests import contracts
from tests.contracts import MIXER_SPECS, ONCE, OUTPUT_SPECS, PATTERNS, Mixing, Output, assert_close, once

mixers = pytest.mark.parametrize("spec", contracts.by_tier(MIXER_SPECS))
FIRST = {spec.partition("(")[0]: spec for spec in reversed(OUTPUT_SPECS)}.values()
outputs = pytest.mark.parametrize(  # further forms of an entry are marked slow
    "spec", [spec if spec in FIRST else pytest.param(spec, marks=pytest.mark.slow) for spec in OUTPUT_SPECS]
)


@pytest.fixture(autouse=True)
def strict():
    """Implicit promotion is an error, as in the tests of ops and nn."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def test_every_entry_has_a_case():
    assert {spec.partition("(")[0] for spec in MIXER_SPECS} == MIXERS.keys() == contracts.REFERENCES.keys()
    assert {spec.partition("(")[0] for spec in OUTPUT_SPECS} == OUTPUTS.keys()


def test_mixers_of_other_files_have_contracts_of_their_own(monkeypatch):
    """All contracts of a registered mixer run in the first tier, also if its class is one of those of the library."""

    def own(back: int = 3):
        return attention.Window(back)

    monkeypatch.setitem(MIXERS, "own", exact_mixer(own))
    assert "own" in contracts.one_of_each_kind([*MIXER_SPECS, "own"])


# Masks.

RANGES = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda start_more: (start_more[0], sum(start_more)))
patterns = pytest.mark.parametrize("mask", PATTERNS, ids=repr)


@patterns
@given(q=RANGES, k=RANGES)
def test_tile_is_sound(mask, q, k):
    """`some` is False only if no pair is allowed, `every` True only if all are; for single tiles and arrays of tiles."""
    visible = mask.at(np.arange(q[0], q[1] + 1)[:, None], np.arange(k[0], k[1] + 1)[None, :])
    some, every = mask.tile(*q, *k)
    assert some or not visible.any()
    assert visible.all() or not every
    for batched, single in zip(mask.tile(*(np.full(3, x) for x in (*q, *k))), (some, every), strict=True):
        np.testing.assert_array_equal(np.broadcast_to(batched, 3), np.full(3, bool(single)))


@patterns
def test_masks_are_values_and_agree_in_numpy_and_jax(mask):
    assert hash(mask) == hash(copy.deepcopy(mask)) and mask == copy.deepcopy(mask)
    q, k = np.arange(45, dtype=np.int32)[:, None], np.arange(-2, 41, dtype=np.int32)[None, :]
    in_numpy = mask.at(q, k)
    assert isinstance(in_numpy, np.ndarray) and in_numpy.shape == (45, 43) and in_numpy.dtype == bool
    with jax.numpy_rank_promotion("allow"):
        np.testing.assert_array_equal(mask.at(jnp.asarray(q), jnp.asarray(k)), in_numpy)
    np.testing.assert_array_equal(mask.to_dense(45, 41), in_numpy[:, 2:])
    assert density(mask, 45, 41) == pytest.approx(in_numpy[:, 2:].mean())


@patterns
def test_tile_is_sound_for_traced_bounds(mask):
    """Schedules that are made at run time pass traced bounds."""
    q, k = np.arange(0, 44, 4), np.arange(0, 40, 5)
    q0, q1, k0, k1 = (jnp.asarray(x, jnp.int32) for x in (q[:, None], q[:, None] + 3, k[None], k[None] + 4))
    some, every = jax.jit(lambda *bounds: mask.tile(*bounds))(q0, q1, k0, k1)
    tiles = mask.to_dense(44, 40).reshape(11, 4, 8, 5)
    assert (np.broadcast_to(some, (11, 8)) | ~tiles.any(axis=(1, 3))).all()
    assert (~np.broadcast_to(every, (11, 8)) | tiles.all(axis=(1, 3))).all()


# Mixers.


@mixers
@pytest.mark.parametrize(
    ("mask", "length", "dtype"),
    [(Full(), 13, "float32"), (Causal(), 37, "float32"), (Causal(), 13, "bfloat16")],
)
def test_mixer_matches_its_reference(spec, mask, length, dtype):
    """Compares values and gradients by inputs and parameters, with segments."""
    mixing = Mixing(spec, length, dtype)
    mask = mask if mixing.module.traits.bidirectional and mixing.module.traits.causal else mixing.mask

    def gradients_and_output(function, arrays):
        def score(arrays, params):
            o = function(arrays, params)
            signs = jnp.asarray(np.random.default_rng(1).standard_normal(o.shape), jnp.float32)
            return jnp.sum(o.astype(jnp.float32) * signs), o

        return jax.grad(score, (0, 1), has_aux=True)(arrays, mixing.params.get("params", {}))

    functions = (
        lambda arrays, params: mixing(mixing.packed(arrays), mask, mixing.params | {"params": params}),
        lambda arrays, params: contracts.reference_output(mixing, arrays, mixing.params | {"params": params}, mask),
    )
    actual, expected = once(lambda arrays: [gradients_and_output(f, arrays) for f in functions], mixing.arrays)
    assert actual[1].shape == ((2, length, 4, 8) if mixing.module.needs else (2, length, 16))
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("spec", contracts.by_tier(contracts.claiming("causal")))
def test_mixer_gives_forbidden_pairs_no_gradient(spec):
    """d out[i] / d in[j] is exactly 0 unless j <= i in one segment, and not 0 at j = i; for x, q, k and v.

    Where tokens do not attend to themselves, it is not 0 at some j.
    """
    mixing = Mixing(spec, 11)

    def sums(arrays):
        return jnp.sum(mixing(mixing.packed(arrays), Causal()).reshape(2, 11, -1), axis=2)

    jacobians = once(jax.jacrev(sums), mixing.arrays)
    ids = np.asarray(mixing.segment_ids)
    allowed = np.tri(11, dtype=bool)[None] & (ids[:, :, None] == ids[:, None, :])
    reached = np.zeros_like(allowed)
    for jacobian in jacobians.values():
        influence = np.abs(np.asarray(jacobian)).reshape(2, 11, 2, 11, -1).sum(axis=-1)
        assert not influence[0, :, 1].any() and not influence[1, :, 0].any()  # sequences are independent
        reached |= np.stack([influence[0, :, 0], influence[1, :, 1]]) > 0
    assert not (reached & ~allowed).any()
    hides_self = parse_one(spec, "mixer").name in contracts.HIDES_SELF
    assert reached[:, 1:].any() and (reached.any(2) if hides_self else np.einsum("bii->bi", reached)).all()


@pytest.mark.parametrize("spec", contracts.one_of_each_kind(contracts.claiming("isolates_segments")))
def test_mixer_isolates_segments(spec):
    """Values of 1e4 in one segment change no bit of the output of another."""
    mixing = Mixing(spec, 23)
    other = (mixing.segment_ids == 1)[:, :, None, None]
    large = {
        name: jnp.where(other.reshape(2, 23, *[1] * (array.ndim - 2)), jnp.float32(1e4), array)
        for name, array in mixing.arrays.items()
    }
    run = jax.jit(lambda arrays: mixing(mixing.packed(arrays)), compiler_options=contracts.ONCE)
    o, large_o = run(mixing.arrays), run(large)
    elsewhere = np.asarray(mixing.segment_ids) != 1
    assert elsewhere.any() and not elsewhere.all()
    np.testing.assert_array_equal(np.asarray(o)[elsewhere], np.asarray(large_o)[elsewhere])


@pytest.mark.parametrize("spec", contracts.mixing_segments())
def test_mixer_excludes_padding(spec):
    """Values of 1e4 in padding at both ends of a text change no bit of its output, which padding does not get."""
    mixing = Mixing(spec, 23)
    ids = jnp.asarray((np.arange(23) >= 2)[None] & (np.arange(23)[None] < np.array([[16], [21]])), jnp.int32)
    padding = (ids == 0)[:, :, None, None]
    large = {
        name: jnp.where(padding.reshape(2, 23, *[1] * (array.ndim - 2)), jnp.float32(1e4), array)
        for name, array in mixing.arrays.items()
    }
    inputs = {"segment_ids": ids, "kv_segment_ids": ids}
    run = jax.jit(lambda arrays: mixing(mixing.inputs(arrays, **inputs)), compiler_options=contracts.ONCE)
    o, large_o = run(mixing.arrays), run(large)
    np.testing.assert_array_equal(o, large_o)
    assert np.asarray(o)[np.asarray(ids) > 0].any() and not np.asarray(o)[np.asarray(ids) == 0].any()


@pytest.mark.parametrize("spec", contracts.one_of_each_kind(contracts.claiming("prefix_consistent")))
def test_mixer_gives_prefixes_the_same_output(spec):
    """Later tokens change no bit of the output of earlier ones, and a shorter sequence gives the same values."""
    mixing = Mixing(spec, 23)

    @functools.partial(jax.jit, compiler_options=contracts.ONCE)
    def run(arrays):
        shorter = {name: array[:, :15] for name, array in arrays.items()}
        return [mixing(mixing.inputs(x), Causal()) for x in (arrays, shorter)]

    o, prefix = run(mixing.arrays)
    changed, _ = run({name: array.at[:, 15:].set(1e4) for name, array in mixing.arrays.items()})
    np.testing.assert_array_equal(changed[:, :15], o[:, :15])
    assert np.any(changed[:, 15:] != o[:, 15:])
    assert_close(prefix, o[:, :15])


@pytest.mark.parametrize("spec", contracts.DRAWING)
def test_mixer_draws_the_same_numbers_with_the_same_key(spec):
    """Other keys draw other numbers, and further tokens draw those of the first ones."""
    mixing = Mixing(spec, 9)
    run = jax.jit(lambda arrays, draws: mixing(mixing.inputs(arrays, draws=draws)), compiler_options=ONCE)
    first, second = jax.random.key(1), jax.random.key(2)
    o = run(mixing.arrays, first)
    np.testing.assert_array_equal(run(mixing.arrays, first), o)
    assert np.any(run(mixing.arrays, second) != o)


@pytest.mark.parametrize("spec", contracts.one_of_each_kind(contracts.claiming("any_length")))
def test_parameters_of_mixers_of_any_length_do_not_depend_on_the_length(spec):
    shapes = [jax.eval_shape(lambda length=length: Mixing(spec, length).params) for length in (1, 9)]
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])


@pytest.mark.parametrize("spec", contracts.one_of_each_kind(MIXER_SPECS))
def test_mixer_is_traced_once(spec):
    first, second = Mixing(spec, 9), Mixing(spec, 9, seed=1)
    once_traced = chex.assert_max_traces(lambda arrays: first(first.inputs(arrays)), n=1)
    call = jax.jit(once_traced, compiler_options=contracts.ONCE)
    assert np.any(call(first.arrays) != call(second.arrays))


@pytest.mark.parametrize("spec", contracts.by_tier(contracts.claiming("decodes")))
def test_mixer_with_cache_matches_full_pass(spec):
    """Prompts of 2 and 7 tokens, the second longer than some caches; then steps of one, one and two tokens."""
    mixing, length, capacity = Mixing(spec, 11), np.array([2, 7]), 12
    full = np.asarray(once(lambda arrays: mixing(mixing.inputs(arrays), Causal()), mixing.arrays))
    rows = np.arange(2)[:, None]

    def take(positions):
        positions = jnp.asarray(positions, jnp.int32)
        return mixing.inputs(
            {name: array[rows, positions] for name, array in mixing.arrays.items()}, positions=positions
        )

    def start(inputs):
        return mixing.module.apply(mixing.params, inputs, Causal()).cache

    def extend(inputs, cache):
        return mixing.module.apply(mixing.params, inputs, Causal(), cache, method="extend")

    prompt = np.tile(np.arange(7), (2, 1))
    inputs = take(prompt)
    filled = jnp.asarray(prompt < length[:, None], jnp.int32)
    cache = once(start, dataclasses.replace(inputs, segment_ids=filled, capacity=capacity))
    for count in (1, 1, 2):
        positions = length[:, None] + np.arange(count)[None]
        o, cache = once(extend, take(positions), cache)
        np.testing.assert_allclose(o, full[rows, positions], atol=contracts.TOLERANCE[o.dtype])
        length = length + count


@pytest.mark.parametrize("spec", contracts.decoding())
def test_caches_of_beams_match_caches_of_their_own(spec):
    """Prompts of 2 and 4 tokens with two beams each, which read two tokens, and the next one after the beams change."""
    mixing, length, order = Mixing(spec, 9), np.array([2, 4]), np.array([[1, 0], [1, 1]])
    prompt = np.tile(np.arange(4), (2, 1))
    filled = jnp.asarray(prompt < length[:, None], jnp.int32)

    def take(examples, columns, positions):
        arrays = {name: array[examples[:, None], columns] for name, array in mixing.arrays.items()}
        return mixing.inputs(arrays, positions=jnp.asarray(positions, jnp.int32))

    def start(examples):
        inputs = take(examples, prompt[examples], prompt[examples])
        inputs = dataclasses.replace(inputs, segment_ids=filled[examples], capacity=8)
        return mixing.module.apply(mixing.params, inputs, Causal()).cache

    def extend(cache, step, beams):
        """`(o, cache)` of one token of each sequence, which is another one for each beam."""
        examples = np.repeat(np.arange(2), 2)
        inputs = take(examples, (4 + step + beams)[:, None], (length[examples] + step)[:, None])
        return mixing.module.apply(mixing.params, inputs, Causal(), cache, method="extend")

    def shared():
        cache = jax.tree.map(lambda x: _for_beams(2, 2, x), start(np.arange(2)), is_leaf=_has_beams)
        for step in range(2):
            cache = extend(cache, step, np.array([0, 1, 0, 1]))[1]
        cache = jax.tree.map(lambda x: _reordered(jnp.asarray(order), x), cache, is_leaf=_is_reordered)
        return extend(cache, 2, np.array([0, 1, 0, 1]))[0]

    def separate():
        cache = start(np.repeat(np.arange(2), 2))
        for step in range(2):
            cache = extend(cache, step, order.reshape(-1))[1]
        return extend(cache, 2, np.array([0, 1, 0, 1]))[0]

    assert_close(*once(lambda: (shared(), separate())))


@pytest.mark.parametrize("spec", contracts.carrying())
def test_mixer_with_carry_matches_full_pass(spec):
    """Three parts of a sequence, the second shorter than the carry, against one pass, with segments that cross the borders.

    Compares values, and gradients of the last part with the earlier ones as constants. Other segments change no bit.
    """
    mixing, parts = Mixing(spec, 14), ((0, 7), (7, 9), (9, 14))
    ids, positions, x = mixing.segment_ids + 1, mixing.positions, mixing.arrays["x"]
    attention = Attention(4, 2, 8, parse_one(spec, "mixer"), rope_theta=100.0, qk_norm=True)
    params = nn.meta.unbox(attention.init(jax.random.key(0), x, Context(positions, ids, Causal())))
    signs = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 16)), jnp.float32)

    def in_parts(params, x):
        carry, outputs = mixing.module.initial_carry(2, 16, x.dtype), []
        for start, end in parts:
            context = Context(positions[:, start:end], ids[:, start:end], Causal(), carry=carry)
            y, _, report = attention.apply(params, x[:, start:end], context)
            assert jax.tree.map(jnp.shape, report.carry) == jax.tree.map(jnp.shape, carry)
            carry = jax.lax.stop_gradient(report.carry)
            outputs.append(y)
        return jnp.concatenate(outputs, axis=1)

    def whole(params, x):
        x = jnp.concatenate([jax.lax.stop_gradient(x[:, :9]), x[:, 9:]], axis=1)
        return attention.apply(params, x, Context(positions, ids, Causal()))[0]

    def gradients_and_values(function, x):
        def score(params, x):
            y = function(params, x)
            return jnp.sum(y[:, 9:] * signs), y

        return jax.grad(score, (0, 1), has_aux=True)(params, x)

    other = (ids == 2) & (jnp.arange(14) < 9)[None]
    large = jnp.where(other[..., None], jnp.float32(1e4), x)
    of_parts, of_large, of_whole = once(
        lambda *xs: [gradients_and_values(f, x) for f, x in zip((in_parts, in_parts, whole), xs, strict=True)],
        x,
        large,
        x,
    )
    assert_close(of_parts, of_whole)
    assert not np.asarray(of_parts[0][1])[:, :9].any()
    elsewhere = np.asarray(ids) != 2
    assert other.any() and (np.asarray(ids)[:, 8] == np.asarray(ids)[:, 9]).any() and elsewhere[:, 9:].any()
    np.testing.assert_array_equal(np.asarray(of_parts[1])[elsewhere], np.asarray(of_large[1])[elsewhere])


# Output layers.


@outputs
@pytest.mark.parametrize(("count", "vocab", "dtype"), [(11, 13, "float32"), (1, 7, "bfloat16")])
def test_output_loss_without_rng_is_weighted_sum_of_nll(spec, count, vocab, dtype):
    """Holds for every training loss, so that perplexities of different layers are comparable."""
    case = Output(spec, count, vocab, dtype=dtype)
    is_normalized = case.module.is_normalized

    def loss_and_nll(h, weights):
        loss = case.call("loss", case.table, h, case.labels, weights)
        return loss, case.call("nll", case.table, h, case.labels) if is_normalized else None

    loss, nll = once(loss_and_nll, case.h, case.weights)
    assert loss.sum.dtype == loss.weight.dtype == jnp.float32
    assert_close(loss.weight, np.sum(case.weights))
    if is_normalized:
        assert nll.dtype == jnp.float32
        assert_close(loss.sum, np.sum(np.asarray(nll) * case.weights))
    else:
        with pytest.raises(InputError, match="no probabilit"):
            case.call("nll", case.table, case.h, case.labels)


@outputs
def test_output_ignores_tokens_without_weight(spec):
    """Loss, statistics and gradients are the same with NaN states or invalid labels at such tokens."""
    case = Output(spec)
    weights = case.weights.at[::2].set(0.0).at[1].set(1.0)
    ignored = np.asarray(weights) == 0
    labels, h = case.labels.at[0].set(-100), case.h.at[2].set(jnp.nan)

    def loss(trained, h, labels):
        table, params = trained
        out = case.call("loss", table, h, labels, weights, case.rng, params=params)
        return out.sum, (out.weight, out.aux)

    both = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), compiler_options=contracts.ONCE)
    trained = case.table, case.params
    value, (by_trained, by_h) = both(trained, h, labels)
    expected_value, (expected_by_trained, _) = both(trained, case.h, case.labels)
    assert_close((value, by_trained), (expected_value, expected_by_trained))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, by_trained, by_h)))
    assert not np.asarray(by_h)[ignored].any() and np.asarray(by_h)[~ignored].any(axis=1).all()


@outputs
def test_output_predictions_are_consistent(spec):
    """nll, log_prob, top_k, best and the sample at temperature 0 agree for bfloat16 states; probabilities sum to one."""
    case = Output(spec, dtype="bfloat16")

    def everything(h):
        best = case.call("sample", case.table, h, case.rng, temperature=0.0), case.call("best", case.table, h)[1]
        results = case.call("logits", case.table, h), case.call("top_k", case.table, h, 3), best
        if not case.module.is_normalized:
            return results
        return *results, case.call("log_prob", case.table, h), case.call("nll", case.table, h, case.labels)

    logits, (values, ids), best, *probabilities = once(everything, case.h)
    scores = logits
    if case.module.is_normalized:
        scores, nll = probabilities
        np.testing.assert_allclose(np.exp(np.asarray(scores, np.float64)).sum(axis=1), 1.0, rtol=1e-5)
        assert_close(nll, -np.take_along_axis(np.asarray(scores), np.asarray(case.labels)[:, None], axis=1)[:, 0])
        assert_close(scores, jax.nn.log_softmax(logits, axis=1))
    assert scores.dtype == jnp.float32 and scores.shape == (11, 13)
    np.testing.assert_array_equal(ids, np.argsort(-np.asarray(scores), axis=1)[:, :3])
    assert_close(values, np.take_along_axis(np.asarray(scores), np.asarray(ids), axis=1))
    np.testing.assert_array_equal(best, [ids[:, 0]] * 2)


@outputs
def test_output_loss_needs_only_its_rows(spec):
    """Given only the rows of `rows`, loss and gradients are the same; other rows of the table have no gradient."""
    case = Output(spec, 5, 61)

    def row_ids(key):
        ids = case.call("rows", jnp.where(case.weights == 0, 0, case.labels), key)
        return None if ids is None else distinct(ids, 61)

    selected = once(row_ids, case.rng)
    if selected is None:
        assert type(case.module).rows is OutputLayer.rows or spec == "margin(3,0,20)"
        return

    def loss(table, h, selected):
        table = table if selected is None else TableRows(selected, table)
        return case.call("loss", table, h, case.labels, case.weights, case.rng).sum

    loss_and_gradients = jax.value_and_grad(loss, (0, 1))
    rows = case.table.at[selected].get(mode="fill", fill_value=0)

    def both(rows, table, h, selected):
        value, (by_rows, by_h) = loss_and_gradients(rows, h, selected)
        expected, (by_table, expected_by_h) = loss_and_gradients(table, h, None)
        in_table = jnp.zeros_like(by_table).at[selected].set(by_rows, mode="drop")
        return (value, by_h, in_table), (expected, expected_by_h, by_table)

    assert_close(*once(both, rows, case.table, case.h, selected))


@outputs
def test_output_loss_of_invalid_labels_is_nan(spec):
    """A label outside of the vocabulary at a token with weight gives NaN, with an rng and without."""
    case = Output(spec)
    weights = jnp.ones_like(case.weights)

    def losses(labels):
        return [case.call("loss", case.table, case.h, labels, weights, rng).sum for rng in (None, case.rng)]

    labels = jnp.stack([case.labels.at[4].set(label) for label in (0, -1, 13, -100)])
    for loss in once(jax.vmap(losses), labels):
        np.testing.assert_array_equal(np.isnan(loss), [False, True, True, True])


@outputs
def test_output_loss_equals_merged_partials(spec):
    """If `merges` is True, the loss follows from the partial results of slices of the table."""
    case = Output(spec)
    rngs = [rng for rng in (None, case.rng) if case.call("merges", rng)]

    def merged(h, start, rng):
        slices = (0, case.table[:5]), (start, case.table[5:])
        lse, score = zip(*(case.call("partial", rows, at, h, case.labels, rng) for at, rows in slices), strict=True)
        losses = jnp.logaddexp(*lse) - sum(score)
        return LossOut((losses * case.weights).sum(), case.weights.sum())

    def both(h, start):
        losses = [case.call("loss", case.table, h, case.labels, case.weights, rng) for rng in rngs]
        return losses, [merged(h, start, rng) for rng in rngs]

    if rngs:
        assert_close(*once(both, case.h, jnp.int32(5)))


@outputs
def test_output_is_traced_once(spec):
    case = Output(spec)

    def loss(trained, h, rng):
        table, params = trained
        return case.call("loss", table, h, case.labels, case.weights, rng, params=params).sum

    step = jax.jit(jax.grad(chex.assert_max_traces(loss, n=1)), compiler_options=contracts.ONCE)
    trained = case.table, case.params
    pairs = zip(
        *(jax.tree.leaves(step(trained, h, jax.random.key(k))) for k, h in ((3, case.h), (4, -case.h))), strict=True
    )
    assert any(np.any(a != b) for a, b in pairs)


@outputs
def test_gradient_descent_makes_labels_most_probable(spec):
    """Fails for gradients of the wrong sign, or with respect to the wrong words."""
    case = Output(spec)
    weights = jnp.ones_like(case.weights)

    def loss(trained, key):
        table, h, params = trained
        return case.call("loss", table, h, case.labels, weights, key, params=params).sum

    def step(trained, key):
        return jax.tree.map(lambda x, g: x - 0.1 * g, trained, jax.grad(loss)(trained, key)), None

    keys = jax.random.split(jax.random.key(0), 300)

    def best_words(trained):
        table, h, params = jax.lax.scan(step, trained, keys)[0]
        return case.call("top_k", table, h, 1, params=params)[1]

    best = once(best_words, (case.table, case.h, case.params))
    np.testing.assert_array_equal(best[:, 0], case.labels)
