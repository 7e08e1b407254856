"""Which implementation of attention runs: what each can honour is its own file's to say, the choice among them is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpnlp.types import InputError

# impl -> the platform it needs, or None, from the fastest to the slowest: "auto" takes the first that can.
PLATFORMS: dict[str, str | None] = {"splash": "tpu", "cudnn": "gpu", "xla": None, "reference": None}


def asked(operands: Mapping[str, Any]) -> set[str]:
    """The names of the operands that a call gives: those that are neither None nor a number or truth of nothing."""
    nothing = lambda value: value is None or (isinstance(value, bool | int | float) and not value)  # noqa: E731
    return {name for name, value in operands.items() if not nothing(value)}


def choose(platform: str, beyond: Mapping[str, Sequence[str]]) -> str:
    """The impl that `auto` takes: the first of PLATFORMS that is given, runs on `platform` and honours all that is asked.

    platform: as `jax.default_backend()` names it. beyond: for each impl that there is, what of this call it cannot
    honour, as `beyond_cudnn` and `beyond_splash` list it. Raises InputError where none is left.
    """
    for name in PLATFORMS:
        if name in beyond and not _against(name, platform, beyond):
            return name
    told = "; ".join(f"{name} {_against(name, platform, beyond)}" for name in PLATFORMS if name in beyond)
    raise InputError(f"no impl of attention can do what is asked ({told}): leave one of these out")


def explain(platform: str, beyond: Mapping[str, Sequence[str]]) -> str:
    """What `auto` takes and why each other impl is out, a line each; arguments and errors as `choose`."""
    taken = choose(platform, beyond)
    names = [name for name in PLATFORMS if name in beyond]
    width = max(len(name) for name in names)
    told = {name: _against(name, platform, beyond) or f"could, but {taken} comes first" for name in names}
    told[taken] = "taken"
    return "\n".join(f"{name:<{width}}  {told[name]}" for name in names)


def _against(name: str, platform: str, beyond: Mapping[str, Sequence[str]]) -> str:
    """Why an impl is out; empty where it is not."""
    needed = PLATFORMS[name]
    reasons = [] if needed in (None, platform) else [f"needs a {needed.upper()}, this is a {platform.upper()}"]
    if beyond[name]:
        reasons.append(f"does not honour {', '.join(beyond[name])}")
    return "; ".join(reasons)
