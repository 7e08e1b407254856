"""Dtypes of activations and products of a trained model, other than that of its training."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.models.decode import Generation
from hpnlp.training.run_directory import Run
from hpnlp.types import InputError

DTYPES = ("float32", "bfloat16", "float16")


def with_dtype(run: Run, dtype: str) -> Run:
    """A run whose model computes in another dtype. Weights stay as they are, and are rounded in each product.

    Args:
      run: The run.
      dtype: An entry of DTYPES.

    Returns:
      The run.

    Raises:
      InputError: The dtype is unknown, the model has none, or a weight is too large for it.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r}: expected {', '.join(DTYPES)}")
    config = run.model.config
    if not _has_dtype(run):
        raise InputError(f"dtype={dtype!r}: the model has no model.dtype that could change: leave it out")
    if dtype == "float16":
        _check_range(run)
    return dataclasses.replace(run, model=run.model.clone(config=dataclasses.replace(config, dtype=dtype)))


@contextlib.contextmanager
def overflow_checked(run: Run) -> Iterator[None]:
    """Raises InputError where a program of a model of float16 returns numbers that are not finite.

    Yields:
      Nothing.

    Cost:
      For float16, programs are compiled again, and results are read.
    """
    if not _has_dtype(run) or run.model.config.dtype != "float16":
        yield
        return
    try:
        with jax.debug_nans(True), jax.debug_infs(True):
            yield
    except FloatingPointError as error:
        raise _overflow(str(error).splitlines()[0]) from error


def overflow_checked_chunks(generation: Generation) -> Iterator[np.ndarray]:
    """The ids of a generation; raises InputError in place of those that follow an overflow of float16.

    Args:
      generation: Continuations of prompts.

    Yields:
      As `generation`.
    """
    for chunk in generation:
        if generation.has_overflowed:
            raise _overflow("hidden states that are not finite")
        yield chunk


def _overflow(where: str) -> InputError:
    limit = np.finfo(np.float16).max
    return InputError(f"float16 overflows at {limit:,.0f} in this model ({where}): use bfloat16 or float32")


def _has_dtype(run: Run) -> bool:
    """Whether the model's config has a dtype."""
    config = run.model.config
    return dataclasses.is_dataclass(config) and "dtype" in (field.name for field in dataclasses.fields(config))


def _check_range(run: Run) -> None:
    """Raises InputError for a weight that float16 cannot hold."""
    limit = float(np.finfo(np.float16).max)
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.params):
        if (
            jnp.issubdtype(leaf.dtype, jnp.floating)
            and float(np.abs(np.asarray(leaf, np.float32)).max(initial=0)) > limit
        ):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise InputError(f"{name} has numbers over {limit:,.0f}, the largest float16: use bfloat16 or float32")
