"""What benchmarks of training steps share: flags, steps of torch models, and the comparison of losses and times."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from absl import flags

from hpnlp import cli, measure

RESULTS = Path(__file__).parents[1] / "results"

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 7, "Measurements of each step; the median is reported.")
flags.DEFINE_integer("threads", 0, "Threads of torch; 0 for one per core.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")

Step = Callable[[], Any]  # one training step, which returns the loss


def prepare() -> None:
    """Prepares JAX, and gives torch as many threads."""
    cli.prepare_jax()
    torch.set_num_threads(FLAGS.threads or len(jax.devices()) * measure.environment()["cores"])


def torch_step(model: torch.nn.Module, *inputs: torch.Tensor) -> Step:
    """The step of a torch model whose forward pass returns the loss: gradients, clipping by global norm, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)

    def step() -> torch.Tensor:
        loss = model(*inputs)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def our_step(trainer: Any, state: Any, data: Any, key: jax.Array) -> Step:
    """The step that the training loop calls: segment ids, clipping, AdamW, metrics, the check for non-finite gradients."""
    held = [state]

    def step() -> jax.Array:
        held[0], metrics = trainer.step(held[0], data, key)
        return metrics["loss"]

    return step


def first_losses(size: str, steps: Mapping[str, Step]) -> list[list[float]]:
    """The first two losses of each step. Exits unless all steps have the same; the second depends on the first gradients."""
    losses = [[float(step()) for step in steps.values()] for _ in range(2)]
    for of_all in losses:
        if np.ptp(of_all) > 2e-4 * of_all[0]:
            sys.exit(f"{size}: the losses of {', '.join(steps)} disagree ({of_all}): nothing is reported")
    return losses


def row_of(
    shape: Mapping[str, Any], losses: Any, times: Mapping[str, Any], flops: int, reference: str = "torch"
) -> dict[str, Any]:
    """The row of a result file, and prints it. shape: sizes of the model and the batch; times: by the name of the step."""
    others = [name for name in times if name != reference]
    row = {
        **shape,
        **{f"{name}_ms": 1e3 * timing.median for name, timing in times.items()},
        **{f"{name}_over_{reference}": times[name].over(times[reference]) for name in others},
        "matmul_gflops_per_step": flops / 1e9,
        "ours_gflops_per_second": flops / 1e9 / times["ours"].median,
        "losses": losses,
        "all_ms": {name: [1e3 * s for s in timing.all] for name, timing in times.items()},
        "torch": torch.__version__,
    }
    shown = ", ".join(f"{name} {row[f'{name}_ms']:.1f} ms" for name in times)
    ratios = ", ".join(f"{name} / {reference} {row[f'{name}_over_{reference}']:.2f}" for name in others)
    print(f"{shape['size']:8} {shown}; {ratios}", flush=True)
    return row
