"""Scaling laws: forms of the loss, fits with intervals, counted FLOPs, and studies that measure them."""

from hpnlp.scaling_laws.diagnostics import Bias as Bias
from hpnlp.scaling_laws.diagnostics import isoflop_bias as isoflop_bias
from hpnlp.scaling_laws.diagnostics import warnings as warnings
from hpnlp.scaling_laws.fit import FORMS as FORMS
from hpnlp.scaling_laws.fit import Estimate as Estimate
from hpnlp.scaling_laws.fit import Fit as Fit
from hpnlp.scaling_laws.fit import Optimum as Optimum
from hpnlp.scaling_laws.fit import fit as fit
from hpnlp.scaling_laws.points import Points as Points
from hpnlp.scaling_laws.study import Study as Study
