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
        "beside dropout outside of the recurrence; Penn Treebank, large LSTM",
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
        "losses of bytes: the claim is a factor of 0.985 of the loss of words",
    ),
    Claim(
        "1.27 bits per character with zoneout, 1.36 without",
        "Krueger et al. 2017",
        "https://arxiv.org/abs/1606.01305",
        "Penn Treebank, LSTM of 1000 units",
        (trick("dropout", "zoneout", "loss {:.4f} times that without", 0.94, 0.995),),
        "140 kB of docstrings, LSTM of 192 units",
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
