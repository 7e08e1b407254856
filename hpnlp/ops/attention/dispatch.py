"""Which implementation of attention runs: what each can honour is its own file's to say, the choice among them is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpnlp.types import InputError

# impl -> the platform it needs, or None, from the fastest to the slowest: "auto" takes the first that can.
PLATFORMS: dict[str, str | None] = {"splash": "tpu", "cudnn": "gpu", "pallas": "gpu", "xla": None, "reference": None}
# What "auto" never takes, and why.
ON_REQUEST = {
    "pallas": "not yet measured on a card: only by its name",
    "reference": "dense, and slow: only by its name",
}


def asked(operands: Mapping[str, Any]) -> set[str]:
    """The names of the operands that a call gives: None, False and the number 0 stand for those that it does not."""
    off = lambda value: value is None or (isinstance(value, bool | int | float) and not value)  # noqa: E731
    return {name for name, value in operands.items() if not off(value)}


def choose(platform: str, beyond: Mapping[str, Sequence[str]]) -> str:
    """The impl that "auto" takes: the first of PLATFORMS that runs on `platform` and honours all that is asked.

    platform: as `jax.default_backend()` names it. beyond: of each impl there is to choose from, what of this call it
    cannot honour, as `beyond_splash` and `beyond_cudnn` list it. Raises InputError where none can do it.
    """
    against = _against(platform, beyond)
    for name, reason in against.items():
        if not reason:
            return name
    told = "; ".join(f"{name} {reason}" for name, reason in against.items())
    raise InputError(f"no impl of attention does what is asked ({told}): leave out what the nearest does not honour")


def explain(platform: str, beyond: Mapping[str, Sequence[str]]) -> str:
    """What "auto" takes and why not another: a line for each impl. Arguments and errors as `choose`."""
    taken = choose(platform, beyond)
    against = _against(platform, beyond)
    width = max(map(len, against))
    told = {name: reason or f"could, but {taken} comes first" for name, reason in against.items()} | {taken: "taken"}
    return "\n".join(f"{name:<{width}}  {reason}" for name, reason in told.items())


def _against(platform: str, beyond: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Why "auto" does not take an impl, for each in the order of PLATFORMS; empty where it could."""
    against = {}
    for name, needed in PLATFORMS.items():
        if name in beyond:
            reasons = [ON_REQUEST[name]] if name in ON_REQUEST else []
            reasons += [] if needed in (None, platform) else [f"needs a {needed.upper()}, this is a {platform.upper()}"]
            reasons += [f"does not honour {', '.join(beyond[name])}"] if beyond[name] else []
            against[name] = "; ".join(reasons)
    return against
