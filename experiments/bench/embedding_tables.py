"""Rows of the result files of embeddings as lines of the documentation's tables. `result_tables.py` lists them."""

from __future__ import annotations

from collections.abc import Sequence

from result_plots import Rows

Lines = Sequence[tuple[str, str]]  # (label, figure)

RULES = {
    "average": "average of key and query",
    "newest": "query in place of the key",
    "circular": "none: every example is written",
}
NOISE = {
    0.0: "the oldest",
    0.01: "the oldest, noise 0.01",
    0.1: "the oldest, noise 0.1",
    "random": "any",
}


def word_embeddings(rows: Rows) -> Lines:
    """Words per second relative to gensim, and similarity of held-out pairs beside gensim's.

    Args:
      rows: Rows of the result file.

    Returns:
      `(label, figure)` of each line.
    """
    names = {"skip_gram": "skip-gram", "cbow": "CBOW"}
    lines = []
    for row in rows:
        label = (
            f"{names[row['objective']]}, negative sampling, D {row['dim']}, V {row['vocab']:,}, {row['epochs']} passes over "
            f"{row['words']:,} words"
        )
        if row["form"].startswith("hpnlp"):
            form = row["form"].removeprefix("hpnlp")
            lines.append(
                (
                    f"{label}{form}: words/s relative to gensim",
                    f"{row['over_gensim']:.2f} ({row['words_per_second']:,.0f} words/s)",
                )
            )
        if row["form"] == "hpnlp":
            peer = next(r for r in rows if r["objective"] == row["objective"] and r["form"] == "gensim, file")
            for name, text in (
                ("spearman", "rank correlation of cosines and held-out mutual information"),
                ("pair_accuracy", "held-out pairs that are more similar than other pairs"),
            ):
                lines.append((f"{label}: {text}; gensim", f"{row[name]:.3f}; {peer[name]:.3f}"))
    return lines


def rare_events(rows: Rows) -> Lines:
    """Accuracy on classes with at most three training examples, of nets with and without memory."""
    return [
        (
            f"names of functions, {row['classes']:,} classes, {row['examples']:,} examples, {row['net']}: accuracy on classes "
            "with at most 3 training examples; points over the dense softmax; accuracy on all",
            f"{100 * row['rare_accuracy']:.1f} %; {row['points']:+.1f}; {100 * row['accuracy']:.1f} %",
        )
        for row in rows
        if row["part"] == "nets"
    ]


def memory_questions(rows: Rows) -> str:
    """Markdown table of the forms of the memory.

    Args:
      rows: Rows of rare_events.py.

    Returns:
      The table.
    """
    lines = [
        "| slots | update | slot that is replaced | accuracy on rare classes | keys never found | accuracy without them |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["part"] == "questions":
            replaced = "the next one" if row["rule"] == "circular" else NOISE[row["noise"]]
            figures = (
                f"{100 * row['rare_accuracy']:.1f} %",
                f"{100 * row['orphaned']:.0f} %",
                f"{100 * row['rare_accuracy_without_orphans']:.1f} %",
            )
            slots = f"{row['slots'] / row['examples']:.2g} of the examples"
            lines.append(f"| {' | '.join([slots, RULES[row['rule']], replaced, *figures])} |")
    return "\n".join(lines)


def bag_variants(rows: Rows) -> Lines:
    """Scores of held-out bags for each variant, and the differences to the first one."""
    score = "accuracy of labels" if rows[0]["variant"] == "none" else "mean reciprocal rank of titles"
    lines = []
    for row in rows:
        figure = f"{row['mean']:.3f}"
        if interval := row.get("interval"):
            figure += f"; {row['difference']:+.3f} ({interval[0]:+.3f} to {interval[1]:+.3f})"
        label = f"titles, {row['variant']}: {score}, {len(row['scores'])} seeds"
        versus = f"; difference to {rows[0]['variant']}, 95 % interval" * ("interval" in row)
        lines.append((f"{label}{versus}", figure))
    return lines


def labelled_bags(rows: Rows) -> Lines:
    """Mean reciprocal rank of titles with and without rare words, by the power of the frequency."""
    return [
        (
            f"titles, gradients of words times frequency^-{row['power']:g}: mean reciprocal rank of {row['rare_titles']} "
            "titles with rare words, of others; mean rank of both; seeds better than without",
            f"{row['rare_mrr']:.3f}, {row['other_mrr']:.3f}; {row['rare_mean_rank']:.1f}, {row['other_mean_rank']:.1f}; "
            f"{row['better_seeds']} of {len(row['rare_mrrs'])}",
        )
        for row in rows
    ]
