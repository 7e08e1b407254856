"""Mixers: modules that mix information along the sequence. `model.mixer` names entries of MIXERS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpnlp.model_interfaces.branch import completed
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
        "reformer": "hpnlp.nn.mixers.bucketed:ReformerMixer",
        "routing": "hpnlp.nn.mixers.bucketed:RoutingMixer",
        "sinkhorn": "hpnlp.nn.mixers.sinkhorn:SinkhornMixer",
        "clustered": "hpnlp.nn.mixers.clustered:ClusteredMixer",
        "clustered_improved": "hpnlp.nn.mixers.clustered:ImprovedClusteredMixer",
        "moba": "hpnlp.nn.mixers.selected_blocks:MobaMixer",
        "nsa": "hpnlp.nn.mixers.selected_blocks:NsaMixer",
        # Low-rank attention, Fourier mixing and learned scores.
        "linformer": "hpnlp.nn.mixers.low_rank:linformer",
        "nystrom": "hpnlp.nn.mixers.low_rank:NystromMixer",
        "fnet": "hpnlp.nn.mixers.fourier:FourierMixer",
        "synthesizer_dense": "hpnlp.nn.mixers.synthesizer:synthesizer_dense",
        "synthesizer_random": "hpnlp.nn.mixers.synthesizer:synthesizer_random",
        "synthesizer_factorized_dense": "hpnlp.nn.mixers.synthesizer:synthesizer_factorized_dense",
        "synthesizer_factorized_random": "hpnlp.nn.mixers.synthesizer:synthesizer_factorized_random",
        "mixture": "hpnlp.nn.mixers.synthesizer:mixture",
        # Linear attention, with a state of constant size.
        "linear": "hpnlp.nn.mixers.linear:LinearMixer",
        "performer": "hpnlp.nn.mixers.performer:PerformerMixer",
        "rfa": "hpnlp.nn.mixers.rfa:RFAMixer",
        "retention": "hpnlp.nn.mixers.gated:RetentionMixer",
        "gla": "hpnlp.nn.mixers.gated:GLAMixer",
        "gated_delta": "hpnlp.nn.mixers.gated:GatedDeltaMixer",
        # State from batch to batch.
        "segment_memory": "hpnlp.nn.mixers.segment_memory:SegmentMemoryMixer",
        "transformer_xl": "hpnlp.nn.mixers.transformer_xl:TransformerXLMixer",
        "compressive": "hpnlp.nn.mixers.compressive:CompressiveMixer",
        # Convolutions.
        "conv": "hpnlp.nn.mixers.convolution:ConvMixer",
        "lightconv": "hpnlp.nn.mixers.light_convolution:LightConvMixer",
        "dynamicconv": "hpnlp.nn.mixers.light_convolution:DynamicConvMixer",
        "convolution": "hpnlp.nn.mixers.dilated_convolution:DilatedConvMixer",
        # The difference of two attentions.
        "differential": "hpnlp.nn.mixers.differential:DifferentialMixer",
    },
    adopt=completed,
)
