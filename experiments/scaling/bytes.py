"""A study of scaling laws on two CPU cores: byte-level language models of 68 thousand to 1.6 million parameters.

    hpnlp scaling plan --config=scaling/bytes
    hpnlp sweep --config=scaling/bytes --workdir=runs/scaling
    hpnlp scaling fit runs/scaling

Four sizes on 1, 2, 4 and 8 million bytes of the Python standard library and its tests, each less than one epoch; three runs
with a second seed, for the noise; and one larger model that is predicted. Rates fall linearly to 0 over the last fifth of each
run, so that no point is taken from the middle of a schedule. The runs took 132 minutes on two busy cores.

`scaling/bytes:rates` tries three learning rates at the two smallest sizes, from which Study(learning_rate=...) is chosen. At
48 x 2 layers and 1 million bytes, rates of 0.0015, 0.005, 0.015 and 0.04 give 2.153, 2.017, 2.017 and 2.257 nats per byte; at
128 x 4, rates of 0.00075 and 0.0025 give 1.749 and 1.692. From 0.005 at 48 x 2, the Step law leads to 0.00075 at 128 x 4, and
1 / width to 0.0019. One run each: this excludes the former and does not determine an exponent.
`scaling/bytes:tiny` takes a few minutes, proves nothing, and shows what the commands write.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from hpnlp.scaling_laws import Study
from hpnlp.spec import lookup
from hpnlp.training.config import default

MILLION = 10**6


def size(dim: int, layers: int) -> dict[str, Any]:
    return {"model.dim": dim, "model.layers": layers, "model.heads": max(2, dim // 32)}


STUDIES = {
    "full": Study(
        budget="3e14",
        sizes=[size(48, 2), size(64, 3), size(96, 3), size(128, 4)],
        tokens=[1 * MILLION, 2 * MILLION, 4 * MILLION, 8 * MILLION],
        held_out=[(size(160, 5), 5 * MILLION)],
        repeats=[(0, 2 * MILLION), (1, 4 * MILLION), (2, 2 * MILLION)],
        learning_rate=0.0075,
        transfer="width",
    ),
    "tiny": Study(
        budget="5min",
        sizes=[size(16, 1), size(32, 1), size(48, 1)],
        tokens=[20_000, 40_000, 80_000],
        held_out=[(size(64, 1), 80_000)],
        repeats=[(0, 20_000)],
        learning_rate=0.01,
    ),
}
STUDIES["rates"] = STUDIES["full"]


def get_config(name: str = "full") -> ConfigDict:
    config = default()
    config.data.path = "stdlib" if name == "tiny" else "stdlib+tests"
    config.data.seq_len = 64 if name == "tiny" else 256
    config.data.heldout_bytes = 20_000 if name == "tiny" else 300_000
    config.model.mlp = "gelu"
    config.optimizer.name = "adamw"
    config.optimizer.schedule = "wsd(0.2)"
    config.optimizer.final = 0.0
    config.train.baselines = False
    config.train.sample = 0
    config.train.checkpoint_every = 0
    return config


def get_study(name: str = "full") -> Study:
    return lookup(STUDIES, name, "study")


def get_sweep(name: str = "full") -> list[dict[str, Any]]:
    members = get_study(name).sweep(get_config(name))
    if name != "rates":
        return members
    sequences = [member["train.steps"] * member["data.batch_size"] for member in members]
    tried = [
        member
        for member, count in zip(members, sequences, strict=True)
        if count == sequences[1] and member["model.dim"] <= 64 and "train.seed" not in member  # 2 million bytes
    ]
    return [
        {**member, "optimizer.learning_rate": factor * member["optimizer.learning_rate"]}
        for member in tried
        for factor in (0.5, 1.0, 2.0)
    ]
