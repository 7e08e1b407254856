"""Rules of tasks about config fields that have no effect, because of other fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpnlp.tasks.task import RunConfig

# Names of fields, and a function of the config that returns the reason why they have no effect, with the fix; "" if they have.
Rule = tuple[tuple[str, ...], Callable[[Any], str]]


def only_with_loss(loss: str) -> Callable[[Any], str]:
    """The reason of fields that one loss of a model reads.

    Args:
      loss: Value of `model.loss`.

    Returns:
      A function of the config.
    """

    def find_reason(config: RunConfig) -> str:
        if config.model.loss == loss:
            return ""
        return f"model.loss={config.model.loss!r} does not read it: leave it out, or set model.loss={loss!r}"

    return find_reason


def below_length(config: RunConfig, limit: str, length: str) -> str:
    """The reason why a limit of positions has no effect.

    Args:
      config: Config of a run.
      limit: Field of `config.model`, the limit.
      length: Field of `config.data`, the length of sequences.

    Returns:
      The reason, if the limit is less than the length, and positions have no limit; otherwise "".
    """
    model, tokens = config.model, getattr(config.data, length)
    if model.position == "learned" or getattr(model, limit) >= tokens or model.fixed_length():
        return ""
    return (
        f"model.position={model.position!r} has no longest sequence, and those of data.{length}={tokens} tokens are longer: "
        "leave it out"
    )
