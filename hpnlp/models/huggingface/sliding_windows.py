"""Sliding windows in config.json and as `LMConfig.mixer`.

A model's windows are a list with one entry per layer: the number of tokens that a query sees, the query's own token included,
or None for full attention.
"""

from __future__ import annotations

import enum
import itertools
import json
from collections.abc import Mapping
from typing import Any

from hpnlp.models.huggingface.config_values import checked_value
from hpnlp.nn.attention import mixer_period
from hpnlp.nn.mixers import MIXERS
from hpnlp.spec import build, shortened
from hpnlp.types import InputError

FULL, SLIDING = "full_attention", "sliding_attention"  # values of layer_types


class WindowLayers(enum.Enum):
    """Layers of a family that may have a sliding window."""

    NONE = "none"
    # All layers if config.json sets sliding_window, or else none.
    ALL = "all"
    # If use_sliding_window is true: the layers that layer_types marks, or without it those from max_window_layers on.
    SOME = "some"
    # The layers that layer_types marks, or without it every second one from the first on.
    ALTERNATING = "alternating"


def read_windows(raw: Mapping[str, Any], allowed: WindowLayers, source: str) -> list[int | None]:
    """Reads the windows of a config.json.

    Args:
      raw: Content of the file, with the family's defaults.
      allowed: Layers that may have a window; not NONE.
      source: Name of the file, for error messages.

    Returns:
      The window of each layer.

    Raises:
      InputError: A value is missing or invalid, or the values contradict each other.
    """
    layers = checked_value(raw, "num_hidden_layers", int, source)
    size = _read_size(raw, allowed, source)
    first = _read_first_layer(raw, source) if allowed is WindowLayers.SOME and size is not None else 0
    step = 2 if allowed is WindowLayers.ALTERNATING else 1
    default = [
        SLIDING if size is not None and layer >= first and layer % step == 0 else FULL for layer in range(layers)
    ]
    types = default if raw["layer_types"] is None else raw["layer_types"]
    contradicts_family = allowed is WindowLayers.ALL and types != default
    if contradicts_family or not _are_layer_types(types, layers, size):
        expected = f"{FULL} or {SLIDING}, the latter with a window"
        if allowed is WindowLayers.ALL:
            expected = f"{default[0]}, because sliding_window holds for all layers of this family"
        raise InputError(
            f"{source}: layer_types={shortened(types, 80)} with sliding_window={json.dumps(size)} is not supported: expected "
            f"{layers} times {expected}"
        )
    return [size if kind == SLIDING else None for kind in types]


def _read_size(raw: Mapping[str, Any], allowed: WindowLayers, source: str) -> int | None:
    """The window of the layers that have one, or None if no layer has."""
    if raw["sliding_window"] is None:
        return None
    if allowed is WindowLayers.SOME and not checked_value(raw, "use_sliding_window", bool, source):
        return None
    return checked_value(raw, "sliding_window", int, source)


def _read_first_layer(raw: Mapping[str, Any], source: str) -> int:
    """The first layer with a window, if layer_types is missing."""
    first = raw["max_window_layers"]
    if type(first) is not int or first < 0:
        raise InputError(f"{source}: max_window_layers is {first!r}: expected a whole number of at least 0")
    return first


def _are_layer_types(types: object, layers: int, size: int | None) -> bool:
    """Whether `types` is a list of one supported layer type per layer; sliding attention needs a window `size`."""
    supported = (FULL,) if size is None else (FULL, SLIDING)
    return isinstance(types, list) and len(types) == layers and all(kind in supported for kind in types)


def windows_json(mixer: str, layers: int, allowed: WindowLayers) -> dict[str, Any]:
    """Writes windows as values of config.json.

    Args:
      mixer: `LMConfig.mixer`.
      layers: Number of layers.
      allowed: Layers of the family that may have a window.

    Returns:
      The values. Windows that the family cannot express are missing or changed.
    """
    if allowed is WindowLayers.NONE:
        return {}
    windows = parse_windows(mixer, layers)[0] or [None]
    sizes = set(windows) - {None}
    size = sizes.pop() if len(sizes) == 1 else None
    if allowed is WindowLayers.ALL:
        return {"sliding_window": None if None in windows else size}
    types = [FULL if window is None else SLIDING for window in windows]
    if allowed is WindowLayers.ALTERNATING:
        # transformers requires a window also where no layer has one.
        return {"sliding_window": size or 4096, "layer_types": types if size else [FULL] * layers}
    if size is None:
        return {"use_sliding_window": False, "layer_types": None}
    return {
        "use_sliding_window": True,
        "sliding_window": size,
        "max_window_layers": types.index(SLIDING),
        "layer_types": types,
    }


def parse_windows(mixer: str, layers: int) -> tuple[list[int | None] | None, dict[str, Any]]:
    """Parses a mixer of full attention and windows.

    Args:
      mixer: `LMConfig.mixer`.
      layers: Number of layers.

    Returns:
      `(windows, options)`: the window of each layer, None if the mixer is of another kind or its layers differ in their
      options; and the arguments `soft_cap` and `scale` of all layers, without those that are None.
    """
    period, options = [], []
    for spec in mixer_period(mixer):
        if spec.name not in ("window", "full"):
            return None, {}
        entry = build(spec, MIXERS, "mixer")
        period.append(entry.pattern.left + 1 if spec.name == "window" else None)
        options.append({name: float(x) for name in ("soft_cap", "scale") if (x := getattr(entry, name)) is not None})
    if any(other != options[0] for other in options):
        return None, {}
    return [period[layer % len(period)] for layer in range(layers)], options[0]


def window_mixer(windows: list[int | None], options: Mapping[str, Any] | None = None) -> str:
    """Writes windows as a mixer.

    Args:
      windows: The window of each layer, at least one.
      options: Arguments of all layers' mixers; None for none.

    Returns:
      The spec string of the shortest period, with runs of equal layers as repeats.
    """
    layers = range(len(windows))
    period = next(n for n in range(1, len(windows) + 1) if all(windows[i] == windows[i % n] for i in layers))
    further = [f"{name}={value!r}" for name, value in (options or {}).items()]
    names = []
    for window, run in itertools.groupby(windows[:period]):
        name, sizes = ("full", []) if window is None else ("window", [str(window - 1), "0"])
        arguments, count = ",".join([*sizes, *further]), len(list(run))
        name = f"{name}({arguments})" if arguments else name
        names.append(name if count == 1 else f"{name}*{count}")
    return ",".join(names)


def canonical_mixer(mixer: str, layers: int, length: int | None = None) -> str:
    """Rewrites a mixer so that equal windows have equal spec strings.

    Args:
      mixer: `LMConfig.mixer`.
      layers: Number of layers.
      length: Windows of at least this many tokens become full attention; None for no such windows.

    Returns:
      The spec string; `mixer` itself if it is neither full attention nor windows.
    """
    windows, options = parse_windows(mixer, layers)
    if windows is None:
        return mixer
    if length is not None:
        windows = [None if window is not None and window >= length else window for window in windows]
    return window_mixer(windows, options)
