"""What a run will take before anybody pays for it: bytes, FLOPs, messages and seconds of a step on devices that are not there.

The step's own trace is read, so that whatever the model, the mixer or the layout, what is said is of the program that will run.
"""

from hpnlp.planner.devices import DEVICES, Device
from hpnlp.planner.estimate import Costs, costs

__all__ = ["DEVICES", "Costs", "Device", "costs"]
