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
from hpnlp.report import plots
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
    plots.plot_expert_loads(loads, lines, workdir / PICTURES[0])
    paired = [layer for layer, use in uses.items() if use.has_pairs]
    if paired:
        shown = [paired[i] for i in spread(len(paired), 3)]
        plots.plot_expert_pairs({layer: uses[layer].shared_use for layer in shown}, workdir / PICTURES[1])


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
