"""A small config that the tests of the planner share."""

import dataclasses
import functools

from hpnlp.data.stream import DataConfig
from hpnlp.models.lm import LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.planner import Device, costs
from hpnlp.training.config import Config

MODEL = LMConfig(layers=6, dim=64, heads=4, mlp_dim=192, vocab=264, unroll=1)
CONFIG = Config(model=MODEL, data=DataConfig(seq_len=128, batch_size=16), plan=Plan("single"))
SMALL = Device({"float32": 1e12, "bfloat16": 2e12}, 80e6, 1e11, 4, 1e10, 1e9, 1e9)


@functools.cache
def planned(plan, devices=8, **fields):
    return costs(dataclasses.replace(CONFIG, plan=plan, **fields), devices)
