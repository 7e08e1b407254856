"""Rows of the results of the demo, serving, vectors of texts and experts as lines of the documentation's tables."""

from __future__ import annotations

from collections.abc import Sequence

from result_plots import Rows

from hpnlp.data.baselines import NAMES

Lines = Sequence[tuple[str, str]]


def serving(rows: Rows) -> Lines:
    """Ratios with their intervals, and seconds."""
    lines = []
    for row in rows:
        if "ratio" in row:
            figure = f"{row['ratio']:.2f} ({row['interval'][0]:.2f} to {row['interval'][1]:.2f})"
        else:
            figure = f"{row['total_seconds']:.1f} s"
        lines.append((row["what"], figure))
    return lines


def sentence_vectors(rows: Rows) -> Lines:
    """Speed over torch with its interval, and texts per second."""
    lines = []
    for row in rows:
        tokens = (
            f"{row['mean_tokens']:.0f} tokens" if row["lengths"] == "equal" else f"{row['most_tokens']} tokens or fewer"
        )
        label = (
            f"vectors of texts of {tokens}, batch {row['batch']}, {row['dtype']}: speed over BertModel of transformers"
        )
        low, high = row["interval"]
        rates = f"{row['ours_per_second']:.0f} texts per second, {row['least_cosine_to_float32']:.4f} least cosine to float32"
        lines.append((label, f"{row['speed_over_torch']:.2f} ({low:.2f} to {high:.2f}; {rates})"))
    return lines


def nearest_pair(rows: Rows) -> Lines:
    """Time of the dual encoder, and time of the cross-encoder with the number of pairs that it is extrapolated from."""
    lines = []
    for row in rows:
        about = f"{row['layers']} layers, D {row['dim']}, random weights"
        label = f"most similar pair of {row['sentences']:,} sentences by a {row['encoder']}, {about}"
        if row["extrapolated"]:
            figure = (
                f"{row['seconds'] / 3600:.2g} hours, extrapolated to {row['pairs']:,} pairs from {row['measured_pairs']:,} "
                f"({row['over_dual_encoder']:,.0f} times that of the dual encoder)"
            )
        else:
            parts = f"vectors {row['encode_seconds']:.2g} s, search {row['search_seconds']:.2g} s"
            figure = f"{row['seconds']:.2g} s ({parts})"
        lines.append((label, figure))
    return lines


def docstring_search(rows: Rows) -> Lines:
    """Recall of the code of docstrings, and the paired difference to the model that is trained from random weights."""
    lines = []
    for row in rows:
        figure = f"{row['recall_at_1']:.1%}; {row['recall_at_10']:.1%}"
        if "steps" in row:
            figure += f" ({row['steps']:,} steps of {row['batch']} pairs)"
        low, high = row["recall_at_1_over_scratch_interval"]
        if low < high:
            points = 100 * row["recall_at_1_over_scratch"]
            figure += f"; recall@1 {points:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}) over from scratch"
        label = f"code of a docstring among {row['pairs']:,}, {row['method']}: recall@1; recall@10"
        lines.append((label, figure))
    return lines


def knn_lm(rows: Rows) -> Lines:
    """Loss of held-out text with neighbours, and its difference to the model alone."""
    lines = []
    for row in rows:
        about = f"{row['tokenizer']}, {row['layers']}, {row['keys']:,} keys"
        bits = row["bits_per_byte"]
        score = f"perplexity {row['perplexity']:.2f}" if bits is None else f"{bits:.3f} bits per byte"
        change = ""
        if row["half_interval"] is not None:
            change = f"; {row['loss_difference']:+.4f} +- {row['half_interval']:.4f} nats per token"
        lines.append((f"held-out text with nearest states, {about}: {row['what']}", score + change))
    return lines


def projections(rows: Rows) -> Lines:
    """Accuracy over seeds, the paired difference to the first model, parameters, bytes and the time of an epoch."""
    lines = []
    for row in rows:
        figure = f"{row['accuracy']:.1%}"
        if "seeds" in row:
            if row["deviation"] is not None:
                figure += f" (sd {row['deviation']:.1%} of {row['seeds']} seeds)"
            if row["half_interval"] is not None:
                figure += f"; {row['difference']:+.1%} +- {row['half_interval']:.1%} to {rows[0]['what']}"
            figure += f"; {row['parameters']:,} parameters, {row['epoch_seconds']:.1f} s per epoch"
        if row.get("int8_bytes"):
            figure += f", {row['int8_bytes']:,} bytes as int8"
        lines.append((f"package of a function: accuracy of {row['what']}", figure))
    return lines


def pretrained_body(rows: Rows) -> Lines:
    """Accuracy over seeds, and the paired difference to the classifier from scratch."""
    lines = []
    for row in rows:
        figure = f"{row['accuracy']:.1%}"
        if row.get("half_interval") is not None:
            figure += f"; {row['difference']:+.1%} +- {row['half_interval']:.1%} to the same classifier from scratch"
        about = f", {row['steps']} steps, {row['seeds']} seeds" if "seeds" in row else ""
        subject = "hidden tokens" if row["what"] == "masked language model" else "package of a function from few labels"
        lines.append((f"{subject}: accuracy of {row['what']}{about}", figure))
    return lines


EXPERT_PEERS = {
    "dense": "layer of experts, time of a training step relative to a dense MLP of equal active FLOPs",
    "trainer": "model with experts, time of a training step relative to a dense model of equal active FLOPs",
    "torch": "layer of experts, time of a training step relative to torch with grouped products",
    "skew": "layer of experts, time of a training step relative to even loads",
    "implementations": "layer of experts by `impl`, time of a training step relative to a dense MLP of equal active FLOPs",
    "decode": "layer of experts, time of decoding relative to a dense MLP of equal active FLOPs",
}


def demo(rows: Rows) -> Lines:
    """Bits per byte; of other text than that of `make demo`, no times, which `demo` gives for a machine without other work."""
    row = rows[0]
    path, mixture = row["config"]["data.path"], row.get("mixture")
    is_demo = path == "stdlib"
    name = "`make demo`" if is_demo else f"`make demo` of {path}"
    compressors = [f"{label} {row[field]:.3f}" for field, label in NAMES.items() if row.get(field) is not None]
    bits = f"{row['heldout_bits_per_byte']:.3f}"
    if mixture:
        best = min(r["bits"] for r in mixture["rows"])
        bits = f"{best:.3f} with an index of the text and dynamic evaluation, {bits} of the model alone"
    lines = [(f"held-out bits per byte after {name}", f"{bits} ({', '.join(compressors)})")]
    if is_demo:
        lines.append((f"{name}: wall time from process start to report", f"{row['seconds']:.0f} s"))
    if mixture:
        scores = ", ".join(f"{r['name']} {r['bits']:.3f} ({r['text']})" for r in mixture["rows"][1:])
        lines.append((f"{name}: held-out bits per byte with an index of the training text", scores))
        if is_demo:
            lines.append((f"{name}: wall time of both commands", f"{row['wall_seconds']:.0f} s"))
    return lines


def experts(rows: Rows) -> Lines:
    lines = []
    for row in rows:
        wall, cpu = row["wall"], row["cpu"]
        figure = (
            f"{wall['ratio']:.2f} ({wall['interval'][0]:.2f} to {wall['interval'][1]:.2f}; CPU time {cpu['ratio']:.2f}"
        )
        if "temporary_mib" in row and row["compared"] == "dense":
            first, second = row["temporary_mib"]
            figure += f"; temporary memory {first / second:.2f}"
        lines.append((f"{EXPERT_PEERS[row['compared']]}, {row['row']}", f"{figure})"))
    return lines


def experts_quality(rows: Rows) -> Lines:
    """Held-out losses of byte-level models with experts and without, over seeds, their differences, and the time of a step."""
    lines = []
    for row in rows:
        change = row["over_equal_time"]
        label = (
            f"byte-level model, `{row['what']}`: held-out loss in nats per byte (standard deviation of {row['seeds']} seeds); "
            "difference to the dense model that takes the time of `top_k(8,2)` (95 % interval); time of a step relative to the "
            "dense model"
        )
        figures = (
            f"{row['heldout_loss']:.4f} ({row['deviation']:.4f})",
            f"{change['mean']:+.4f} ({change['low']:+.4f} to {change['high']:+.4f})",
            f"{row['ratios']['time of a step over dense']:.2f}",
        )
        lines.append((label, "; ".join(figures)))
    return lines


def realm(rows: Rows) -> Lines:
    """Shares of a training step that search and refresh of the index take, with their intervals."""
    lines = []
    for row in rows:
        label = (
            f"step of `task=realm`, {row['texts']} texts, {row['candidates']} of {row['documents']:,} documents each, "
            f"{row['layers']} layers, D {row['dim']}, T {row['length']}: share of search and refresh "
            f"({row['documents_per_step']} documents per step); of the refresh (95 % interval)"
        )
        figures = []
        for share in ("search_and_refresh", "refresh"):
            low, high = row[f"{share}_interval"]
            figures.append(f"{100 * row[f'{share}_share']:.0f} % ({100 * low:.0f} to {100 * high:.0f} %)")
        lines.append((label, "; ".join(figures)))
    return lines


def realm_stdlib(rows: Rows) -> Lines:
    """Held-out losses with and without retrieval, with the intervals of their differences."""
    lines = []
    for row in rows:
        difference, figure = row["learned_over_this"], f"{row['heldout_loss']:.3f}"
        if difference is not None:
            mean, half = difference["difference"], difference["half_interval"]
            figure += f" ({mean:+.2f}, {mean - half:+.2f} to {mean + half:+.2f})"
        label = f"`realm/stdlib`, {row['what']}: held-out loss, nats, {len(row['by_seed'])} seeds"
        lines.append((label if difference is None else f"{label} (with retrieval that learns less this)", figure))
    return lines
