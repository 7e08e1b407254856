"""Recipes: compressors that are applied one after the other, as in "layers(3),heads(0.5),factorize(parameters=0.5),int8"."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from hpnlp.compress.layers import Layer, join_layers, split_layers
from hpnlp.compress.matrices import is_table, map_matrices
from hpnlp.compress.stages import (
    FACTORS,
    NONZERO,
    NUMBERS,
    STRUCTURE,
    Calibration,
    Stage,
    UnitStage,
    calibration_gradients,
    check_known_widths,
    convolutions,
    share_option,
    structure,
    zeros,
)
from hpnlp.compress.stages.experts import merged
from hpnlp.compress.stages.moments import listed_matrices, with_input_moments
from hpnlp.compress.stages.numbers import CONVERSIONS
from hpnlp.compress.stages.sensitivity import choose_bits, mean_curvature
from hpnlp.errors import RangeError
from hpnlp.models.variables import BUFFERS, FROZEN
from hpnlp.ops.weight import is_weight
from hpnlp.ops.weights import factorize as factorize_matrix
from hpnlp.ops.weights import quantize
from hpnlp.ops.weights.calibrated.observed import split_observed
from hpnlp.ops.weights.low_rank import rank_by_energy, rank_for_share
from hpnlp.spec import build, parse
from hpnlp.types import REQUIRED, InputError, option

if TYPE_CHECKING:
    from hpnlp.models.backbone import BackboneConfig
    from hpnlp.models.shared.body import ConfigOfModel

# Stages may follow each other in this order.
ORDER = (STRUCTURE, FACTORS, NUMBERS)


def _is_ascending(text: str, least: int = 0, most: int | None = None) -> bool:
    """Whether a text lists ascending numbers of a range, at least one."""
    items = [int(part) if part.isdecimal() else -1 for part in text.split()]
    in_range = all(least <= item and (most is None or item <= most) for item in items)
    return bool(items) and in_range and items == sorted(set(items))


@dataclasses.dataclass(frozen=True)
class LayersStage(Stage):
    """Keeps some layers."""

    keep: int | str = option(
        REQUIRED,
        'The number of layers, evenly spaced and with the first and the last one; or their indices, as "0 2 4"; or "nonzero" '
        "for those whose kernels have numbers other than 0.",
        rule=(
            "a number of at least 1, ascending indices as '0 2 4', or nonzero",
            lambda keep: keep >= 1 if isinstance(keep, int) else keep == NONZERO or _is_ascending(keep),
        ),
    )

    def compress(self, config: BackboneConfig, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        layers = split_layers(config, weights)
        if self.keep == NONZERO:
            check_known_widths("layers", calibration, False, self.keep)
            (kept,) = structure.nonzero_units([np.array([structure.has_weights(layer) for layer in layers])])
        elif isinstance(self.keep, int):
            kept = np.round(np.linspace(0, len(layers) - 1, self.keep)).astype(int)
        else:
            kept = np.array(self.keep.split(), int)
        if len(kept) > len(layers) or kept.max() >= len(layers):
            raise InputError(f"{self.text}: the model has {len(layers)} layers, 0 to {len(layers) - 1}")
        return join_layers(config, weights, [layers[i] for i in kept])


@dataclasses.dataclass(frozen=True)
class LayerUnitStage(UnitStage):
    """Removes units of the layers of a Backbone, those of `structure.UNITS`."""

    def unit_counts(self, config: BackboneConfig, weights: PyTree) -> list[int]:
        return self._counts(split_layers(config, weights))

    def _counts(self, layers: Sequence[Layer]) -> list[int]:
        counts = [structure.unit_count(layer, self.unit) for layer in layers]
        if not any(counts):
            raise InputError(f"{self.text}: the model's layers have no {self.unit}: leave the stage out")
        return counts

    def prepared(self, layer: Layer, kept: np.ndarray, scores: np.ndarray) -> Layer:
        """The layer before other units than those in `kept` are removed; `scores` are the importance of all."""
        return layer

    def compress(self, config: BackboneConfig, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        layers = split_layers(config, weights)
        counts = self._counts(layers)
        self.check_keeps_units(counts)
        check_known_widths(self.unit, calibration, self.across_layers, self.share)
        is_outline = calibration is not None and calibration.is_outline
        ones = [np.ones(n) for n in counts if n]
        scores = ones if is_outline else self._scores(config, weights, calibration, layers)
        if isinstance(self.share, str):
            kept = structure.nonzero_units(scores)
        else:
            kept = structure.choose_units(scores, self.share, across_layers=self.across_layers)
        chosen = iter(zip(kept, scores, strict=True))

        def reduced(layer: Layer) -> Layer:
            indices, values = next(chosen)
            layer = layer if is_outline else self.prepared(layer, indices, values)
            return structure.keep_units(layer, self.unit, indices)

        smaller = [reduced(layer) if n else layer for layer, n in zip(layers, counts, strict=True)]
        return join_layers(config, weights, smaller)

    def _scores(
        self, config: BackboneConfig, weights: PyTree, calibration: Calibration | None, layers: Sequence[Layer]
    ) -> list[np.ndarray]:
        """Importance of the units of each layer that has some."""
        gradients: list[Any] = [None] * len(layers)
        if self.share == NONZERO:
            layers = [structure.kernels_only(layer) for layer in layers]
        elif self.by == "gradient":
            slopes = calibration_gradients(self.unit, config, weights, calibration)
            gradients = [layer.variables["params"] for layer in split_layers(config, {**weights, **slopes})]
        pairs = zip(layers, gradients, strict=True)
        return [structure.importance(x, self.unit, g) for x, g in pairs if structure.unit_count(x, self.unit)]


@dataclasses.dataclass(frozen=True)
class HeadsStage(LayerUnitStage):
    """Removes attention heads; with grouped heads, key heads with their query heads."""

    unit = "heads"


@dataclasses.dataclass(frozen=True)
class MlpStage(LayerUnitStage):
    """Removes columns of the feed-forward networks."""

    unit = "mlp"


@dataclasses.dataclass(frozen=True)
class ExpertsStage(LayerUnitStage):
    """Removes experts, with their columns of the router. Experts that no calibration data use have no gradient."""

    unit = "experts"

    share: int | float = share_option()
    merge: bool = option(
        False, "Experts are not removed but averaged with the ones that stay, see `compress.stages.experts.merged`."
    )

    def prepared(self, layer: Layer, kept: np.ndarray, scores: np.ndarray) -> Layer:
        return merged(layer, kept, scores) if self.merge else layer


@dataclasses.dataclass(frozen=True)
class FactorizeStage(Stage):
    """Kernels become products of two thin matrices, where that saves parameters. One of the first three arguments is given."""

    changes = FACTORS

    parameters: int | float = option(
        0.0, "Share of the parameters of each kernel that its factors have.", least=0, most=1
    )
    energy: int | float = option(
        0.0, "Share of the sum of squared singular values that each kernel keeps.", least=0, most=1
    )
    rank: int = option(0, "The rank.", least=0)
    by: str = option(
        "inputs",
        "inputs minimises the error of products with inputs from calibration data; weights that of the kernels.",
        among=("inputs", "weights"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(value != 0 for value in (self.parameters, self.energy, self.rank)) != 1:
            raise InputError(f"{self.text}: factorize takes one of parameters=0.5, energy=0.9 and rank=64")

    def compress(self, config: BackboneConfig, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        if calibration is not None and calibration.is_outline and self.energy:
            raise InputError(f"{self.text}: the weights decide on its ranks: plan with parameters or rank")
        chosen = {path: (self._rank(w), w.shape[-2:]) for path, w in listed_matrices(weights) if not is_table(path)}
        saves = {path: r for path, (r, (d, f)) in chosen.items() if r * (d + f) < d * f}
        if not saves:
            raise InputError(
                f"{self.text}: the factors would have as many parameters as the kernels: lower the share or rank"
            )
        if self.by == "inputs":
            name = "factorize(by='inputs')"
            weights = with_input_moments(name, config, weights, calibration, lambda path: path in saves)

        def convert(path: str, w: Any) -> Any:
            if path not in saves:
                return w
            matrix, moments = split_observed(w)
            return factorize_matrix(matrix, saves[path], covariance=moments)

        return config, map_matrices(convert, weights)

    def _rank(self, w: Any) -> int:
        """The rank of a matrix's factors."""
        if self.rank:
            return min(self.rank, *w.shape[-2:])
        if self.parameters:
            return rank_for_share(w.shape[-2:], self.parameters)
        # Layers of a stack have one rank, that of the layer that needs the largest.
        stacked = np.reshape(np.asarray(w), (-1, *w.shape[-2:]))
        return max(rank_by_energy(np.linalg.svd(matrix, compute_uv=False), self.energy) for matrix in stacked)


@dataclasses.dataclass(frozen=True)
class MixedStage(Stage):
    """Kernels of integers with few bits where the loss is flat, and more where it is curved; tables of 8 bits."""

    changes = NUMBERS

    bits: int | float = option(4.0, "Largest mean number of bits of a weight of the kernels.")
    choices: str = option(
        "2 4 8",
        "Numbers of bits that a kernel of a layer may have, ascending, of 2 to 8.",
        rule=("ascending numbers of bits of 2 to 8", lambda choices: _is_ascending(choices, 2, 8)),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.allowed[0] <= self.bits <= self.allowed[-1]:
            limits = f"{self.allowed[0]} to {self.allowed[-1]}, the fewest and the most bits of its choices"
            raise RangeError(type(self).__name__, f"bits={self.bits}: expected {limits}")

    @property
    def allowed(self) -> list[int]:
        """`choices` as numbers."""
        return [int(item) for item in self.choices.split()]

    def compress(self, config: ConfigOfModel, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        if calibration is None:
            raise InputError("mixed needs calibration data: use int4 or int8, or pass some")
        kernels = {path: w for path, w in listed_matrices(weights) if not is_table(path)}
        if any(map(is_weight, kernels.values())):
            raise InputError("mixed after factorize: choose int8 or int4 for the factors")
        layers = {f"{path}:{i}": w for path, stacked in kernels.items() for i, w in enumerate(_one_by_one(stacked))}
        if calibration.is_outline:
            chosen = dict.fromkeys(layers, self.allowed[0])  # all are stored in bytes
        else:
            curvatures = _curvatures(config, weights, kernels, calibration)
            chosen = choose_bits(layers, curvatures, self.bits, self.allowed)

        def convert(path: str, w: Any) -> Any:
            if is_table(path):
                return quantize(w, 8, by_row=True)
            one_by_one = [quantize(matrix, chosen[f"{path}:{i}"]) for i, matrix in enumerate(_one_by_one(w))]
            as_bytes = [dataclasses.replace(matrix, codes=matrix.codes.astype(jnp.int8)) for matrix in one_by_one]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *as_bytes) if w.ndim == 3 else as_bytes[0]

        return config, map_matrices(convert, weights, stacked=True)


def _curvatures(
    config: ConfigOfModel, weights: PyTree, paths: Collection[str], calibration: Calibration
) -> dict[str, float]:
    """Mean curvature of the loss in each kernel of each layer, by "path:layer"."""
    params = {name: tree for name, tree in weights.items() if name not in (BUFFERS, FROZEN)}
    further = {name: tree for name, tree in weights.items() if name in (BUFFERS, FROZEN)}
    curvature = mean_curvature(lambda p: calibration.gradients(config, {**p, **further}), params)
    curved = dict(listed_matrices(curvature))
    return {f"{path}:{i}": c for path in paths for i, c in enumerate(np.atleast_1d(curved[path]))}


def _one_by_one(w: Any) -> list[Any]:
    """Splits a stack of matrices into its layers; a single matrix is the only one."""
    return list(w) if w.ndim == 3 else [w]


# Stages by name.
COMPRESSORS: dict[str, type[Stage]] = {
    "layers": LayersStage,
    "heads": HeadsStage,
    "mlp": MlpStage,
    "experts": ExpertsStage,
    "filters": convolutions.FiltersStage,
    "channels": convolutions.ChannelsStage,
    "hidden": convolutions.HiddenStage,
    "shapes": convolutions.ShapesStage,
    "magnitude": zeros.MagnitudeStage,
    "factorize": FactorizeStage,
    "mixed": MixedStage,
    **CONVERSIONS,
}


def parse_recipe(text: str) -> list[Stage]:
    """The stages of a recipe.

    Args:
      text: A spec string, as "layers(3),heads(0.5),int8".

    Returns:
      The stages.

    Raises:
      InputError: A stage is unknown or has invalid arguments, or stages are in an order that cannot work.
    """
    specs = parse(text, "--recipe", example="heads(0.5),mlp(0.5),int8") if text.strip() else ()
    if not specs:
        raise InputError(f"the recipe is empty: name stages, of {', '.join(COMPRESSORS)}, as in heads(0.5),int8")
    by_stage = [dataclasses.replace(spec, repeat=1) for spec in specs for _ in range(spec.repeat)]
    stages = [build(spec, COMPRESSORS, "stage of the recipe", text=str(spec)) for spec in by_stage]
    for first, second in zip(stages, stages[1:], strict=False):
        if ORDER.index(first.changes) > ORDER.index(second.changes):
            raise InputError(
                f"{second.text} after {first.text}: {second.text} works on matrices of floats: put it before {first.text}"
            )
        if first.changes == second.changes != STRUCTURE:
            raise InputError(
                f"{second.text} after {first.text}: both represent the same matrices: leave out one of them"
            )
    zeroing = [stage.text for stage in stages if isinstance(stage, zeros.MagnitudeStage)]
    if len(zeroing) > 1:
        raise InputError(
            f"{zeroing[1]} after {zeroing[0]}: both are shares of all weights, so that only the smaller one has an effect: "
            "leave out one of them"
        )
    return stages


def check_plain(weights: PyTree) -> None:
    """Checks that the matrices of a model are arrays of finite numbers.

    Args:
      weights: Weights of the model.

    Raises:
      InputError: One is a Weight, or has a number that is not finite.
    """
    if any(map(is_weight, jax.tree.leaves(weights, is_leaf=is_weight))):
        raise InputError("the model is compressed already: start from the run that it was made of, with all stages")
    params = {name: tree for name, tree in weights.items() if name not in (BUFFERS, FROZEN)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.isfinite(leaf).all()):
            raise InputError(
                f"{jax.tree_util.keystr(path, simple=True, separator='/')} of the model has numbers that are not finite: "
                "start from an earlier checkpoint"
            )


def compress(
    config: ConfigOfModel, weights: PyTree, stages: Sequence[Stage], calibration: Calibration | None = None
) -> Iterator[tuple[Stage, Any, Any]]:
    """Applies the stages of a recipe.

    Args:
      config: Config of the model.
      weights: Weights of the model, without Weights.
      stages: Result of `parse_recipe`.
      calibration: Data for stages that need them; None for none.

    Yields:
      `(stage, config, weights)` after each stage.

    Raises:
      InputError: A stage does not fit the model, needs calibration data, or the model is compressed already.
    """
    check_plain(weights)
    for stage in stages:
        config, weights = stage.compress(config, weights, calibration)
        yield stage, config, weights
