"""Rewinding: pruned weights with the values of an earlier time (Frankle and Carbin 2019; Frankle et al. 2020)."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from hpnlp.compress.matrices import KERNELS, is_table
from hpnlp.models import variables
from hpnlp.parallel.plan import Plan
from hpnlp.training import run_directory
from hpnlp.training.config_file import load_config
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError

INITIAL, RANDOM = "initial", "random"


def rewound(params: Any, run: run_directory.Run, source: str) -> Any:
    """Restores earlier weights and sets the zeros of the kernels of `params` again.

    Args:
      params: Weights of the model of the run, after stages that set single weights to 0.
      run: The run.
      source: "initial" for the weights before the first step, which follow from `train.seed`; "random" for weights of another
        seed, a control; or RUN@STEP for those of a checkpoint.

    Returns:
      A tree like `params`.

    Raises:
      InputError: `source` is no such checkpoint, or its model has other shapes; see `check_source` for the rest.
    """
    earlier = _weights(run, source)
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (params, earlier)]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"--rewind={source}: the weights have other shapes than those of the pruned model: use stages that keep shapes, as "
            "magnitude does, and a checkpoint of the same model"
        )

    def masked(path: KeyPath, pruned: PyTree, early: PyTree) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        is_kernel = name.rsplit("/", 1)[-1] in KERNELS and not is_table(name)
        return jnp.where(pruned == 0, 0, early) if is_kernel else early

    return jax.tree_util.tree_map_with_path(masked, params, earlier)


def check_source(run: run_directory.Run, source: str) -> None:
    """Checks that the weights that a source names exist, before stages take time.

    Args:
      run: The run.
      source: As for `rewound`, or "" for no rewinding.

    Raises:
      InputError: `source` is malformed or no such checkpoint, or the first weights of the run came from another run.
    """
    if not source:
        return
    if checkpoint := _checkpoint(source):
        workdir, step = checkpoint
        load_config(workdir)
        with contextlib.closing(Checkpointer(workdir, read_only=True)) as checkpoints:
            checkpoints.step_of(step)
    elif source == INITIAL and run.config.train.init_from:
        raise InputError(
            f"--rewind=initial: the run began with the weights of {run.config.train.init_from}: use --rewind=RUN@STEP with an "
            "early checkpoint of it"
        )


def _checkpoint(source: str) -> tuple[Path, int] | None:
    """Run and step that a source names; None for initial and random. Raises InputError if it is malformed."""
    if source in (INITIAL, RANDOM):
        return None
    match = re.fullmatch(r"(.+)@(\d{1,18})", source, re.DOTALL)
    if match is None:
        raise InputError(f"--rewind={source}: expected initial, random, or RUN@STEP, the checkpoint of a step")
    return Path(match[1]), int(match[2])


def _weights(run: run_directory.Run, source: str) -> Any:
    """The weights that a source names."""
    if checkpoint := _checkpoint(source):
        return run_directory.load(*checkpoint).params
    optimizer = run.config.optimizer.for_batch(run.config.data.batch_size)
    trainer = make_trainer(run.model, optimizer, Plan("single"), steps=1, batch_size=run.config.data.batch_size)
    state = trainer.init(jax.random.key((run.config.train.seed + (source == RANDOM)) % 2**32))
    return variables.join(state.params, state.buffers)
