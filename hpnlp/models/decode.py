"""Decoding: prompts in, new tokens out; one pass over the prompts, then a cache."""

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

from hpnlp import measure
from hpnlp.data.huggingface import HFTokenizer
from hpnlp.models.lm import LM, apart
from hpnlp.ops.sampling import pick
from hpnlp.parallel import host_offload
from hpnlp.types import InputError, Tokenizer

CHUNK = 16  # tokens a call of the decoding program: the host stays out of the inner loop, and text still streams
MAX_TOKENS = 1 << 30
BUCKET = 64  # prompts are padded to a multiple of this, so that prompts of similar lengths share a program


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """Arrays, or their shapes. h `[B, D]`: of each row's last token. positions `[B]`: of the next one. ended `[B]`: which
    rows have met eos."""

    h: Any
    caches: Any
    positions: Any
    ended: Any


class Generation:
    """Continues prompts. Iterate once for `[B, n]` int32 arrays of n <= 16 new ids a row, as they are made.

    A row ends with eos, after which it holds pads; all ends when every row has, or at `tokens` a row. programs: the
    compiled "prefill" and "decode". seconds: spent so far, by "compile" (tracing included), "prefill" and "decode".
    """

    def __init__(
        self,
        model: LM,
        params: Any,
        prompts: Sequence[np.ndarray | Sequence[int]],
        *,
        tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        eos_id: int | Sequence[int] | None = None,
        pad_id: int = 0,
        allowed: np.ndarray | None = None,
    ) -> None:
        """Validates, and compiles what is not yet compiled; computes nothing.

        prompts: int ids, one array a row, of any lengths. tokens: new ones a row. temperature: 0 takes the most probable
        id. top_k: draw among so many, 0 for all. top_p: draw among the most probable that reach this mass. seed: of 32 bits; a
        row's tokens depend on it, on the row's number and on its prompt only, not on the rows beside it. eos_id: the id or ids
        that end a row, None for none. allowed: bool by id, what may be drawn beside eos; ids past its end may not; None for
        all.

        Raises InputError on what cannot be. Cost: one pass over the prompts, padded to a common length, then a token's
        pass and one read of the cache for each token; programs are kept for prompts of similar length.
        """
        vocab = model.config.vocab
        rows = [np.asarray(prompt, np.int32) for prompt in prompts]
        _validate(model, rows, tokens, temperature, top_k, top_p, seed)
        may = np.zeros(vocab, bool)
        may[: vocab if allowed is None else len(allowed)] = True if allowed is None else allowed[:vocab]
        eos = [] if eos_id is None else [*eos_id] if isinstance(eos_id, Sequence) else [eos_id]
        if any(not 0 <= i < vocab for i in eos):
            raise InputError(f"eos_id={eos_id}: expected ids of the model's {vocab}, or None for rows without end")
        may[eos] = True
        if not may.any():
            raise InputError("allowed: no id may be drawn: allow at least one")

        lengths = np.array([len(row) for row in rows], np.int32)
        width = _round_up(int(lengths.max()), BUCKET)
        if model.config.position == "learned":
            width = min(width, model.config.max_len)
        padded = np.full((len(rows), width), pad_id, np.int32)
        for place, row in zip(padded, rows, strict=True):
            place[: len(row)] = row
        # What is idle is left out and costs nothing; what is there may change without a new program.
        draw: dict[str, Any] = {"key": jax.random.key(seed), "allowed": jnp.asarray(may)}
        if temperature > 0:
            draw["temperature"] = jnp.float32(temperature)
            if 0 < top_k < vocab:
                draw["top_k"] = jnp.int32(top_k)
            if top_p < 1:
                draw["top_p"] = jnp.float32(top_p)
        self._eos, self._tokens = np.array(eos, np.int32), tokens
        ids = {"eos": jnp.asarray(self._eos), "pad": jnp.int32(pad_id)}

        start = time.perf_counter()
        params = host_offload.here(params)
        layout, params = _replicated(params), jax.jit(apart)(params)
        self._start, self._always = (params, padded, lengths), (params, draw, ids)
        prefill, decode = _jitted(layout)
        fixed = {"model": model, "capacity": width + _round_up(tokens, CHUNK)}
        state = prefill.eval_shape(*self._start, **fixed)
        _check_memory(state, len(rows), width, tokens)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), state)
        self.programs = {
            "prefill": prefill.lower(*self._start, **fixed).compile(),
            "decode": decode.lower(state, *self._always, model=model).compile(),
        }
        self.seconds = {"compile": time.perf_counter() - start, "prefill": 0.0, "decode": 0.0}

    def __iter__(self) -> Iterator[np.ndarray]:
        with self._timed("prefill"):
            state = jax.block_until_ready(self.programs["prefill"](*self._start))
        ended = np.zeros(len(self._start[1]), bool)
        for done in range(0, self._tokens, CHUNK):
            with self._timed("decode"):
                state, chunk = self.programs["decode"](state, *self._always)
                ids = np.asarray(chunk)[:, : self._tokens - done]
            yield ids
            ended |= np.isin(ids, self._eos).any(axis=1)
            if ended.all():
                return

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start


def _replicated(params: Any) -> NamedSharding | None:
    """Where the state of decoding lies: whole on every device that has a part of the parameters."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


@functools.cache
def _jitted(layout: NamedSharding | None) -> tuple[Any, Any]:
    prefill = jax.jit(_prefill, static_argnames=("model", "capacity"), out_shardings=layout)
    return prefill, jax.jit(_decode, static_argnames="model", donate_argnames="state", out_shardings=layout)


def _prefill(params: Any, tokens: jax.Array, lengths: jax.Array, *, model: LM, capacity: int) -> _State:
    h, caches = model.apply({"params": params}, tokens, lengths, capacity, method="prefill")  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
    return _State(h, caches, lengths, jnp.zeros(lengths.shape, bool))


def _decode(
    state: _State, params: Any, draw: dict[str, jax.Array], ids: dict[str, jax.Array], *, model: LM
) -> tuple[_State, jax.Array]:
    """CHUNK tokens for each row, `[B, CHUNK]`. draw: the key, and pick's options that are not idle."""
    options = {"temperature": 0.0, **draw}
    points = _points(options.pop("key"), state.positions)

    def step(state: _State, points: jax.Array) -> tuple[_State, jax.Array]:
        logits: Any = model.apply({"params": params}, state.h, method=lambda m, h: m.output.logits(m.table, h))
        token = jnp.where(state.ended, ids["pad"], pick(logits, points, **options).astype(jnp.int32))
        ended = state.ended | jnp.isin(token, ids["eos"])
        h, caches = model.apply(  # pyright: ignore[reportGeneralTypeIssues, reportAssignmentType]
            {"params": params}, token[:, None], state.positions[:, None], state.caches, method="extend"
        )
        return _State(h[:, 0], caches, state.positions + 1, ended), token

    state, tokens = jax.lax.scan(step, state, points)
    return state, tokens.T


def _points(key: jax.Array, positions: jax.Array) -> jax.Array:
    """`[CHUNK, B]` in [0, 1): functions of the key, the row's number and the position alone."""

    def one(row: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row), position), dtype=jnp.float32)

    rows = jnp.arange(len(positions), dtype=jnp.uint32)[None]
    steps = jnp.arange(CHUNK, dtype=jnp.int32)[:, None]
    return jnp.vectorize(one)(rows, positions[None] + steps)


def _validate(
    model: LM, prompts: Sequence[np.ndarray], tokens: int, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    if tokens < 1:
        raise InputError(f"tokens={tokens}: expected at least 1")
    if tokens > MAX_TOKENS:  # positions are 32 bits wide
        raise InputError(f"tokens={tokens}: expected at most {MAX_TOKENS}")
    if not 0 <= seed < 1 << 32:  # JAX drops further bits
        raise InputError(f"seed={seed}: expected 0 to {(1 << 32) - 1}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InputError(
            f"temperature={temperature}: expected 0 (the most probable token) or a positive number, as 0.8"
        )
    if temperature > 0 and not model.is_normalized:
        raise InputError(
            f"temperature={temperature}: model.output={model.config.output!r} gives no probabilities to draw from; take 0, the "
            "best token"
        )
    if top_k < 0:
        raise InputError(f"top_k={top_k}: expected how many tokens to draw among, or 0 for all")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p={top_p}: expected a probability in (0, 1]; 1 draws among all tokens")
    if not prompts:
        raise InputError("prompts is empty: give at least one")
    vocab, max_len = model.config.vocab, model.config.max_len
    for number, prompt in enumerate(prompts):
        if prompt.ndim != 1 or not len(prompt):
            raise InputError(
                f"prompt {number} is empty: start it with some text, or with bos where the tokenizer has one"
            )
        strange = prompt[(prompt < 0) | (prompt >= vocab)]
        if len(strange):
            raise InputError(
                f"prompt {number} holds id {strange[0]}, the model has {vocab}: encode it with the model's own tokenizer"
            )
        if model.config.position == "learned" and len(prompt) + tokens > max_len:
            fixes = [f"ask for at most {max_len - len(prompt)} tokens"] * (len(prompt) < max_len)
            fixes += [f"shorten the prompt to at most {max_len - tokens} tokens"] * (tokens < max_len)
            fixes = fixes or [f"shorten the prompt to less than {max_len} tokens"]
            raise InputError(
                f"prompt {number} has {len(prompt)} tokens, and with {tokens} more it passes the {max_len} positions that "
                f"the model has learned: {' or '.join(fixes)}"
            )


def _check_memory(state: _State, rows: int, width: int, tokens: int) -> None:
    """Raises InputError where the keys and values of prompts of `width` tokens, and of `tokens` more, do not fit."""
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    if needed > (limit := measure.memory_bytes()):
        most = int((width + tokens) * limit / needed) - width
        raise InputError(
            f"tokens={tokens}: the cache of {rows} prompts of up to {width} tokens and their continuations takes "
            f"{needed / 1e9:,.1f} GB, and the device has {limit / 1e9:,.1f} GB: "
            + (f"ask for at most {most} tokens" if most > 0 else "give fewer or shorter prompts")
        )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def speakable(tokenizer: Tokenizer) -> np.ndarray:
    """bool by id: those that may be drawn.

    Ids that stand for nothing or for an unknown part are left out. A tokenizer that others have made keeps its special tokens:
    `transformers` draws them as well, and they are left out of the text.
    """
    if isinstance(tokenizer, HFTokenizer) and not tokenizer.is_trained_here:
        return np.isin(np.arange(tokenizer.vocab_size), tokenizer.ids)
    # Doubled, because some tokenizers drop one space at the beginning, and a lone space with it.
    ids = range(tokenizer.vocab_size)
    return np.array([tokenizer.decode([i, i]) != b"" and tokenizer.decode([i]) != b"<unk>" for i in ids])


class TextStream:
    """The text of ids that come in pieces, without halves of characters; what is no UTF-8 becomes U+FFFD."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray = ()) -> None:
        """prompt: the ids that came before, whose own text is not repeated."""
        self._tokenizer = tokenizer
        self._ids = [int(i) for i in prompt]
        self._sent = len(tokenizer.decode(self._ids))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int] | np.ndarray, final: bool = False) -> str:
        """The text that further ids add; `final` where no more will come."""
        self._ids += [int(i) for i in ids]
        # All of them, because what a token says may depend on the ones before it.
        data = self._tokenizer.decode(self._ids)
        if not final:
            # Tokenizers that do not speak bytes give U+FFFD for a character that is not whole yet, or for each of its bytes.
            unknown = "\N{REPLACEMENT CHARACTER}".encode()
            while data.endswith(unknown):
                data = data.removesuffix(unknown)
        new, self._sent = data[self._sent :], max(self._sent, len(data))
        return self._decoder.decode(new, final)


def sample_text(model: LM, params: Any, tokenizer: Tokenizer, length: int, seed: int = 0) -> str:
    """About `length` bytes of text that the model makes up from nothing, at temperature 0.8 and top-p 0.95; the best tokens
    where there are no probabilities."""
    may = speakable(tokenizer)
    start = tokenizer.bos_id if tokenizer.bos_id is not None else int(np.flatnonzero(may)[0])
    tokens = min(length, model.config.max_len - 1) if model.config.position == "learned" else length
    if tokens < 1:
        return ""
    run = Generation(
        model, params, [np.array([start])], tokens=tokens, temperature=0.8 if model.is_normalized else 0.0, top_p=0.95,
        seed=seed,
        eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, allowed=may,
    )  # fmt: skip
    ids = np.concatenate([chunk[0] for chunk in run])
    return tokenizer.decode(ids)[:length].decode("utf-8", "replace")
