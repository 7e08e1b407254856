"""Decoding: the cache against the full pass, independence of sequences, sampling options, and text streams."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from hpnlp import measure
from hpnlp.data.tokenizers import ByteTokenizer
from hpnlp.data.tokenizers.word_tokenizer import WordTokenizer
from hpnlp.models import decode
from hpnlp.models.decode import GREEDY, Generation, Sampling, TextStream, sample_text
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.variables import logical_axes
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.parallel.memory.host_offload import HOST
from hpnlp.parallel.plan import Plan
from tests.drawn import drawn_params
from tests.messages import raises

VOCAB = 264  # of bytes
ROPE = {"kv_heads": 2, "qk_norm": True, "tied": False}
LEARNED = {"norm": "layer", "position": "learned", "qkv_bias": True, "mlp": "gelu", "mlp_bias": True, "tied": False}
LEARNED["max_len"] = 41  # the longest of PROMPTS with 20 new tokens
MIXED = {"mixer": "window(3,0),longformer(4,2)*2,full", "layers": 5}
PROMPTS = [np.arange(40, 47), np.array([256]), np.arange(100, 121)]


@functools.cache
def make(**fields):
    """A model whose logits differ by several nats, and its parameters."""
    sizes = {"dim": 16, "heads": 4, "layers": 2, "vocab": VOCAB, "max_len": 64, "mlp_dim": 24}
    model = LM(LMConfig(**sizes | fields))
    return model, drawn_params(model, 0.3, {"table": 1.0})


SAMPLING = {field.name for field in dataclasses.fields(Sampling)}


def with_sampling(options):
    """Arguments of Generation, with those of Sampling in one record."""
    others = {name: value for name, value in options.items() if name not in SAMPLING}
    return others | {"sampling": Sampling(**{name: options[name] for name in SAMPLING & options.keys()})}


def generate(prompts, tokens=20, fields=(), **options):
    """All new ids, `[B, n]`."""
    run = Generation(*make(**dict(fields)), prompts, tokens=tokens, **with_sampling(options))
    return np.concatenate(list(run), axis=1)


@functools.cache
def logits_of(model):
    return jax.jit(lambda p, t: model.apply({"params": p}, t, method=LM.logits))


@pytest.mark.parametrize("fields", [ROPE | {"dtype": "bfloat16"}, LEARNED | MIXED], ids=["bfloat16", "mixed"])
def test_greedy_ids_equal_the_argmax_of_the_full_pass(fields):
    """Decoding token by token with a cache, for prompts of different lengths, against full logits."""
    model, params = make(**fields)
    ids = generate(PROMPTS, fields=fields.items(), temperature=0.0)
    assert ids.shape == (3, 20)
    rows = [np.concatenate(pair) for pair in zip(PROMPTS, ids, strict=True)]
    padded = np.stack([np.pad(row, (0, 41 - len(row))) for row in rows]).astype(np.int32)
    logits = np.asarray(logits_of(model)(params, padded))
    for row, prompt, new in zip(logits, PROMPTS, ids, strict=True):
        steps = row[len(prompt) - 1 :][: len(new)]
        if model.config.dtype == "float32":
            np.testing.assert_array_equal(new, steps.argmax(-1))
        else:
            assert np.all(steps.max(-1) - steps[np.arange(len(new)), new] < 0.3)
    assert len(set(ids.ravel().tolist())) > 10  # a single repeated id would hide most mistakes


def test_sequence_depends_on_its_prompt_index_and_seed_only():
    options = {"temperature": 1.0, "top_p": 0.95, "top_k": 100}
    together = generate(PROMPTS, seed=3, **options)
    np.testing.assert_array_equal(generate(PROMPTS[:1], seed=3, **options), together[:1])
    changed = generate([PROMPTS[2], PROMPTS[1], PROMPTS[2]], seed=3, **options)
    np.testing.assert_array_equal(changed[1:], together[1:])
    assert np.any(changed[0] != changed[2])  # the same prompt at another index gives another text
    assert np.all(np.any(generate(PROMPTS, seed=4, **options) != together, axis=1))


def test_many_sequences_equal_few():
    """For nine or more sequences, the cache is written by another operation."""
    few, many = generate(PROMPTS, temperature=0.0), generate(PROMPTS * 4, temperature=0.0)
    np.testing.assert_array_equal(many.reshape(4, 3, 20), np.broadcast_to(few, (4, 3, 20)))


def test_similar_calls_share_a_trace(monkeypatch):
    """Two calls with different prompts of different lengths use one prefill and one decoding program."""
    for name in ("_prefill", "_decode"):
        monkeypatch.setattr(decode, name, chex.assert_max_traces(getattr(decode, name), n=1))
    decode._jitted.cache_clear()
    first = generate(PROMPTS, tokens=30, temperature=0.5)
    again = generate([prompt[:1] for prompt in PROMPTS], tokens=17, temperature=0.9, seed=1, pad_id=2)
    assert first.shape == (3, 30) and again.shape == (3, 17)
    decode._jitted.cache_clear()


def test_ids_arrive_in_chunks():
    run = Generation(*make(), PROMPTS, tokens=20, sampling=GREEDY)
    assert [chunk.shape for chunk in run] == [(3, 16), (3, 4)]
    assert set(run.seconds) == {"compile", "prefill", "decode"} and min(run.seconds.values()) > 0


def test_eos_ends_a_sequence():
    """One of two allowed ids ends a sequence: pads follow, and decoding stops when all sequences have ended."""
    allowed = np.arange(VOCAB) == 7
    ids = generate(PROMPTS, tokens=32, temperature=50.0, eos_id=257, pad_id=258, allowed=allowed)
    assert ids.shape == (3, 16)
    ends = (ids == 257).argmax(axis=1)
    assert len(set(ends.tolist())) > 1
    for row, end in zip(ids, ends, strict=True):
        assert np.all(row[:end] == 7) and row[end] == 257 and np.all(row[end + 1 :] == 258)


def test_several_ids_may_end_a_row():
    """The first of them that is drawn ends the row, and each may be drawn."""
    allowed = np.arange(VOCAB) == 7
    ids = generate(PROMPTS * 4, tokens=32, temperature=50.0, eos_id=(257, 9), pad_id=258, allowed=allowed)
    ends = np.isin(ids, (257, 9)).argmax(axis=1)
    for row, end in zip(ids, ends, strict=True):
        assert np.all(row[:end] == 7) and row[end] in (257, 9) and np.all(row[end + 1 :] == 258)
    assert {*ids[np.arange(12), ends].tolist()} == {257, 9}


def test_special_ids_are_never_drawn():
    allowed = ByteTokenizer().drawable_ids()
    np.testing.assert_array_equal(np.flatnonzero(~allowed), np.arange(256, 264))
    for mask in (allowed, allowed[:150]):  # the table may have more rows than the tokenizer has ids
        ids = generate(PROMPTS, tokens=32, temperature=100.0, eos_id=257, pad_id=260, allowed=mask)
        drawn = ids[ids != 260]
        assert np.all((drawn < min(len(mask), 256)) | (drawn == 257)) and len(set(drawn.tolist())) > 40
    assert np.all(generate(PROMPTS, temperature=0.0, allowed=np.arange(VOCAB) == 5) == 5)


def test_speakable_excludes_special_words():
    tokenizer = WordTokenizer(["fox", "dog", "\n"])
    assert np.flatnonzero(tokenizer.drawable_ids()).tolist() == [4, 5, 6]


def test_parameters_on_several_devices_and_on_the_host():
    model, params = make()
    layout = Plan(data=1, fsdp=4, tensor=2).layout(model.config.sizes())
    specs = layout.state_specs(logical_axes(model), params, divided=True)
    spread = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(layout.mesh, spec)), params, specs)
    resting = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(HOST)), spread["layers"])
    for placed in (spread, {**spread, "layers": resting}):
        ids = [chunk for chunk in Generation(model, placed, PROMPTS, tokens=20, sampling=GREEDY)]
        np.testing.assert_array_equal(np.concatenate(ids, axis=1), generate(PROMPTS, temperature=0.0))


def test_invalid_arguments_raise():
    for options, message in (
        ({"tokens": 0}, "tokens=0: expected at least 1"),
        ({"tokens": 10**30}, "tokens=10+: expected at most 1073741824"),
        ({"seed": -1}, "seed=-1: expected 0 to 4294967295"),
        ({"seed": 1 << 32}, "seed=4294967296: expected 0 to"),
        ({"temperature": float("nan")}, "temperature=nan: expected 0"),
        ({"temperature": float("inf")}, "temperature=inf: expected 0"),
        ({"temperature": -0.1}, "temperature=-0.1: expected 0"),
        ({"top_k": -1}, "top_k=-1: expected the number"),
        ({"top_p": 0.0}, r"top_p=0.0: expected a probability in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p=1.01: expected a probability in \(0, 1\]"),
        ({"top_p": float("nan")}, r"top_p=nan: expected a probability in \(0, 1\]"),
        ({"prompts": []}, "prompts is empty: give at least one"),
        ({"prompts": [[1], []]}, "prompt 1 is empty: start it with some text, or with bos"),
        ({"prompts": [[1, VOCAB]]}, f"prompt 0 holds id {VOCAB}, the model has {VOCAB}"),
        ({"prompts": [[3, -4]]}, "prompt 0 holds id -4"),
        ({"eos_id": VOCAB}, f"eos_id={VOCAB}: expected ids of the model's {VOCAB}"),
        ({"eos_id": (1, -1)}, r"eos_id=\(1, -1\): expected ids"),
        ({"allowed": np.zeros(VOCAB, bool)}, "allowed: no id may be drawn"),
        ({"prompts": [[1], [1] * 30], "tokens": 12}, "prompt 1 has 30 tokens, which with 12 more .* at most 11 tokens"),
        ({"prompts": [[1] * 70]}, "prompt 0 has 70 tokens, .* learned positions: shorten the prompt to at most 37"),
    ):
        arguments = {"prompts": [[1]], "tokens": 4} | options
        raises(message, Generation, *make(**LEARNED), **with_sampling(arguments))


class Doubled(ExactMixer):
    """Changes `__call__` alone, which decoding calls for the prompt and not for the tokens that follow."""

    def __call__(self, inputs, mask):
        found = super().__call__(inputs, mask)
        return dataclasses.replace(found, o=2 * found.o)


def test_mixers_that_decoding_would_run_as_another_function_raise(monkeypatch):
    monkeypatch.setitem(MIXERS, "doubled", Doubled)
    model, params = make(mixer="doubled")
    raises("Doubled takes `extend` from ExactMixer and `__call__`", Generation, model, params, PROMPTS, tokens=1)


def test_cache_larger_than_memory_raises_before_compilation(monkeypatch):
    monkeypatch.setattr(measure, "memory_bytes", lambda: 10**6)
    raises(r"tokens=200000: the cache of 1 prompts", lambda: Generation(*make(**ROPE), [[1]], tokens=200_000))


# Text.


class CharacterTokenizer(ByteTokenizer):
    """A tokenizer that decodes an incomplete character as U+FFFD: id i is byte i."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace").encode()


class EachByte(ByteTokenizer):
    """A tokenizer that gives U+FFFD for each byte of a run of bytes that is not UTF-8, as those with a byte fallback do."""

    def decode(self, ids):
        try:
            return bytes(ids).decode().encode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}".encode() * len(ids)


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), CharacterTokenizer(), EachByte()], ids=["bytes", "characters", "each_byte"]
)
def test_stream_waits_for_complete_characters(tokenizer):
    text = "naïve 漢字 🦊 end"
    stream = TextStream(tokenizer)
    pieces = [stream.push([byte]) for byte in text.encode()] + [stream.push([], final=True)]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharacterTokenizer()], ids=["bytes", "characters"])
def test_stream_replaces_invalid_bytes(tokenizer):
    stream = TextStream(tokenizer, prompt=b"before")
    pieces = [stream.push([byte]) for byte in (65, 0xFF, 66, 0xF0)] + [stream.push([], final=True)]
    assert "".join(pieces) == "A\N{REPLACEMENT CHARACTER}B\N{REPLACEMENT CHARACTER}"


def test_stream_continues_the_prompt():
    """A word tokenizer puts a space between two words, also between the prompt and the first word of the stream."""
    tokenizer = WordTokenizer(["fox", "dog", "\n"])
    stream = TextStream(tokenizer, prompt=[2, 4])
    assert [stream.push([5]), stream.push([6, 4]), stream.push([], final=True)] == [" dog", "\nfox", ""]


@pytest.mark.parametrize(("fields", "length"), [({}, 30), (LEARNED, 100)], ids=["rope", "learned"])
def test_sample_text_has_the_length_and_repeats(fields, length):
    model, params = make(**fields)
    text = sample_text(model, params, ByteTokenizer(), length)
    assert isinstance(text, str) and 10 < len(text) <= length
    assert text == sample_text(model, params, ByteTokenizer(), length)
    assert sample_text(model, params, ByteTokenizer(), 0) == ""
