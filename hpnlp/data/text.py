"""Former name of `sources`."""

import sysconfig

from hpnlp.data.sources import find

__all__ = ["find", "sysconfig"]
