"""Published claims on attention."""

from __future__ import annotations

import dataclasses

from claims import Claim, Figure


def step(mixer: str, length: int, text: str, reproduced: float | None = None, partly: float | None = None) -> Figure:
    """Training steps per second of a mixer relative to exact attention, in a classifier of bytes."""
    same = {"task": "text_stdlib", "length": length}
    return Figure(
        "arena_efficiency",
        {**same, "mixer": mixer},
        ("steps_per_second",),
        text,
        over=("steps_per_second",),
        over_row={**same, "mixer": "full"},
        reproduced=reproduced,
        partly=partly,
    )


def growth(mixer: str) -> Figure:
    """Time of a training step at 4 times the length. 5 is near linear; a step of exact attention has its own row."""
    same = {"task": "text_stdlib", "mixer": mixer}
    return Figure(
        "arena_efficiency",
        {**same, "length": 1024},
        ("steps_per_second",),
        "training step at 4 times the length: {:.1f} times",
        over=("steps_per_second",),
        over_row={**same, "length": 4096},
        reproduced=5,
        lower_is_better=True,
    )


def exact_growth() -> Figure:
    return dataclasses.replace(growth("full"), text="of exact attention: {:.1f} times", reproduced=None)


def accuracy(mixer: str) -> Figure:
    return Figure("arena", {"mixer": mixer}, ("accuracy",), f"`{mixer}` {{:.1%}}")


def block(group: str, form: str, text: str, reproduced: float | None = None, partly: float | None = None) -> Figure:
    """Held-out loss of a model with other blocks over that of the standard block, after equal steps."""
    fields, field = {"group": group, "form": form}, ("steps", "over_plain")
    return Figure("evolved_lite", fields, field, text, reproduced=reproduced, partly=partly, lower_is_better=True)


IN_WORDS = "numbers to words, loss {:.3f} times that of the standard block"
IN_BYTES = "byte-level language model {:.3f}"


ATTENTION = (
    Claim(
        "15 % faster training of BERT-large",
        "Dao et al. 2022 (FlashAttention)",
        "https://arxiv.org/abs/2205.14135",
        "512 tokens, beside the record of MLPerf 1.1; one kernel that keeps no scores; A100 GPUs",
        (
            Figure(
                "attention",
                {"what": "dense, T 4096"},
                ("ratios", "over jax.nn"),
                "attention alone, T 4096: {:.1f} times as fast as jax.nn",
                inverse=True,
            ),
            Figure(
                "attention",
                {"what": "temporary memory, dense"},
                ("ratios", "T 4096 over jax.nn"),
                "temporary memory 1/{:.0f}",
                inverse=True,
            ),
        ),
        "the same algorithm in XLA on a CPU; [Results](results.md#on-a-gpu) compare attention on a GPU with torch",
        is_comparable=False,
    ),
    Claim(
        "sequences up to 8 times longer on similar hardware",
        "Zaheer et al. 2020 (BigBird)",
        "https://arxiv.org/abs/2007.14062",
        "beside attention that stores all scores",
        (
            Figure(
                "mixers",
                {"mixer": "bigbird", "mask": "full"},
                ("temp_over_jax_nn",),
                "memory of attention at T 4096: 1/{:.0f} of that of jax.nn",
                inverse=True,
                partly=8,
            ),
            Figure(
                "mixers",
                {"mixer": "full", "mask": "full"},
                ("temp_over_jax_nn",),
                "of exact attention by tiles: 1/{:.0f}",
                inverse=True,
            ),
            step("bigbird(32, 3, 1, 1)", 4096, "training steps at T 4096: {:.1f} times those of exact attention"),
        ),
        "exact attention needs no less memory by the pattern; time is what it saves",
    ),
    Claim(
        "cost linear in the length (no factor in the abstract)",
        "Beltagy et al. 2020 (Longformer)",
        "https://arxiv.org/abs/2004.05150",
        "sliding windows and global tokens",
        (
            Figure(
                "attention",
                {"what": "longformer, window +-256, 16 global, T 16384"},
                ("ratios", "over our dense by its square law"),
                "T 16,384: {:.0f} times as fast as dense attention, extrapolated from T 4096",
                inverse=True,
                reproduced=4,
            ),
            growth("longformer(128, 16)"),
            exact_growth(),
            step("longformer(128, 16)", 4096, "training steps at T 4096: {:.1f} times"),
        ),
    ),
    Claim(
        "cost of the order of T log T in place of T^2",
        "Kitaev et al. 2020 (Reformer)",
        "https://arxiv.org/abs/2001.04451",
        "hashed buckets of queries and keys",
        (
            growth("reformer(16, 2, window=64)"),
            exact_growth(),
            step("reformer(16, 2, window=64)", 4096, "T 4096: {:.1f} times the training steps per second"),
        ),
    ),
    Claim(
        "linear cost",
        "Wang et al. 2020 (Linformer)",
        "https://arxiv.org/abs/2006.04768",
        "keys and values compressed along the sequence",
        (
            growth("linformer(128)"),
            exact_growth(),
            step("linformer(128)", 4096, "T 4096: {:.1f} times the training steps per second"),
        ),
    ),
    Claim(
        "linear cost",
        "Choromanski et al. 2021 (Performer)",
        "https://arxiv.org/abs/2009.14794",
        "random features of the softmax",
        (
            growth("performer"),
            exact_growth(),
            step("performer", 4096, "T 4096: {:.1f} times the training steps per second"),
        ),
    ),
    Claim(
        "linear cost; up to 4,000 times as fast in autoregressive prediction of very long sequences",
        "Katharopoulos et al. 2020 (linear attention)",
        "https://arxiv.org/abs/2006.16236",
        "images of CIFAR-10 (4,462 times); beside softmax attention that recomputes each prefix; GPU",
        (
            Figure(
                "linear_attention",
                {"what": "linear, causal, T 16384"},
                ("ratios", "over T 4096"),
                "4 times the length: {:.2f} times the time",
                reproduced=4.4,
                lower_is_better=True,
            ),
            Figure(
                "linear_attention",
                {"what": "linear, causal, decoding after 32768 tokens"},
                ("ratios", "pass over step"),
                "a step after 32,768 tokens: 1/{:,.0f} of a pass",
                reproduced=4000,
                partly=100,
            ),
        ),
        "beside a pass of linear attention, and not of softmax attention",
    ),
    Claim(
        "ListOps: dense 36.4 %, BigBird 36.1, Longformer 35.6, Reformer 37.3, Linformer 35.7, Performer 18.0, linear 16.1",
        "Tay et al. 2021 (Long Range Arena)",
        "https://arxiv.org/abs/2011.04006",
        "about 2,000 tokens, 5,000 steps",
        tuple(
            accuracy(name)
            for name in ("full", "bigbird(32, 3, 1, 1)", "longformer(128, 16)", "linformer(128)", "performer", "linear")
        ),
        "up to 256 tokens, equal time on two cores",
        is_comparable=False,
    ),
    Claim(
        "training 80 % faster on GPUs (70 % on TPUs) at 92 to 97 % of the accuracy of BERT",
        "Lee-Thorp et al. 2021 (FNet)",
        "https://arxiv.org/abs/2105.03824",
        "512 tokens; GLUE",
        (
            step("fnet", 1024, "T 1024: {:.1f} times the training steps per second", partly=1.8),
            Figure(
                "arena",
                {"mixer": "fnet"},
                ("accuracy",),
                "accuracy on ListOps {:.3f} times that of attention",
                over=("accuracy",),
                over_row={"mixer": "full"},
            ),
        ),
        "small models, in which attention takes a larger share; ListOps does not tell mixers apart here",
    ),
    Claim(
        "random synthesizers 60 % faster than dynamic convolutions, perplexity 3.5 % lower",
        "Tay et al. 2020 (Synthesizer)",
        "https://arxiv.org/abs/2005.00743",
        "masked language modelling on C4",
        (
            Figure(
                "mixers",
                {"mixer": "dynamicconv", "mask": "full"},
                ("time_over_exact",),
                "T 4096: {:.2f} times as fast as dynamic convolutions",
                over=("time_over_exact",),
                over_row={"mixer": "synthesizer_random", "mask": "full"},
                reproduced=1.6,
                partly=1.05,
            ),
        ),
        "the cost of a synthesizer grows by the square of the length, that of a convolution linearly; perplexity not measured",
    ),
    Claim(
        "2.5 times less computation for 0.3 BLEU",
        "Wu et al. 2020 (Lite Transformer)",
        "https://arxiv.org/abs/2004.11886",
        "beside the base Transformer; WMT'14",
        (
            block("numbers", "lite, 40 % of the parameters", IN_WORDS),
            Figure(
                "evolved_lite",
                {"group": "numbers", "form": "lite, 40 % of the parameters"},
                ("flops_over_plain",),
                "{:.1f} times fewer FLOPs",
                inverse=True,
            ),
            block("language_model", "lite, 40 % of the parameters", IN_BYTES, 1.01, 1.03),
        ),
        "judged by the language model, small models and equal steps; with numbers to words three seeds show no difference",
    ),
    Claim(
        "the quality of the big Transformer with 37.6 % fewer parameters",
        "So et al. 2019 (Evolved Transformer)",
        "https://arxiv.org/abs/1901.11117",
        "WMT'14 English-German",
        (
            block("numbers", "evolved, 62 % of the parameters", IN_WORDS),
            block("language_model", "evolved, 62 % of the parameters", IN_BYTES, 1.0, 1.01),
            block("language_model", "evolved", "{:.3f} with as many parameters"),
        ),
        "judged by the language model, equal steps; numbers to words: a difference of -0.47 ± 0.61 nats",
    ),
    Claim(
        "BLEU 29.7",
        "Wu et al. 2019 (dynamic convolutions)",
        "https://arxiv.org/abs/1901.10430",
        "WMT'14 English-German",
        note="the mixer is there (`dynamicconv`); no translation was measured",
    ),
    Claim(
        "evaluation up to 1,874 times as fast",
        "Dai et al. 2019 (Transformer-XL)",
        "https://arxiv.org/abs/1901.02860",
        "a context of 3,800 tokens, beside a window for each token; GPU",
        (
            Figure(
                "memory_evaluation",
                {"context": 512},
                ("speedup",),
                "context 512: {:.0f} times",
                reproduced=1874,
                partly=100,
            ),
            Figure("memory_evaluation", {"context": 256}, ("speedup",), "256: {:.0f} times", partly=100),
        ),
        "the factor grows with the context",
    ),
)
