"""Linear attention: attention with a kernel in place of the softmax, computed by a state of constant size."""

from hpnlp.ops.attention.linear.linear_attention import linear_attention
from hpnlp.ops.attention.linear.recurrent import linear_attention_step
from hpnlp.ops.attention.linear.reference import reference_linear_attention, reference_linear_recurrence
from hpnlp.ops.attention.linear.state import LinearState, zero_state

__all__ = [
    "LinearState", "linear_attention", "linear_attention_step", "reference_linear_attention", "reference_linear_recurrence",
    "zero_state",
]  # fmt: skip
