"""Published claims on recurrent layers."""

from __future__ import annotations

from claims import Claim, Figure


def cell(function: str, batch: int, text: str, reproduced: float | None = None, partly: float | None = None) -> Figure:
    """Training speed of a layer relative to the LSTM of hpnlp."""
    row = {"part": "training", "batch": batch, "function": function}
    return Figure("recurrent", row, ("over_ours",), text, inverse=True, reproduced=reproduced, partly=partly)


def trick(group: str, form: str, text: str, reproduced: float | None = None, partly: float | None = None) -> Figure:
    """Held-out loss of a trick of recurrent models over that of the plain model of its group, after equal steps."""
    fields = {"group": group, "form": form}
    field = ("steps", "over_plain")
    return Figure("recurrent_tricks", fields, field, text, reproduced=reproduced, partly=partly, lower_is_better=True)


SMALL_TEXT = "140 kB of docstrings, LSTM of 192 units"

RECURRENT = (
    Claim(
        "a forget bias of 1 closes the gap between LSTM and GRU",
        "Jozefowicz et al. 2015",
        "https://proceedings.mlr.press/v37/jozefowicz15.html",
        "arithmetic, XML modelling and Penn Treebank; thousands of settings",
        (
            trick("gates", "LSTM, forget bias 1", "loss {:.4f} times that of a bias of 0"),
            Figure(
                "recurrent_tricks",
                {"group": "gates", "form": "LSTM, forget bias 1"},
                ("steps", "score"),
                "{:.4f} times that of a GRU of equal size",
                over=("steps", "score"),
                over_row={"group": "gates", "form": "GRU, reset bias -1"},
                reproduced=1.005,
                partly=1.02,
                lower_is_better=True,
            ),
        ),
        "a byte-level language model after equal steps",
    ),
    Claim(
        "perplexity from 78.4 to 73.4 by dropout within the recurrence, one mask for a sequence",
        "Gal and Ghahramani 2016",
        "https://arxiv.org/abs/1512.05287",
        "beside dropout outside of the recurrence; Penn Treebank, large LSTM; mean of many masks in the test (75.2 without)",
        (
            Figure(
                "recurrent_tricks",
                {"group": "dropout", "form": "variational dropout"},
                ("steps", "score"),
                "loss {:.4f} times that of dropout outside of the recurrence",
                over=("steps", "score"),
                over_row={"group": "dropout", "form": "dropout of inputs and outputs"},
                reproduced=0.985,
                partly=0.999,
                lower_is_better=True,
            ),
        ),
        "losses of bytes, without masks in the test; the claim is a factor of 0.985 of the loss of words",
    ),
    Claim(
        "1.27 bits per character with zoneout, 1.36 without",
        "Krueger et al. 2017",
        "https://arxiv.org/abs/1606.01305",
        "Penn Treebank, LSTM of 1000 units",
        (trick("dropout", "zoneout", "loss {:.4f} times that without", 0.94, 0.995),),
        SMALL_TEXT,
    ),
    Claim(
        "perplexity from 114.5 to 78.4 by dropout of inputs and outputs",
        "Zaremba et al. 2014",
        "https://arxiv.org/abs/1409.2329",
        "a large LSTM beside a small one without dropout; Penn Treebank",
        (trick("dropout", "dropout of inputs and outputs", "loss {:.4f} times that without", 0.92, 0.995),),
        f"{SMALL_TEXT}; the claim is a factor of 0.920 of the loss of words",
    ),
    Claim(
        "consistent improvements by dropout of the candidate alone (no number for language models of bytes)",
        "Semeniuta et al. 2016",
        "https://arxiv.org/abs/1603.05118",
        "also together with dropout outside of the recurrence; language models of words, taggers, classifiers",
        (trick("dropout", "dropout of the candidate", "loss {:.4f} times that without", 0.999),),
        SMALL_TEXT,
    ),
    Claim(
        "perplexity from 68.9 to 57.3 by dropout of the recurrent weights",
        "Merity et al. 2018 (weight drop)",
        "https://arxiv.org/abs/1708.02182",
        "within the other regularization of the recipe; Penn Treebank, 24M parameters",
        (trick("dropout", "weight drop", "loss {:.4f} times that without", 0.956, 0.995),),
        f"{SMALL_TEXT}, without the rest of the recipe; the claim is a factor of 0.956 of the loss of words",
    ),
    Claim(
        "phoneme errors from 23.0 to 18.6 % by three layers in place of one of as many weights",
        "Graves et al. 2013",
        "https://arxiv.org/abs/1303.5778",
        "speech of TIMIT, bidirectional LSTMs of 3.8M weights",
        (trick("layers", "three layers", "loss {:.4f} times that of one layer", 0.81, 0.995),),
        "a byte-level language model after 600 steps, in which narrow layers learn slowly",
    ),
    Claim(
        "up to 16 times as fast as an LSTM",
        "Bradbury et al. 2017 (QRNN)",
        "https://arxiv.org/abs/1611.01576",
        "stacked LSTMs of the same hidden size; training and test",
        (
            cell("qrnn", 32, "training, B 32, 512 features: {:.2f} times", 16, 1.05),
            cell("qrnn", 8, "B 8, 128 features: {:.2f}", 16, 1.05),
        ),
        "two cores gain less from parallel tokens than a GPU",
    ),
    Claim(
        "5 to 9 times as fast as an LSTM of cuDNN",
        "Lei et al. 2017 (SRU)",
        "https://arxiv.org/abs/1709.02755",
        "classification and question answering; GPU",
        (
            cell("sru", 32, "training, B 32, 512 features: {:.2f} times", 5, 1.05),
            cell("sru", 8, "B 8, 128 features: {:.2f}", 5, 1.05),
        ),
        "two cores gain less from parallel tokens than a GPU",
    ),
)
