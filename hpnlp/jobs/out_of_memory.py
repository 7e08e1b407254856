"""Out-of-memory errors of training as InputErrors with advice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax

from hpnlp import measure
from hpnlp.table import Table
from hpnlp.training.config import Config
from hpnlp.types import InputError

_ADVICE: Table[Callable[[Config], str]] = Table({"memory": "hpnlp.planner.out_of_memory:advice"})


@contextlib.contextmanager
def advised(config: Config) -> Iterator[None]:
    """Turns an out-of-memory error of training into an InputError with advice.

    Args:
      config: Config of the run.

    Yields:
      Nothing.

    Raises:
      InputError: The body ran out of memory.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not measure.is_out_of_memory(error):
            raise
        reason = (str(error).strip().splitlines() or ["MemoryError"])[0]
        raise InputError(f"out of memory ({reason:.200}): {_ADVICE['memory'](config)}") from error
