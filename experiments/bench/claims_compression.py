"""Published claims on pruning, distillation and convolutional networks."""

from __future__ import annotations

from claims import Claim, Figure, Path

FILE, FILE_BEFORE = ("disk_bytes",), ("original_disk_bytes",)
TIME, TIME_BEFORE = ("seconds", "8"), ("original_seconds", "8")


def technique(
    name: str,
    field: Path,
    over: Path,
    text: str,
    reproduced: float | None = None,
    partly: float | None = None,
    task: str = "classification",
) -> Figure:
    """A ratio within the row of a technique of compression."""
    row = {"task": task, "technique": name}
    return Figure("compression", row, field, text, over=over, reproduced=reproduced, partly=partly)


def smaller(name: str, reproduced: float | None = None, partly: float | None = None) -> Figure:
    return technique(name, FILE_BEFORE, FILE, "file 1/{:.1f}", reproduced, partly)


def faster(name: str, reproduced: float | None = None, partly: float | None = None) -> Figure:
    return technique(name, TIME_BEFORE, TIME, "{:.2f} times as fast at B 8", reproduced, partly)


def score(name: str, reproduced: float | None = None, partly: float | None = None) -> Figure:
    return technique(name, ("score",), ("teacher_score",), "{:.1%} of the accuracy", reproduced, partly)


def second_order(recipe: str, simple: str, reproduced: float | None = None) -> Figure:
    """Increase of the loss over that by the simple form: rounding to the nearest, or pruning by magnitude."""
    text = f"the loss increases {{:.2f}} times as much as by {simple}"
    row = {"what": recipe}
    return Figure("second_order", row, ("ratio",), text, reproduced=reproduced, partly=1.0, lower_is_better=True)


def network(name: str, field: str, text: str, reproduced: float | None = None, partly: float | None = None) -> Figure:
    """A gain of a convolutional network of width 64."""
    row = {"table": "networks", "network": name, "width": 64}
    return Figure("convnets", row, (field,), text, inverse=True, reproduced=reproduced, partly=partly)


def recipe(
    technique: str,
    control: str,
    field: Path,
    text: str,
    over: Path = (),
    reproduced: float | None = None,
    partly: float | None = None,
) -> Figure:
    """A number of a technique and its control in `bench/recipes.py`."""
    row = {"technique": technique, "control": control}
    return Figure("recipes", row, field, text, over=over, reproduced=reproduced, partly=partly)


def time_of_student(name: str, text: str, faster: float | None = None) -> Figure:
    """Time of a distilled classifier of functions relative to its teacher's."""
    return Figure(
        "recipe_times",
        {"table": "models", "what": f"{name} student"},
        ("over_first_8",),
        text,
        inverse=True,
        reproduced=faster,
        partly=None if faster is None else 1.05,
    )


def student(name: str, technique: str, control: str, smaller: float, faster: float, share: float) -> tuple[Figure, ...]:
    """Size, time and accuracy of a distilled classifier relative to its teacher, and the lead over its control."""
    size, score, lead = ("teacher_parameters",), ("technique_score",), ("difference",)
    return (
        recipe(technique, control, size, "1/{:.2f} of the parameters", ("technique_parameters",), smaller, 1.5),
        time_of_student(name, "{:.2f} times as fast at B 8", faster),
        recipe(technique, control, score, "{:.1%} of the accuracy", ("teacher_score",), share, 0.9),
        recipe(technique, control, lead, "{:+.1%} to the same student without a teacher"),
        recipe(technique, control, ("half_interval",), "+- {:.1%}"),
    )


SMALL = "a classifier of 4 layers, 3.8M parameters"
BYTE_MODEL = "a byte-level model of 2M parameters"

CLAIMS = (
    Claim(
        "files 1/35 (AlexNet, 240 to 6.9 MB) and 1/49 (VGG-16, 552 to 11.3 MB) without loss of accuracy",
        "Han et al. 2016 (Deep Compression)",
        "https://arxiv.org/abs/1510.00149",
        "pruning, shared values of 5 to 8 bits, both trained, and Huffman codes; ImageNet",
        (smaller("Deep Compression, values trained", 35, 10), score("Deep Compression, values trained", 1.0)),
        f"10 % of the weights and 31 values of {SMALL}",
    ),
    Claim(
        "Deep Compression: layers 3 to 4 times as fast",
        "Han et al. 2016 (Deep Compression)",
        "https://arxiv.org/abs/1510.00149",
        "pruned fully connected layers, batch size 1; CPU, GPU and mobile GPU",
        (faster("Deep Compression, values trained", 3, 1.05),),
        "products restore the dense matrix; `blocks` is the sparse format that is faster",
    ),
    Claim(
        "1/9 to 1/13 of the connections without loss of accuracy",
        "Han et al. 2016 (Deep Compression)",
        "https://arxiv.org/abs/1510.00149",
        "magnitude pruning and retraining of AlexNet and VGG-16",
        (score("magnitude", 1.0, 0.95),),
        f"1/10 of the weights of {SMALL}, fine-tuned",
    ),
    Claim(
        "winning tickets of less than 10 to 20 % of the network reach its accuracy",
        "Frankle and Carbin 2019",
        "https://arxiv.org/abs/1803.03635",
        "fully connected and convolutional networks; MNIST and CIFAR-10",
        (
            recipe(
                "tickets/ticket",
                "tickets/dense",
                ("technique_score",),
                "5 % of the weights: {:.1%} of the accuracy of all",
                ("control_score",),
                0.995,
                0.95,
            ),
            recipe("tickets/ticket", "tickets/other_values", ("difference",), "{:+.1%} to other first values"),
            recipe("tickets/ticket", "tickets/random_mask", ("difference",), "{:+.1%} to a random mask"),
        ),
        "a narrow convolutional network on drawn digits; larger tickets were not measured",
    ),
    Claim(
        "F1 with 10 % of the weights: 84.3 by movement, 80.1 by magnitude (dense: 88.1)",
        "Sanh et al. 2020 (movement pruning)",
        "https://arxiv.org/abs/2005.07683",
        "BERT-base pruned while fine-tuned and distilled (not distilled: 81.7 and 78.5); SQuAD",
        (
            Figure(
                "compression",
                {"task": "classification", "technique": "movement while learning, 10 %"},
                ("score",),
                "10 % of the weights: movement over magnitude {:.3f}",
                over=("score",),
                over_row={"task": "classification", "technique": "magnitude while learning, 10 %"},
                reproduced=84.3 / 80.1,
                partly=1.0,
            ),
            Figure(
                "compression",
                {"task": "classification", "technique": "movement while learning, 3 %"},
                ("score",),
                "3 %: {:.3f}",
                over=("score",),
                over_row={"task": "classification", "technique": "magnitude while learning, 3 %"},
                reproduced=78.0 / 59.6,
                partly=1.0,
            ),
            recipe(
                "movement/stronger_movement",
                "movement/stronger_magnitude",
                ("difference",),
                "after masked words, 14 %: movement {:+.1%} to magnitude",
                reproduced=0.042,
                partly=0.0,
            ),
            recipe("movement/stronger_movement", "movement/stronger_magnitude", ("half_interval",), "+- {:.1%}"),
        ),
        "classifiers of functions of 1.1M to 3.8M parameters, not distilled",
    ),
    Claim(
        "F1 with 3 % of the weights: 82.3 by soft movement, 59.6 by magnitude (dense: 88.1)",
        "Sanh et al. 2020 (movement pruning)",
        "https://arxiv.org/abs/2005.07683",
        "BERT-base pruned while fine-tuned and distilled (not distilled: 79.9 and 54.5); SQuAD",
        (
            recipe(
                "movement/stronger",
                "movement/stronger_magnitude",
                ("difference",),
                "14 % of the weights: {:+.1%} to magnitude",
                reproduced=0.227,
                partly=0.0,
            ),
            recipe("movement/stronger", "movement/stronger_magnitude", ("half_interval",), "+- {:.1%}"),
            recipe("movement/stronger", "functions/dense", ("difference",), "{:+.1%} to all weights"),
        ),
        "14 % of the weights in place of 3, not distilled; a classifier of functions of 1.1M parameters",
    ),
    Claim(
        "2.4 times as fast, 74 % smaller, F1 1 % lower",
        "Lagunas et al. 2021 (block pruning)",
        "https://arxiv.org/abs/2109.04838",
        "BERT-base, blocks pruned by movement, empty heads and columns removed; SQuAD",
        (
            faster("blocks, fine-tuned", 2.4, 1.2),
            technique(
                "blocks, fine-tuned",
                ("original_parameters",),
                ("parameters",),
                "1/{:.1f} of the parameters",
                1 / 0.26,
                1.5,
            ),
            score("blocks, fine-tuned", 0.99, 0.95),
            faster("heads and columns"),
        ),
        "the last figure removes half of the heads and columns, without blocks",
    ),
    Claim(
        "convolutional layers 5.1 times as fast on a CPU, 3.1 on a GPU",
        "Wen et al. 2016",
        "https://arxiv.org/abs/1608.03665",
        "structures removed by group lasso, mean of the convolutional layers; AlexNet",
        (
            network(
                "standard, half the filters",
                "logits_over_original",
                "half of the filters: {:.1f} times as fast",
                5.1,
                1.5,
            ),
            network(
                "standard, two thirds of the positions", "logits_over_original", "a third of the positions: {:.1f}"
            ),
        ),
        "times of a whole network; structures chosen by size, and fewer of them removed",
    ),
    Claim(
        "a pruned architecture, trained from random weights, is as good as the pruned network",
        "Liu et al. 2019",
        "https://arxiv.org/abs/1810.05270",
        "convolutional networks, structured pruning; CIFAR and ImageNet",
        (
            Figure(
                "compression",
                {"task": "classification", "technique": "heads and columns, from scratch"},
                ("score",),
                "accuracy from scratch over that of the pruned teacher: {:.3f}",
                over=("score",),
                over_row={"task": "classification", "technique": "heads and columns"},
                reproduced=0.98,
            ),
        ),
        f"half of the heads and columns of {SMALL}; the standard error of an accuracy is 1.7 points",
    ),
    Claim(
        "40 % fewer parameters, 97 % of BERT, 60 % faster",
        "Sanh et al. 2019 (DistilBERT)",
        "https://arxiv.org/abs/1910.01108",
        "6 of 12 layers of BERT-base, distilled in pretraining; GLUE",
        (
            technique(
                "distilled student",
                ("original_parameters",),
                ("parameters",),
                "1/{:.2f} of the parameters",
                1 / 0.6,
                task="masked words",
            ),
            technique(
                "distilled student", ("score",), ("teacher_score",), "{:.1%} of the accuracy", 0.97, task="masked words"
            ),
            technique(
                "distilled student", TIME_BEFORE, TIME, "{:.2f} times as fast at B 8", 1.6, 1.05, task="masked words"
            ),
            time_of_student("DistilBERT", "a classifier of functions {:.2f} times"),
            technique(
                "student without a teacher",
                ("score",),
                ("teacher_score",),
                "{:.1%} without a teacher",
                task="masked words",
            ),
        ),
        "2 of 4 layers, masked words; the vocabulary takes a larger share of the time, and the teacher adds little",
    ),
    Claim(
        "7.5 times smaller, 9.4 times as fast, 96.8 % of BERT",
        "Jiao et al. 2020 (TinyBERT)",
        "https://arxiv.org/abs/1909.10351",
        "4 layers of width 312 beside BERT-base; GLUE",
        student("TinyBERT", "tinybert/student", "tinybert/alone", 7.5, 9.4, 0.968),
        "2 layers of width 40 beside 4 of 128, packages of functions, no augmented data",
    ),
    Claim(
        "4.3 times smaller, 5.5 times as fast as BERT-base; GLUE 77.7, 62 ms",
        "Sun et al. 2020 (MobileBERT)",
        "https://arxiv.org/abs/2004.02984",
        "24 bottleneck layers, distilled from a BERT-large with inverted bottlenecks; Pixel 4",
        student("MobileBERT", "mobilebert/student_functions", "mobilebert/alone_functions", 4.3, 5.5, 0.99),
        "4 bottleneck layers beside 4 of width 128, packages of functions; a teacher without bottlenecks",
    ),
    Claim(
        "perplexity 8.21 with half of the weights (dense: 8.35; by magnitude: 43,000)",
        "Frantar and Alistarh 2023 (SparseGPT)",
        "https://arxiv.org/abs/2301.00774",
        "OPT-175B; WikiText-2; nothing is trained",
        (second_order("magnitude(0.5,by=inputs)", "pruning by magnitude", 0.0),),
        f"{BYTE_MODEL}, whose loss increases, where that of OPT-175B falls",
    ),
    Claim(
        "perplexity 8.74 with two of each four weights (dense: 8.35)",
        "Frantar and Alistarh 2023 (SparseGPT)",
        "https://arxiv.org/abs/2301.00774",
        "OPT-175B; WikiText-2; nothing is trained",
        (second_order("two_four(by=inputs)", "pruning by magnitude"),),
        f"{BYTE_MODEL}; the paper has no perplexity by magnitude to compare with",
    ),
    Claim(
        "two of four weights: 1.1 times as fast",
        "torchao",
        "https://github.com/pytorch/ao",
        "SAM (ViT-h) with sparse feed-forward layers in bfloat16; an A100, whose tensor cores skip the zeros",
        (faster("2:4, fine-tuned", 1.1, 1.05),),
        "products restore the dense matrix",
    ),
    Claim(
        "8 to 9 times fewer multiplications",
        "Howard et al. 2017 (MobileNets)",
        "https://arxiv.org/abs/1704.04861",
        "depthwise separable in place of standard 3 x 3 convolutions",
        (
            network("separable", "multiply_adds_over_standard", "whole network of width 64: 1/{:.1f}", 8),
            network("separable", "step_over_standard", "training step {:.1f} times as fast"),
            network("separable", "logits_over_standard", "logits {:.1f} times as fast"),
        ),
    ),
)
