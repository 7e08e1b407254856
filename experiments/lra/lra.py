"""Long Range Arena: all bidirectional mixers on one task, under one setting of model, optimizer and budget.

    hpnlp lra --mixers=all --tasks=listops_short --budget=1000 --workdir=runs/lra
    hpnlp train --config=lra/lra:listops_short --model.mixer=nystrom --workdir=runs/nystrom
    hpnlp sweep --config=lra/lra:pathfinder --workdir=runs/pathfinder

`hpnlp lra` needs no file: the setting is `hpnlp.lra.get_config`. Published figures (Tay et al. 2021, table 1) are of larger
models on accelerators: dense attention has 36.4 % on ListOps, 64.3 % on text, 57.5 % on retrieval, 42.4 % on images and 71.4 %
on Pathfinder.
"""

from __future__ import annotations

from hpnlp.lra.experiment import get_config, get_sweep

__all__ = ["get_config", "get_sweep"]
