"""Tests that every mask, mixer and output layer must pass; the cases are in contracts.py."""

import copy
import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.decoding.beam_search import _for_beams, _has_beams, _is_reordered, _reordered
from hpnlp.nn.attention import Attention, Context
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.exact import exact_mixer
from hpnlp.nn.output import OUTPUTS, OutputLayer
from hpnlp.ops import attention
from hpnlp.ops.attention import Causal, Full
from hpnlp.ops.attention.block_sparse.block_mask import density
from hpnlp.ops.table_rows import TableRows
from hpnlp.spec import parse_one
from hpnlp.training.optimizers.sparse_rows import distinct
from hpnlp.types import LossOut
from tests import contracts
from tests.contracts import MIXER_SPECS, OUTPUT_SPECS, PATTERNS, Mixing, Output, assert_close, once
from tests.messages import raises
from tests.traces import TRACES

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

# First and last tokens of tiles: places from 0 to 40, and up to 13 tokens.
STARTS, LENGTHS = np.meshgrid(np.arange(41), np.arange(13), indexing="ij")
TILES = STARTS.reshape(-1), (STARTS + LENGTHS).reshape(-1)
patterns = pytest.mark.parametrize("mask", PATTERNS, ids=repr)


@patterns
def test_tile_is_sound(mask):
    """`some` is False only if no pair is allowed, `every` True only if all are; for single tiles and arrays of tiles."""
    first, last = TILES
    tiles = first[:, None], last[:, None], first[None], last[None]
    some, every = (np.broadcast_to(found, (len(first), len(first))) for found in mask.tile(*tiles))
    visible = np.pad(mask.at(np.arange(53)[:, None], np.arange(53)[None, :]), ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    q0, q1, k0, k1 = tiles
    count = visible[q1 + 1, k1 + 1] - visible[q0, k1 + 1] - visible[q1 + 1, k0] + visible[q0, k0]
    assert (some | (count == 0)).all() and (~every | (count == (q1 + 1 - q0) * (k1 + 1 - k0))).all()
    for i, j in np.random.default_rng(0).integers(0, len(first), (20, 2)):
        single = mask.tile(*(int(x) for x in (first[i], last[i], first[j], last[j])))
        assert tuple(map(bool, single)) == (some[i, j], every[i, j])


def test_tile_is_sound_for_traced_bounds():
    """Schedules that are made at run time pass traced bounds."""
    q, k = np.arange(0, 44, 4, dtype=np.int32), np.arange(0, 40, 5, dtype=np.int32)
    bounds = q[:, None], q[:, None] + 3, k[None], k[None] + 4
    for mask, (some, every) in zip(
        PATTERNS, once(lambda *x: [pattern.tile(*x) for pattern in PATTERNS], *bounds), strict=True
    ):
        tiles = mask.to_dense(44, 40).reshape(11, 4, 8, 5)
        assert (np.broadcast_to(some, (11, 8)) | ~tiles.any(axis=(1, 3))).all(), mask
        assert (~np.broadcast_to(every, (11, 8)) | tiles.all(axis=(1, 3))).all(), mask


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


# Mixers.


@pytest.mark.parametrize("case", contracts.reference_cases())
def test_mixer_matches_its_reference(case):
    """Compares values and gradients by inputs and parameters, with segments."""
    mixing = Mixing(*case)

    def reference(arrays, params, ids):
        return contracts.reference_output(mixing, arrays, params, mixing.mask)

    arguments = mixing.arrays, mixing.params, mixing.segment_ids, mixing.signs
    actual = mixing.gradients(*arguments)
    assert actual[1].shape == mixing.signs.shape
    assert_close(actual, once(contracts.gradients_and_output(reference), *arguments), actual[1].dtype)


@pytest.mark.parametrize("spec", contracts.by_tier(contracts.claiming("causal")))
def test_mixer_gives_forbidden_pairs_no_gradient(spec):
    """d out[i] / d in[j] is exactly 0 unless j <= i in one segment, and not 0 at j = i; for x and all projections.

    Where tokens do not attend to themselves, it is not 0 at some j. The sequence of token i is that of i's parity.
    """
    mixing = Mixing(spec)
    tokens, ids = np.arange(mixing.length), np.asarray(mixing.segment_ids)
    reached = np.zeros((mixing.length, mixing.length), bool)
    for i in tokens:
        signs = np.zeros(mixing.signs.shape, np.float32)
        signs[i % 2, i] = mixing.signs[i % 2, i]
        gradients = mixing.gradients(mixing.arrays, mixing.params, mixing.segment_ids, signs)[0][0]
        for gradient in gradients.values():
            influence = np.asarray(gradient).reshape(2, mixing.length, -1).any(axis=2)
            assert not influence[1 - i % 2].any()  # sequences are independent
            reached[i] |= influence[i % 2]
    allowed = (tokens[:, None] >= tokens) & np.stack([ids[i % 2, i] == ids[i % 2] for i in tokens])
    assert not (reached & ~allowed).any()
    hides_self = parse_one(spec, "mixer").name in contracts.HIDES_SELF
    assert reached[:, 1:].any() and (reached.any(1) if hides_self else np.diag(reached)).all()


@pytest.mark.parametrize("spec", contracts.one_of_each_kind(contracts.claiming("isolates_segments")))
def test_mixer_isolates_segments(spec):
    """Values of 1e4 in one segment change no bit of the output of another."""
    mixing = Mixing(spec)
    other = np.asarray(mixing.segment_ids) == 1
    large = contracts.with_large(mixing.arrays, other)
    assert other.any() and not other.all()
    np.testing.assert_array_equal(mixing.output(large)[~other], mixing.output(mixing.arrays)[~other])


@pytest.mark.parametrize("spec", contracts.mixing_segments())
def test_mixer_excludes_padding(spec):
    """Values of 1e4 in padding at both ends of a text change no bit of its output, which padding does not get."""
    mixing = Mixing(spec)
    tokens = np.arange(mixing.length)[None]
    ids = ((tokens >= 2) & (tokens < np.array([[23], [34]]))).astype(np.int32)
    o = mixing.output(mixing.arrays, ids)
    np.testing.assert_array_equal(mixing.output(contracts.with_large(mixing.arrays, ids == 0), ids), o)
    assert o[ids > 0].any() and not o[ids == 0].any()


@pytest.mark.parametrize("spec", contracts.one_of_each_kind(contracts.in_both_directions("any_padding")))
def test_mixer_gives_texts_the_same_output_with_any_padding(spec):
    """Without a mask, a text alone and with padding after it."""
    mixing, size = Mixing(spec), 20
    ids = np.repeat(np.arange(mixing.length)[None] < size, 2, axis=0).astype(np.int32)

    def run(arrays, ids):
        inputs = dataclasses.replace(mixing.inputs(arrays), segment_ids=ids)
        return mixing(inputs, mask=Full())

    text = {name: array[:, :size] for name, array in mixing.arrays.items()}
    padded, alone = once(lambda *cases: [run(*case) for case in cases], (mixing.arrays, ids), (text, ids[:, :size]))
    assert_close(padded[:, :size], alone)


@pytest.mark.parametrize("spec", contracts.one_of_each_kind(contracts.claiming("prefix_consistent")))
def test_mixer_gives_prefixes_the_same_output(spec):
    """Later tokens change no bit of the output of earlier ones, and a shorter sequence gives the same values.

    The shorter sequence has no segment ids, and the longer one those of one segment.
    """
    mixing, end = Mixing(spec), contracts.PREFIX
    later = np.tile(np.arange(mixing.length) >= end, (2, 1))
    o, changed = mixing.alone(mixing.arrays), mixing.alone(contracts.with_large(mixing.arrays, later))
    np.testing.assert_array_equal(changed[:, :end], o[:, :end])
    assert np.any(changed[:, end:] != o[:, end:])
    assert_close(mixing.prefix(mixing.arrays, jax.random.key(4)), o[:, :end])


@pytest.mark.parametrize("spec", contracts.DRAWING)
def test_mixer_draws_the_same_numbers_with_the_same_key(spec):
    """Other keys draw other numbers."""
    mixing = Mixing(spec)
    first, again, other = (mixing.prefix(mixing.arrays, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)


@pytest.mark.parametrize("spec", contracts.one_of_each_kind(contracts.claiming("any_length")))
def test_parameters_of_mixers_of_any_length_do_not_depend_on_the_length(spec):
    shapes = jax.eval_shape(Mixing(spec, 1).initial), jax.eval_shape(lambda: Mixing(spec).params)
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])


@pytest.mark.parametrize("spec", contracts.one_of_each_kind(MIXER_SPECS))
def test_mixer_is_traced_once(spec):
    mixing = Mixing(spec)
    negative = jax.tree.map(jnp.negative, mixing.arrays)
    first, traces = mixing.output(mixing.arrays), TRACES.total()
    second = mixing.output(negative)
    assert TRACES.total() == traces and np.any(first != second)


@pytest.mark.parametrize("spec", contracts.by_tier(contracts.claiming("decodes")))
def test_mixer_with_cache_matches_full_pass(spec):
    """Prompts of 2 and 7 tokens, the second longer than some caches; then steps of one, one and two tokens."""
    mixing, length = Mixing(spec), np.array([2, 7])
    full = mixing.alone(mixing.arrays)
    cache = mixing.cache_of(length)
    for count in (1, 1, 2):
        positions = length[:, None] + np.arange(count)
        o, cache = mixing.extend(mixing.at(positions), cache)
        np.testing.assert_allclose(o, full[np.arange(2)[:, None], positions], atol=contracts.TOLERANCE[o.dtype])
        length = length + count


@pytest.mark.parametrize("spec", contracts.decoding())
def test_caches_of_beams_match_caches_of_their_own(spec):
    """Prompts of 2 and 4 tokens with two beams each, which read two tokens, and the next one after the beams change."""
    mixing, length, order = Mixing(spec), np.array([2, 4]), np.array([[1, 0], [1, 1]])

    def inputs(step, beams):
        """One token of each sequence, which is another one for each beam `[2, beams]`; the sequences of a beam are adjacent."""
        return mixing.at(contracts.PROMPT + step + beams, length[:, None] + step + 0 * beams)

    def flat(inputs):
        return jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]) if x.ndim else x, inputs)

    def change(function, is_changed, cache):
        return once(lambda cache: jax.tree.map(function, cache, is_leaf=is_changed), cache)

    beams = np.array([[0, 1], [0, 1]])
    cache = change(functools.partial(_for_beams, 2, 2), _has_beams, mixing.cache_of(length))
    for step in range(2):
        cache = mixing.extend(flat(inputs(step, beams)), cache)[1]
    cache = change(functools.partial(_reordered, jnp.asarray(order)), _is_reordered, cache)
    shared = mixing.extend(flat(inputs(2, beams)), cache)[0]

    separate = []
    for beam in range(2):
        cache = mixing.cache_of(length)
        for step in range(2):
            cache = mixing.extend(inputs(step, order[:, beam : beam + 1]), cache)[1]
        separate.append(mixing.extend(inputs(2, beams[:, beam : beam + 1]), cache)[0])
    assert_close(shared, jnp.stack(separate, axis=1).reshape(shared.shape))


@pytest.mark.parametrize("spec", contracts.carrying())
def test_mixer_with_carry_matches_full_pass(spec):
    """Three parts of a sequence, the second shorter than the carry, against one pass, with segments that cross the borders.

    Compares values, and gradients of the last part with the earlier ones as constants. Other segments change no bit.
    """
    mixing, parts = Mixing(spec, 14), ((0, 7), (7, 9), (9, 14))
    ids, positions, x = mixing.segment_ids + 1, mixing.positions, mixing.arrays["x"]
    attention = Attention(4, 2, 8, parse_one(spec, "mixer"), rope_theta=100.0, qk_norm=True)
    params = once(lambda: nn.meta.unbox(attention.init(jax.random.key(0), x, Context(positions, ids, Causal()))))
    signs = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 16)).astype(jnp.float32))

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

    def gradients_and_values(function):
        def score(params, x):
            y = function(params, x)
            return jnp.sum(y[:, 9:] * signs), y

        return jax.jit(jax.grad(score, (0, 1), has_aux=True), compiler_options=contracts.ONCE)

    other = (ids == 2) & (jnp.arange(14) < 9)[None]
    large = jnp.where(other[..., None], jnp.float32(1e4), x)
    run = gradients_and_values(in_parts)
    of_parts, of_large, of_whole = run(params, x), run(params, large), gradients_and_values(whole)(params, x)
    assert_close(of_parts, of_whole)
    assert not np.asarray(of_parts[0][1])[:, :9].any()
    elsewhere = np.asarray(ids) != 2
    assert other.any() and (np.asarray(ids)[:, 8] == np.asarray(ids)[:, 9]).any() and elsewhere[:, 9:].any()
    np.testing.assert_array_equal(np.asarray(of_parts[1])[elsewhere], np.asarray(of_large[1])[elsewhere])


# Output layers.


@outputs
def test_output_ignores_tokens_without_weight(spec):
    """Loss, statistics and gradients are the same with NaN states or invalid labels at such tokens."""
    case = Output(spec)
    weights = case.weights.at[::2].set(0.0).at[1].set(1.0)
    ignored = np.asarray(weights) == 0
    labels, h = case.labels.at[0].set(-100), case.h.at[2].set(jnp.nan)
    value, (by_trained, by_h) = case.gradients(case.trained, h, labels, weights, case.rng)
    expected_value, (expected_by_trained, _) = case.gradients(case.trained, case.h, case.labels, weights, case.rng)
    assert_close((value, by_trained), (expected_value, expected_by_trained))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, by_trained, by_h)))
    assert not np.asarray(by_h)[ignored].any() and np.asarray(by_h)[~ignored].any(axis=1).all()


@outputs
@pytest.mark.parametrize(("count", "vocab"), [(11, 13), pytest.param(1, 7, marks=pytest.mark.slow)])
def test_output_predictions_are_consistent(spec, count, vocab):
    """nll, log_prob, top_k, best and the sample at temperature 0 agree for bfloat16 states; probabilities sum to one.

    The loss without rng is the weighted sum of nll for every training loss, so that perplexities of layers are comparable.
    """
    case = Output(spec, count, vocab, dtype="bfloat16")
    loss, (logits, (values, ids), best), probabilities = case.evaluated(case.h, case.labels, case.weights)
    assert loss.sum.dtype == loss.weight.dtype == jnp.float32
    assert_close(loss.weight, np.sum(case.weights))
    scores = logits
    if case.module.is_normalized:
        scores, nll = probabilities
        np.testing.assert_allclose(np.exp(np.asarray(scores, np.float64)).sum(axis=1), 1.0, rtol=1e-5)
        assert_close(nll, -np.take_along_axis(np.asarray(scores), np.asarray(case.labels)[:, None], axis=1)[:, 0])
        assert_close(scores, jax.nn.log_softmax(logits, axis=1))
        assert_close(loss.sum, np.sum(np.asarray(nll) * case.weights))
    else:
        raises("no probabilit", case.call, "nll", case.table, case.h, case.labels)
    assert scores.dtype == jnp.float32 and scores.shape == (count, vocab)
    np.testing.assert_array_equal(ids, np.argsort(-np.asarray(scores), axis=1)[:, :3])
    assert_close(values, np.take_along_axis(np.asarray(scores), np.asarray(ids), axis=1))
    np.testing.assert_array_equal(best, [ids[:, 0]] * 2)


ROWS_OF_SAMPLES = ("importance", "nce", "negative_sampling")  # the code of "sampled"


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=[] if spec in FIRST and not spec.startswith(ROWS_OF_SAMPLES) else [pytest.mark.slow])
        for spec in OUTPUT_SPECS
    ],
)
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
    case, evaluated = Output(spec), Output(spec, 11, 13, dtype="bfloat16")
    weights = jnp.ones_like(case.weights)
    for label in (0, -1, 13, -100):
        labels = case.labels.at[4].set(label)
        losses = (
            evaluated.evaluated(evaluated.h, labels, weights)[0].sum,
            case.gradients(case.trained, case.h, labels, weights, case.rng)[0][0],
        )
        np.testing.assert_array_equal(np.isnan(losses), label != 0)


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
    case, keys = Output(spec), [jax.random.key(number) for number in (3, 4)]
    negative = -case.h
    first = case.gradients(case.trained, case.h, case.labels, case.weights, keys[0])[1][0]
    traces = TRACES.total()
    second = case.gradients(case.trained, negative, case.labels, case.weights, keys[1])[1][0]
    assert TRACES.total() == traces
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True))


@outputs
def test_gradient_descent_makes_labels_most_probable(spec):
    """Fails for gradients of the wrong sign, or with respect to the wrong words."""
    case = Output(spec)
    weights = jnp.ones_like(case.weights)
    trained, h = jax.tree.map(np.asarray, (case.trained, case.h))
    for key in jax.random.split(jax.random.key(0), 300):
        _, gradients = case.gradients(trained, h, case.labels, weights, key)
        trained, h = jax.tree.map(lambda x, g: x - np.float32(0.1) * np.asarray(g), (trained, h), gradients)
    table, params = trained
    best = once(lambda table, h, params: case.call("top_k", table, h, 1, params=params)[1], table, h, params)
    np.testing.assert_array_equal(best[:, 0], case.labels)
