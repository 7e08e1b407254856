"""Mixers to compare: specs of comparable cost, and the selection of bidirectional or causal ones."""

from __future__ import annotations

from collections.abc import Mapping

from hpnlp.models.stacks.layer_forms import build_mixers
from hpnlp.nn.mixers import MIXERS
from hpnlp.spec import Spec, lookup, parse
from hpnlp.types import InputError

# Name of an entry of MIXERS -> its spec, by which a query sees about 128 keys where the mixer has a choice. Entries that are
# not here are compared with their default arguments.
SPECS: Mapping[str, str] = {
    "blockwise": "blockwise(128)",
    "window": "window(64, 64)",
    "dilated": "dilated(63, 2)",
    "strided": "strided(64)",
    "fixed": "fixed(64, 8)",
    "random": "random(32, 3)",
    "global": "global(64)",
    "longformer": "longformer(128, 16)",
    "bigbird": "bigbird(32, 3, 1, 1)",
    "linformer": "linformer(128)",
    "nystrom": "nystrom(64)",
    "reformer": "reformer(16, 2, window=64)",
    "routing": "routing(16, window=128)",
    "compressive": "compressive(128, 128, 4)",  # lengths are multiples of 4
}


def mixer_spec(entry: Spec) -> str:
    """The spec of a mixer that a user names.

    Args:
      entry: A parsed spec.

    Returns:
      The entry of SPECS for a name without arguments, otherwise the spec as it is.
    """
    return SPECS.get(entry.name, entry.name) if entry == Spec(entry.name) else str(entry)


def all_specs(*, causal: bool = False) -> tuple[list[str], dict[str, str]]:
    """Specs of all entries of MIXERS that an encoder, or a language model, can have.

    Args:
      causal: The entries for a language model.

    Returns:
      The specs; and the entries that cannot be made without arguments, with the reason.
    """
    specs, left_out = [], {}
    for name in MIXERS:
        spec = mixer_spec(Spec(name))
        try:
            (mixer,) = build_mixers(spec)
        except InputError as error:
            left_out[name] = str(error)
            continue
        if mixer.traits.causal if causal else mixer.traits.bidirectional:
            specs.append(spec)
    return specs, left_out


def select_specs(text: str) -> list[str]:
    """The mixers that a list names.

    Args:
      text: Specs, separated by commas.

    Returns:
      The specs, without repetitions.

    Raises:
      InputError: The list is no list of specs, or an entry is unknown.
    """
    entries = parse(text, "--mixers") if text else ()
    if not entries:
        raise InputError("--mixers is empty: name mixers, as in --mixers=full,linear, or use --mixers=all")
    for entry in entries:
        lookup(MIXERS, entry.name, "mixer")
    return list(dict.fromkeys(mixer_spec(entry) for entry in entries))
