"""Flags of the commands that mix a language model with a datastore of its hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from hpnlp import cli
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.jobs.ensembles import Member
    from hpnlp.retrieval.knn import Neighbours
    from hpnlp.training.run_directory import Run


def define() -> None:
    """Defines the flags."""
    flags.DEFINE_string(
        "datastore", None, "Datastore of the run, whose neighbours are mixed in; see hpnlp index build."
    )
    flags.DEFINE_string(
        "mixture",
        "tuned",
        'How they are mixed: tuned, learned, or linear(weight, temperature), as in "linear(weight=0.25,temperature=10.0)".',
    )
    flags.DEFINE_integer("k", None, "Number of neighbours; by default that of hpnlp index build.", lower_bound=1)


def neighbours() -> Neighbours | None:
    """The datastore of the flags, None without one.

    Raises:
      InputError: A flag has no effect.
    """
    f = cli.FLAGS
    if not f.datastore:
        cli.refuse(["mixture", "k"], "without --datastore: leave it out")
        return None
    from hpnlp.retrieval.knn import Neighbours

    return Neighbours(f.datastore, f.mixture, f.k)


def mixed(loaded: Run, members: Sequence[Member]) -> Run:
    """A run with the datastore of the flags.

    Args:
      loaded: The run.
      members: Its members.

    Returns:
      The run, whose model mixes the neighbours in.

    Raises:
      InputError: There are several members, or the datastore is of another run.
    """
    options = neighbours()
    if options is None:
        return loaded
    if len(members) > 1:
        raise InputError(f"--datastore={options.directory} is for one run: name one, or leave it out")
    from hpnlp.models.variables import FROZEN

    _, model, frozen = options.load(loaded.model, loaded.params, loaded.tokenizer, members[0][0])
    return dataclasses.replace(loaded, model=model, params={**loaded.params, FROZEN: frozen})
