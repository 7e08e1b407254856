"""Measures decoding and prefill against the same model in torch eager with a cache, interleaved in one process.

    python experiments/bench/decode.py [--models=demo,gpt2] [--batches=1,8] [--new_tokens=256] [--rounds=7]

"demo" is the model of experiments/lm/bytes.py (RMSNorm, RoPE); "gpt2" is GPT-2's shape (LayerNorm, learned positions,
biases), for which torch has fused kernels. The prompts of a batch differ in length; the torch model, which has no lengths
per prompt, gets all of them at the longest length, and is timed with its best number of threads. Both sample at temperature
0.8. hpnlp is timed by its public interface, prefill included, compilation excluded.

The torch model has the same weights. Its logits must agree with those of hpnlp to 1e-4, and the logit of every greedily decoded
id must be within 1e-4 of its largest one; otherwise nothing is reported.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import torch
import torch.nn.functional as F
from absl import app, flags

from hpnlp import measure
from hpnlp.models.decode import GREEDY, Generation, Sampling
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.ops.attention.positions.rope import frequencies

RESULTS = Path(__file__).parents[1] / "results"
VOCAB = 264
TEMPERATURE = 0.8
TOLERANCE = 1e-4
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {"norm": "rms", "position": "rope"},
    "gpt2": {
        "norm": "layer",
        "norm_eps": 1e-5,
        "position": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    },
}

FLAGS = flags.FLAGS
flags.DEFINE_list("models", list(SHAPES), f"Models to measure, of {', '.join(SHAPES)}.")
flags.DEFINE_list("batches", ["1", "8"], "Numbers of prompts in a batch.")
flags.DEFINE_integer("layers", 4, "Layers.")
flags.DEFINE_integer("dim", 192, "Model dimension.")
flags.DEFINE_integer("heads", 6, "Heads.")
flags.DEFINE_integer("prompt", 64, "Length of the longest prompt.")
flags.DEFINE_integer("new_tokens", 256, "New tokens per prompt.")
flags.DEFINE_integer("prefill", 1024, "Length of the prompt whose prefill is timed.")
flags.DEFINE_integer("rounds", 7, "Measurements of each program; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def linear(x: torch.Tensor, weights: Any) -> torch.Tensor:
    return F.linear(x, weights["kernel"], weights.get("bias"))


class TorchLM:
    """The same model in torch with a preallocated cache; weights are copied from the Flax parameters."""

    def __init__(self, params: Any, config: LMConfig) -> None:
        self.config = config
        params = jax.tree.map(lambda leaf: torch.from_numpy(np.array(leaf)), params)
        self.table, self.final_norm = params["embed"]["table"], params["final_norm"]
        self.positions = params["positions"]["table"] if config.position == "learned" else None
        self.layers = []
        for i in range(config.layers):
            layer = jax.tree.map(lambda leaf: leaf[i], params["layers"])  # noqa: B023
            attention, mlp = layer["attention"], layer["mlp"]
            # torch users fuse the three projections
            qkv = {name: torch.cat([attention[n][name] for n in "qkv"], -1) for name in attention["q"]}
            dense = {"qkv": qkv, "out": attention["out"], "up": mlp["up"], "down": mlp["down"]}
            for weights in dense.values():  # torch's linear holds [out, in]
                weights["kernel"] = weights["kernel"].mT.contiguous()
            self.layers.append((layer["mix_norm"], layer["feed_norm"], dense))
        angles = np.arange(config.max_len)[:, None] * frequencies(config.head_size)[None]
        rotations = np.concatenate([np.cos(angles)] * 2, -1), np.concatenate([-np.sin(angles), np.sin(angles)], -1)
        self.cos, self.sin = (torch.from_numpy(x[:, None].astype(np.float32)) for x in rotations)

    def cache(self, rows: int, capacity: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        c = self.config
        shape = rows, c.heads, capacity, c.head_size
        return [(torch.empty(shape), torch.empty(shape)) for _ in range(c.layers)]

    def __call__(self, tokens: torch.Tensor, cache: Any, at: int) -> torch.Tensor:
        """Final hidden states of tokens at positions `at` and after; writes their keys and values to the cache."""
        c, (rows, length), half = self.config, tokens.shape, self.config.head_size // 2
        end = at + length
        x = F.embedding(tokens, self.table)
        if self.positions is not None:
            x = x + self.positions[at:end]
        cos, sin = self.cos[at:end], self.sin[at:end]
        for (mix, feed, dense), (keys, values) in zip(self.layers, cache, strict=True):
            q, k, v = linear(self.norm(x, mix), dense["qkv"]).view(rows, length, 3, c.heads, -1).unbind(2)
            if c.position == "rope":
                q, k = (y * cos + torch.cat([y[..., half:], y[..., :half]], -1) * sin for y in (q, k))
            keys[:, :, at:end], values[:, :, at:end] = k.transpose(1, 2), v.transpose(1, 2)
            o = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys[:, :, :end], values[:, :, :end], is_causal=length > 1
            )
            x = x + linear(o.transpose(1, 2).reshape(rows, length, -1), dense["out"])
            x = x + linear(F.gelu(linear(self.norm(x, feed), dense["up"]), approximate="tanh"), dense["down"])
        return self.norm(x, self.final_norm)

    def norm(self, x: torch.Tensor, weights: Any) -> torch.Tensor:
        shape, eps = x.shape[-1:], self.config.norm_eps
        if self.config.norm == "rms":
            return F.rms_norm(x, shape, weights["scale"], eps)
        return F.layer_norm(x, shape, weights["scale"], weights["bias"], eps)

    def logits(self, tokens: torch.Tensor, cache: Any, at: int) -> torch.Tensor:
        return F.linear(self(tokens, cache, at), self.table)

    def generate(self, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
        length = prompts.shape[1]
        cache = self.cache(len(prompts), length + new_tokens)
        h, out = self(prompts, cache, 0)[:, -1], []
        for i in range(new_tokens):
            probabilities = F.softmax(F.linear(h, self.table) / TEMPERATURE, -1)
            out.append(torch.multinomial(probabilities, 1))
            if i + 1 < new_tokens:
                h = self(out[-1], cache, length + i)[:, -1]
        return torch.cat(out, 1)


def make(name: str) -> tuple[LM, Any, TorchLM]:
    longest = max(FLAGS.prompt + FLAGS.new_tokens, FLAGS.prefill + 1)
    config = LMConfig(
        layers=FLAGS.layers, dim=FLAGS.dim, heads=FLAGS.heads, mlp="gelu", vocab=VOCAB, max_len=longest, **SHAPES[name]
    )
    model = LM(config)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), example_batch(1, 8)))["params"]
    return model, params, TorchLM(params, config)


def int64_tensor(ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def check(name: str, model: LM, params: Any, theirs: TorchLM) -> None:
    """Exits unless the logits of both models agree, in one pass and with caches."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (2, FLAGS.prompt), dtype=np.int32)
    logits = np.asarray(jax.jit(lambda p, t: model.apply({"params": p}, t, method="logits"))(params, tokens))
    cache, split = theirs.cache(2, FLAGS.prompt), FLAGS.prompt // 2
    chunks = [theirs.logits(int64_tensor(tokens[:, :split]), cache, 0)]
    chunks += [theirs.logits(int64_tensor(tokens[:, i : i + 1]), cache, i) for i in range(split, FLAGS.prompt)]
    difference = np.abs(torch.cat(chunks, 1).numpy() - logits).max()

    prompts = [row[:length] for row, length in zip(tokens, (FLAGS.prompt, FLAGS.prompt // 3), strict=True)]
    ids = np.concatenate(list(Generation(model, params, prompts, tokens=32, sampling=GREEDY)), axis=1)
    greedy_gap = 0.0  # largest difference between torch's best logit and its logit of the decoded id
    for prompt, row in zip(prompts, ids, strict=True):
        text = np.concatenate([prompt, row])[None]
        scores = theirs.logits(int64_tensor(text), theirs.cache(1, text.shape[1]), 0).numpy()[0, len(prompt) - 1 : -1]
        greedy_gap = max(greedy_gap, float((scores.max(-1) - scores[np.arange(32), row]).max()))
    if difference > TOLERANCE or greedy_gap > TOLERANCE:
        sys.exit(
            f"{name}: logits differ from torch's by {difference:.1e}, and logits of greedy ids are {greedy_gap:.1e} "
            "below torch's largest: nothing is reported"
        )
    print(f"{name}: logits agree with torch's to {difference:.1e}, greedy ids to {greedy_gap:.1e}", flush=True)


def bench_decode(name: str, model: LM, params: Any, theirs: TorchLM, batch: int) -> dict[str, Any]:
    rng, count = np.random.default_rng(1), FLAGS.new_tokens
    lengths = [max(1, FLAGS.prompt * (i + 1) // batch) for i in range(batch)]
    prompts = [rng.integers(0, VOCAB, length) for length in lengths]
    padded = torch.from_numpy(rng.integers(0, VOCAB, (batch, FLAGS.prompt)))

    def ours() -> Generation:
        run = Generation(model, params, prompts, tokens=count, sampling=Sampling(TEMPERATURE))
        list(run)
        return run

    torch_calls = {
        f"torch_{n}": lambda n=n: (torch.set_num_threads(n), theirs.generate(padded, count)) for n in threads()
    }
    times = measure.timeit({"ours": ours, **torch_calls}, rounds=FLAGS.rounds)
    best = min(torch_calls, key=lambda label: times[label].median)
    run = ours()
    row = {
        "what": "decode", "model": name, "batch": batch, "prompt": FLAGS.prompt, "new_tokens": count,
        "layers": FLAGS.layers, "dim": FLAGS.dim, "heads": FLAGS.heads, "torch_threads": int(best.split("_")[1]),
        "ours_tokens_per_second": batch * count / times["ours"].median,
        "torch_tokens_per_second": batch * count / times[best].median,
        "speedup": times[best].over(times["ours"]),
        "ours_phase_ms": {phase: 1e3 * seconds for phase, seconds in run.seconds.items()},
        "ours_temporary_bytes": run.programs["decode"].memory_analysis().temp_size_in_bytes,
        "all_ms": {label: [1e3 * s for s in timing.all] for label, timing in times.items()},
    }  # fmt: skip
    print(
        f"{name}, {batch} prompts: ours {row['ours_tokens_per_second']:.0f} tokens/s, torch with {row['torch_threads']} "
        f"threads {row['torch_tokens_per_second']:.0f}; {row['speedup']:.2f} times as fast",
        flush=True,
    )
    return row


def bench_prefill(name: str, model: LM, params: Any, theirs: TorchLM) -> dict[str, Any]:
    length = FLAGS.prefill
    tokens = np.random.default_rng(2).integers(0, VOCAB, (1, length), dtype=np.int32)
    torch_tokens = int64_tensor(tokens)
    forward = measure.compile(lambda p, t: model.apply({"params": p}, t, method="logits"), params, tokens)

    def prefill() -> Generation:
        run = Generation(model, params, list(tokens), tokens=1, sampling=GREEDY)
        list(run)
        return run

    calls: dict[str, Any] = {"forward": lambda: forward(params, tokens)}
    for n in threads():
        calls[f"torch_{n}"] = lambda n=n: (torch.set_num_threads(n), theirs(torch_tokens, theirs.cache(1, length), 0))
    run, rounds = prefill(), []
    for _ in range(FLAGS.rounds):  # Generation measures its prefill itself, so the interleaving is done here
        prefill_seconds = prefill().seconds["prefill"]
        rounds.append(
            {"prefill": prefill_seconds, **{label: t.median for label, t in measure.timeit(calls, rounds=1).items()}}
        )
    times = {label: measure.Timing(tuple(seconds[label] for seconds in rounds)) for label in rounds[0]}
    row = {
        "what": "prefill", "model": name, "batch": 1, "prompt": length,
        "layers": FLAGS.layers, "dim": FLAGS.dim, "heads": FLAGS.heads,
        "prefill_ms": 1e3 * times["prefill"].median, "forward_ms": 1e3 * times["forward"].median,
        "prefill_over_forward": times["prefill"].over(times["forward"]),
        "torch_prefill_ms": 1e3 * min(times[label].median for label in times if label.startswith("torch")),
        "prefill_temporary_bytes": run.programs["prefill"].memory_analysis().temp_size_in_bytes,
        "forward_temporary_bytes": forward.memory.temp,
        "all_ms": {label: [1e3 * s for s in timing.all] for label, timing in times.items()},
    }  # fmt: skip
    print(
        f"{name}, prefill of {length}: {row['prefill_ms']:.1f} ms, one forward pass {row['forward_ms']:.1f} ms "
        f"(ratio {row['prefill_over_forward']:.2f}), torch {row['torch_prefill_ms']:.1f} ms",
        flush=True,
    )
    return row


def threads() -> list[int]:
    return sorted({1, measure.environment()["cores"]})


@torch.inference_mode()
def main(_: Any) -> None:
    rows = []
    for name in FLAGS.models:
        model, params, theirs = make(name)
        check(name, model, params, theirs)
        rows.append(bench_prefill(name, model, params, theirs))
        rows += [bench_decode(name, model, params, theirs, int(batch)) for batch in FLAGS.batches]
    print(measure.write_result("decode", [{**row, "torch": torch.__version__} for row in rows], FLAGS.out))


if __name__ == "__main__":
    app.run(main)
