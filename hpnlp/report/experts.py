"""The report's section on mixtures of experts: which experts the tokens of held-out text use."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp import tasks
from hpnlp.report.plots import pyplot
from hpnlp.tasks.reports.reporting import Outcome, Section, code_cell, spread
from hpnlp.types import Tokenizer

TOKENS = 16384  # held-out tokens that are routed
PICTURES = ("expert_loads.png", "expert_pairs.png")
DEAD = 0.01  # an expert with less than this share of the mean load counts as dead, as in metrics.jsonl
EXPERTS, WORDS = 16, 5  # experts of a table of tokens, and tokens of each


@dataclasses.dataclass
class Use:
    """Use of the experts of one layer.

    Attributes:
      load: `[E]`, number of tokens that use each expert.
      pairs: `[E, E]`, number of tokens that use both experts.
      words: `[V, E]`, number of times that a token of each id uses each expert.
      tokens: Number of tokens.
      routed: Number of tokens with at least one expert; without a capacity, all.
      largest_gates: Sum of the largest gate of these tokens.
    """

    load: np.ndarray
    pairs: np.ndarray
    words: np.ndarray
    tokens: int = 0
    routed: int = 0
    largest_gates: float = 0.0

    @classmethod
    def zeros(cls, experts: int, vocab: int) -> Use:
        """The use of no token."""
        load, pairs, words = (np.zeros(shape, np.int64) for shape in (experts, (experts, experts), (vocab, experts)))
        return cls(load, pairs, words)

    def add(self, gates: np.ndarray, ids: np.ndarray) -> None:
        """Counts tokens.

        Args:
          gates: `[N, E]`, 0 for experts that a token does not use.
          ids: `[N]`, ids of the tokens.
        """
        used = (gates > 0).astype(np.int64)
        self.load += used.sum(axis=0)
        self.pairs += used.T @ used
        np.add.at(self.words, ids, used)
        self.tokens += len(ids)
        self.routed += int(used.any(axis=1).sum())
        self.largest_gates += float(gates.max(axis=1).sum())

    @property
    def largest_gate(self) -> float:
        """Mean of the largest gate of a token, over the tokens that have an expert."""
        return self.largest_gates / max(self.routed, 1)

    @property
    def relative_load(self) -> np.ndarray:
        """`[E]`, the load of each expert over the mean load."""
        return self.load / max(self.load.mean(), 1e-20)

    @property
    def has_pairs(self) -> bool:
        """Whether a token uses two experts."""
        return bool(self.pairs.sum() > self.load.sum())

    @property
    def shared_use(self) -> np.ndarray:
        """`[E, E]`, the share of the tokens of expert i that also use expert j; NaN for i = j."""
        shares = self.pairs / np.maximum(self.load, 1)[:, None]
        np.fill_diagonal(shares, np.nan)
        return shares

    def specific_words(self, expert: int) -> list[tuple[int, float, float]]:
        """Tokens whose share of an expert's tokens exceeds their share of all tokens most.

        Args:
          expert: Number of the expert.

        Returns:
          `(id, share of the expert's tokens, share of the tokens of all experts)`, at most WORDS.
        """
        of_expert = self.words[:, expert] / max(self.load[expert], 1)
        overall = self.words.sum(axis=1) / max(self.load.sum(), 1)
        order = np.argsort(overall - of_expert, kind="stable")[:WORDS]
        return [(int(i), of_expert[i], overall[i]) for i in order if of_expert[i] > overall[i]]


def measure_use(outcome: Outcome) -> dict[int, Use]:
    """Routes held-out text once.

    Args:
      outcome: Result of a run.

    Returns:
      Index of a layer -> use of its experts, for the layers that have experts.
    """
    config = outcome.config
    limit = math.ceil(TOKENS / (config.data.batch_size * config.data.seq_len))
    return counted_use(outcome, tasks.find(config.task).heldout(config, outcome.dataset, limit=limit))


def counted_use(outcome: Outcome, batches: Iterable[Mapping[str, np.ndarray]]) -> dict[int, Use]:
    """The use of experts by the tokens of some batches.

    Args:
      outcome: Model and parameters.
      batches: Batches of the model.

    Returns:
      As `measure_use`.
    """
    config, uses = outcome.model.config, {}
    run = outcome.compiled("loss", True, ("routing",))
    for batch in batches:
        weights = np.asarray(batch["weights"])
        # The last batch is filled with sequences of weight 0.
        is_example = weights.reshape(len(weights), -1).any(axis=1, keepdims=True)
        real = (np.asarray(batch["segment_ids"]) > 0) & is_example
        ids = np.asarray(batch["tokens"])[real]
        for stack, taps in run(batch).taps["layers"].items():
            for layer, gates in zip(
                config.stack_order().members(stack, config.layers), taps.get("gates", ()), strict=False
            ):
                values = np.asarray(gates)[real]
                use = uses.setdefault(layer, Use.zeros(values.shape[1], config.vocab))
                use.add(values, ids)
    return dict(sorted(uses.items()))


def section(outcome: Outcome, lines: Sequence[Mapping[str, Any]]) -> Section:
    """The section of report.md, for which held-out text is routed once.

    Args:
      outcome: Result of a run with experts whose parameters this process has.
      lines: Lines of metrics.jsonl.

    Returns:
      Text, which refers to PICTURES, numbers, and the function that draws the pictures.
    """
    uses = measure_use(outcome)
    tokenizer = outcome.dataset.tokenizer
    tokens = next(iter(uses.values())).tokens
    has_pairs = any(use.has_pairs for use in uses.values())
    rows = [_row(layer, use) for layer, use in uses.items()]
    text = [
        f"Experts, over {tokens:,} tokens of held-out text (loads are over the mean load, without dropped assignments):",
        "",
        "| layer | experts | experts per token | largest load | smallest load | below 1 % of mean | mean of the largest gate |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"![loads of the experts]({PICTURES[0]})",
        *(["", f"![experts that serve the same tokens]({PICTURES[1]})"] if has_pairs else []),
    ]
    layers = list(uses)
    for layer in [layers[i] for i in spread(len(layers), 2)]:
        text += ["", *_word_table(layer, uses[layer], tokenizer)]
    numbers = {
        "expert_load_max": max(float(use.relative_load.max()) for use in uses.values()),
        "expert_load_min": min(float(use.relative_load.min()) for use in uses.values()),
        "expert_largest_gate": float(np.mean([use.largest_gate for use in uses.values()])),
    }
    return Section("\n".join(text), numbers=numbers, draw=functools.partial(plot, uses, lines))


def plot(uses: Mapping[int, Use], lines: Sequence[Mapping[str, Any]], workdir: Path) -> None:
    """Draws PICTURES.

    Args:
      uses: As `measure_use` returns it.
      lines: Lines of metrics.jsonl.
      workdir: Directory of the files.
    """
    loads = {layer: use.relative_load for layer, use in uses.items()}
    plot_expert_loads(loads, lines, workdir / PICTURES[0])
    paired = [layer for layer, use in uses.items() if use.has_pairs]
    if paired:
        shown = [paired[i] for i in spread(len(paired), 3)]
        plot_expert_pairs({layer: uses[layer].shared_use for layer in shown}, workdir / PICTURES[1])


def plot_expert_loads(loads: Mapping[int, np.ndarray], lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plots the loads of experts over the mean load: by layer and expert, sorted, and during training.

    Args:
      loads: Index of a layer -> `[E]`, which may differ in E.
      lines: Lines of a run's metrics.jsonl, of which those of steps have "load_max" and "load_min".
      path: File to write; its extension decides the format.
    """
    plt = pyplot()
    widest = max(map(len, loads.values()))
    grid = np.full((len(loads), widest), np.nan)
    for row, load in zip(grid, loads.values(), strict=True):
        row[: len(load)] = load
    size = (11 + min(0.08 * widest, 4), max(3.4, 1.4 + 0.25 * len(loads)))
    ratios = {"width_ratios": [1.3 + 0.01 * widest, 1, 1]}
    figure, (by_expert, by_rank, by_step) = plt.subplots(1, 3, figsize=size, layout="constrained", gridspec_kw=ratios)
    image = by_expert.imshow(grid, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    by_expert.set(
        title="load / mean load", xlabel="expert", ylabel="layer", yticks=range(len(loads)), yticklabels=loads
    )
    by_expert.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=by_expert, extend="max", label="load over the mean load")
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(loads)))
    for (layer, load), color in zip(loads.items(), colors, strict=True):
        label = f"layer {layer}" if layer in (min(loads), max(loads)) else None
        by_rank.plot(range(1, len(load) + 1), np.sort(load)[::-1], ".-", color=color, label=label, linewidth=0.9)
    by_rank.set(title="sorted", xlabel="rank of the expert", ylabel="load / mean load")
    by_rank.xaxis.get_major_locator().set_params(integer=True)
    for name, label in (("load_max", "largest"), ("load_min", "smallest")):
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if points:
            by_step.plot(*zip(*points, strict=True), linewidth=0.9, label=f"{label}, mean over layers")
    by_step.set(title="during training", xlabel="step", ylabel="load / mean load of a batch")
    for axes in (by_rank, by_step):
        axes.axhline(1, color="0.4", linewidth=0.9, linestyle=":")
        room = 1.0 if axes is by_rank else 1.25  # for the legend above the curves
        axes.set_ylim(0, room * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, loc="upper right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_expert_pairs(shares: Mapping[int, np.ndarray], path: Path) -> None:
    """Plots how often two experts serve the same token.

    Args:
      shares: Index of a layer -> `[E, E]`, the share of the tokens of expert i that also use expert j.
      path: File to write; its extension decides the format.
    """
    plt = pyplot()
    figure, panels = plt.subplots(
        1, len(shares), figsize=(1 + 3.4 * len(shares), 3.6), layout="constrained", squeeze=False
    )
    highest = max(float(np.nanmax(share, initial=0.0)) for share in shares.values())
    for axes, (layer, share) in zip(panels[0], shares.items(), strict=True):
        image = axes.imshow(share, cmap="Blues", vmin=0, vmax=highest or 1, aspect="auto", interpolation="nearest")
        axes.set(title=f"layer {layer}", xlabel="also used expert")
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
    panels[0, 0].set(ylabel="expert")
    figure.colorbar(image, ax=panels[0].tolist(), label="share of the tokens of an expert")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _row(layer: int, use: Use) -> str:
    """A row of the table of layers."""
    load, tokens = use.relative_load, max(use.tokens, 1)
    cells = [
        f"{layer}",
        f"{len(load)}",
        f"{use.load.sum() / tokens:.2f}",
        f"{load.max():.2f}",
        f"{load.min():.2f}",
        f"{(load < DEAD).sum()}",
        f"{use.largest_gate:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def _word_table(layer: int, use: Use, tokenizer: Tokenizer) -> list[str]:
    """Lines of a table of the tokens that are most specific to the experts of a layer."""
    order = np.argsort(-use.load, kind="stable")[:EXPERTS]
    limit = f", the {EXPERTS} with the most tokens" if len(use.load) > EXPERTS else ""
    lines = [
        f"Tokens most specific to the experts of layer {layer}{limit}: their share of the expert's tokens, and of all tokens.",
        "",
        "| expert | load | tokens |",
        "|---|---|---|",
    ]
    for expert in order.tolist():
        words = [
            f"{code_cell(_text(word, tokenizer))} {100 * share:.1f} % ({100 * overall:.1f} %)"
            for word, share, overall in use.specific_words(expert)
        ]
        lines.append(f"| {expert} | {use.relative_load[expert]:.2f} | {', '.join(words) or '-'} |")
    return lines


def _text(word: int, tokenizer: Tokenizer) -> str:
    """Text of a token; the name of a special token, and the number of another id without text, as that of a mask."""
    text = tokenizer.decode(np.array([word])) if word < tokenizer.vocab_size else b""
    if text:
        return repr(text.decode("utf-8", "replace"))
    names = {tokenizer.pad_id: "<pad>", tokenizer.bos_id: "<bos>", tokenizer.eos_id: "<eos>"}
    return names.get(word, f"id {word}")
