"""Output layers that predict the bits of a word's code, in time and memory of the logarithm of the vocabulary.

A code feeds the bits of a word's id through a shift register; a register of length 1 leaves them as they are (`Code`). The L
logits of a token, taken as independent bits, give a probability to every string of L bits. Most strings are the code of no
word, so that the probabilities of the words must be divided by their sum. `_trellis` is the dynamic program over the states of
the register that computes this sum, the k best words (Viterbi's algorithm) or a sample, depending on how it merges the words
that meet in a state.

The hybrid layer has logits for F frequent words and for "another word", and a code for the other words, with ids from F on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.sampling import sample
from hpnlp.ops.softmax.structured.convolutional_code import Code
from hpnlp.ops.softmax.structured.grouped_softmax import check_k
from hpnlp.types import AnyArray, InputError

LOSSES = ("normalized", "logistic", "squared")
# Score of a path that no word takes. Not -inf, whose differences are NaN in gradients.
NEVER = np.float32(-1e30)


def binary_code(vocab: int, bits: int | None = None) -> Code:
    """The code whose bits are those of the ids themselves.

    In the paper ids are sorted by falling frequency, so that frequent words share their high bits.

    Args:
      vocab: V, the number of words.
      bits: Number of bits of an id; None for ceil(log2 V), which is 0 for one word.

    Returns:
      The code.

    References:
      Oda et al. 2017, "Neural machine translation via binary code prediction",
      section "Representing words by bit arrays".
    """
    return convolutional_code(vocab, bits, generators=(1,))


def convolutional_code(vocab: int, bits: int | None = None, *, generators: tuple[int, ...] = (0o171, 0o133)) -> Code:
    """An error-correcting code.

    The default has rate 1/2 and K = 7, and any two of its words differ in 10 bits or more, so that any 4 wrong bits of a word
    are corrected by `code_top_k`.

    Args:
      vocab: V, the number of words.
      bits: Number of bits of an id; None for ceil(log2 V).
      generators: See `Code`.

    Returns:
      The code.

    References:
      Dietterich and Bakiri 1995, "Solving multiclass learning problems via error-correcting output codes".
      Oda et al. 2017, "Neural machine translation via binary code prediction": with a convolutional code.
    """
    return Code(vocab, max(vocab - 1, 0).bit_length() if bits is None else bits, generators)


@array_op("N", logits="N")
def code_nll(
    logits: Float[Array, "N L"], labels: Int[Array, " N"], code: Code, *, loss: str = "normalized"
) -> Float[Array, " N"]:
    """Losses of tokens from the logits of the bits of their labels' codes.

    Args:
      logits: [N, L] log-odds of each coded bit being 1.
      labels: [N] words, 0 to V - 1; the loss of other labels is NaN.
      code: The code.
      loss: "normalized" is -log p(label), in nats, of a distribution over the words. "logistic" is the sum of the
        cross-entropies of the bits, -log of the probability of the string of the label: larger than "normalized", because
        strings that are no words have probability too. "squared" is the sum of (sigmoid(logit) - bit)^2, no log-probability.
        The paper trains the latter two.

    Returns:
      [N] float32 losses.

    Raises:
      InputError: logits do not have code.length columns, or the loss is none of these.

    Cost:
      O(N L) time and memory; "normalized" that of `code_log_normalizer` too.

    References:
      Oda et al. 2017, "Neural machine translation via binary code prediction", section "Loss functions".
    """
    _check(logits, code, labels)
    if loss not in LOSSES:
        raise InputError(f"loss {loss!r}: expected one of {', '.join(LOSSES)}")
    is_word = (labels >= 0) & (labels < code.vocab)
    bits = code.encode(jnp.where(is_word, labels, 0)) == 1
    z = logits.astype(jnp.float32)
    against = jnp.where(bits, -z, z)
    if loss == "normalized":
        score_0, score_1 = _bit_scores(z)
        losses = _log_sum(z, code) - jnp.where(bits, score_1, score_0).sum(axis=1)
    else:
        losses = (jax.nn.softplus(against) if loss == "logistic" else jax.nn.sigmoid(against) ** 2).sum(axis=1)
    return jnp.where(is_word, losses, jnp.nan)


@array_op("N", logits="N")
def code_log_normalizer(logits: Float[Array, "N L"], code: Code) -> Float[Array, " N"]:
    """Log of the probability that independently drawn bits are the code of a word.

    Its gradient by the logits is the mean of the bits over the words less their mean over all strings.

    Args:
      logits: [N, L] log-odds of each coded bit being 1.
      code: The code.

    Returns:
      [N] float32, at most 0.

    Raises:
      InputError: logits do not have code.length columns.

    Cost:
      O(N L 2^K) time and O(N 2^K) memory, O(N B 2^K) with the gradient; no array of size V.
    """
    _check(logits, code)
    # `_log_sum` is relative to the most probable string; this is minus the log-probability of that.
    best_string_nll = jax.nn.softplus(-jnp.abs(logits.astype(jnp.float32)))
    return _log_sum(logits, code) - best_string_nll.sum(axis=1)


@array_op("N", logits="N")
def code_log_probs(logits: Float[Array, "N L"], code: Code) -> Float[Array, "N V"]:
    """Log-probabilities of all words: log-softmax of logits @ table^T.

    Args:
      logits: [N, L] log-odds of each coded bit being 1.
      code: The code.

    Returns:
      [N, V] float32.

    Cost:
      O(N L V) time, O(N V) memory.
    """
    _check(logits, code)
    words = code.encode(jnp.arange(code.vocab, dtype=jnp.int32)).astype(jnp.float32)
    scores = jnp.matmul(logits.astype(jnp.float32), words.T, precision=lax.Precision.HIGHEST)
    return jax.nn.log_softmax(scores, axis=1)


@array_op("N", logits="N")
def code_top_k(logits: Float[Array, "N L"], code: Code, k: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """The k most probable words of each token, exact; ties may be broken in any way.

    With k = 1 this is Viterbi's soft decoder, restricted to strings that are words.

    Args:
      logits: [N, L] log-odds of each coded bit being 1.
      code: The code.
      k: Number of words.

    Returns:
      (log_probs [N, k] float32, ids [N, k] int32), best first.

    Raises:
      InputError: k is not 1 to code.vocab, or logits do not have code.length columns.

    Cost:
      O(N (L + k B log k) 2^K) time, O(N k 2^K) memory; no array of size V. For dozens of words of a code with many states,
      `code_log_probs` of a few tokens at a time may be faster.

    References:
      Viterbi 1967, "Error bounds for convolutional codes and an asymptotically optimum decoding algorithm".
      Seshadri and Sundberg 1994, "List Viterbi decoding algorithms with applications": k survivors in each state.
    """
    _check(logits, code)
    check_k(k, code.vocab)

    def merge_best(scores: Array, ids: Array, _: PyTree) -> tuple[Array, Array]:
        best, at = lax.top_k(jnp.moveaxis(scores, 0, -1), k)
        return jnp.moveaxis(best, -1, 0), jnp.take_along_axis(ids, jnp.moveaxis(at, -1, 0), axis=0)

    scores, ids = _trellis(code, logits, k, merge_best)
    return (scores - _log_sum(logits, code)[None]).T, ids.T


@array_op("N", logits="N")
def code_sample(
    logits: Float[Array, "N L"], code: Code, rng: Array, *, temperature: float | Float[Array, ""] = 1.0
) -> Int[Array, " N"]:
    """Draws a word for each token from p^(1 / temperature). For top-k sampling, draw among the words of `code_top_k`.

    Args:
      logits: [N, L] log-odds of each coded bit being 1.
      code: The code.
      rng: A PRNG key.
      temperature: Over 0.

    Returns:
      [N] int32 ids.

    Raises:
      InputError: logits do not have code.length columns.

    Cost:
      As `code_log_normalizer`, and B + K random numbers a token.
    """
    _check(logits, code)
    # All states of a step share a random number: the state for which it decides depends on the numbers of later steps only.
    points = jax.random.uniform(rng, (code.steps + 1, logits.shape[0]), jnp.float32)
    return _trellis(code, logits.astype(jnp.float32) / temperature, 1, _merge_draw, points)[1][0]


@array_op("N", class_logits="N")
def hybrid_nll(
    class_logits: Float[Array, "N C"],
    bit_logits: Float[Array, "N L"],
    labels: Int[Array, " N"],
    code: Code,
    *,
    loss: str = "normalized",
) -> Float[Array, " N"]:
    """Losses of a softmax over F frequent words and "another word", with a code for the other words.

    The bits of a token with a frequent label influence nothing, even if they are NaN.

    Args:
      class_logits: [N, F + 1] logits of the F frequent words and, last, of "another word".
      bit_logits: [N, L] log-odds of the coded bits of the other words.
      labels: [N] words, 0 to F + code.vocab - 1; the loss of other labels is NaN.
      code: Code of the other words; word F + i has the code of i.
      loss: The `loss` of `code_nll` for the other words; "normalized" gives -log p(label) in all.

    Returns:
      [N] float32 losses.

    Raises:
      InputError: As `code_nll`, and where class_logits and bit_logits have different numbers of tokens.

    Cost:
      O(N F) beside that of `code_nll`.

    References:
      Oda et al. 2017, "Neural machine translation via binary code prediction", section "Hybrid softmax/binary model".
    """
    log_p = _class_log_probs(class_logits, bit_logits)
    _check(bit_logits, code, labels)
    frequent = class_logits.shape[1] - 1
    is_coded = labels >= frequent
    classes = jnp.clip(labels, 0, frequent)
    class_nll = -jnp.take_along_axis(log_p, classes[:, None], axis=1)[:, 0]
    bit_logits = jnp.where(is_coded[:, None], bit_logits, jnp.zeros((), bit_logits.dtype))
    bit_nll = code_nll(bit_logits, jnp.where(is_coded, labels - frequent, 0), code, loss=loss)
    return jnp.where(labels >= 0, class_nll + jnp.where(is_coded, bit_nll, 0.0), jnp.nan)


@array_op("N", class_logits="N")
def hybrid_log_probs(
    class_logits: Float[Array, "N C"], bit_logits: Float[Array, "N L"], code: Code
) -> Float[Array, "N V"]:
    """Log-probabilities of all V = F + code.vocab words.

    Args:
      class_logits: [N, F + 1] logits of the F frequent words and, last, of "another word".
      bit_logits: [N, L] log-odds of the coded bits of the other words.
      code: Code of the other words.

    Returns:
      [N, V] float32.

    Cost:
      O(N L V) time, O(N V) memory.
    """
    log_p = _class_log_probs(class_logits, bit_logits)
    return jnp.concatenate([log_p[:, :-1], log_p[:, -1:] + code_log_probs(bit_logits, code)], axis=1)


@array_op("N", class_logits="N")
def hybrid_top_k(
    class_logits: Float[Array, "N C"], bit_logits: Float[Array, "N L"], code: Code, k: int
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """The k most probable of all words, exact; ties may be broken in any way.

    Args:
      class_logits: [N, F + 1] logits of the F frequent words and, last, of "another word".
      bit_logits: [N, L] log-odds of the coded bits of the other words.
      code: Code of the other words.
      k: Number of words.

    Returns:
      (log_probs [N, k] float32, ids [N, k] int32), best first.

    Cost:
      O(N F) beside that of `code_top_k`.
    """
    log_p = _class_log_probs(class_logits, bit_logits)
    frequent = class_logits.shape[1] - 1
    check_k(k, frequent + code.vocab)
    coded_log_p, coded_ids = code_top_k(bit_logits, code, min(k, code.vocab))
    scores, at = lax.top_k(jnp.concatenate([log_p[:, :-1], log_p[:, -1:] + coded_log_p], axis=1), k)
    frequent_ids = jnp.broadcast_to(jnp.arange(frequent, dtype=jnp.int32)[None], (coded_ids.shape[0], frequent))
    return scores, jnp.take_along_axis(jnp.concatenate([frequent_ids, frequent + coded_ids], axis=1), at, axis=1)


@array_op("N", class_logits="N")
def hybrid_sample(
    class_logits: Float[Array, "N C"],
    bit_logits: Float[Array, "N L"],
    code: Code,
    rng: Array,
    *,
    temperature: float | Float[Array, ""] = 1.0,
) -> Int[Array, " N"]:
    """Draws a word for each token from p^(1 / temperature) of all words.

    Args:
      class_logits: [N, F + 1] logits of the F frequent words and, last, of "another word".
      bit_logits: [N, L] log-odds of the coded bits of the other words.
      code: Code of the other words.
      rng: A PRNG key.
      temperature: Over 0.

    Returns:
      [N] int32 ids.

    Cost:
      O(N F) beside that of `code_sample`; a temperature other than 1 takes `code_log_normalizer` twice more.
    """
    log_p = _class_log_probs(class_logits, bit_logits)
    frequent = class_logits.shape[1] - 1
    z = bit_logits.astype(jnp.float32)
    classes = log_p / temperature
    if not isinstance(temperature, int | float) or temperature != 1:
        # All other words together have the weight p(another)^(1 / temperature) * sum of p(word | another)^(1 / temperature).
        classes = classes.at[:, -1].add(_log_sum(z / temperature, code) - _log_sum(z, code) / temperature)
    class_key, bit_key = jax.random.split(rng)
    drawn = sample(classes, class_key).astype(jnp.int32)
    return jnp.where(drawn < frequent, drawn, frequent + code_sample(z, code, bit_key, temperature=temperature))


def _class_log_probs(class_logits: Array, bit_logits: Array) -> Array:
    if class_logits.ndim != 2 or class_logits.shape[1] < 1 or class_logits.shape[0] != bit_logits.shape[0]:
        shapes = f"class_logits {class_logits.shape}, bit_logits {bit_logits.shape}"
        raise InputError(f"{shapes}: expected [N, F + 1] and [N, {bit_logits.shape[-1]}], of the same tokens")
    return jax.nn.log_softmax(class_logits.astype(jnp.float32), axis=1)


def _bit_scores(z: Array) -> tuple[Array, Array]:
    """Scores of a bit being 0 and being 1, from its logit z: 0 for the more probable value, -|z| for the other.

    They are the log-probabilities up to a constant that all words share. The score of a probable word is small, so that
    differences keep their digits. At z = 0 the slopes of the two differ by 1, as they do elsewhere.
    """
    return jnp.where(z > 0, -z, 0.0), jnp.where(z > 0, 0.0, z)


def _log_sum(logits: Array, code: Code) -> Float[Array, " N"]:
    """Log of the sum over words of exp(score)."""
    return _trellis(code, logits, 1, _merge_sum)[0][0]


Merge = Callable[[Array, Array, Any], tuple[Array, Array]]


def _trellis(code: Code, logits: Array, k: int, merge: Merge, points: PyTree = None) -> tuple[Array, Array]:
    """(scores [k, N], ids [k, N]) that `merge` leaves of all words; the score of a word is the sum of `_bit_scores`.

    A step appends a bit to the ids, from the highest on, and merges the words whose register agrees in its last K - 1 bits,
    the state. Ids over vocab - 1 must not arise. The prefix of the last word, vocab - 1, is therefore a path of its own, the
    edge, whose scores are computed beforehand. Words on the other paths have a lower prefix and take any bit. Where the last
    word has a 1, words that take a 0 there leave the edge, and join the state of their register.

    merge: (scores [C, S, N], ids [C, S, N], random numbers of the step [N]) -> (scores [k, S, N], ids [k, S, N]) of S states.
    points: [steps + 1, N] random numbers, or None.

    Tokens are the last axis, so that all other work is on vectors of them.
    """
    n, states, rate = logits.shape[0], 1 << (code.constraint - 1), len(code.generators)
    z = logits.astype(jnp.float32).T.reshape(code.steps, rate, n)
    score_0, score_1 = _bit_scores(z)
    registers = np.arange(2 * states)[:, None]  # the state, and above it the new bit
    outputs = np.bitwise_count(registers & np.array([code.generators])) % 2 == 1

    edge, leaving, prefixes = _edge(code)
    off_edge = edge % states  # the register with 0 as the new bit
    edge_scores = jnp.cumsum(_output_scores(outputs[edge], score_1, score_0), axis=0)
    edge_scores = jnp.concatenate([jnp.zeros((1, n), jnp.float32), edge_scores])
    left = edge_scores[:-1] + _output_scores(outputs[off_edge], score_1, score_0)
    leave = jnp.where(leaving[:, None], left, NEVER)
    # After the bits of the id, the new bit is 0 and the id stays.
    in_id = np.arange(code.steps) < code.bits
    penalty_1, factor = np.where(in_id, np.float32(0), NEVER), np.where(in_id, 2, 1).astype(np.int32)

    def step(carry: PyTree, x: PyTree) -> tuple[Any, None]:
        scores, ids = carry
        score_0, score_1, penalty_1, factor, leave, joined, prefix, points = x
        scores = jnp.concatenate([scores, scores + penalty_1], axis=1)
        scores = scores + _output_scores(outputs, score_1[None], score_0[None])[None]
        ids = jnp.concatenate([factor * ids, factor * ids + 1], axis=1)
        is_joined = jnp.arange(states, dtype=jnp.int32) == joined
        new = jnp.where(is_joined[:, None], leave[None], NEVER)[None]
        # The oldest bit leaves the register: two registers become one state.
        scores = jnp.concatenate([scores[:, ::2], scores[:, 1::2], new])
        ids = jnp.concatenate([ids[:, ::2], ids[:, 1::2], jnp.full_like(new, prefix, jnp.int32)])
        return merge(scores, ids, points), None

    start = jnp.full((k, states, n), NEVER), jnp.zeros((k, states, n), jnp.int32)
    start = tuple(vary_alike(x, z)[0] for x in start)
    step_points = None if points is None else points[:-1]
    xs = (score_0, score_1, penalty_1, factor, leave, (off_edge // 2).astype(np.int32), prefixes, step_points)
    # The derivative computes the scores of a step again, which are many times larger than the carry.
    scores, ids = lax.scan(jax.checkpoint(step, prevent_cse=False), start, xs)[0]
    scores = jnp.concatenate([scores[:, :1], edge_scores[-1:, None]])
    ids = jnp.concatenate([ids[:, :1], jnp.full_like(ids[:1, :1], code.vocab - 1)])
    scores, ids = merge(scores, ids, None if points is None else points[-1])
    return scores[:, 0], ids[:, 0]


def _output_scores(outputs: np.ndarray, score_1: Array, score_0: Array) -> Array:
    """Scores [A, N] of the output bits [A, rate], from the scores [A or 1, rate, N] of the bits being 1 and 0."""
    return jnp.where(outputs[..., None], score_1, score_0).sum(axis=1)


def _edge(code: Code) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """At each step: the register of the last word, whether words may leave the edge, and the id so far of those that do."""
    shifts = np.maximum(np.arange(code.bits - 1, -code.constraint, -1), 0)
    in_id = np.arange(code.steps) < code.bits
    prefixes = (code.vocab - 1) >> shifts
    bits = np.where(in_id, prefixes % 2, 0)
    padded = np.concatenate([np.zeros(code.constraint - 1, np.int64), bits])
    edge = sum(padded[i : i + code.steps] << i for i in range(code.constraint))
    return np.asarray(edge), bits == 1, (prefixes - 1).astype(np.int32)


def _merge_sum(scores: Array, ids: Array, _: PyTree) -> tuple[Array, Array]:
    """The log-sum-exp of the scores; the ids are of no use."""
    return jax.nn.logsumexp(scores, axis=0, keepdims=True), ids[:1]


def _merge_draw(scores: Array, ids: Array, points: Array) -> tuple[Array, Array]:
    """The log-sum-exp of the scores, and an id that is drawn in proportion to the exponentials of the scores."""
    top = scores.max(axis=0, keepdims=True)
    mass = jnp.exp(scores - top)
    cumulative = jnp.cumsum(mass, axis=0)
    drawn = jnp.argmax((cumulative > points[None, None] * cumulative[-1:]) & (mass > 0), axis=0, keepdims=True)
    return top + jnp.log(cumulative[-1:]), jnp.take_along_axis(ids, drawn, axis=0)


def _check(logits: AnyArray, code: Code, labels: AnyArray | None = None) -> None:
    if logits.ndim != 2 or logits.shape[1] != code.length:
        raise InputError(f"logits {logits.shape}: expected [N, {code.length}], a column for each coded bit")
    if labels is not None and (labels.shape != logits.shape[:1] or not jnp.issubdtype(labels.dtype, jnp.integer)):
        raise InputError(f"labels {labels.dtype} {labels.shape}: expected integers of shape {logits.shape[:1]}")
