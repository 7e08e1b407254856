"""Recipes: compressors that are applied one after the other, as in "layers(3),heads(0.5),factorize(parameters=0.5),int8"."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
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
    Compressor,
    calibration_gradients,
    check_keeps_units,
    check_known_widths,
    check_unit_arguments,
    convolutions,
    structure,
    zeros,
)
from hpnlp.compress.stages.experts import merged
from hpnlp.compress.stages.moments import listed_matrices, map_arrays, with_input_moments
from hpnlp.compress.stages.numbers import CONVERSIONS, Conversion
from hpnlp.compress.stages.sensitivity import choose_bits, mean_curvature
from hpnlp.models.variables import BUFFERS, FROZEN
from hpnlp.ops.weight import is_weight
from hpnlp.ops.weights import factorize as factorize_matrix
from hpnlp.ops.weights import quantize
from hpnlp.ops.weights.calibrated.observed import split_observed
from hpnlp.ops.weights.low_rank import rank_by_energy, rank_for_share
from hpnlp.spec import build, parse
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.models.backbone import BackboneConfig
    from hpnlp.models.shared.body import ConfigOfModel

# Stages may follow each other in this order.
ORDER = (STRUCTURE, FACTORS, NUMBERS)


@dataclasses.dataclass(frozen=True)
class Stage:
    """An entry of a recipe.

    Attributes:
      text: The spec of the stage.
      changes: STRUCTURE (which units there are), FACTORS (matrices become products) or NUMBERS (of fewer bits).
      compressor: Pure function of (config, weights, calibration) that returns (config, weights).
    """

    text: str
    changes: str
    compressor: Compressor


def layers(keep: int | str) -> tuple[str, Compressor]:
    """Keeps some layers.

    Args:
      keep: The number of layers, evenly spaced and with the first and the last one; or their indices, as "0 2 4"; or "nonzero"
        for those whose kernels have numbers other than 0.

    Returns:
      What it changes, and the compressor.

    Raises:
      InputError: `keep` is no number over 0 and no list of indices.
    """
    chosen = [] if keep == NONZERO else structure.layer_indices(keep)

    def compress(config: BackboneConfig, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        of_model = split_layers(config, weights)
        if keep == NONZERO:
            check_known_widths("layers", calibration, False, keep)
            (used,) = structure.nonzero_units([np.array([structure.has_weights(layer) for layer in of_model])])
            return join_layers(config, weights, [of_model[i] for i in used])
        kept = np.round(np.linspace(0, len(of_model) - 1, keep)).astype(int) if isinstance(keep, int) else chosen
        if len(kept) > len(of_model) or max(kept, default=0) >= len(of_model):
            raise InputError(f"layers({keep}): the model has {len(of_model)} layers, 0 to {len(of_model) - 1}")
        return join_layers(config, weights, [of_model[i] for i in kept])

    return STRUCTURE, compress


def heads(share: int | float | str, by: str = "gradient", across_layers: bool = False) -> tuple[str, Compressor]:
    """Removes attention heads; with grouped heads, key heads with their query heads.

    Args:
      share: Share of the heads that stays, in (0, 1]; or "nonzero" for those that have weights other than 0, as trained with
        train.weights=group_lasso.
      by: "gradient", |weight x gradient| on calibration data; or "magnitude".
      across_layers: The most important heads of all layers stay, at least one of each; otherwise the same share of each layer.

    Returns:
      What it changes, and the compressor.

    Raises:
      InputError: `share` or `by` is invalid.
    """
    return STRUCTURE, _unit_compressor("heads", share, by, across_layers)


def mlp(share: int | float | str, by: str = "gradient", across_layers: bool = False) -> tuple[str, Compressor]:
    """Removes columns of the feed-forward networks.

    Args:
      share: As in `heads`.
      by: As in `heads`.
      across_layers: As in `heads`.

    Returns:
      What it changes, and the compressor.

    Raises:
      InputError: `share` or `by` is invalid.
    """
    return STRUCTURE, _unit_compressor("mlp", share, by, across_layers)


def experts(
    share: int | float, by: str = "gradient", across_layers: bool = False, merge: bool = False
) -> tuple[str, Compressor]:
    """Removes experts of mixtures of experts, with their columns of the router.

    Args:
      share: As in `heads`.
      by: As in `heads`. Experts that no token of the calibration data uses have no gradient.
      across_layers: As in `heads`.
      merge: Experts are not removed but averaged with the ones that stay, see `experts.merged`.

    Returns:
      What it changes, and the compressor.

    Raises:
      InputError: `share` or `by` is invalid.
    """
    return STRUCTURE, _unit_compressor("experts", share, by, across_layers, merged if merge else None)


def factorize(
    parameters: int | float = 0.0, energy: int | float = 0.0, rank: int = 0, by: str = "inputs"
) -> tuple[str, Compressor]:
    """Kernels become products of two thin matrices, where that saves parameters.

    Args:
      parameters: Share of the parameters of each kernel that its factors have; or
      energy: share of the sum of squared singular values that each kernel keeps; or
      rank: the rank.
      by: "inputs" minimises the error of products with inputs from calibration data; "weights" that of the kernels.

    Returns:
      What it changes, and the compressor.

    Raises:
      InputError: `by` is unknown, not exactly one argument is given, or it is out of range.
    """
    if sum(value != 0 for value in (parameters, energy, rank)) != 1 or min(parameters, energy, rank) < 0:
        raise InputError("factorize takes one of parameters=0.5, energy=0.9 and rank=64")
    if by not in ("inputs", "weights"):
        raise InputError(f"factorize(by={by!r}): expected inputs or weights")
    if max(parameters, energy) > 1:
        raise InputError(f"factorize({parameters or energy}): expected a share, at most 1")

    def compress(config: BackboneConfig, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        is_outline = calibration is not None and calibration.is_outline
        if is_outline and energy:
            raise InputError(
                f"factorize(energy={energy}): the weights decide on its ranks: plan with parameters or rank"
            )
        chosen = {
            path: (_rank(w, parameters, energy, rank), w.shape[-2:])
            for path, w in listed_matrices(weights)
            if not is_table(path)
        }
        saves = {path: r for path, (r, (d, f)) in chosen.items() if r * (d + f) < d * f}
        if not saves:
            raise InputError(
                "factorize: the factors would have as many parameters as the kernels: lower the share or rank"
            )
        if by == "inputs":
            name = "factorize(by='inputs')"
            weights = with_input_moments(name, config, weights, calibration, lambda path: path in saves)

        def convert(path: str, w: Any) -> Any:
            if path not in saves:
                return w
            matrix, moments = split_observed(w)
            return factorize_matrix(matrix, saves[path], covariance=moments)

        return config, map_matrices(convert, weights)

    return FACTORS, compress


def _rank(w: Any, parameters: int | float, energy: int | float, rank: int) -> int:
    """The rank of a matrix's factors by one of the arguments of `factorize`."""
    if rank:
        return min(rank, *w.shape[-2:])
    if parameters:
        return rank_for_share(w.shape[-2:], parameters)
    # Layers of a stack have one rank, that of the layer that needs the largest.
    stacked = np.reshape(np.asarray(w), (-1, *w.shape[-2:]))
    return max(rank_by_energy(np.linalg.svd(matrix, compute_uv=False), energy) for matrix in stacked)


def mixed(bits: int | float = 4.0, choices: str = "2 4 8") -> tuple[str, Compressor]:
    """Kernels of integers with few bits where the loss is flat, and more where it is curved; tables of 8 bits.

    Args:
      bits: Largest mean number of bits of a weight of the kernels.
      choices: Numbers of bits that a kernel of a layer may have, ascending, of 2 to 8.

    Returns:
      What it changes, and the compressor.

    Raises:
      InputError: `choices` is no such list, or `bits` is below the first or above the last.
    """
    items = str(choices).split()
    if (
        not items
        or any(not part.isdecimal() or not 2 <= int(part) <= 8 for part in items)
        or items != sorted(set(items))
    ):
        raise InputError(f"mixed(choices={choices!r}): expected ascending numbers of bits of 2 to 8, as '2 4 8'")
    allowed = list(map(int, items))
    if not allowed[0] <= bits <= allowed[-1]:
        raise InputError(
            f"mixed(bits={bits}): expected {allowed[0]} to {allowed[-1]}, the fewest and the most bits of its choices"
        )

    def compress(config: ConfigOfModel, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        if calibration is None:
            raise InputError("mixed needs calibration data: use int4 or int8, or pass some")
        kernels = {path: w for path, w in listed_matrices(weights) if not is_table(path)}
        if any(map(is_weight, kernels.values())):
            raise InputError("mixed after factorize: choose int8 or int4 for the factors")
        layers = {f"{path}:{i}": w for path, stacked in kernels.items() for i, w in enumerate(_one_by_one(stacked))}
        if calibration.is_outline:
            chosen = dict.fromkeys(layers, allowed[0])  # all are stored in bytes
        else:
            chosen = choose_bits(layers, _curvatures(config, weights, kernels, calibration), bits, allowed)

        def convert(path: str, w: Any) -> Any:
            if is_table(path):
                return quantize(w, 8, by_row=True)
            one_by_one = [quantize(matrix, chosen[f"{path}:{i}"]) for i, matrix in enumerate(_one_by_one(w))]
            as_bytes = [dataclasses.replace(matrix, codes=matrix.codes.astype(jnp.int8)) for matrix in one_by_one]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *as_bytes) if w.ndim == 3 else as_bytes[0]

        return config, map_matrices(convert, weights, stacked=True)

    return NUMBERS, compress


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


def _conversion_stage(name: str, conversion: type[Conversion]) -> Callable[..., tuple[str, Compressor]]:
    """The stage that converts each matrix by itself, with the arguments of an entry of `CONVERSIONS`."""

    @functools.wraps(conversion, updated=())
    def stage(*args: Any, **kwargs: Any) -> tuple[str, Compressor]:
        chosen = conversion(*args, **kwargs)

        def convert(path: str, w: Any) -> Any:
            return chosen.convert(path, *split_observed(w))

        def compress(config: ConfigOfModel, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
            if chosen.reads_inputs:
                weights = with_input_moments(name, config, weights, calibration)
            result = map_matrices(functools.partial(map_arrays, convert), weights, experts=True)
            if calibration is None or not calibration.is_outline:
                _check_range(name, result)
            return config, result

        return NUMBERS, compress

    return stage


def _check_range(name: str, weights: PyTree) -> None:
    """Raises InputError for a matrix whose numbers are beyond the range of a format without scales."""
    for path, w in listed_matrices(weights, experts=True):
        if is_weight(w) and not w.is_in_range():
            raise InputError(f"{name}: {path} has numbers beyond the range of {w.codes.dtype}: use bf16")


# Compressors by name.
COMPRESSORS: dict[str, Callable[..., tuple[str, Compressor]]] = {
    "layers": layers,
    "heads": heads,
    "mlp": mlp,
    "experts": experts,
    "filters": convolutions.filters,
    "channels": convolutions.channels,
    "hidden": convolutions.hidden,
    "shapes": convolutions.shapes,
    "magnitude": zeros.magnitude,
    "factorize": factorize,
    "mixed": mixed,
    **{name: _conversion_stage(name, conversion) for name, conversion in CONVERSIONS.items()},
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
    stages = [Stage(str(spec), *build(spec, COMPRESSORS, "stage of the recipe")) for spec in by_stage]
    for first, second in zip(stages, stages[1:], strict=False):
        if ORDER.index(first.changes) > ORDER.index(second.changes):
            raise InputError(
                f"{second.text} after {first.text}: {second.text} works on matrices of floats: put it before {first.text}"
            )
        if first.changes == second.changes != STRUCTURE:
            raise InputError(
                f"{second.text} after {first.text}: both represent the same matrices: leave out one of them"
            )
    zeroing = [stage.text for stage, spec in zip(stages, by_stage, strict=True) if spec.name == "magnitude"]
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
        config, weights = stage.compressor(config, weights, calibration)
        yield stage, config, weights


# (layer, units that stay, importance of all units) -> the layer before the other units are removed.
_Prepare = Callable[[Layer, np.ndarray, np.ndarray], Layer]


def _unit_compressor(
    unit: str, share: int | float | str, by: str, across_layers: bool, prepare: _Prepare | None = None
) -> Compressor:
    """Compressor that keeps a share of the units of each layer."""
    check_unit_arguments(unit, share, by)

    def compress(config: BackboneConfig, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        of_model = split_layers(config, weights)
        counts = [structure.unit_count(layer, unit) for layer in of_model]
        if not any(counts):
            raise InputError(f"{unit}({share}): the model's layers have no {unit}: leave the stage out")
        check_keeps_units(unit, share, counts)
        check_known_widths(unit, calibration, across_layers, share)
        is_outline = calibration is not None and calibration.is_outline
        if is_outline:
            scores = [np.ones(n) for n in counts if n]
        else:
            slopes = (
                [None] * len(of_model)
                if by == "magnitude" or share == NONZERO
                else _slopes(config, weights, unit, calibration)
            )
            scores = [
                structure.importance(structure.kernels_only(layer) if share == NONZERO else layer, unit, g)
                for layer, g, n in zip(of_model, slopes, counts, strict=True)
                if n
            ]
        if isinstance(share, str):
            kept = structure.nonzero_units(scores)
        else:
            kept = structure.choose_units(scores, share, across_layers=across_layers)
        chosen = iter(zip(kept, scores, strict=True))

        def reduced(layer: Layer) -> Layer:
            indices, values = next(chosen)
            prepared = layer if prepare is None or is_outline else prepare(layer, indices, values)
            return structure.keep_units(prepared, unit, indices)

        smaller = [reduced(layer) if n else layer for layer, n in zip(of_model, counts, strict=True)]
        return join_layers(config, weights, smaller)

    return compress


def _slopes(config: BackboneConfig, weights: PyTree, unit: str, calibration: Calibration | None) -> list[Any]:
    """Gradients of the parameters of each layer."""
    slopes = calibration_gradients(unit, config, weights, calibration)
    return [layer.variables["params"] for layer in split_layers(config, {**weights, **slopes})]
