"""`hpnlp profile`: where the time of a training step or of a forward pass goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from hpnlp import cli
from hpnlp.cli import run_names

USAGE = """
hpnlp profile RUN [--program=training|loss] [--batch_size=N] [--calls=6] [--ablations=2]

Divides the time of a training step of a run, or of the loss of a batch without gradients, among the parts of the model
(embedding, projections, mixing, feed-forward, norms, output layer, optimizer) by a trace of JAX's profiler. Beside each part
stand its FLOPs, the rate that they reach, and by what factor the program becomes faster at most if the part takes no time.
What no operation accounts for is printed as "not attributed". The shares of the two largest parts are checked by the time of
the program without their operations.

The figures are those of this machine. They are printed, and written to profile_PROGRAM.json and .png in RUN.
"""

flags.DEFINE_string("workdir", None, "The same as RUN.")
flags.DEFINE_enum(
    "program", "training", ["training", "loss"], "A training step, or the loss of a batch without gradients."
)
flags.DEFINE_integer("batch_size", 0, "Sequences of a batch; 0 for data.batch_size of the run.", lower_bound=0)
flags.DEFINE_integer("calls", 6, "Calls of the program in the trace.", lower_bound=1, upper_bound=1000)
flags.DEFINE_integer(
    "ablations", 2, "Number of the largest parts without which the program is timed too; 0 for none.", lower_bound=0
)
flags.DEFINE_integer("step", None, "Step of the checkpoint; by default the best, or the newest if none was evaluated.")


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp profile`.

    Args:
      argv: "hpnlp profile" and the arguments of the command.

    Raises:
      InputError: A flag or the run is invalid.
    """
    workdir = cli.named_run(cli.parse(argv, USAGE, positional=True), "hpnlp profile RUN", "workdir")
    f = cli.FLAGS
    directory, step = run_names.expand_one(workdir, f.step)
    cli.prepare_jax()

    from hpnlp.jobs.profile import profile_run

    settings = profile_run.ProfileSettings(f.program, f.batch_size, f.calls, f.ablations)
    profile = profile_run.profile_run(directory, step, settings)
    print(f"{directory}, step {profile.step}\n")
    print(profile_run.render(profile))
    print(f"written: {', '.join(map(str, profile_run.write(profile, Path(directory))))}")
