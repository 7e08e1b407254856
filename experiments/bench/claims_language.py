"""Published claims on losses over vocabularies, embeddings and retrieval."""

from __future__ import annotations

from claims import Claim, Figure

WORDS = {"tokenizer": "words(20000)", "task": "lm"}
LARGE = "V 262,144"


def layer(
    name: str, vocabulary: str, text: str, reproduced: float | None = None, partly: float | None = None
) -> Figure:
    """Speed of a training step of an output layer relative to `full`."""
    row, field = {"what": f"step of {name}, {vocabulary}"}, ("ratios", "time over full")
    return Figure("softmax_layers", row, field, text, inverse=True, reproduced=reproduced, partly=partly)


def perplexity(output: str, reproduced: float | None = None, partly: float | None = None) -> Figure:
    """Held-out perplexity over that of `full`, after equal numbers of steps."""
    text = "perplexity {:.3f} times that of `full`"
    field = ("ratios", "over full")
    return Figure(
        "softmax_quality_docs",
        {"output": output},
        field,
        text,
        reproduced=reproduced,
        partly=partly,
        lower_is_better=True,
    )


LOSSES = (
    Claim(
        "2 to 10 times as fast as the full softmax, perplexity close to it",
        "Grave et al. 2017 (adaptive softmax)",
        "https://arxiv.org/abs/1609.04309",
        "LSTMs on Text8, EuroParl and One Billion Word, 44,000 to 800,000 words; GPU",
        (
            layer("adaptive", LARGE, f"{LARGE}: {{:.0f}} times as fast", 2, 1.05),
            perplexity("adaptive(div_value=2)", 1.02, 1.1),
        ),
    ),
    Claim(
        "about 200 times as fast in training and recognition",
        "Morin and Bengio 2005 (hierarchical softmax)",
        "https://proceedings.mlr.press/r5/morin05a.html",
        "a tree from WordNet; Brown corpus, vocabulary of 10,000 words",
        (
            layer("hierarchical(huffman)", LARGE, f"{LARGE}: {{:.0f}} times as fast", 200, 10),
            layer("hierarchical(huffman) by rows", LARGE, "{:.0f} times by rows"),
            perplexity("hierarchical(similar)"),
        ),
        "beside products of matrices, which the baseline of 2005 did not have, and with 26 times the words",
    ),
    Claim(
        "memory of the loss from 24 GB to 1 MB",
        "Wijmans et al. 2024 (Cut Cross-Entropy)",
        "https://arxiv.org/abs/2411.09009",
        "Gemma 2 (2B), 8,192 tokens, one fused kernel on an A100",
        (
            Figure(
                "softmax",
                {"what": f"exact, {LARGE}"},
                ("ratios", "temporary memory over naive"),
                "temporary memory 1/{:.0f}",
                inverse=True,
                reproduced=24_000,
                partly=10,
            ),
            Figure("softmax", {"what": f"exact, {LARGE}"}, ("ratios", "time over naive"), "{:.2f} of the time"),
        ),
        "blocks of the vocabulary in XLA, without a kernel of its own",
    ),
)

EMBEDDINGS = (
    Claim(
        "a billion words in ten minutes; half a million sentences among 312,000 classes in a minute",
        "Joulin et al. 2017 (fastText)",
        "https://arxiv.org/abs/1607.01759",
        "a classifier of bags of words and n-grams; CPU with several cores",
        (
            Figure(
                "word_embeddings",
                {"objective": "skip_gram", "form": "hpnlp"},
                ("words_per_second",),
                "skip-gram: {:,.0f} words/s",
            ),
            Figure(
                "word_embeddings",
                {"objective": "skip_gram", "form": "hpnlp"},
                ("over_gensim",),
                "{:.2f} times gensim",
            ),
        ),
        "word vectors and not a classifier, on two cores",
        is_comparable=False,
    ),
    Claim(
        "models of 200 kB, better than CNNs and LSTMs",
        "Kaliamoorthi et al. 2019 (PRADO)",
        "https://aclanthology.org/D19-1506",
        "long documents; 8 bits",
        (
            Figure(
                "projections",
                {"what": "prado"},
                ("int8_bytes",),
                "{:,.0f} bytes in int8",
                reproduced=200_000,
                lower_is_better=True,
            ),
            Figure(
                "projections",
                {"what": "prado"},
                ("accuracy",),
                "accuracy {:.3f} times that of an LSTM of 1.0M parameters",
                over=("accuracy",),
                over_row={"what": "lstm"},
                reproduced=1.01,
                partly=0.99,
            ),
        ),
        "a classifier of functions, three seeds; no convolutional network beside it",
    ),
    Claim(
        "perplexity 52.8 in place of 57.3 (Penn Treebank), 52.0 in place of 65.8 (WikiText-2)",
        "Merity et al. 2018 (AWD-LSTM with a continuous cache)",
        "https://arxiv.org/abs/1708.02182",
        "24M and 33M parameters",
        (
            Figure(
                "awd_lstm",
                {"table": "cache"},
                ("over_none",),
                "perplexity with the cache 1/{:.2f}",
                inverse=True,
                reproduced=65.8 / 52.0,
                partly=57.3 / 52.8,
            ),
        ),
        "documentation of the standard library, which repeats words; 1.8M parameters",
    ),
    Claim(
        "perplexity 57.3 (Penn Treebank), 65.8 (WikiText-2)",
        "Merity et al. 2018 (AWD-LSTM)",
        "https://arxiv.org/abs/1708.02182",
        "24M and 33M parameters",
        (
            Figure("awd_lstm", {"form": "recipe"}, ("perplexity",), "perplexity {:.0f} with the recipe"),
            Figure("awd_lstm", {"form": "plain"}, ("perplexity",), "{:.0f} without"),
        ),
        "other text, 1.8M parameters",
        is_comparable=False,
    ),
    Claim(
        "perplexity 51.1 (Penn Treebank), 44.3 (WikiText-2)",
        "Krause et al. 2018 (dynamic evaluation)",
        "https://arxiv.org/abs/1709.07432",
        "a gradient step on each segment after its prediction; LSTMs",
        (
            Figure("demo", {}, ("mixture", "rows", 0, "bits"), "bits per byte: {:.3f} without"),
            Figure("demo", {}, ("mixture", "rows", 4, "bits"), "{:.3f} with dynamic evaluation"),
        ),
        "a byte model, other text",
        is_comparable=False,
    ),
    Claim(
        "a classifier of 100 labelled texts has the error of one from scratch with 10 times as many",
        "Howard and Ruder 2018 (ULMFiT)",
        "https://arxiv.org/abs/1801.06146",
        "IMDb; an LSTM of 103 million words of Wikipedia",
        (
            Figure(
                "pretrained_subwords",
                {"what": "a classifier from the masked language model"},
                ("difference",),
                "accuracy {:+.1%} to one from scratch with as many labelled texts",
            ),
            Figure(
                "pretrained_subwords",
                {"what": "a classifier from the masked language model"},
                ("half_interval",),
                "± {:.1%}",
            ),
        ),
        "420 labelled functions, minutes of pretraining; more labels were not measured",
        is_comparable=False,
    ),
)

RETRIEVAL = (
    Claim(
        "perplexity 16.12 in place of 18.65",
        "Khandelwal et al. 2020 (kNN-LM)",
        "https://arxiv.org/abs/1911.00172",
        "Transformer of 247M parameters, 103 million states, k 1,024; WikiText-103",
        (
            Figure(
                "knn_lm",
                {**WORDS, "what": "model"},
                ("perplexity",),
                "perplexity of words 1/{:.3f} at a weight of 0.25",
                over=("perplexity",),
                over_row={**WORDS, "what": "fixed weight 0.25"},
                reproduced=18.65 / 16.12,
                partly=1.02,
            ),
            Figure(
                "knn_lm",
                {**WORDS, "what": "model"},
                ("perplexity",),
                "1/{:.3f} with weights by distances",
                over=("perplexity",),
                over_row={**WORDS, "what": "weight by distances"},
            ),
        ),
        "a million states, k 32; standard library",
    ),
    Claim(
        "the most similar pair of 10,000 sentences in 5 seconds in place of 65 hours",
        "Reimers and Gurevych 2019 (Sentence-BERT)",
        "https://arxiv.org/abs/1908.10084",
        "one pass for each sentence in place of 50 million pairs; BERT",
        (
            Figure(
                "nearest_pair",
                {"encoder": "cross-encoder"},
                ("over_dual_encoder",),
                "{:,.0f} times as fast",
                reproduced=65 * 3600 / 5,
                partly=1000,
            ),
        ),
        "encoders of 4 layers of width 128; the time of all pairs is extrapolated from 2,000 of them",
    ),
    Claim(
        "exact match 38.2; 28.7 with an index that is refreshed 30 times less often",
        "Guu et al. 2020 (REALM)",
        "https://arxiv.org/abs/2002.08909",
        "13 million passages of Wikipedia; Natural Questions, development set",
        note="other scale; [Retrieval](guide/retrieval.md#learned-retrieval-realm) has the same comparison on synthetic keys",
    ),
    Claim(
        "16 TPUs refresh the index every 500 steps beside 64 that train: 20 % of the devices",
        "Guu et al. 2020 (REALM)",
        "https://arxiv.org/abs/2002.08909",
        "13 million passages, encoded by other machines than those that train",
        (
            Figure(
                "realm",
                {"texts": 16},
                ("search_and_refresh_share",),
                "{:.0%} of the step for search and refresh",
                reproduced=0.2,
                partly=0.5,
                lower_is_better=True,
            ),
            Figure("realm", {"texts": 16}, ("search_and_refresh_interval", 0), "95 % interval from {:.0%}"),
            Figure(
                "realm",
                {"texts": 16},
                ("search_and_refresh_interval", 1),
                "to {:.0%}",
                reproduced=0.2,
                partly=0.5,
                lower_is_better=True,
            ),
        ),
        "100,000 documents, small towers, one shared machine",
    ),
    Claim(
        "memory nearly independent of the size of the batch",
        "Gao et al. 2021 (GradCache)",
        "https://arxiv.org/abs/2101.06983",
        "contrastive losses of text encoders",
        (
            Figure(
                "grad_cache",
                {"step": "in parts"},
                ("temp_bytes",),
                "16 parts of 64 pairs: {:.2f} times the memory of one part",
                over=("temp_bytes",),
                over_row={"step": "one part"},
                reproduced=1.1,
                lower_is_better=True,
            ),
            Figure(
                "grad_cache", {"step": "in parts"}, ("time_over_at_once",), "{:.2f} of the time of the batch at once"
            ),
        ),
    ),
    Claim(
        "state of the art on ann-benchmarks.com",
        "Guo et al. 2020 (ScaNN)",
        "https://arxiv.org/abs/1908.10396",
        "1.2 million GloVe vectors of 100 numbers, one core",
        (
            Figure(
                "search_scann",
                {"what": "search, V 100,000, D 128, 500 queries, recall@10 of 0.95"},
                ("ratios", "time of scann over exact"),
                "{:.2f} of the time of the exact search",
            ),
            Figure(
                "search_scann",
                {"what": "search, V 100,000, D 128, 500 queries, recall@10 of 0.95"},
                ("ratios", "time of scann over exact"),
                "{:.2f} of that of faiss's inverted file",
                over=("ratios", "time of faiss ivf over exact"),
            ),
        ),
        "100,000 synthetic vectors, and none of the other libraries of that site",
        is_comparable=False,
    ),
)
