"""Attention matrices of a trained model on held-out text: spectrum, distance and entropy of each head.

The matrices are those by which the mixers multiply the values, softmax of the scores of the queries and keys that the layers
report; layers whose mixer has no such matrix are skipped.

References:
  Wang et al. 2020, "Linformer: self-attention with linear complexity", arXiv 2006.04768, section 4: cumulative singular values
  of the attention matrices of RoBERTa, and their share in the leading 128 of 512.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from hpnlp.models.stacks.layer_forms import build_mixer
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.tasks.reports.reporting import Outcome, spread
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.models.backbone import BackboneConfig

Window = Mapping[str, np.ndarray]  # the arrays of a batch of one sequence

HELD = 0.9  # share of the sum of the singular values that `rank` counts
LEADING = 0.25  # share of the singular values whose sum is `leading`, as 128 of 512
POINTS = 101  # points of a curve of cumulative singular values


@dataclasses.dataclass(frozen=True)
class Measures:
    """Measures of the attention matrices of a layer.

    Attributes:
      rank: `[W, N]`, number of singular values, the largest first, that hold the share HELD of their sum.
      leading: `[W, N]`, share of the sum in the leading quarter of the singular values.
      distance: `[W, N]`, mean distance of query and key in tokens, weighted by the attention.
      entropy: `[W, N]`, mean entropy of the rows in nats.
      curve: `[W, N, POINTS]`, share of the sum by the share of the singular values, from 0 to 1.
    """

    rank: np.ndarray
    leading: np.ndarray
    distance: np.ndarray
    entropy: np.ndarray
    curve: np.ndarray

    @classmethod
    def of(cls, matrices: np.ndarray) -> Measures:
        """Measures of the matrices of one window.

        Args:
          matrices: `[N, T, T]`, each row a distribution over keys, or zeros for a query that sees no key.

        Returns:
          The measures, with W = 1.

        Cost: the singular values of N matrices, O(N T^3).
        """
        matrices = np.asarray(matrices, np.float64)
        length = matrices.shape[-1]
        values = np.linalg.svd(matrices, compute_uv=False)
        cumulative = np.cumsum(values, axis=-1) / values.sum(axis=-1, keepdims=True)
        grid = np.linspace(0, length, POINTS)
        curve = [np.interp(grid, range(length + 1), [0.0, *shares]) for shares in cumulative]
        rows = np.maximum((matrices.sum(axis=-1) > 0).sum(axis=-1), 1)
        index = np.arange(length)
        logs = np.log(np.where(matrices > 0, matrices, 1.0))
        measures = (
            # The last sums may be 1 only up to rounding.
            np.minimum((cumulative < HELD).sum(axis=-1) + 1, length),
            cumulative[:, max(1, round(LEADING * length)) - 1],
            (matrices * np.abs(index[:, None] - index)).sum(axis=(1, 2)) / rows,
            -(matrices * logs).sum(axis=(1, 2)) / rows,
            np.array(curve),
        )
        return cls(*(measure[None] for measure in measures))

    @classmethod
    def joined(cls, windows: Sequence[Measures]) -> Measures:
        """The measures of several windows."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(window, name) for window in windows]) for name in names))

    def by_head(self, name: str) -> np.ndarray:
        """A measure of each head, the mean over the windows, `[N]` or `[N, POINTS]`."""
        return np.asarray(getattr(self, name), np.float64).mean(axis=0)


@dataclasses.dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer.

    Attributes:
      layer: Index of the layer, from 0.
      mixer: Spec of its mixer.
      measures: Measures of its matrices.
      uniform: Measures of matrices that spread the attention evenly over the same keys, of each head or of all heads together.
    """

    layer: int
    mixer: str
    measures: Measures
    uniform: Measures


def choose_windows(batches: Iterable[Window], count: int) -> list[Window]:
    """Chooses windows of text in which there are few documents, since attention does not cross their borders.

    Args:
      batches: Held-out batches.
      count: Largest number of windows.

    Returns:
      Batches of one sequence: those with the fewest documents, of equal ones the longest, and of these some that are spread
      over all of them.
    """
    windows = []
    for batch in batches:
        for row in range(len(batch["tokens"])):
            window = {name: np.asarray(x)[row : row + 1] for name, x in batch.items()}
            if window["weights"].any() and (window["segment_ids"] > 0).sum() > 1:
                windows.append(window)
    if len(windows) <= count:
        return windows
    ranks = [(documents(window), -int((window["segment_ids"] > 0).sum())) for window in windows]
    last = sorted(ranks)[count - 1]
    better = [window for window, rank in zip(windows, ranks, strict=True) if rank < last]
    equal = [window for window, rank in zip(windows, ranks, strict=True) if rank == last]
    return [*better, *(equal[i] for i in spread(len(equal), count - len(better)))]


def documents(window: Window) -> int:
    """Number of documents of a window."""
    segments = window["segment_ids"][0]
    return len(np.unique(segments[segments > 0]))


def skipped_layers(config: BackboneConfig, layers: Iterable[int]) -> dict[int, str]:
    """Layers without attention matrices.

    Args:
      config: Config of a Backbone.
      layers: Indices of layers.

    Returns:
      Index of a layer -> reason why it has none.
    """
    reasons = {}
    for layer in layers:
        form = _form(config, layer)
        if not build_mixer(form).has_matrices:
            reasons[layer] = (
                f"{form.mixer} does not multiply values by a softmax of the layer's own queries and keys alone"
            )
        elif form.block.startswith("evolved"):
            reasons[layer] = f"model.block={form.block} has several kinds of attention"
    return reasons


def inspect_attention(outcome: Outcome, windows: Sequence[Window], layers: Sequence[int]) -> list[LayerAttention]:
    """Measures attention matrices.

    Args:
      outcome: Model and parameters; the model is a `models.prediction.PredictionModel`.
      windows: Batches of one sequence each.
      layers: Indices of layers that have attention matrices.

    Returns:
      The attention of each layer.

    Raises:
      InputError: The matrices are not finite.

    Cost: a forward pass of each window, and the singular values of the matrices of each head.
    """
    config = outcome.model.config
    run = outcome.compiled("loss", True, ("attention",))
    measures: dict[int, list[tuple[Measures, Measures]]] = {layer: [] for layer in layers}
    for window in windows:
        tapped = run(window).taps["layers"]
        for layer in layers:
            arrays = config.stack_order().layer(tapped, layer)
            measures[layer].append(_measured(config, layer, arrays, window))
    return [
        LayerAttention(
            layer, _form(config, layer).mixer, *(Measures.joined(list(side)) for side in zip(*pairs, strict=True))
        )
        for layer, pairs in measures.items()
    ]


def _measured(
    config: BackboneConfig, layer: int, arrays: Mapping[str, jax.Array], window: Window
) -> tuple[Measures, Measures]:
    """Measures of a layer's matrices of one window, and of even attention over the same keys."""
    matrices, visible = attention_matrices(config, layer, arrays, window)
    if not np.isfinite(matrices).all():
        raise InputError(
            f"layer {layer}: attention is not finite: the run has diverged, name an earlier checkpoint, RUN@STEP"
        )
    even = visible / np.maximum(visible.sum(axis=-1, keepdims=True), 1)
    if (visible == visible[:1]).all():
        even = even[:1]
    return Measures.of(matrices), Measures.of(even)


def attention_matrices(
    config: BackboneConfig, layer: int, arrays: Mapping[str, jax.Array], window: Window
) -> tuple[np.ndarray, np.ndarray]:
    """Attention matrices of the tokens of a window.

    Args:
      config: Config of a Backbone.
      layer: Index of a layer.
      arrays: Its queries `[1, T, N, H]` and keys `[1, T, K, H]`, as the mixer gets them.
      window: The window; its padding is left out.

    Returns:
      `(matrices, visible)`: float32 and bool `[N, T, T]`.
    """
    mixer = cast(ExactMixer, build_mixer(_form(config, layer)))
    segment_ids, positions = (jax.numpy.asarray(window[name]) for name in ("segment_ids", "positions"))
    matrices, visible = mixer.matrices(arrays["queries"], arrays["keys"], config.mask, segment_ids, positions)
    real = np.flatnonzero(window["segment_ids"][0] > 0)
    return tuple(np.asarray(x)[0][:, real][:, :, real] for x in (matrices, visible))  # pyright: ignore[reportReturnType]


def _form(config: BackboneConfig, layer: int) -> Any:
    """The form of a layer."""
    forms = config.forms()
    return forms[layer % len(forms)]
