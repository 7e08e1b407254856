"""Mixers: modules that mix information along the sequence. `model.mixer` names entries of MIXERS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpnlp.model_interfaces.branch import completed
from hpnlp.nn.mixers.checks import checked_dropout
from hpnlp.table import Table

MIXERS: Table[Callable[..., Any]] = Table(
    {
        # Exact attention over a pattern.
        "full": "hpnlp.nn.mixers.patterns:full",
        "blockwise": "hpnlp.nn.mixers.patterns:blockwise",
        "window": "hpnlp.nn.mixers.patterns:window",
        "dilated": "hpnlp.nn.mixers.patterns:dilated",
        "strided": "hpnlp.nn.mixers.patterns:strided",
        "fixed": "hpnlp.nn.mixers.patterns:fixed",
        "random": "hpnlp.nn.mixers.patterns:random",
        "global": "hpnlp.nn.mixers.patterns:global_",
        "longformer": "hpnlp.nn.mixers.patterns:longformer",
        "bigbird": "hpnlp.nn.mixers.patterns:bigbird",
        # Attention to tokens that are chosen by content.
        "reformer": "hpnlp.nn.mixers.bucketed:reformer",
        "routing": "hpnlp.nn.mixers.bucketed:routing",
        "sinkhorn": "hpnlp.nn.mixers.sinkhorn:sinkhorn",
        "clustered": "hpnlp.nn.mixers.clustered:clustered",
        "clustered_improved": "hpnlp.nn.mixers.clustered:clustered_improved",
        "moba": "hpnlp.nn.mixers.selected_blocks:moba",
        "nsa": "hpnlp.nn.mixers.selected_blocks:nsa",
        # Low-rank attention, Fourier mixing and learned scores.
        "linformer": "hpnlp.nn.mixers.low_rank:linformer",
        "nystrom": "hpnlp.nn.mixers.low_rank:nystrom",
        "fnet": "hpnlp.nn.mixers.fourier:fnet",
        "synthesizer_dense": "hpnlp.nn.mixers.synthesizer:synthesizer_dense",
        "synthesizer_random": "hpnlp.nn.mixers.synthesizer:synthesizer_random",
        "synthesizer_factorized_dense": "hpnlp.nn.mixers.synthesizer:synthesizer_factorized_dense",
        "synthesizer_factorized_random": "hpnlp.nn.mixers.synthesizer:synthesizer_factorized_random",
        "mixture": "hpnlp.nn.mixers.synthesizer:mixture",
        # Linear attention, with a state of constant size.
        "linear": "hpnlp.nn.mixers.linear:linear",
        "performer": "hpnlp.nn.mixers.performer:performer",
        "rfa": "hpnlp.nn.mixers.rfa:rfa",
        "retention": "hpnlp.nn.mixers.gated:retention",
        "gla": "hpnlp.nn.mixers.gated:gla",
        "gated_delta": "hpnlp.nn.mixers.gated:gated_delta",
        # State from batch to batch.
        "segment_memory": "hpnlp.nn.mixers.segment_memory:segment_memory",
        "transformer_xl": "hpnlp.nn.mixers.transformer_xl:transformer_xl",
        "compressive": "hpnlp.nn.mixers.compressive:compressive",
        # Convolutions.
        "conv": "hpnlp.nn.mixers.convolution:conv",
        "lightconv": "hpnlp.nn.mixers.light_convolution:lightconv",
        "dynamicconv": "hpnlp.nn.mixers.light_convolution:dynamicconv",
        "convolution": "hpnlp.nn.mixers.dilated_convolution:convolution",
        # The difference of two attentions.
        "differential": "hpnlp.nn.mixers.differential:differential",
    },
    checked_dropout,
    completed,
)
