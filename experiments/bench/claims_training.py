"""Published claims on speed tricks, memory and parallelism of training, experts and scaling laws."""

from __future__ import annotations

from claims import Claim, Figure

NO_DEVICES = "other scale and devices"
BAGS = {"table": "bags", "form": "padded", "passes": "forward and backward"}


def stack(kind: str, layers: int, field: str, text: str, other: tuple[str, int], bound: float, less: bool) -> Figure:
    """A number of a stack of layers over that of another stack."""
    return Figure(
        "reversible",
        {"stack": kind, "layers": layers},
        (field,),
        text,
        over=(field,),
        over_row={"stack": other[0], "layers": other[1]},
        reproduced=bound,
        lower_is_better=less,
    )


def state(layout: str, text: str, reproduced: float, partly: float) -> Figure:
    """Bytes of the state of a device under data parallelism over those under another layout."""
    return Figure(
        "parity",
        {"layout": "data"},
        ("state_bytes",),
        text,
        over=("state_bytes",),
        over_row={"layout": layout},
        reproduced=reproduced,
        partly=partly,
    )


def bubble(rounds: int, microbatches: int) -> Figure:
    row = {"stages": 4, "rounds": rounds, "microbatches": microbatches, "kept": "all"}
    text = f"R {rounds}, M {microbatches}: idle share counted over the formula {{:.4f}}"
    return Figure(
        "bubble", row, ("idle_counted",), text, over=("idle_formula",), reproduced=1.001, lower_is_better=True
    )


def lengths(form: str, field: str, text: str, reproduced: float | None = None) -> Figure:
    return Figure("trees", {"table": "lengths", "form": form}, (field,), text, reproduced=reproduced)


def against_vector(rows: int, text: str) -> Figure:
    """Speed of a product of matrix and vector over multiplication and sum in one compiled program."""
    fields = {"table": "vector", "rows": rows, "passes": "forward"}
    return Figure(
        "speed_tricks",
        {**fields, "form": "product of matrix and vector"},
        ("factor",),
        text,
        over=("factor",),
        over_row={**fields, "form": "multiplication and sum"},
        reproduced=1.4,
        partly=1.05,
    )


TRICKS = (
    Claim(
        "batched dot products 40 % faster",
        "named in [Speed tricks](guide/speed_tricks.md) without a source",
        "",
        "one vector against n rows: a product of matrix and vector in place of multiplication and sum",
        (
            against_vector(1024, "1,024 rows of 128: {:.2f} times as fast"),
            against_vector(16_384, "16,384 rows of 512: {:.2f} times"),
        ),
        "beside multiplication and sum that the compiler fuses; as two operations they take longer",
    ),
    Claim(
        "padded bags of words 1.79 times as fast (14,863 ms to 8,294 ms)",
        "named in [Speed tricks](guide/speed_tricks.md) without a source",
        "",
        "bags in one operation in place of one after another, in another framework",
        (
            Figure(
                "speed_tricks",
                {**BAGS, "lengths": "8 to 12 words"},
                ("factor",),
                "8 to 12 words: {:.2f}",
                reproduced=1.79,
                partly=1.05,
            ),
            Figure(
                "speed_tricks", {**BAGS, "lengths": "1 to 200 words, geometric"}, ("factor",), "1 to 200 words: {:.2f}"
            ),
            Figure(
                "speed_tricks",
                {**BAGS, "lengths": "8 to 12 words", "passes": "forward"},
                ("factor",),
                "forward, 8 to 12 words, over a call for each bag: {:.0f}",
            ),
        ),
        "the first two are forward and backward, beside a loop in one compiled program; bags of very different lengths lose",
    ),
    Claim(
        "up to 50 % of all tokens are padding; packing is 2 times as fast",
        "Krell et al. 2021",
        "https://arxiv.org/abs/2107.02027",
        "sequences of 512 tokens, second phase of the pretraining of BERT; Wikipedia",
        (
            lengths("padded", "padding", "{:.0%} padding in rows of 256", 0.5),
            lengths("packed", "tokens_per_second_over_padded", "packed {:.2f} times the tokens/s", 2),
            lengths("buckets", "tokens_per_second_over_padded", "in buckets {:.2f} times"),
        ),
        "a language model on functions",
    ),
    Claim(
        "automatic batching 3.6 to 9.2 times as fast on a CPU",
        "Neubig et al. 2017 (DyNet)",
        "https://arxiv.org/abs/1705.07860",
        "taggers of bidirectional LSTMs, Tree-LSTMs (7.1 times) and parsers; 64 sentences beside one after another",
        (
            Figure(
                "trees",
                {"table": "trees", "form": "loop over nodes, torch"},
                ("ours_over",),
                "{:.0f} times as fast as a loop over nodes in torch",
                inverse=True,
                reproduced=9.2,
                partly=3.6,
            ),
        ),
        "a binary Tree-LSTM by levels in one compiled step, beside another framework",
    ),
)

MEMORY = (
    Claim(
        "memory from 48 to 7 GB for 30 % more time; of the order of the square root of the layers",
        "Chen et al. 2016 (gradient checkpointing)",
        "https://arxiv.org/abs/1604.06174",
        "a residual network of 1,000 layers; ImageNet; GPU",
        (
            stack("plain", 32, "temp_bytes", "32 layers: temporary memory 1/{:.1f}", ("remat", 32), 48 / 7, False),
            stack("remat", 32, "temp_bytes", "{:.2f} times that of 4 layers", ("remat", 4), 8**0.5, True),
            Figure(
                "reversible",
                {"stack": "remat", "layers": 32},
                ("time_over_plain",),
                "{:.2f} of the time",
                reproduced=1.3,
                lower_is_better=True,
            ),
        ),
        "the input of each layer is kept, and nothing else; less memory is also less time on this CPU",
    ),
    Claim(
        "activation memory independent of the depth",
        "Gomez et al. 2017 (RevNet)",
        "https://arxiv.org/abs/1707.04585",
        "residual networks; CIFAR and ImageNet",
        (
            stack(
                "reversible",
                32,
                "temp_bytes",
                "32 layers over 4: {:.3f} times the temporary memory",
                ("reversible", 4),
                1.01,
                True,
            ),
            Figure(
                "reversible",
                {"stack": "reversible", "layers": 32},
                ("time_over_plain",),
                "{:.2f} of the time of stored activations",
            ),
        ),
    ),
    Claim(
        "memory of parameters, gradients and optimizer 1/4 (stage 1), 1/8 (2), 1 / devices (3)",
        "Rajbhandari et al. 2020 (ZeRO)",
        "https://arxiv.org/abs/1910.02054",
        "Adam with 2 + 2 + 12 bytes for each parameter in 16 bits; 1/4 and 1/8 are limits of many devices",
        (
            state("zero1", "8 devices, stage 1: 1/{:.2f}", 4, 2),
            state("zero3", "stage 3: 1/{:.2f}", 7.5, 4),
        ),
        "float32 parameters and moments without gradients, 8 devices: the formula gives 1/2.4 and 1/8; stage 2 is not measured",
    ),
    Claim(
        "idle share (S - 1) / (M + S - 1) of S stages and M microbatches",
        "Huang et al. 2019 (GPipe)",
        "https://arxiv.org/abs/1811.06965",
        "a formula",
        (bubble(1, 8), bubble(1, 32)),
    ),
    Claim(
        "idle share (S - 1) / (R M + S - 1) of R rounds",
        "MaxText, circular pipelines",
        "https://github.com/AI-Hypercomputer/maxtext",
        "a formula of its configuration",
        (bubble(4, 8), bubble(4, 32)),
    ),
    Claim(
        "nearly half the memory, the accuracy of float32",
        "Micikevicius et al. 2018 (mixed precision)",
        "https://arxiv.org/abs/1710.03740",
        "float16 with a copy of the parameters in float32 and loss scaling; GPUs",
        (
            Figure(
                "precision",
                {"table": "steps", "what": "float16, loss scaling"},
                ("temp_over_float32",),
                "float16: {:.2f} of the temporary memory of a step",
                reproduced=0.55,
                partly=0.9,
                lower_is_better=True,
            ),
            Figure(
                "precision",
                {"table": "training", "what": "float16, loss scaling"},
                ("loss",),
                "{:.4f} times the held-out loss",
                over=("loss",),
                over_row={"table": "training", "what": "float32"},
                reproduced=1.005,
                partly=1.02,
                lower_is_better=True,
            ),
            Figure(
                "precision",
                {"table": "steps", "what": "float16, loss scaling"},
                ("over_float32",),
                "{:.2f} times the time",
            ),
        ),
        "a language model of 4 layers; activations of float16, parameters of float32",
    ),
    Claim(
        "BERT in 76 minutes in place of 3 days; batches of 32,868 without loss of quality",
        "You et al. 2020 (LAMB)",
        "https://arxiv.org/abs/1904.00962",
        "a TPUv3 pod; the 76 minutes with batches of 65,536 for sequences of 128 tokens and of 32,768 for 512",
        (
            *(
                Figure(
                    "large_batch",
                    {"optimizer": optimizer.lower(), "rule": "sqrt"},
                    ("over_small",),
                    f"{optimizer}, batches 16 times as large, rate scaled by the square root: {{:.3f}} times the loss",
                )
                for optimizer in ("LAMB", "AdamW")
            ),
        ),
        "other scale: 1,024 large batches of a byte-level model, relative to AdamW with 16 times the steps",
        is_comparable=False,
    ),
)

EXPERTS = (
    Claim(
        "up to 40 % faster than Tutel, 2.4 times as fast as dense models of Megatron-LM",
        "Gale et al. 2022 (MegaBlocks)",
        "https://arxiv.org/abs/2211.15841",
        "whole trainings; GPUs",
        (
            Figure(
                "experts",
                {"compared": "dense", "row": "E 8, N 4096"},
                ("wall", "ratio"),
                "E 8: {:.2f} times the time of a dense layer of equal FLOPs",
            ),
            Figure(
                "experts",
                {"compared": "torch", "row": "E 64, N 4096"},
                ("wall", "ratio"),
                "E 64: {:.2f} times that of `grouped_mm` of torch",
            ),
        ),
        "a layer on two cores; the time to an equal loss is not measured",
        is_comparable=False,
    ),
    Claim(
        "pretraining up to 7 times as fast",
        "Fedus et al. 2021 (Switch Transformer)",
        "https://arxiv.org/abs/2101.03961",
        "T5-Base and T5-Large of equal FLOPs; TPUs",
        (
            Figure(
                "experts_quality",
                {"what": "switch(8,kind=gelu), 512 columns, 2000 steps"},
                ("time_to_dense_loss",),
                "one expert per token: the dense model's loss {:.2f} times as fast",
                inverse=True,
                reproduced=7.0,
                partly=1.2,
            ),
            Figure(
                "experts_quality",
                {"what": "top_k(8,2,kind=gelu), 256 columns, 2000 steps"},
                ("time_to_dense_loss",),
                "two: {:.2f} times",
                inverse=True,
            ),
        ),
        "8 experts, byte models of 2 layers, 8.2 million tokens",
    ),
    Claim(
        "600 billion parameters in 4 days on 2,048 TPUs",
        "Lepikhin et al. 2020 (GShard)",
        "https://arxiv.org/abs/2006.16668",
        "translation from 100 languages; TPU v3",
        note=NO_DEVICES,
    ),
    Claim(
        "better than the dense model for 50 % more of its training cost",
        "Komatsuzaki et al. 2023 (sparse upcycling)",
        "https://arxiv.org/abs/2212.05055",
        "T5 and ViT; SuperGLUE and ImageNet",
        note="`train.init_from` starts experts from a dense model; not measured",
    ),
)


def refit(field: str, text: str, reproduced: float | None = None) -> Figure:
    row = {"part": "refit", "points": "240 points"}
    return Figure("scaling_laws", row, (field,), text, reproduced=reproduced, lower_is_better=True)


SCALING = (
    Claim(
        "A 482.0, B 2085.4, E 1.817, α 0.348, β 0.366",
        "Besiroglu et al. 2024",
        "https://arxiv.org/abs/2404.10102",
        "240 points read from a figure of Hoffmann et al.",
        (
            refit("largest_difference_to_published", "largest relative difference of a constant {:.3f}", 0.05),
            refit("A", "A {:.1f}"),
            refit("B", "B {:.1f}"),
            refit("E", "E {:.3f}"),
            refit("alpha", "α {:.3f}"),
            refit("beta", "β {:.3f}"),
        ),
    ),
    Claim(
        "parameters of the best model grow as FLOPs^0.46 (A 406.4, B 410.7, E 1.69, α 0.34, β 0.28)",
        "Hoffmann et al. 2022 (Chinchilla, approach 3)",
        "https://arxiv.org/abs/2203.15556",
        "more than 400 models of 70M to 16B parameters",
        (refit("a", "exponent of the refit {:.3f}", 0.47),),
        "as Besiroglu et al. found: the 240 points fit other constants",
    ),
    Claim(
        "the exponent 0.835 becomes 0.497 by counting, warm-up, schedule and tuned rates",
        "Porian et al. 2024",
        "https://arxiv.org/abs/2406.19146",
        "RefinedWeb; on OpenWebText2, 0.864 becomes 0.519",
        note="the four rules are built in; other scale",
    ),
    Claim(
        "up to four passes over a text are nearly as good as new text",
        "Muennighoff et al. 2023",
        "https://arxiv.org/abs/2305.16264",
        "models of up to 9 billion parameters, up to 900 billion tokens",
        note="studies allow it (`Study(epochs=...)`), and none has measured it",
    ),
)
