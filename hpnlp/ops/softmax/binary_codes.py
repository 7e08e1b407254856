"""Words predicted by the bits of a code, in time and memory of the logarithm of the vocabulary.

A code feeds the bits of a word's id through a shift register; one of length 1 leaves them as they are (`Code`). A token's L
logits, taken as independent bits, give a probability to every string of L bits, and most strings are no word's: what is
left to the words must be divided by its sum before it is a distribution. `_fold` goes over the ids bit by bit, and keeps of
the words so far what a merge makes of them: the sum gives the distribution, the k best decode it, one drawn samples it.

The hybrid has logits for F frequent words and for "another", and a code for the others, ids F and on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from hpnlp.ops.array_op import array_op
from hpnlp.ops.custom_vjp import vary_alike
from hpnlp.ops.sampling import sample
from hpnlp.ops.softmax.grouped_softmax import check_k
from hpnlp.types import InputError

LOSSES = ("normalized", "logistic", "squared")
# Scores of what is no word. Not -inf, whose differences are NaN in gradients.
NEVER = np.float32(-1e30)


def _static() -> Any:
    return dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Code:
    """A convolutional code of the ids 0 to vocab - 1: hashable, without arrays.

    bits: B, in which an id is written, the highest first. generators: which bits of the shift register each output sums
    modulo 2, the newest the highest; the longest generator is K bits long. K - 1 zeros after the id empty the register, so
    a word has L = len(generators) (B + K - 1) coded bits, those of one step side by side.

    Raises InputError on an empty vocabulary, on too few bits, and on generators that are no positive numbers.
    """

    vocab: int = _static()
    bits: int = _static()
    generators: tuple[int, ...] = _static()

    def __post_init__(self) -> None:
        if not 1 <= self.vocab < 1 << 31:
            raise InputError(f"vocab {self.vocab}: expected 1 to {(1 << 31) - 1} words")
        least = (self.vocab - 1).bit_length()
        if not least <= self.bits <= 31:
            raise InputError(f"bits {self.bits}: {self.vocab} words need at least {least}, and int32 ids at most 31")
        if not self.generators or not all(0 < g < 1 << 16 for g in self.generators):
            told = ", ".join(f"{g:o}" for g in self.generators)
            raise InputError(f"generators ({told}), in octal: expected one or more, each from 1 to 177777")

    @property
    def constraint(self) -> int:
        """K, the length of the shift register."""
        return max(self.generators).bit_length()

    @property
    def steps(self) -> int:
        return self.bits + self.constraint - 1

    @property
    def length(self) -> int:
        """L, the coded bits of a word."""
        return len(self.generators) * self.steps

    def encode(self, ids: Any) -> Any:
        """The words' coded bits [N, L], uint8, 0 or 1, of ids [N]; of numpy ids in numpy. Cost: O(N L) time and memory."""
        xp = np if isinstance(ids, np.ndarray) else jnp
        size, last = self.constraint, np.arange(self.bits - 1, -self.constraint, -1)
        # The register at each step is a window of the id's bits; the newest is the window's lowest.
        right, left = (np.maximum(x, 0).astype(np.uint32)[None] for x in (last, -last))
        windows = ((ids.astype(np.uint32)[:, None] >> right) << left) & np.uint32((1 << size) - 1)
        taps = (np.uint32(int(f"{g:0{size}b}"[::-1], 2)) for g in self.generators)
        coded = [xp.bitwise_count(windows & tap).astype(np.uint8) & np.uint8(1) for tap in taps]
        return xp.stack(coded, axis=-1).reshape(ids.shape[0], self.length)

    def table(self) -> UInt8[np.ndarray, "V L"]:
        """All words' coded bits. Cost: O(V L); less than a second for half a million words."""
        return self.encode(np.arange(self.vocab))


def binary_code(vocab: int, bits: int | None = None) -> Code:
    """The ids themselves, in ceil(log2 vocab) bits or more; 0 for one word.

    The source gives words ids by falling frequency, so that frequent words share their high bits. Source: Oda et al. 2017,
    "Neural machine translation via binary code prediction", representing words by bit arrays.
    """
    return convolutional_code(vocab, bits, generators=(1,))


def convolutional_code(vocab: int, bits: int | None = None, *, generators: tuple[int, ...] = (0o171, 0o133)) -> Code:
    """A code that corrects errors; by default of rate 1/2 and K = 7, any two of whose words differ in 10 bits or more.

    Any 4 wrong bits of a word are then corrected (`code_top_k`). Source: Dietterich and Bakiri 1995, "Solving multiclass
    learning problems via error-correcting output codes"; with a convolutional code Oda et al. 2017, error-correcting codes.
    """
    return Code(vocab, max(vocab - 1, 0).bit_length() if bits is None else bits, generators)


@array_op("N", logits="N")
def code_nll(
    logits: Float[Array, "N L"], labels: Int[Array, " N"], code: Code, *, loss: str = "normalized"
) -> Float[Array, " N"]:
    """What each token's bits lose against its label's, float32. Labels are in [0, code.vocab); others give NaN.

    logits: log-odds of each coded bit being 1.
    loss: "normalized" is -log p(label), in nats, of a distribution over the words: the one to report, and to train.
      "logistic" is the sum of the bits' cross-entropies, -log of the probability of the label's bits: larger by what falls
      to strings that are no words. "squared" is the sum of (sigmoid(logit) - bit)^2, no log-probability at all.
      The last two are what the source trains.

    Raises InputError on logits that do not have code.length columns, and on another loss.
    Cost: O(N L) time and memory; "normalized" that of `code_log_normalizer` too.
    Source: Oda et al. 2017, loss functions.
    """
    _check(logits, code, labels)
    if loss not in LOSSES:
        raise InputError(f"loss {loss!r}: expected one of {', '.join(LOSSES)}")
    known = (labels >= 0) & (labels < code.vocab)
    ones = code.encode(jnp.where(known, labels, 0)) == 1
    z = logits.astype(jnp.float32)
    wrong = jnp.where(ones, -z, z)
    if loss == "normalized":
        zero, one = _scores(z)
        found = _log_sum(z, code) - jnp.where(ones, one, zero).sum(axis=1)
    else:
        found = (jax.nn.softplus(wrong) if loss == "logistic" else jax.nn.sigmoid(wrong) ** 2).sum(axis=1)
    return jnp.where(known, found, jnp.nan)


@array_op("N", logits="N")
def code_log_normalizer(logits: Float[Array, "N L"], code: Code) -> Float[Array, " N"]:
    """The log of the probability that the bits, drawn independently, are a word's; at most 0, float32.

    Its gradient with respect to the logits is the bits' mean over the words less their mean over all strings.
    Raises InputError on logits that do not have code.length columns.
    Cost: O(N L 2^K) time, O(N 2^K) memory, O(N B 2^K) with the gradient; no table, and nothing of the size of V.
    """
    _check(logits, code)
    doubt = jax.nn.softplus(-jnp.abs(logits.astype(jnp.float32)))  # of the strings' most probable
    return _log_sum(logits, code) - doubt.sum(axis=1)


@array_op("N", logits="N")
def code_log_probs(logits: Float[Array, "N L"], code: Code) -> Float[Array, "N V"]:
    """log p of all words, float32: softmax of logits @ table^T. Cost: O(N L V) time, O(N V) memory."""
    _check(logits, code)
    words = code.encode(jnp.arange(code.vocab, dtype=jnp.int32)).astype(jnp.float32)
    scores = jnp.matmul(logits.astype(jnp.float32), words.T, precision=lax.Precision.HIGHEST)
    return jax.nn.log_softmax(scores, axis=1)


@array_op("N", logits="N")
def code_top_k(logits: Float[Array, "N L"], code: Code, k: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """(log p, ids) of the k most probable words, best first; exact, float32 and int32. Equally probable ones in any order.

    With k = 1 this is Viterbi's soft decoder over the strings that are words; of a code with 2^B words, over all.
    Raises InputError where k is not 1 to code.vocab, and on logits that do not have code.length columns.
    Cost: O(N (L + k B log k) 2^K) time, O(N k 2^K) memory; nothing of the size of V. For dozens of words from a code of many
    states, `code_log_probs` of some tokens at a time may be faster.
    Source: Viterbi 1967; lists of k survivors a state as in Seshadri and Sundberg 1994, parallel list Viterbi decoding.
    """
    _check(logits, code)
    check_k(k, code.vocab)

    def best(scores: Array, ids: Array, _: Any) -> tuple[Array, Array]:
        found, at = lax.top_k(jnp.moveaxis(scores, 0, -1), k)
        return jnp.moveaxis(found, -1, 0), jnp.take_along_axis(ids, jnp.moveaxis(at, -1, 0), axis=0)

    scores, ids = _fold(code, logits, k, best)
    return (scores - _log_sum(logits, code)[None]).T, ids.T


@array_op("N", logits="N")
def code_sample(
    logits: Float[Array, "N L"], code: Code, rng: Array, *, temperature: float | Float[Array, ""] = 1.0
) -> Int[Array, " N"]:
    """One id a token, drawn from p^(1 / temperature); int32. For top-k sampling draw among `code_top_k`.

    temperature: over 0. Raises InputError on logits that do not have code.length columns.
    Cost: as `code_log_normalizer`, and B + K random numbers a token.
    """
    _check(logits, code)
    # All states of a step share a number: which state it is asked for depends on later steps' numbers only.
    points = jax.random.uniform(rng, (code.steps + 1, logits.shape[0]), jnp.float32)
    return _fold(code, logits.astype(jnp.float32) / temperature, 1, _draw, points)[1][0]


@array_op("N", class_logits="N")
def hybrid_nll(
    class_logits: Float[Array, "N C"],
    bit_logits: Float[Array, "N L"],
    labels: Int[Array, " N"],
    code: Code,
    *,
    loss: str = "normalized",
) -> Float[Array, " N"]:
    """What a softmax over F frequent words and "another", the last, and a code for the others lose; float32.

    code: of the V - F other words, whose ids begin at F. loss: as `code_nll`'s, for the others; "normalized" makes the whole
    -log p(label). The bits of a token with a frequent label count for nothing, NaN or not. Labels are in [0, F + code.vocab);
    others give NaN. Raises as `code_nll`. Cost: O(N F) beside the code's.
    Source: Oda et al. 2017, hybrid softmax/binary model.
    """
    log_p = _class_log_probs(class_logits, bit_logits)
    _check(bit_logits, code, labels)
    frequent = class_logits.shape[1] - 1
    rare = labels >= frequent
    classes = jnp.clip(labels, 0, frequent)
    first = -jnp.take_along_axis(log_p, classes[:, None], axis=1)[:, 0]
    bit_logits = jnp.where(rare[:, None], bit_logits, jnp.zeros((), bit_logits.dtype))
    second = code_nll(bit_logits, jnp.where(rare, labels - frequent, 0), code, loss=loss)
    return jnp.where(labels >= 0, first + jnp.where(rare, second, 0.0), jnp.nan)


@array_op("N", class_logits="N")
def hybrid_log_probs(
    class_logits: Float[Array, "N C"], bit_logits: Float[Array, "N L"], code: Code
) -> Float[Array, "N V"]:
    """log p of all V = F + code.vocab words, float32. Cost: O(N L V) time, O(N V) memory."""
    log_p = _class_log_probs(class_logits, bit_logits)
    return jnp.concatenate([log_p[:, :-1], log_p[:, -1:] + code_log_probs(bit_logits, code)], axis=1)


@array_op("N", class_logits="N")
def hybrid_top_k(
    class_logits: Float[Array, "N C"], bit_logits: Float[Array, "N L"], code: Code, k: int
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """(log p, ids) of the k most probable of all words, best first, exact. Cost: O(N F) beside `code_top_k`'s."""
    log_p = _class_log_probs(class_logits, bit_logits)
    frequent = class_logits.shape[1] - 1
    check_k(k, frequent + code.vocab)
    rare, ids = code_top_k(bit_logits, code, min(k, code.vocab))
    scores, at = lax.top_k(jnp.concatenate([log_p[:, :-1], log_p[:, -1:] + rare], axis=1), k)
    first = jnp.broadcast_to(jnp.arange(frequent, dtype=jnp.int32)[None], (ids.shape[0], frequent))
    return scores, jnp.take_along_axis(jnp.concatenate([first, frequent + ids], axis=1), at, axis=1)


@array_op("N", class_logits="N")
def hybrid_sample(
    class_logits: Float[Array, "N C"],
    bit_logits: Float[Array, "N L"],
    code: Code,
    rng: Array,
    *,
    temperature: float | Float[Array, ""] = 1.0,
) -> Int[Array, " N"]:
    """One id a token, drawn from p^(1 / temperature) of all words; int32. temperature: over 0; other than 1 it costs two sums
    over words more. Cost: O(N F) beside `code_sample`'s."""
    log_p = _class_log_probs(class_logits, bit_logits)
    frequent = class_logits.shape[1] - 1
    z = bit_logits.astype(jnp.float32)
    classes = log_p / temperature
    if not isinstance(temperature, int | float) or temperature != 1:
        # The others together weigh p(another)^(1 / temperature) times the sum of their own p^(1 / temperature).
        classes = classes.at[:, -1].add(_log_sum(z / temperature, code) - _log_sum(z, code) / temperature)
    first, second = jax.random.split(rng)
    drawn = sample(classes, first).astype(jnp.int32)
    return jnp.where(drawn < frequent, drawn, frequent + code_sample(z, code, second, temperature=temperature))


def _class_log_probs(class_logits: Array, bit_logits: Array) -> Array:
    if class_logits.ndim != 2 or class_logits.shape[1] < 1 or class_logits.shape[0] != bit_logits.shape[0]:
        told = f"class_logits {class_logits.shape}, bit_logits {bit_logits.shape}"
        raise InputError(f"{told}: expected [N, F + 1] and [N, {bit_logits.shape[-1]}], the same tokens")
    return jax.nn.log_softmax(class_logits.astype(jnp.float32), axis=1)


def _scores(z: Array) -> tuple[Array, Array]:
    """What a bit of 0 and one of 1 count for: 0 as the logit's sign says, -|logit| against it.

    These are log-probabilities up to a number that all words share, and small where a word is likely, so that differences
    keep their digits. Slopes differ by 1 at a logit of 0 as well.
    """
    return jnp.where(z > 0, -z, 0.0), jnp.where(z > 0, 0.0, z)


def _log_sum(logits: Array, code: Code) -> Float[Array, " N"]:
    """The log of the sum over words of exp(score)."""
    return _fold(code, logits, 1, _sum)[0][0]


Merge = Callable[[Array, Array, Any], tuple[Array, Array]]


def _fold(code: Code, logits: Array, k: int, merge: Merge, points: Any = None) -> tuple[Array, Array]:
    """(scores, ids) [k, N] that `merge` leaves of all words; a word's score is the sum of its bits' `_scores`.

    merge: (scores [C, S, N], ids [C, S, N], the step's points) -> scores and ids [k, S, N]; S is the number of groups.
    points: [steps + 1, N] for the merges, or None.

    Words are grouped by the register's last K - 1 bits, the state, and ids are made from the highest bit on. Those that
    begin as the last word, vocab - 1, does are one path, the edge, whose scores are known beforehand; any others that
    began lower may go on as they like. Where the last word has a 1, what takes a 0 leaves the edge and joins the others.
    Tokens come last, so that all else is done to vectors of them.
    """
    n, states, rate = logits.shape[0], 1 << (code.constraint - 1), len(code.generators)
    z = logits.astype(jnp.float32).T.reshape(code.steps, rate, n)
    zero, one = _scores(z)
    registers = np.arange(2 * states)[:, None]  # the state, and above it the new bit
    outputs = np.bitwise_count(registers & np.array([code.generators])) % 2 == 1

    def scored(bits: np.ndarray, one: Array, zero: Array) -> Array:
        """The scores [A, N] of outputs [A, rate]."""
        return jnp.where(bits[..., None], one, zero).sum(axis=1)

    edge, leaving, prefixes = _edge(code)
    other = edge % states  # what takes a 0 instead
    reached = jnp.cumsum(scored(outputs[edge], one, zero), axis=0)
    reached = jnp.concatenate([jnp.zeros((1, n), jnp.float32), reached])
    leave = jnp.where(leaving[:, None], reached[:-1] + scored(outputs[other], one, zero), NEVER)
    # After the id's bits none is 1, and the ids are done.
    message = np.arange(code.steps) < code.bits
    bar, factor = np.where(message, np.float32(0), NEVER), np.where(message, 2, 1).astype(np.int32)

    def step(carry: Any, x: Any) -> tuple[Any, None]:
        scores, ids = carry
        zero, one, bar, factor, leave, joined, prefix, points = x
        scores = jnp.concatenate([scores, scores + bar], axis=1) + scored(outputs, one[None], zero[None])[None]
        ids = jnp.concatenate([factor * ids, factor * ids + 1], axis=1)
        here = jnp.arange(states, dtype=jnp.int32) == joined
        new = jnp.where(here[:, None], leave[None], NEVER)[None]
        # The register's oldest bit falls out: two registers make one state.
        scores = jnp.concatenate([scores[:, ::2], scores[:, 1::2], new])
        ids = jnp.concatenate([ids[:, ::2], ids[:, 1::2], jnp.full_like(new, prefix, jnp.int32)])
        return merge(scores, ids, points), None

    start = jnp.full((k, states, n), NEVER), jnp.zeros((k, states, n), jnp.int32)
    start = tuple(vary_alike(x, z)[0] for x in start)
    at_steps = None if points is None else points[:-1]
    xs = (zero, one, bar, factor, leave, (other // 2).astype(np.int32), prefixes, at_steps)
    # Differentiating makes a step's scores again: they are many times what a step carries on.
    scores, ids = lax.scan(jax.checkpoint(step, prevent_cse=False), start, xs)[0]
    scores = jnp.concatenate([scores[:, :1], reached[-1:, None]])
    ids = jnp.concatenate([ids[:, :1], jnp.full_like(ids[:1, :1], code.vocab - 1)])
    scores, ids = merge(scores, ids, None if points is None else points[-1])
    return scores[:, 0], ids[:, 0]


def _edge(code: Code) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """At each step: the last word's register, whether a word may leave the edge, and the id so far of one that does."""
    shifts = np.maximum(np.arange(code.bits - 1, -code.constraint, -1), 0)
    message = np.arange(code.steps) < code.bits
    prefixes = (code.vocab - 1) >> shifts
    bits = np.where(message, prefixes % 2, 0)
    padded = np.concatenate([np.zeros(code.constraint - 1, np.int64), bits])
    edge = sum(padded[i : i + code.steps] << i for i in range(code.constraint))
    return np.asarray(edge), bits == 1, (prefixes - 1).astype(np.int32)


def _sum(scores: Array, ids: Array, _: Any) -> tuple[Array, Array]:
    return jax.nn.logsumexp(scores, axis=0, keepdims=True), ids[:1]


def _draw(scores: Array, ids: Array, points: Array) -> tuple[Array, Array]:
    """The sum, and one of the ids in proportion to the exponentials of the scores."""
    top = scores.max(axis=0, keepdims=True)
    mass = jnp.exp(scores - top)
    cumulative = jnp.cumsum(mass, axis=0)
    drawn = jnp.argmax((cumulative > points[None, None] * cumulative[-1:]) & (mass > 0), axis=0, keepdims=True)
    return top + jnp.log(cumulative[-1:]), jnp.take_along_axis(ids, drawn, axis=0)


def _check(logits: Any, code: Code, labels: Any = None) -> None:
    if logits.ndim != 2 or logits.shape[1] != code.length:
        raise InputError(f"logits {logits.shape}: expected [N, {code.length}], a column for each coded bit")
    if labels is not None and (labels.shape != logits.shape[:1] or not jnp.issubdtype(labels.dtype, jnp.integer)):
        raise InputError(f"labels {labels.dtype} {labels.shape}: expected integers of shape {logits.shape[:1]}")
