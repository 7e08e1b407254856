"""Planner: memory, FLOPs, communication and time of a training step on devices that need not exist.

`costs` traces the step and reads its jaxpr, so that every model, mixer and layout is planned as the program that will run.
"""

from hpnlp.planner.devices import DEVICES, Device
from hpnlp.planner.estimate import Costs, costs

__all__ = ["DEVICES", "Costs", "Device", "costs"]
