"""Published claims on quantization."""

from __future__ import annotations

from claims import Claim, Figure
from claims_compression import BYTE_MODEL, SMALL, faster, recipe, score, second_order, smaller, technique

NEAREST = "rounding to the nearest"


def product(what: str, ratio: str, text: str, reproduced: float | None = None, partly: float | None = None) -> Figure:
    """A gain of `bench/quantized_products.py` over float32."""
    field = ("ratios", f"{ratio}: time over float32")
    return Figure("quantized_products", {"what": what}, field, text, inverse=True, reproduced=reproduced, partly=partly)


CLAIMS = (
    Claim(
        "int8: 2 to 4 times as fast as float32",
        "PyTorch, Quantization",
        "https://pytorch.org/docs/1.8.1/quantization.html",
        "integer products of hardware that has them; no model named",
        (
            product(
                "encoder of 6 layers, D 384, B 1, T 128",
                "int8",
                "encoder of 6 layers, B 1: {:.2f} times as fast",
                2,
                1.05,
            ),
            product("encoder of 6 layers, D 384, B 8, T 128", "int8", "B 8: {:.2f}", 2, 1.05),
            product("x [1024, 1536] times w [1536, 384]", "int8", "product of 1,024 rows: {:.2f}"),
        ),
        "a whole encoder has more than products",
    ),
    Claim(
        "BERT 4 times smaller with minimal loss of accuracy",
        "Zafrir et al. 2019 (Q8BERT)",
        "https://arxiv.org/abs/1910.06188",
        "8 bits, trained while fine-tuning BERT; GLUE and SQuAD",
        (
            smaller("int8 in training", 4),
            score("int8 in training", 0.99),
            recipe("q8bert/inputs", "functions/dense", ("difference",), "weights and inputs of 8 bits: {:+.2%}"),
            recipe("q8bert/inputs", "functions/dense", ("half_interval",), "+- {:.2%}"),
            recipe("q8bert/inputs", "q8bert/after", ("difference",), "to rounding after training {:+.2%}"),
        ),
        SMALL,
    ),
    Claim(
        "14.9 times smaller, comparable to full precision",
        "Zhang et al. 2020 (TernaryBERT)",
        "https://arxiv.org/abs/2009.12812",
        "BERT-base, distilled while it is ternarized; GLUE and SQuAD",
        (
            smaller("ternary in training, distilled", 14.9),
            score("ternary in training, distilled", 0.99, 0.95),
            faster("ternary in training, distilled"),
        ),
        f"{SMALL}; the standard error of an accuracy is 1.7 points",
    ),
    Claim(
        "convolutions 58 times as fast, memory 1/32",
        "Rastegari et al. 2016 (XNOR-Net)",
        "https://arxiv.org/abs/1603.05279",
        "one bit for weights and inputs of a convolution on a CPU; its operations, without allocation and access of memory",
        (
            product(
                "bits: x [1024, 1024] times w [1024, 1024]",
                "binary of both",
                "product of 1,024 rows: {:.1f} times as fast",
                58,
                1.05,
            ),
            product("x [128, 1536] times w [1536, 384]", "binary packed", "inputs of 8 bits, 128 rows: {:.2f} times"),
            smaller("binary", 32, 4),
        ),
        "wall-clock time of products with the rounding of inputs; in the file, tables of embeddings keep 8 bits",
    ),
    Claim(
        "binary weights: top-1 accuracy of AlexNet as with float32 (56.8 and 56.6 %; 2.9 points lower in the first version)",
        "Rastegari et al. 2016 (Binary-Weight-Networks)",
        "https://arxiv.org/abs/1603.05279",
        "AlexNet trained with binary filters; ImageNet",
        (score("binary in training", 0.99, 0.95), score("binary")),
        f"first with training, then without; {SMALL}",
    ),
    Claim(
        "perplexity 8.37 in 4 bits (float16: 8.34; to the nearest: 10.54)",
        "Frantar et al. 2023 (GPTQ)",
        "https://arxiv.org/abs/2210.17323",
        "OPT-175B; WikiText-2; nothing is trained",
        (second_order("int4(by=inputs)", NEAREST, (8.37 - 8.34) / (10.54 - 8.34)),),
        BYTE_MODEL,
    ),
    Claim(
        "perplexity 6.24 in 3 bits, 5.60 in 4 bits (to the nearest: 6.66 and 5.73; float16: 5.47)",
        "Lin et al. 2024 (AWQ)",
        "https://arxiv.org/abs/2306.00978",
        "Llama-2-7B, groups of 128 weights; WikiText-2; nothing is trained",
        (second_order("int4(scaled=True)", NEAREST, (5.60 - 5.47) / (5.73 - 5.47)),),
        f"4 bits in groups of 32, {BYTE_MODEL}",
    ),
    Claim(
        "up to 1.56 times as fast, half of the memory",
        "Xiao et al. 2023 (SmoothQuant)",
        "https://arxiv.org/abs/2211.10438",
        "8 bits beside float16; language models up to 530B parameters on GPUs",
        note="other scale, and no model whose inputs have outliers",
    ),
    Claim(
        "int4 weights: 1.89 times as fast, 58 % less memory",
        "torchao",
        "https://github.com/pytorch/ao",
        "Llama-3-8B, one text; peak memory; beside bfloat16 on an A100",
        (
            faster("int4", 1.89, 1.05),
            # 2.38 beside bfloat16, which takes half of the memory of float32.
            technique("int4", ("original_memory_bytes",), ("memory_bytes",), "arrays 1/{:.2f}", 2 * 2.38, 1.05),
        ),
        f"8 texts at once, beside float32; bytes of the weights; {SMALL}",
    ),
)
