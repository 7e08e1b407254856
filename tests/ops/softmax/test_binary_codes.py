"""Codes of words against enumeration of all words and all strings of bits, published distances, scipy and torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_expit, logsumexp
from scipy.stats import chisquare

from hpnlp.ops.softmax.structured.binary_codes import (
    LOSSES,
    Code,
    binary_code,
    code_log_normalizer,
    code_log_probs,
    code_nll,
    code_sample,
    code_top_k,
    convolutional_code,
    hybrid_log_probs,
    hybrid_nll,
    hybrid_sample,
    hybrid_top_k,
)
from tests.contracts import ONCE, assert_close, once
from tests.messages import raises

# More bits than necessary, the default code, and three generators
CODES = {
    "plain": binary_code(13, 6),
    "ecc": convolutional_code(29),
    "rate 1/3": convolutional_code(11, generators=(0o7, 0o7, 0o5)),
}
ONE_WORD = {"one plain word": binary_code(1), "one coded word": convolutional_code(1, generators=(0o7, 0o5))}
# Larsen 1973, "Short convolutional codes with maximal free distance for rates 1/2, 1/3, and 1/4", rate 1/2
DISTANCES = {(0o7, 0o5): 5, (0o17, 0o15): 6, (0o35, 0o23): 7, (0o75, 0o53): 8, (0o171, 0o133): 10}


def logits_of(code, n=5, scale=3.0, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    return jnp.asarray((scale * rng.standard_normal((n, code.length))).astype(dtype))


def coded(code):
    """Codes of all words, as products of polynomials over the integers modulo 2."""
    rows = []
    for word in range(code.vocab):
        message = [int(bit) for bit in f"{word:0{code.bits}b}"] if code.bits else []
        size = max(g.bit_length() for g in code.generators)
        taps = [[int(bit) for bit in f"{g:0{size}b}"] for g in code.generators]
        outputs = [np.convolve(message, tap) % 2 if message else np.zeros(size - 1) for tap in taps]
        rows.append(np.stack(outputs, axis=1).reshape(-1))
    return np.array(rows, np.int64)


def joint(z, table):
    """The log-probability [N, V] of each word's bits, drawn independently; float64."""
    z = np.asarray(z, np.float64)[:, None]
    return np.where(table[None] == 1, log_expit(z), log_expit(-z)).sum(axis=2)


@pytest.mark.parametrize("code", [*CODES.values(), *ONE_WORD.values()], ids=[*CODES, *ONE_WORD])
def test_codes_are_products_of_polynomials(code):
    np.testing.assert_array_equal(code.table(), coded(code))
    assert code.table().dtype == np.uint8 and code.table().shape == (code.vocab, code.length)
    ids = jnp.arange(code.vocab, dtype=jnp.int32)
    assert_close(once(code.encode, ids), jnp.asarray(code.table()))


def test_codes_computed_by_hand():
    """The word 1011 with the generators (7, 5), and a plain code with the highest bit first."""
    word = convolutional_code(16, generators=(0o7, 0o5)).encode(np.array([0b1011]))
    np.testing.assert_array_equal(word[0], [1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1, 1])
    np.testing.assert_array_equal(binary_code(7).table()[4], [1, 0, 0])


@pytest.mark.parametrize(("generators", "distance"), DISTANCES.items(), ids=str)
def test_free_distances_are_those_published(generators, distance):
    """The distance of a linear code is the least weight of a word that is not zero."""
    assert convolutional_code(1 << 11, generators=generators).table()[1:].sum(axis=1).min() == distance


def test_top_k_decodes_a_large_vocabulary():
    code = convolutional_code(455_000)
    table, ids = code.table(), np.array([0, 1, 234_567, 454_999])
    assert (code.bits, code.constraint, table.shape) == (19, 7, (455_000, 50))
    np.testing.assert_array_equal(table[ids], code.encode(ids))
    # Certain bits decode to their word, for large ids too; bits of an id over the vocabulary decode to the best word.
    z = jnp.asarray(np.where(table[ids] == 1, 30.0, -30.0), jnp.float32)
    np.testing.assert_array_equal(once(lambda z: code_top_k(z, code, 1)[1], z)[:, 0], ids)
    plain = binary_code(455_000)
    beyond = jnp.concatenate([jnp.full((1, 19), 5.0), jnp.asarray(np.where(plain.encode(ids) == 1, 9.0, -9.0))])
    actual = once(lambda z: code_top_k(z, plain, 1)[1], beyond.astype(jnp.float32))[:, 0]
    best = joint(beyond[:1], plain.table())[0].argmax()
    np.testing.assert_array_equal(actual, [best, *ids])


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_all_functions_match_enumeration_of_words(code):
    z, vocab = logits_of(code), code.vocab

    def everything(z):
        labels = jnp.arange(vocab, dtype=jnp.int32)
        nll = jax.vmap(lambda label: code_nll(z, jnp.full(z.shape[0], label), code), out_axes=1)(labels)
        normalizer, pull = jax.vjp(lambda z: code_log_normalizer(z, code), z)
        return nll, normalizer, code_log_probs(z, code), code_top_k(z, code, vocab), pull(jnp.ones_like(normalizer))

    nll, normalizer, log_probs, (best, ids), (slope,) = once(everything, z)
    scores = joint(z, coded(code))
    mass = logsumexp(scores, axis=1)
    expected = scores - mass[:, None]
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)
    close(normalizer, mass)
    close(nll, -expected)
    close(log_probs, expected)
    close(best, -np.sort(-expected, axis=1))
    np.testing.assert_array_equal(ids, np.argsort(-expected, axis=1))
    close(np.exp(np.asarray(best, np.float64)).sum(axis=1), 1.0)
    mean = np.exp(expected) @ coded(code)
    close(slope, mean - 1 / (1 + np.exp(-np.asarray(z, np.float64))))
    assert all(x.dtype == jnp.float32 for x in (nll, normalizer, log_probs, best)) and ids.dtype == jnp.int32


@pytest.mark.parametrize(("generators", "step"), [((1,), 1), ((0o7, 0o5), 5)], ids=["plain", "ecc"])
def test_normalizer_matches_enumeration_for_each_vocabulary_size(generators, step):
    """Includes every pattern of the last word's bits, one word, and vocabularies in which all strings are words."""
    z = [logits_of(Code(1, bits, generators), 3) for bits in range(6)]
    codes = [convolutional_code(vocab, generators=generators) for vocab in (1, 2, 3, *range(16, 33, step))]
    actual = once(lambda z: [code_log_normalizer(z[code.bits], code) for code in codes], z)
    for code, ours in zip(codes, actual, strict=True):
        expected = logsumexp(joint(z[code.bits], code.table()), axis=1)
        np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=2e-6, err_msg=str(code))


def test_viterbi_equals_exhaustive_search():
    """All strings of ten bits are words, and the noise is so strong that thresholds often fail."""
    code = convolutional_code(1 << 10)
    sent = np.random.default_rng(1).integers(0, 1 << 10, 40)
    z = (2.0 * code.encode(sent) - 1) + np.asarray(logits_of(code, 40, 1.0))
    _, ids = once(lambda z: code_top_k(z, code, 4), jnp.asarray(z, jnp.float32))
    expected = np.argsort(-(z @ coded(code).T), axis=1)[:, :4]
    np.testing.assert_array_equal(ids, expected)
    assert (expected[:, 0] == sent).mean() > 0.9 > ((z > 0) == code.encode(sent)).all(axis=1).mean()


def test_losses_match_definitions():
    code = convolutional_code(29)
    z, labels = logits_of(code), jnp.array([0, 28, 7, 7, 16])
    actual = once(lambda z: [code_nll(z, labels, code, loss=loss) for loss in LOSSES], z)
    bits, x = coded(code)[labels], np.asarray(z, np.float64)
    logistic = np.logaddexp(0, x).sum(axis=1) - (x * bits).sum(axis=1)
    squared = ((1 / (1 + np.exp(-x)) - bits) ** 2).sum(axis=1)
    np.testing.assert_allclose(actual[1], logistic, rtol=2e-6)
    np.testing.assert_allclose(actual[2], squared, rtol=2e-6)
    assert (np.asarray(actual[0]) < logistic).all()


def test_confident_bits_keep_loss_and_gradient():
    """Values match float64, where 1 - sigmoid would round to 0; bits that are all wrong have a gradient of 1."""
    code = binary_code(5)
    z = jnp.array([[-30.0, 40.0, 40.0], [60.0, -60.0, -60.0]])
    run = jax.value_and_grad(lambda z: code_nll(z, jnp.array([3, 3]), code, loss="logistic").sum())
    loss, slope = once(run, z)
    np.testing.assert_allclose(loss, np.exp(-30) + 2 * np.exp(-40) + 180, rtol=1e-6)
    np.testing.assert_allclose(slope, [[np.exp(-30), -np.exp(-40), -np.exp(-40)], [1, -1, -1]], rtol=1e-6)
    exact, slope = once(jax.value_and_grad(lambda z: code_nll(z, jnp.array([3, 3]), code).sum()), z)
    np.testing.assert_allclose(exact, 180, rtol=1e-6)
    np.testing.assert_allclose(slope, [[0, 0, 0], [1, -1, -1]], atol=1e-6)


def test_zero_logits_have_exact_loss_and_gradient():
    """Logits are 0 in an output layer that is initialised to zeros; the gradient at the kink of the scores is exact."""
    code, labels = binary_code(5), jnp.array([0, 4])
    run = jax.value_and_grad(lambda z: code_nll(z, labels, code).sum())
    loss, slope = once(run, jnp.zeros((2, 3)))
    np.testing.assert_allclose(loss, 2 * np.log(5), rtol=1e-6)
    np.testing.assert_allclose(slope, code.table().mean(axis=0) - code.table()[labels], rtol=1e-6)


def test_transformations_match_log_probs():
    code = convolutional_code(6, generators=(0o7, 0o5))
    z = logits_of(code, 2)

    def everything(nll):
        loss = lambda z: nll(z).sum()  # noqa: E731
        return jax.hessian(loss)(z), jax.vmap(nll)(jnp.stack([z, -z])), jax.jvp(nll, (z,), (jnp.cos(z),))[1]

    reference = lambda z: -code_log_probs(z, code)[:, 5]  # noqa: E731
    assert_close(*(once(lambda: everything(f)) for f in (lambda z: code_nll(z, jnp.array([5, 5]), code), reference)))  # noqa: B023


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_sixteen_bit_logits_are_computed_in_float32(dtype):
    code = CODES["rate 1/3"]
    z, labels = logits_of(code, dtype=dtype), jnp.arange(5)

    def run(z):
        nll, pull = jax.vjp(lambda z: code_nll(z, labels, code), z)
        return nll, pull(jnp.ones_like(nll))[0]

    (nll, slope), (wide, wide_slope) = once(run, z), once(run, z.astype(jnp.float32))
    assert_close(nll, wide)
    assert_close(slope, wide_slope.astype(dtype), dtype)


def test_invalid_labels_give_nan():
    code = binary_code(5)
    labels = jnp.array([-1, 4, 5, -(1 << 31), 7])
    losses = once(lambda z: code_nll(z, labels, code), logits_of(code))
    np.testing.assert_array_equal(np.isnan(losses), [True, False, True, True, True])
    labels = jnp.array([-1, 1, 6, 7, 2])
    losses = once(lambda c, z: hybrid_nll(c, z, labels, code), jnp.zeros((5, 3)), logits_of(code))
    np.testing.assert_array_equal(np.isnan(losses), [True, False, False, True, False])


def assert_drawn(draws, probabilities):
    counts = np.bincount(np.asarray(draws), minlength=len(probabilities))
    assert len(counts) == len(probabilities)
    assert chisquare(counts, len(draws) * np.asarray(probabilities, np.float64)).pvalue > 1e-3


def test_samples_follow_the_distribution():
    code, temperature = binary_code(13), 2.0
    z = logits_of(code, 1, 1.0)
    many = jnp.repeat(z, 20_000, axis=0)
    draws = once(lambda z: code_sample(z, code, jax.random.key(1), temperature=temperature), many)
    p = np.exp(joint(z, coded(code))[0]) ** (1 / temperature)
    assert draws.dtype == jnp.int32
    assert_drawn(draws, p / p.sum())
    # Samples of different tokens are independent.
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def hybrid(n=6, frequent=4, code=CODES["rate 1/3"]):
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.standard_normal((n, frequent + 1)).astype(jnp.float32)), logits_of(code, n, 1.0), code


@pytest.mark.parametrize(("frequent", "k"), [(0, 11), (4, 2), pytest.param(4, 15, marks=pytest.mark.slow)], ids=str)
def test_hybrid_matches_enumeration_of_words(frequent, k):
    classes, z, code = hybrid(frequent=frequent)
    vocab = frequent + code.vocab

    def everything(classes, z):
        labels = jnp.arange(vocab, dtype=jnp.int32)
        run = lambda label: hybrid_nll(classes, z, jnp.full(classes.shape[0], label), code)  # noqa: E731
        log_probs, best = hybrid_log_probs(classes, z, code), hybrid_top_k(classes, z, code, k)
        return jax.vmap(run, out_axes=1)(labels), log_probs, best

    nll, log_probs, (best, ids) = once(everything, classes, z)
    x, coded_log_p = np.asarray(classes, np.float64), joint(z, coded(code))
    log_p, coded_log_p = x - logsumexp(x, axis=1)[:, None], coded_log_p - logsumexp(coded_log_p, axis=1)[:, None]
    expected = np.concatenate([log_p[:, :-1], log_p[:, -1:] + coded_log_p], axis=1)
    np.testing.assert_allclose(logsumexp(expected, axis=1), 0.0, atol=1e-12)
    order = np.argsort(-expected, axis=1)[:, :k]
    ranked = np.take_along_axis(expected, order, axis=1)
    for actual, known in ((nll, -expected), (log_probs, expected), (best, ranked)):
        np.testing.assert_allclose(actual, known, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(ids, order)
    assert ids.dtype == jnp.int32


def test_hybrid_ignores_bits_of_frequent_labels():
    """NaN in the bits of a frequent label changes no loss and no gradient."""
    classes, z, code = hybrid()
    labels = jnp.array([0, 5, 3, 4, 14, 1])
    dirty = jnp.where(labels[:, None] < 4, jnp.nan, z)

    def run(z):
        total = lambda loss, c, z: hybrid_nll(c, z, labels, code, loss=loss).sum()  # noqa: E731
        return [jax.value_and_grad(functools.partial(total, loss), (0, 1))(classes, z) for loss in LOSSES]

    clean, actual = once(run, z), once(run, dirty)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)
    slope = np.asarray(clean[0][1][1])
    np.testing.assert_array_equal(np.any(slope != 0, axis=1), np.asarray(labels) >= 4)


def test_hybrid_samples_follow_the_distribution():
    classes, z, code = hybrid(1)
    many = [jnp.repeat(x, 20_000, axis=0) for x in (classes, z)]
    draw = lambda heat, *x: hybrid_sample(*x, code, jax.random.key(1), temperature=heat)  # noqa: E731
    log_probs = np.asarray(once(lambda *x: hybrid_log_probs(*x, code), classes, z)[0], np.float64)
    for temperature in (1.0, 0.5):
        p = np.exp(log_probs / temperature)
        assert_drawn(once(draw, jnp.float32(temperature), *many), p / p.sum())


def test_memory_does_not_grow_with_the_vocabulary():
    code, n = convolutional_code(455_000, generators=(0o35, 0o23)), 64
    shapes = jax.ShapeDtypeStruct((n, code.length), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
    run = jax.jit(jax.grad(lambda z, labels: code_nll(z, labels, code).sum()))
    # Three numbers for each state at each step; one for each word would be 500 times more.
    used = run.lower(*shapes).compile(ONCE).memory_analysis().temp_size_in_bytes
    assert used < 3 * n * 16 * code.steps * 4 < n * code.vocab * 4 / 400


@pytest.mark.slow
def test_64_bit_inputs_give_the_same_results():
    code = convolutional_code(6, generators=(0o7, 0o5))
    z = np.asarray(logits_of(code))
    labels = np.arange(5)

    def run(z, labels):
        classes = jnp.zeros((5, 3), z.dtype)
        best, drawn = hybrid_top_k(classes, z, code, 3), hybrid_sample(classes, z, code, jax.random.key(0))
        return hybrid_nll(classes, z, labels, code), best, drawn

    expected = once(run, jnp.asarray(z), jnp.asarray(labels, jnp.int32))
    with jax.enable_x64(True):
        actual = once(run, jnp.asarray(z, jnp.float64), jnp.asarray(labels, jnp.int64))
    assert_close(actual, expected)


def test_invalid_arguments_raise():
    for call, expected_message in (
        (lambda: binary_code(0), "vocab 0: expected 1 to"),
        (lambda: binary_code(9, 3), "bits 3: 9 words need at least 4"),
        (lambda: convolutional_code(8, 2), "at least 3"),
        (lambda: binary_code(9, 32), "at most 31"),
        (lambda: convolutional_code(9, generators=()), r"generators \(\)"),
        (lambda: convolutional_code(9, generators=(0o5, 0)), r"generators \(5, 0\), in octal"),
        (lambda: code_nll(jnp.ones((2, 5)), jnp.zeros(2, jnp.int32), binary_code(9)), r"expected \[N, 4\]"),
        (lambda: code_nll(jnp.ones((2, 4)), jnp.zeros(2, jnp.int32), binary_code(9), loss="mean"), "normalized, logis"),
        (lambda: code_log_probs(jnp.ones((2, 5)), binary_code(9)), r"logits \(2, 5\)"),
        (lambda: code_top_k(jnp.ones((2, 4)), binary_code(9), 10), "k 10: expected 1 to 9"),
        (lambda: code_top_k(jnp.ones((2, 4)), binary_code(9), 0), "k 0"),
        (lambda: code_sample(jnp.ones((2, 5)), binary_code(9), jax.random.key(0)), r"logits \(2, 5\)"),
        (lambda: hybrid_top_k(jnp.ones((2, 3)), jnp.ones((2, 4)), binary_code(9), 12), "k 12: expected 1 to 11"),
        (lambda: hybrid_log_probs(jnp.ones((2, 3)), jnp.ones((2, 5)), binary_code(9)), r"logits \(2, 5\)"),
        (lambda: hybrid_log_probs(jnp.ones((2, 0)), jnp.ones((2, 4)), binary_code(9)), "class_logits"),
    ):
        raises(expected_message, call)
