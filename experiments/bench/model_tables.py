"""Rows of the result files of mixers, recurrent layers, trees and convolutions as lines of the documentation's tables."""

from __future__ import annotations

from collections.abc import Sequence

from result_plots import Rows

Lines = Sequence[tuple[str, str]]  # (label, figure)


def linear_attention(rows: Rows) -> Lines:
    def label(name: str) -> str:
        if name == "pass over step":
            return "speed of a step relative to a pass over these tokens"
        return f"time relative to {name.removeprefix('over ')}"

    return [
        (f"{row['what']}: {label(name)}", f"{ratio:,.0f}" if ratio > 100 else f"{ratio:.3g}")
        for row in rows
        for name, ratio in row["ratios"].items()
    ]


def memory_evaluation(rows: Rows) -> Lines:
    return [
        (f"Transformer-XL, evaluation with a memory of {row['context']} tokens: speed relative to sliding windows",
         f"{row['speedup']:,.0f}")
        for row in rows
    ]  # fmt: skip


def bucketed(rows: Rows) -> Lines:
    """The attention mass that buckets recall, and the time of attention within them."""
    recalled = [
        (f"{row['method']}, {row['rounds']} rounds, {row['buckets']} buckets, window {row['window']}, T {row['length']}: "
         "attention mass recalled; pairs visited",
         f"{row['recall']:.3f}; {row['pairs']:.1%}")
        for row in rows
        if row["what"] == "recall"
    ]  # fmt: skip
    timed = [
        (f"{row['method']}, T {row['length']}, causal: time relative to exact attention", f"{row['over_attend']:.2f}")
        for row in rows
        if row["what"] == "time" and row["method"] != "attend"
    ]
    return recalled + timed


def random_features(rows: Rows) -> Lines:
    """The error of each kind of features, with the largest number of them."""
    last = {}
    for row in rows:
        last[row["what"].rpartition(", M ")[0]] = row
    return [
        (f"{row['what']}: relative error of the output; slope of its logarithm over that of M",
         f"{row['ratios']['error of the output']:.2f}; {row['slope']:.2f}")
        for row in last.values()
    ]  # fmt: skip


def convnets(rows: Rows) -> Lines:
    networks = [
        (
            f"{row['network']} blocks, width {row['width']}, B {row['batch']}, relative to standard ones: multiplications; "
            "time of a training step; time of the logits",
            f"{row['multiply_adds_over_standard']:.2f}; {row['step_over_standard']:.2f}; {row['logits_over_standard']:.2f}",
        )
        for row in rows
        if row["table"] == "networks" and row["network"] in ("separable", "inverted")
    ]
    pruned = [
        (
            f"{row['network']} removed, width {row['width']}, B {row['batch']}, relative to the original: multiplications; "
            "time of a training step; time of the logits",
            f"{row['multiply_adds_over_original']:.2f}; {row['step_over_original']:.2f}; {row['logits_over_original']:.2f}",
        )
        for row in rows
        if row["table"] == "networks" and "," in row["network"]
    ]
    depthwise = [
        (
            f"depthwise convolution, {row['part']}, {row['side']} x {row['side']} pixels, {row['channels']} channels, stride "
            f"{row['stride']}, B {row['batch']}: time relative to XLA's grouped convolution",
            f"{row['over_xla']:.2g}",
        )
        for row in rows
        if row["table"] == "depthwise" and row["impl"] == "shifts"
    ]
    return networks + pruned + depthwise


def trees(rows: Rows) -> Lines:
    forms = [
        (
            f"binary Tree-LSTM, {row['trees']} trees, {row['nodes']:,} nodes, H {row['dim']}, forward and backward: time "
            f"relative to {row['form']}",
            f"{row['ours_over']:.3g} ({1e3 * row['seconds']:,.0f} ms)",
        )
        for row in rows
        if row["table"] == "trees" and row["form"] != "ours"
    ]
    return forms + [
        (
            f"language model on functions, {row['form']}, rows of {', '.join(map(str, row['widths']))}: share of padding; "
            "tokens/s relative to padded",
            f"{row['padding']:.2f}; {row['tokens_per_second_over_padded']:.2f} ({row['tokens_per_second']:,.0f} tokens/s)",
        )
        for row in rows
        if row["table"] == "lengths"
    ]


# The forms of recurrent.py -> their description.
RECURRENT = {
    "lstm": "LSTM",
    "gru": "GRU",
    "lstm_norm": "layer-normalised LSTM",
    "lstm_zoneout": "LSTM with zoneout",
    "lstm_weight_drop": "LSTM with weight drop",
    "gru_original": "GRU in the original form",
    "qrnn": "QRNN",
    "sru": "SRU",
}


def recurrent(rows: Rows) -> Lines:
    """Times of our LSTM and GRU relative to the peers', and of the other forms relative to our LSTM."""
    peers = {"over_torch": "torch", "over_flax": "flax under nn.RNN", "over_ours": "the LSTM of hpnlp"}
    lines = []
    for row in rows:
        if (form := row["function"]) not in RECURRENT:
            continue
        names = [name for name in ("over_torch", "over_flax") if name in row] or ["over_ours"]
        size = f"2 layers, H {row['features']}"
        setting = {
            "training": f"{size}, B {row['batch']}, T {row['length']}, forward and backward",
            "decoding": f"{size}, a decoding step of one sequence",
        }[row["part"]]
        label = f"{RECURRENT[form]}, {setting}: time relative to {'; to '.join(peers[name] for name in names)}"
        lines.append((label, "; ".join(f"{row[name]:.2f}" for name in names)))
    return lines


# name of the result file without the device -> a function to lines of the table: (label, figure)
