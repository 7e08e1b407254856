"""Decoding: one pass over the prompts (prefill), then one token at a time with a KV cache."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from hpnlp import measure
from hpnlp.models.decoding.decoding_weights import for_decoding
from hpnlp.models.variables import collections
from hpnlp.nn.attention import Memory
from hpnlp.ops.sampling import pick
from hpnlp.parallel.memory import host_offload
from hpnlp.types import InputError, Model, Tokenizer

# Tokens per call of the decoding program: many enough to keep the host out of the inner loop, few enough to stream text.
CHUNK = 16
MAX_TOKENS = 1 << 30  # positions are int32
MAX_SEED = (1 << 32) - 1  # JAX ignores higher bits of a seed
BUCKET = 64  # prompts are padded to a multiple of this, so that prompts of similar length share a program

# Sampling of `sample_text`.
SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_P = 0.95


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _DecodeState:
    """Arrays, or their shapes.

    h: `[B, D]`, hidden state of each sequence's last token. caches: of all its tokens. positions: int32 `[B]`, of the next
    token. ended: bool `[B]`, whether eos was drawn.
    """

    h: Any
    caches: Any
    positions: Any
    ended: Any


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Rule by which each id is drawn from the probabilities of a model.

    Attributes:
      temperature: Temperature of the softmax; 0 takes the most probable id.
      top_k: Number of most probable ids to draw from, 0 for all.
      top_p: Draw from the most probable ids that together reach this probability.
      seed: Seed of the samples, 32 bits.
      allowed: bool `[V']`, the ids that may be drawn in addition to eos; None for all. Ids from V' on may not be drawn.
    """

    temperature: float | int = 1.0
    top_k: int = 0
    top_p: float | int = 1.0
    seed: int = 0
    allowed: np.ndarray | None = None

    def check(self, model: Model) -> None:
        """Raises InputError for a number out of range, or a temperature for a model without probabilities."""
        if not 0 <= self.seed <= MAX_SEED:
            raise InputError(f"seed={self.seed}: expected 0 to {MAX_SEED}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(
                f"temperature={self.temperature}: expected 0 (the most probable token) or a positive number, as 0.8"
            )
        if self.temperature > 0 and not model.is_normalized:
            raise InputError(
                f"temperature={self.temperature}: model.output={model.config.output!r} has no probabilities to draw from; "
                "set temperature to 0, for the best token"
            )
        if self.top_k < 0:
            raise InputError(f"top_k={self.top_k}: expected the number of tokens to draw from, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p}: expected a probability in (0, 1]; 1 draws from all tokens")

    def drawable_ids(self, vocab: int, eos_ids: Sequence[int]) -> np.ndarray:
        """The ids that may be drawn, bool `[V]`. Raises InputError if there is none."""
        allowed, drawable = self.allowed, np.zeros(vocab, bool)
        drawable[: vocab if allowed is None else len(allowed)] = True if allowed is None else allowed[:vocab]
        drawable[[*eos_ids]] = True
        if not drawable.any():
            raise InputError("allowed: no id may be drawn: allow at least one")
        return drawable

    def pick_options(self, vocab: int) -> dict[str, jax.Array]:
        """Options of `pick` that have an effect.

        Options without effect are left out, and cost nothing; the values of the others may change without a new program.
        """
        options: dict[str, jax.Array] = {}
        if self.temperature > 0:
            options["temperature"] = jnp.float32(self.temperature)
            if 0 < self.top_k < vocab:
                options["top_k"] = jnp.int32(self.top_k)
            if self.top_p < 1:
                options["top_p"] = jnp.float32(self.top_p)
        return options


GREEDY = Sampling(temperature=0.0)


class Generation:
    """Continuations of prompts.

    Iterating, once, yields int32 arrays `[B, n]` of n <= CHUNK new ids per sequence, as they are decoded. A sequence ends with
    eos and is padded after it. Iteration ends when all sequences have ended, or after the requested number of tokens.

    Attributes:
      programs: The compiled "prefill" and "decode".
      seconds: Time spent so far by "compile" (including tracing), "prefill" and "decode".
      has_overflowed: Whether a hidden state of float16 has been NaN or infinite so far, after which tokens mean nothing.
    """

    def __init__(
        self,
        model: Model,
        params: PyTree,
        prompts: Sequence[np.ndarray | Sequence[int]],
        *,
        tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
        eos_id: int | Sequence[int] | None = None,
        pad_id: int = 0,
        memory: Memory | None = None,
    ) -> None:
        """Checks the arguments and compiles the programs; computes nothing else.

        Args:
          model: The model.
          params: Weights of the model (`models.variables`), on any layout, in the device's or the host's memory.
          prompts: Ids of each prompt, at least one, of any lengths.
          tokens: Number of new tokens per sequence.
          sampling: How ids are drawn. The tokens of a sequence depend on the seed, the index of the sequence and its prompt,
              and not on the other prompts.
          eos_id: Id or ids that end a sequence, None for sequences without end.
          pad_id: Id after the end.
          memory: Memory of a decoder, one for each prompt, with segment id 1; None for a model without a memory.

        Raises:
          InputError: Invalid arguments, or caches that do not fit in memory.

        Cost: one pass over the prompts, padded to a common length, then one pass over a token and one read of the caches per
        new token. Programs are cached for prompts of similar length.
        """
        arrays = [np.asarray(prompt, np.int32) for prompt in prompts]
        check_decodes(model, memory, len(arrays))
        _check_tokens(tokens)
        sampling.check(model)
        _check_prompts(model, arrays, tokens)
        eos_ids = end_ids(eos_id, model.config.vocab)
        drawable = sampling.drawable_ids(model.config.vocab, eos_ids)
        padded, lengths = _pad(model, arrays, pad_id)
        draw: dict[str, Any] = {"key": jax.random.key(sampling.seed), "allowed": jnp.asarray(drawable)}
        draw |= sampling.pick_options(model.config.vocab)
        self._eos, self._tokens = np.array(eos_ids, np.int32), tokens
        ids = {"eos": jnp.asarray(self._eos), "pad": jnp.int32(pad_id)}

        start = time.perf_counter()
        params = host_offload.to_device(params)
        sharding = _replicated(params)
        params = jax.jit(for_decoding, static_argnums=(1, 2))(params, model.config, len(padded))
        self._prefill_args, self._decode_args = (params, padded, lengths, memory), (params, draw, ids)
        prefill, decode = _jitted(sharding)
        static = {"model": model, "capacity": padded.shape[1] + _round_up(tokens, CHUNK)}
        state = prefill.eval_shape(*self._prefill_args, **static)
        _check_memory(state, len(padded), padded.shape[1], tokens)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)
        self.programs = {
            "prefill": prefill.lower(*self._prefill_args, **static).compile(),
            "decode": decode.lower(state, *self._decode_args, model=model).compile(),
        }
        self.seconds = {"compile": time.perf_counter() - start, "prefill": 0.0, "decode": 0.0}
        self.has_overflowed = False

    def __iter__(self) -> Iterator[np.ndarray]:
        with self._timed("prefill"):
            state = jax.block_until_ready(self.programs["prefill"](*self._prefill_args))
        self.has_overflowed = _has_overflowed(state)
        ended = np.zeros(len(self._prefill_args[1]), bool)
        for done in range(0, self._tokens, CHUNK):
            with self._timed("decode"):
                state, chunk = self.programs["decode"](state, *self._decode_args)
                ids = np.asarray(chunk)[:, : self._tokens - done]
            self.has_overflowed = self.has_overflowed or _has_overflowed(state)
            yield ids
            ended |= np.isin(ids, self._eos).any(axis=1)
            if ended.all():
                return

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start


def _has_overflowed(state: _DecodeState) -> bool:
    """Whether a hidden state of float16 is not finite; False for other dtypes, whose range is that of float32."""
    halves = [h for h in jax.tree.leaves(state.h) if h.dtype == jnp.float16]
    return any(not np.isfinite(np.asarray(h)).all() for h in halves)


def end_ids(eos_id: int | Sequence[int] | None, vocab: int | None = None) -> list[int]:
    """The ids that end a sequence.

    Args:
      eos_id: Id or ids; None for sequences without end.
      vocab: Number of ids of the model; None for no check.

    Returns:
      The ids.

    Raises:
      InputError: An id is not one of the model's.
    """
    ids = [] if eos_id is None else [*eos_id] if isinstance(eos_id, Sequence) else [eos_id]
    if vocab is not None and any(not 0 <= i < vocab for i in ids):
        raise InputError(f"eos_id={eos_id}: expected ids of the model's {vocab}, or None for sequences without end")
    return ids


def _pad(model: Model, prompts: Sequence[np.ndarray], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """`(ids [B, width], lengths [B])` of the prompts, padded at the end to a common width, a multiple of BUCKET."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = _round_up(int(lengths.max()), BUCKET)
    if model.config.position == "learned":
        width = min(width, model.config.max_len)
    padded = np.full((len(prompts), width), pad_id, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded, lengths


def _replicated(params: PyTree) -> NamedSharding | None:
    """Sharding of the decoding state, which every device that has a shard of the parameters holds in full."""
    leaf = jax.tree.leaves(params)[0]
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


@functools.cache
def _jitted(sharding: NamedSharding | None) -> tuple[Any, Any]:
    """The jitted `_prefill` and `_decode`, one pair per sharding, so that JAX's cache of programs is shared."""
    prefill = jax.jit(_prefill, static_argnames=("model", "capacity"), out_shardings=sharding)
    decode = jax.jit(_decode, static_argnames="model", donate_argnames="state", out_shardings=sharding)
    return prefill, decode


def _prefill(
    params: PyTree,
    tokens: jax.Array,
    lengths: jax.Array,
    memory: Memory | None,
    *,
    model: Model,
    capacity: int,
) -> _DecodeState:
    # Flax declares the result of `apply` as Any or (Any, variables); it is what the method returns, as no variable is mutable.
    h, caches = model.apply(collections(params), tokens, lengths, capacity, memory, method="prefill")  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
    return _DecodeState(h, caches, lengths, jnp.zeros(lengths.shape, bool))


def _decode(
    state: _DecodeState,
    params: PyTree,
    draw: dict[str, jax.Array],
    ids: dict[str, jax.Array],
    *,
    model: Model,
) -> tuple[_DecodeState, jax.Array]:
    """`(state, ids [B, CHUNK])`: the next CHUNK tokens of each sequence. draw: the key, and options of `pick`."""
    options = {"temperature": 0.0, **draw}
    points = _uniform_points(options.pop("key"), state.positions)

    def step(state: _DecodeState, points: jax.Array) -> tuple[_DecodeState, jax.Array]:
        logits: Any = model.apply(collections(params), state.h, method="next_logits")
        token = jnp.where(state.ended, ids["pad"], pick(logits, points, **options).astype(jnp.int32))
        ended = state.ended | jnp.isin(token, ids["eos"])
        # As in `_prefill`, the result is what the method returns.
        h, caches = model.apply(  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
            collections(params), token[:, None], state.positions[:, None], state.caches, method="extend"
        )
        return _DecodeState(h[:, 0], caches, state.positions + 1, ended), token

    state, tokens = jax.lax.scan(step, state, points)
    return state, tokens.T


def _uniform_points(key: jax.Array, positions: jax.Array) -> jax.Array:
    """Random numbers in [0, 1), `[CHUNK, B]`, that depend on the key, the index of the sequence and the position only."""

    def draw(sequence: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, sequence), position), dtype=jnp.float32)

    sequences = jnp.arange(len(positions), dtype=jnp.uint32)[None]
    steps = jnp.arange(CHUNK, dtype=jnp.int32)[:, None]
    return jnp.vectorize(draw)(sequences, positions[None] + steps)


def check_decodes(model: Model, memory: Memory | None, count: int) -> None:
    """Checks that a model can continue prompts.

    Args:
      model: The model.
      memory: Memory of a decoder, or None.
      count: Number of prompts.

    Raises:
      InputError: A mixer has no cache, or mixes sequences of one length only; or there is not one memory for each prompt of a
          decoder, and none for other models.
    """
    width = model.config.memory_dim
    actual = None if memory is None else (memory.states.shape[0], memory.states.shape[-1])
    if actual != ((count, width) if width else None):
        expected = f"states [{count}, S, {width}], one memory for each prompt" if width else "None"
        shape = None if memory is None else list(memory.states.shape)
        raise InputError(f"memory has states of shape {shape}: model.memory_dim={width} expects {expected}")
    if not model.config.decodes:
        raise InputError(
            f"model.mixer={model.config.mixer!r} cannot decode: a mixer has no cache of earlier tokens, or takes sequences of "
            "one length only; generate with a model of other mixers, such as full"
        )


def _check_tokens(tokens: int) -> None:
    """Raises InputError for a number of new tokens out of range."""
    if tokens < 1:
        raise InputError(f"tokens={tokens}: expected at least 1")
    if tokens > MAX_TOKENS:
        raise InputError(f"tokens={tokens}: expected at most {MAX_TOKENS}")


def _check_prompts(model: Model, prompts: Sequence[np.ndarray], tokens: int) -> None:
    """Raises InputError for prompts that the model cannot continue by `tokens` tokens."""
    if not prompts:
        raise InputError("prompts is empty: give at least one")
    vocab, max_len = model.config.vocab, model.config.max_len
    for number, prompt in enumerate(prompts):
        if prompt.ndim != 1 or not len(prompt):
            raise InputError(f"prompt {number} is empty: start it with some text, or with bos if the tokenizer has one")
        invalid = prompt[(prompt < 0) | (prompt >= vocab)]
        if len(invalid):
            raise InputError(
                f"prompt {number} holds id {invalid[0]}, the model has {vocab}: encode it with the model's own tokenizer"
            )
        if model.config.position == "learned" and len(prompt) + tokens > max_len:
            fixes = [f"decode at most {max_len - len(prompt)} tokens"] * (len(prompt) < max_len)
            fixes += [f"shorten the prompt to at most {max_len - tokens} tokens"] * (tokens < max_len)
            fixes = fixes or [f"shorten the prompt to less than {max_len} tokens"]
            raise InputError(
                f"prompt {number} has {len(prompt)} tokens, which with {tokens} more exceed the model's {max_len} learned "
                f"positions: {' or '.join(fixes)}"
            )


def _check_memory(state: _DecodeState, batch: int, width: int, tokens: int) -> None:
    """Raises InputError if the caches of prompts of `width` tokens, with room for `tokens` more, exceed the memory."""
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    if needed > (limit := measure.memory_bytes()):
        most = int((width + tokens) * limit / needed) - width
        raise InputError(
            f"tokens={tokens}: the cache of {batch} prompts of up to {width} tokens and their continuations takes "
            f"{needed / 1e9:,.1f} GB, and the device has {limit / 1e9:,.1f} GB: "
            + (f"decode at most {most} tokens" if most > 0 else "give fewer or shorter prompts")
        )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class TextStream:
    """Text of ids that arrive in pieces, without incomplete characters. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray = ()) -> None:
        """Starts a stream.

        Args:
          tokenizer: Tokenizer that decodes the ids.
          prompt: Ids that precede the stream, whose own text is left out.
        """
        self._tokenizer = tokenizer
        self._ids = [int(i) for i in prompt]
        self._sent = len(tokenizer.decode(self._ids))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int] | np.ndarray, final: bool = False) -> str:
        """Adds ids to the stream.

        Args:
          ids: The next ids of the stream.
          final: True if no more ids will follow.

        Returns:
          The text that is complete with these ids.
        """
        self._ids += [int(i) for i in ids]
        # All ids are decoded, because the text of a token may depend on the preceding ones.
        data = self._tokenizer.decode(self._ids)
        if not final:
            # Tokenizers that are not over bytes decode an incomplete character as U+FFFD, or each of its bytes as one.
            unknown = "\N{REPLACEMENT CHARACTER}".encode()
            while data.endswith(unknown):
                data = data.removesuffix(unknown)
        new, self._sent = data[self._sent :], max(self._sent, len(data))
        return self._decoder.decode(new, final)


def sample_text(model: Model, params: PyTree, tokenizer: Tokenizer, length: int, seed: int = 0) -> str:
    """Samples text without a prompt, at SAMPLE_TEMPERATURE and SAMPLE_TOP_P, or greedily if there are no probabilities.

    Args:
      model: The model.
      params: Parameters of the model.
      tokenizer: Tokenizer of the model.
      length: Bytes of text.
      seed: Seed of the samples.

    Returns:
      About `length` bytes of text.
    """
    allowed = tokenizer.drawable_ids()
    start = tokenizer.bos_id if tokenizer.bos_id is not None else int(np.flatnonzero(allowed)[0])
    tokens = min(length, model.config.max_len - 1) if model.config.position == "learned" else length
    if tokens < 1:
        return ""
    temperature = SAMPLE_TEMPERATURE if model.is_normalized else 0.0
    generation = Generation(
        model,
        params,
        [np.array([start])],
        tokens=tokens,
        sampling=Sampling(temperature, top_p=SAMPLE_TOP_P, seed=seed, allowed=allowed),
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
    )
    ids = np.concatenate([chunk[0] for chunk in generation])
    return tokenizer.decode(ids)[:length].decode("utf-8", "replace")
