"""Row of decoding with a KV cache, against a compiled torch model with a static cache."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from gpu_rows import peers
from gpu_rows.rows import TOLERANCES, Calls, Case, Context, Record, Row, Target, Work, compare, difference
from gpu_rows.step import SIZES, VOCAB
from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.models.decode import Generation, Sampling
from hpnlp.models.lm import LM, LMConfig, example_batch

PEER = "torch with a static cache"
TEMPERATURE = 0.8


def decode_case(prompts: int, seconds: float) -> Case:
    """Generation of 128 tokens after prompts of 128, by bfloat16 weights, prefill included and compilation excluded."""

    def run(context: Context) -> list[Record]:
        (layers, dim, heads), vocab, length, count = SIZES["350M"], VOCAB, 128, 128
        if context.rehearse:
            (layers, dim, heads), vocab, length, count = SIZES["tiny"], 512, 8, 18
        config = LMConfig(
            layers=layers, dim=dim, heads=heads, vocab=vocab, max_len=length + count, mlp="gelu", dtype="bfloat16"
        )
        params = nn.meta.unbox(jax.jit(LM(config).init)(jax.random.key(0), example_batch(1, 8)))["params"]
        *_, (_, config, weights) = compress(config, params, parse_recipe("bf16"))
        model, ids = LM(config), np.random.default_rng(0).integers(0, vocab, (prompts, length), dtype=np.int32)
        phases: dict[str, float] = {}

        def ours() -> Any:
            def call() -> None:
                generation = Generation(model, weights, list(ids), tokens=count, sampling=Sampling(TEMPERATURE))
                list(generation)
                phases.update({name: 1e3 * s for name, s in generation.seconds.items()})

            return call

        calls = Calls()
        calls.add("ours", ours)
        their_logits: list[Any] = []

        def theirs() -> Any:
            peers.load_torch(context)
            from gpu_rows.torch_decoder import TorchDecoder

            decoder = TorchDecoder(context, params, config, prompts, length + count)
            tokens = peers.tensor(context, jnp.asarray(ids)).long()
            their_logits.append(decoder.prompt_logits(tokens).float().cpu().numpy())
            return lambda: peers.Pending((decoder.generate(tokens, count, TEMPERATURE),))

        calls.add(PEER, theirs)
        if their_logits and "ours" in calls.running:
            logits = jax.jit(lambda w, t: model.apply({"params": w}, t, method="logits"))(weights, ids)
            gap = difference(logits[:, -1], their_logits[0])
            if gap is None or gap > TOLERANCES["bfloat16"]:
                calls.failed["ours"] = f"logits of the prompt differ from torch's by {gap}"
                del calls.running["ours"]
        read = 2 * (12 * layers * dim**2 + vocab * dim) + 4 * prompts * layers * dim * (length + count // 2)
        record = compare(
            context, f"{layers} x {dim}, B {prompts}, {count} tokens after {length}", calls, Work(bytes=count * read)
        )
        rates = {f"{name}, tokens/s": 1e3 * prompts * count / ms for name, ms in record["ms"].items()}
        return [record | {"tokens_per_second": rates, "our_phases_ms": phases}]

    return Case(f"B {prompts}", seconds, run, rehearsed=prompts == 1)


DECODING = Row(
    "decoding",
    "generation of 128 tokens after prompts of 128, 350M parameters, bfloat16 weights, 1 and 32 prompts",
    "torch compile with a static cache",
    {f"time over {PEER}": Target(1.0, 0.7)},
    [decode_case(count, 110) for count in (1, 32)],
    checks=("decoding",),
)
