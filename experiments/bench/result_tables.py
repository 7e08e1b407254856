"""Rows of result files as lines of the documentation's tables. `results.py` writes the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import advise_tables
import compression_tables
import embedding_tables
import form_tables
import layout_tables
import model_use_tables
import recipe_tables
from awd_lstm_tables import awd_lstm
from model_tables import bucketed, convnets, linear_attention, memory_evaluation, random_features, recurrent, trees
from result_plots import Rows
from speed_tables import encoders

Lines = Sequence[tuple[str, str]]  # (label, figure)
BAR = r"\|"  # a literal bar in a cell of a Markdown table
# Names of ratios in the result files that need more than `describe_ratio` to be understood by themselves.
RATIO_LABELS = {
    "over our dense": "time relative to dense attention of hpnlp",
    "over our dense by its square law": "time relative to 16 times dense attention of hpnlp at T 4096",
    "over the faster of jax.nn and naive": "time relative to the faster of jax.nn and naive JAX",
    "time over full": "time relative to the full softmax",
    "time over naive": "time relative to naive JAX",
    "temporary memory over naive": "temporary memory relative to naive JAX",
    "bias of the gradient by h": "relative bias of the gradient with respect to h",
}


def describe_ratio(name: str) -> str:
    """The label of a ratio: "time over torch" and "over torch" both become "time relative to torch"."""
    label = f"time {name}" if name.startswith("over ") else name
    return RATIO_LABELS.get(name, label.replace(" over ", " relative to "))


def train_step(rows: Rows) -> Lines:
    return [
        (
            f"training step, {row['layers']} layers, D {row['dim']}, T {row['length']}, B {row['batch']}: "
            "time relative to torch eager",
            f"{row['ours_over_torch']:.2f} ({row['ours_ms']:.0f} ms; plain Flax {row['flax_over_torch']:.2f})",
        )
        for row in rows
    ]


def encoder(rows: Rows) -> Lines:
    return [
        (
            f"encoder training step, {row['layers']} layers, D {row['dim']}, T {row['length']}, B {row['batch']}: "
            "time relative to torch.nn.TransformerEncoder, eager",
            f"{row['ours_over_torch']:.2f} ({row['ours_ms']:.0f} ms)",
        )
        for row in rows
    ]


def attention(rows: Rows) -> Lines:
    return [
        (f"attention, {row['what']}: {describe_ratio(name)}", f"{ratio:.3g}")
        for row in rows
        for name, ratio in row["ratios"].items()
    ]


def softmax(rows: Rows) -> Lines:
    return [
        (f"{row['what']}: {describe_ratio(name)}", f"{ratio:.3g}")
        for row in rows
        for name, ratio in row["ratios"].items()
    ]


def estimates(rows: Rows) -> Lines:
    """Biases with the standard errors of their measurement, and numerical errors."""
    lines = []
    for row in rows:
        (name, error), *standard_errors = row["ratios"].items()
        spread = "".join(f" (standard error of the measurement {x:.1g})" for _, x in standard_errors)
        lines.append((f"{row['what']}: {describe_ratio(name)}", f"{error:.2g}{spread}"))
    return lines


def loop(rows: Rows) -> Lines:
    row = rows[0]
    return [
        (
            f"{row['steps']} steps of the training loop: time relative to the bare jitted steps",
            f"{row['loop_over_bare']:.3f}",
        ),
        ("`import hpnlp` after `import jax`: additional time", f"{1e3 * row['import_seconds']:.1f} ms"),
    ]


def decode(rows: Rows) -> Lines:
    lines = []
    for row in rows:
        model = f"{row['layers']} layers, D {row['dim']}, {row['model']}"
        if row["what"] == "prefill":
            figure = f"{row['prefill_over_forward']:.2f} ({row['prefill_ms']:.0f} ms)"
            lines.append((f"prefill of {row['prompt']} tokens, {model}: time relative to one forward pass", figure))
        else:
            prompts = f"{row['batch']} prompt{'s' * (row['batch'] > 1)}"
            figure = f"{row['speedup']:.1f} ({row['ours_tokens_per_second']:,.0f} tokens/s)"
            lines.append((f"decoding, {prompts}, {model}: tokens/s relative to torch eager with a cache", figure))
    return lines


def parity(rows: Rows) -> Lines:
    """The largest differences over all layouts."""
    layouts, names = rows[1:], "; ".join(row["layout"] for row in rows[1:])
    differences = [max(row[name] for row in layouts) for name in ("loss_relative", "gradient_relative")]
    plan_errors = [
        max(abs(row[f"{kind}_bytes"] / row[f"{kind}_bytes_planned"] - 1) for row in layouts)
        for kind in ("state", "sent")
    ]
    compared = f"{len(layouts)} layouts of 8 devices"
    return [
        (
            f"{compared} ({names}) and one device: largest relative difference of losses over "
            f"{layouts[0]['steps']} steps; of first gradients, array by array",
            f"{differences[0]:.1e}; {differences[1]:.1e}",
        ),
        (
            f"{compared}: largest relative error of the planned bytes of a device: state; sent in a step",
            f"{plan_errors[0]:.2%}; {plan_errors[1]:.2%}",
        ),
    ]


def auxiliary(rows: Rows) -> Lines:
    """The largest differences of auxiliary losses, buffers and gradients over all layouts."""
    names = ", ".join(row["layout"] for row in rows[1:])
    differences = [
        max(row[f"{what}_relative"] for row in rows) for what in ("loss", "gradient", "first_buffers", "buffers")
    ]
    label = (
        f"a model with buffers and three auxiliary losses, {rows[0]['steps']} steps under {names}, and on one device: largest "
        "relative difference of losses; of first gradients; of buffers after the first step; after the last"
    )
    return [(label, "; ".join(f"{difference:.1e}" for difference in differences))]


def tasks(rows: Rows) -> Lines:
    """The largest differences of each task over its layouts, and the errors of its plans."""
    lines, plans = [], []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        layouts = [row for row in of_task if "loss_relative" in row]
        if layouts:
            names = ", ".join(row["layout"] for row in layouts)
            label = (
                f"`{task}`, {layouts[0]['steps']} steps on 8 devices ({names}) and on one: largest relative difference of "
                "losses; of first gradients, array by array"
            )
            figures = [max(row[f"{what}_relative"] for row in layouts) for what in ("loss", "gradient")]
            fall = f"loss {layouts[0]['first_loss']:.2f} to {layouts[0]['last_loss']:.2f}"
            if (rounding := layouts[0].get("loss_relative_of_rounding")) is not None:
                fall += f"; losses on one device from parameters one rounding larger differ by {rounding:.1e}"
            lines.append((label, f"{figures[0]:.1e}; {figures[1]:.1e} ({fall})"))
        lines += [
            (f"`{task}`, layout {row['layout']}", f"refused: {row['refused']}") for row in of_task if "refused" in row
        ]
        for row in of_task:
            if "state_bytes" in row:
                step = f"`{task}`, `{row['mixer']}`, `plan.remat={row['remat']}`"
                label = (
                    f"plan of a step of {step}: relative error against the compiled program: state; temporary memory"
                )
                errors = [row[f"{what}_bytes_planned"] / row[f"{what}_bytes"] - 1 for what in ("state", "temporaries")]
                plans.append((label, f"{errors[0]:+.1%}; {errors[1]:+.1%}"))
    return [*lines, *plans]


# Field of a task's score -> (its name, the baselines' fields and names), for the reports in the rows of `task_runs`.
SCORES = {
    "heldout_recall_at_10": (
        "recall@10",
        {"tfidf_recall_at_10": "TF-IDF of words", "token_tfidf_recall_at_10": "TF-IDF of the model's tokens"},
    ),
    "heldout_exact_match": ("exact match", {"linear_exact_match": "linear model of words"}),
    "heldout_accuracy": (
        "accuracy",
        {
            "words_accuracy": "linear model of words",
            "characters_accuracy": "linear model of characters",
            "majority_accuracy": "most frequent label",
            "token_accuracy": "most frequent label of each token",
            "frequent_accuracy": "most frequent token",
        },
    ),
}


def task_runs(rows: Rows) -> Lines:
    """The score of each experiment and those of its baselines."""
    lines = []
    for row in rows:
        field = next(name for name in SCORES if row.get(name) is not None)
        score, baselines = SCORES[field]
        others = [f"{label} {100 * row[name]:.1f} %" for name, label in baselines.items() if row.get(name) is not None]
        minutes = f"{row['seconds'] / 60:.1f} min"
        figure = f"{100 * row[field]:.1f} % ({', '.join([*others, minutes])})"
        lines.append((f"`experiments/{row['experiment']}.py`: held-out {score}", figure))
    return lines


def beam(rows: Rows) -> Lines:
    return [
        (
            f"beam search, {row['layers']} + {row['layers']} layers, D {row['dim']}, {row['batch']} "
            f"source{'s' * (row['batch'] > 1)}, {row['beams']} beams: tokens/s relative to transformers, equal outputs",
            f"{row['times_faster']:.1f} ({row['ours_tokens_per_second']:,.0f} tokens/s)",
        )
        for row in rows
    ]


# The layouts of ring.py -> their description.


def plan(rows: Rows) -> Lines:
    return [
        (
            f"`hpnlp plan --depth={row['depth']}` of a model of {row['model']} parameters for {row['devices']} devices: time",
            f"{row['seconds']:.1f} s",
        )
        for row in rows
    ] + [
        (
            f"plan for {row['devices']} devices, {row['model']} parameters, relative error against the compiled program: "
            "state; temporary memory; bytes sent",
            "; ".join(f"{row[f'{kind} off']:+.1%}" for kind in ("state", "temporaries", "communication")),
        )
        for row in rows
        if "state off" in row
    ]


def plan_tpu(rows: Rows) -> Lines:
    errors = [row["temporaries off"] for row in rows]
    label = (
        f"plans of {len(rows)} steps of 110M and 7B parameters on 1 to 512 TPUs: "
        "relative error of the temporary memory against the compiled program"
    )
    return [(label, f"{min(errors):+.0%} to {max(errors):+.0%}")]


def resume(rows: Rows) -> Lines:
    row = rows[0]
    lost, lines = row["steps_lost_beyond_interval"], f"of {row['lines_of_each']} in each of {row['runs_compared']} runs"
    training = {"memory": "training with buffers and carry", "experts": "training with experts"}.get(
        row.get("model", ""), "training"
    )
    return [
        (f"{training}, killed {row['kills']} times by `kill -9`: steps lost beyond one checkpoint interval", str(lost)),
        (
            f"{training}: lines of metrics that differ in any bit from those of an uninterrupted run",
            f"{row['lines_that_differ']} {lines}",
        ),
    ]


def launch(rows: Rows) -> Lines:
    """Lines of what was measured; kinds that --only left out are absent."""
    total, of_kind = rows[0], {row["kind"]: row for row in rows[1:]}
    lines = []
    if total["moments"]:
        title = (
            f"{total['processes']} processes under `hpnlp launch`, of which one was disturbed {total['moments']} times"
        )
        lines += [
            (f"{title}: steps lost beyond one checkpoint interval", str(total["steps_lost_beyond_interval"])),
            (f"{title}: lines of metrics that differ in any bit", str(total["lines_that_differ"])),
        ]
    for name, text in (
        ("seconds_to_notice_a_death", "until a death is noticed"),
        ("seconds_to_notice_a_hang", "until a process that stopped or sleeps is noticed"),
        ("seconds_to_next_step", "from the notice to the next step"),
    ):
        if total[name] is not None:
            lines.append((f"`hpnlp launch`: seconds {text}, at most", f"{total[name]:.1f}"))
    if half := of_kind.get("half"):
        title = "`hpnlp launch`: largest relative difference of a loss after half the processes went on"
        lines.append((title, f"{half['worst_relative_difference']:.1e}"))
    if forced := of_kind.get("forced"):
        left = f"{forced['orphans']}; {forced['open_ports']}"
        lines.append((f"`hpnlp launch`: processes and ports left after {forced['ends']} forced ends", left))
    for kind in ("poison step", "config error"):
        if kind in of_kind:
            lines.append((f"`hpnlp launch`: attempts before a {kind} is given up", str(of_kind[kind]["attempts"])))
    return lines


# The stacks of reversible.py -> their description.
STACKS = {"plain": "plain", "remat": "rematerialised", "reversible": "reversible"}


def reversible(rows: Rows) -> Lines:
    """Memory by depth, and memory and time of each kind of stack at the greatest depth."""
    deep = max(row["layers"] for row in rows)
    shallow_stacks, deep_stacks = (
        {row["stack"]: row for row in rows if row["layers"] == n} for n in (min(r["layers"] for r in rows), deep)
    )
    plain, ours = deep_stacks["plain"], deep_stacks["reversible"]
    size = f"D {ours['dim']}, T {ours['length']}, B {ours['batch']}"
    lines = [
        (
            f"temporary memory of reversible layers, {size}: {deep} layers relative to "
            f"{shallow_stacks['reversible']['layers']} layers",
            f"{ours['temp_bytes'] / shallow_stacks['reversible']['temp_bytes']:.3f}",
        )
    ]
    lines += [
        (
            f"gradient, {deep} layers, {size}, {STACKS[row['stack']]} layers: temporary memory; time relative to plain layers",
            f"{row['temp_bytes'] / 2**20:,.0f} MiB; {row['time_over_plain']:.2f} ({row['ms']:.0f} ms)",
        )
        for row in (plain, deep_stacks["remat"], ours)
    ]
    error = f"{ours['gradient_error']:.1e}"
    label = f"gradients of {deep} reversible layers: relative difference from the same layers with stored activations"
    return [*lines, (label, error)]


def grad_cache(rows: Rows) -> Lines:
    """Memory and time of a step whose batch is encoded in parts, and memory of a step of one part."""
    by_step = {row["step"]: row for row in rows}
    at_once, in_parts, one_part = (by_step[name] for name in ("at once", "in parts", "one part"))
    size = f"{at_once['layers']} layers, D {at_once['dim']}, T {at_once['length']}"
    memory = [f"{row['temp_bytes'] / 2**20:,.0f} MiB" for row in (in_parts, at_once, one_part)]
    return [
        (
            f"step of a dual encoder, {size}, {at_once['pairs']:,} pairs in {in_parts['parts']} parts (GradCache): temporary "
            f"memory; of the batch at once; of a batch of {one_part['pairs']}",
            "; ".join(memory),
        ),
        (
            "the same step: time relative to the batch at once; floating-point operations",
            f"{in_parts['time_over_at_once']:.2f} ({in_parts['ms']:.0f} ms); "
            f"{in_parts['matmul_gflops'] / at_once['matmul_gflops']:.2f}",
        ),
    ]


# The forms of adamw.py -> their description.
ADAMW_FORMS = {
    "stacks": "stacked layers",
    "layers": "separate layers",
    "flat": "moments as flat vectors",
    "all flat": "everything as flat vectors",
}


def adamw(rows: Rows) -> Lines:
    """Time, bandwidth and temporary memory of each form of the update."""
    lines = []
    for row in rows:
        arrays = f"{row['arrays']} array{'s' * (row['arrays'] > 1)}"
        update = f"AdamW of {row['parameters'] / 1e6:.0f}M parameters, {ADAMW_FORMS[row['form']]} ({arrays})"
        figures = f"{row['ms']:.0f} ms, {row['gb_per_second']:.0f} GB/s, {row['temp_bytes'] >> 20} MiB temporary memory"
        lines.append((f"{update}: time relative to stacked layers", f"{row['time_over_stacks']:.2f} ({figures})"))
    return lines


def large_batch(rows: Rows) -> Lines:
    """Loss of the best recipe for the small batch, and of the others relative to it at the same number of tokens."""
    best = min((row for row in rows if row["rule"] == "small"), key=lambda row: row["loss"])
    rules = {"small": "tuned", "none": "unchanged", "sqrt": "scaled by the square root", "linear": "scaled linearly"}
    lines = [
        (
            f"{best['optimizer']}, batches of {best['batch'] * best['length']:,} bytes: held-out loss",
            f"{best['loss']:.3f} nats per byte ({best['steps']:,} steps)",
        )
    ]
    for row in rows:
        if row is not best:
            label = (
                f"{row['optimizer']}, batches of {row['batch'] * row['length']:,} bytes, learning rate "
                f"{rules[row['rule']]}: held-out loss relative to the small batch"
            )
            figure = f"{row['over_small']:.3f} ({row['steps']:,} steps)"
            if row.get("half_interval") is not None:
                figure += f"; {row['difference']:+.3f} +- {row['half_interval']:.3f} nats per byte"
            lines.append((label, figure))
    return lines


def suite(rows: Rows) -> Lines:
    return [
        (f"`make {row['target']}` after set-up: wall time", f"{row['seconds'] / 60:.1f} min ({row['passed']} tests)")
        for row in rows
    ]


def faults(rows: Rows) -> Lines:
    detected, first = (sum(row["tier"] in tiers for row in rows) for tiers in ((1, 2), (1,)))
    return [("seeded faults that tests detect", f"{detected} of {len(rows)}, {first} of them by `make test`")]


def commits(rows: Rows) -> Lines:
    """The last commits before and after a change: median of the ratios of the rounds, and their range."""
    lines = []
    for row in rows:
        if "largest_difference" in row:
            label = f"{row['what']}: largest relative difference from commit {row['commit'][:7]}"
            lines.append((label, f"{row['largest_difference']:.1e}"))
            continue
        ratios = [after / before for after, before in zip(row["after"], row["before"], strict=True)]
        figure = f"{row['over_before']:.3f} ({min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds)"
        measured = "" if "memory" in row["what"] or "CPU" in row["what"] else "time "
        lines.append((f"{row['what']}: {measured}relative to commit {row['commit'][:7]}", figure))
    return lines


TABLE: dict[str, Callable[[Rows], Lines]] = {
    "demo": model_use_tables.demo,
    "train_step": train_step,
    "encoder": encoder,
    "convnets": convnets,
    "trees": trees,
    "encoders": encoders,
    "attention": attention,
    "linear_attention": linear_attention,
    "memory_evaluation": memory_evaluation,
    "bucketed": bucketed,
    "random_features": random_features,
    "recurrent": recurrent,
    "word_embeddings": embedding_tables.word_embeddings,
    "awd_lstm": awd_lstm,
    **dict.fromkeys(("recurrent_tricks", "evolved_lite"), form_tables.forms),
    "recurrent_sizes": form_tables.recurrent_sizes,
    "word_codes": form_tables.word_codes,
    "rare_events": embedding_tables.rare_events,
    "labelled_bags": embedding_tables.labelled_bags,
    **dict.fromkeys(("bag_memory", "bag_positives"), embedding_tables.bag_variants),
    **dict.fromkeys(
        (
            "softmax",
            "softmax_layers",
            "search",
            "search_keys",
            "search_lsh",
            "search_pq",
            "search_pq_one_core",
            "search_scann",
            "containers",
        ),
        softmax,
    ),
    "quantized_products": compression_tables.quantized_products,
    "second_order": compression_tables.second_order,
    "sparse_products": compression_tables.sparse_products,
    "recipes": recipe_tables.recipes,
    "recipe_times": recipe_tables.recipes,
    "precision": recipe_tables.precision,
    "pair_encoders": recipe_tables.pair_encoders,
    "estimates": estimates,
    "reversible": reversible,
    "grad_cache": grad_cache,
    "decode": decode,
    "loop": loop,
    "parity": parity,
    "tasks": tasks,
    "auxiliary": auxiliary,
    "task_runs": task_runs,
    "beam": beam,
    "bubble": layout_tables.bubble,
    "ring": layout_tables.ring,
    "remat": layout_tables.remat,
    "operations": layout_tables.operations,
    "plan": plan,
    "plan_tpu": plan_tpu,
    **dict.fromkeys(("resume", "resume-memory", "resume-experts"), resume),
    "launch": launch,
    "adamw": adamw,
    "advise": advise_tables.advise,
    "advise_bert": advise_tables.bert,
    "large_batch": large_batch,
    "experts": model_use_tables.experts,
    "experts_quality": model_use_tables.experts_quality,
    "suite": suite,
    "faults": faults,
    "serving": model_use_tables.serving,
    "sentence_vectors": model_use_tables.sentence_vectors,
    "nearest_pair": model_use_tables.nearest_pair,
    "docstring_search": model_use_tables.docstring_search,
    "knn_lm": model_use_tables.knn_lm,
    "projections": model_use_tables.projections,
    "realm": model_use_tables.realm,
    "realm_stdlib": model_use_tables.realm_stdlib,
    "pretrained_body": model_use_tables.pretrained_body,
    "pretrained_subwords": model_use_tables.pretrained_body,
    "demo_perl": model_use_tables.demo,
    "demo_documentation": model_use_tables.demo,
    **dict.fromkeys(("commits", "commits-quiet", "commits_tests"), commits),
}
