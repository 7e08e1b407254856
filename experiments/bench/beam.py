"""Measures beam search of an encoder and decoder against BART's `generate` of transformers, interleaved in one process.

    python experiments/bench/beam.py [--sizes=base] [--batches=1,8] [--rounds=5]

Both have the same weights, and encode the sources in the measured time. The best continuation of each source must be the same;
otherwise nothing is reported. Continuations have the full number of ids unless all beams end before. transformers is timed with
its best number of threads; compilation is excluded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.models.decoding.beam_search import BeamOptions
from hpnlp.models.seq2seq import Seq2SeqModel, Seq2SeqModelConfig
from hpnlp.models.seq2seq_decode import search

RESULTS = Path(__file__).parents[1] / "results"
VOCAB, PAD, EOS, BEAMS = 8192, 1, 2, 4
SIZES = {  # layers of encoder and of decoder, D, heads, tokens of a source, new tokens
    "base": (6, 512, 8, 128, 64),
    "tiny": (2, 32, 2, 16, 8),
}
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
NORMS = {"mix_norm": "self_attn_layer_norm", "read_norm": "encoder_attn_layer_norm", "feed_norm": "final_layer_norm"}

FLAGS = flags.FLAGS
flags.DEFINE_list("sizes", ["base"], f"Sizes to measure, of {', '.join(SIZES)}.")
flags.DEFINE_list("batches", ["1", "8"], "Numbers of sources in a batch.")
flags.DEFINE_integer("rounds", 5, "Measurements of each; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def make(size: str) -> tuple[Seq2SeqModel, Any, Any]:
    """`(model, its parameters, BART with the same weights)`, drawn by BART's initialisation with a larger deviation."""
    layers, dim, heads, length, new_tokens = SIZES[size]
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=dim, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * dim, decoder_ffn_dim=4 * dim, dropout=0.0, init_std=0.05,
        max_position_embeddings=length + new_tokens, activation_function="gelu", pad_token_id=PAD, eos_token_id=EOS,
        bos_token_id=0, decoder_start_token_id=EOS, forced_eos_token_id=None,
    )  # fmt: skip
    bart = transformers.BartForConditionalGeneration(config).eval()
    values = {name: value.numpy() for name, value in bart.state_dict().items()}
    model = Seq2SeqModel(
        Seq2SeqModelConfig(
            dim=dim, heads=heads, layers=layers, mlp_dim=4 * dim, vocab=VOCAB, max_len=length + new_tokens,
            target_len=length + new_tokens, norm="layer", norm_eps=1e-5, norm_placement="post", embed_norm=True,
            position="learned", mlp="gelu_exact", qkv_bias=True, out_bias=True, mlp_bias=True,
        )
    )  # fmt: skip
    stacks = {name: stack(values, f"model.{name}.", layers) for name in ("encoder", "decoder")}
    return model, {"embed": {"table": values["model.shared.weight"]}, **stacks}, bart


def stack(values: dict[str, np.ndarray], prefix: str, layers: int) -> dict[str, Any]:
    """Parameters of the encoder or the decoder from BART's."""
    trees = [layer(values, f"{prefix}layers.{i}.") for i in range(layers)]
    return {
        "positions": {"table": values[f"{prefix}embed_positions.weight"][2:]},  # BART's positions begin at 2
        "embed_norm": norm(values, f"{prefix}layernorm_embedding"),
        "layers": jax.tree.map(lambda *leaves: np.stack(leaves), *trees),
    }


def layer(values: dict[str, np.ndarray], prefix: str) -> dict[str, Any]:
    """Parameters of one layer from BART's."""

    def attention(name: str) -> dict[str, Any]:
        return {ours: dense(values, f"{prefix}{name}.{theirs}") for ours, theirs in PROJECTIONS.items()}

    norms = {ours: name for ours, name in NORMS.items() if f"{prefix}{name}.weight" in values}
    cross = {"cross_attention": attention("encoder_attn")} if "read_norm" in norms else {}
    mlp = {"up": dense(values, f"{prefix}fc1"), "down": dense(values, f"{prefix}fc2")}
    return {
        "attention": attention("self_attn"),
        "mlp": mlp,
        **cross,
        **{ours: norm(values, f"{prefix}{name}") for ours, name in norms.items()},
    }


def dense(values: dict[str, np.ndarray], name: str) -> dict[str, Any]:
    return {"kernel": values[f"{name}.weight"].T, "bias": values[f"{name}.bias"]}


def norm(values: dict[str, np.ndarray], name: str) -> dict[str, Any]:
    return {"scale": values[f"{name}.weight"], "bias": values[f"{name}.bias"]}


def threads() -> list[int]:
    return sorted({1, measure.environment()["cores"]})


def bench(size: str, batch: int) -> dict[str, Any]:
    layers, dim, heads, length, new_tokens = SIZES[size]
    model, params, bart = make(size)
    params = jax.device_put(params)
    tokens = np.random.default_rng(0).integers(3, VOCAB, (batch, length)).astype(np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
    sources = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "positions": positions}
    ids = torch.from_numpy(tokens.astype(np.int64))

    def ours() -> jax.Array:
        options = {"tokens": new_tokens, "beams": BeamOptions(BEAMS), "eos_id": EOS, "pad_id": PAD}
        return search(model, params, sources, start_id=EOS, **options).ids[:, 0]

    def theirs(n: int) -> np.ndarray:
        torch.set_num_threads(n)
        mask = torch.ones_like(ids)
        out = bart.generate(ids, attention_mask=mask, num_beams=BEAMS, max_new_tokens=new_tokens, do_sample=False)
        return out[:, 1:].numpy()

    expected = theirs(threads()[-1])
    actual = np.asarray(ours())[:, : expected.shape[1]]
    if not np.array_equal(actual, expected):
        sys.exit(f"{size}, batch {batch}: the outputs of ours and transformers disagree: nothing is reported")
    calls: dict[str, Callable[[], Any]] = {"ours": ours}
    calls |= {f"transformers_{n}": lambda n=n: theirs(n) for n in threads()}
    times = measure.timeit(calls, rounds=FLAGS.rounds)
    seconds = {name: timing.median for name, timing in times.items()}
    best = min((name for name in times if name != "ours"), key=lambda name: seconds[name])
    count = int((expected != PAD).sum())
    row = {
        "size": size, "layers": layers, "dim": dim, "heads": heads, "source": length, "batch": batch, "beams": BEAMS,
        "ids": count, "ours_tokens_per_second": count / seconds["ours"],
        "transformers_tokens_per_second": count / seconds[best], "times_faster": seconds[best] / seconds["ours"],
        "all_ms": {name: [1e3 * s for s in timing.all] for name, timing in times.items()},
        "transformers": transformers.__version__, "torch": torch.__version__,
    }  # fmt: skip
    print(
        f"{size}, batch {batch}, beam {BEAMS}: ours {row['ours_tokens_per_second']:.0f} tokens/s, transformers "
        f"{row['transformers_tokens_per_second']:.0f} tokens/s: {row['times_faster']:.2f} times as fast",
        flush=True,
    )
    return row


@torch.inference_mode()
def main(_: Any) -> None:
    cli.prepare_jax()
    transformers.logging.set_verbosity_error()
    rows = [bench(size, int(batch)) for size in FLAGS.sizes for batch in FLAGS.batches]
    print(measure.write_result("beam", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
