"""Mixers: modules that mix information along the sequence. `model.mixer` names entries of MIXERS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpnlp.nn.mixers import patterns
from hpnlp.nn.mixers.bucketed import reformer, routing
from hpnlp.nn.mixers.checks import checked_dropout
from hpnlp.nn.mixers.clustered import clustered, clustered_improved
from hpnlp.nn.mixers.compressive import compressive
from hpnlp.nn.mixers.convolution import conv
from hpnlp.nn.mixers.differential import differential
from hpnlp.nn.mixers.dilated_convolution import convolution
from hpnlp.nn.mixers.exact import exact_mixer
from hpnlp.nn.mixers.fourier import fnet
from hpnlp.nn.mixers.gated import gated_delta, gla, retention
from hpnlp.nn.mixers.light_convolution import dynamicconv, lightconv
from hpnlp.nn.mixers.linear import linear
from hpnlp.nn.mixers.low_rank import linformer, nystrom
from hpnlp.nn.mixers.performer import performer
from hpnlp.nn.mixers.rfa import rfa
from hpnlp.nn.mixers.segment_memory import segment_memory
from hpnlp.nn.mixers.selected_blocks import moba, nsa
from hpnlp.nn.mixers.sinkhorn import sinkhorn
from hpnlp.nn.mixers.synthesizer import (
    mixture,
    synthesizer_dense,
    synthesizer_factorized_dense,
    synthesizer_factorized_random,
    synthesizer_random,
)
from hpnlp.nn.mixers.transformer_xl import transformer_xl
from hpnlp.ops.attention import Full

MIXERS: dict[str, Callable[..., Any]] = {
    # Exact attention over a pattern.
    "full": exact_mixer(Full),
    "blockwise": exact_mixer(patterns.blockwise),
    "window": exact_mixer(patterns.window),
    "dilated": exact_mixer(patterns.dilated),
    "strided": exact_mixer(patterns.strided),
    "fixed": exact_mixer(patterns.fixed),
    "random": exact_mixer(patterns.random),
    "global": exact_mixer(patterns.global_),
    "longformer": exact_mixer(patterns.longformer),
    "bigbird": exact_mixer(patterns.bigbird),
    # Attention to tokens that are chosen by content.
    "reformer": reformer,
    "routing": routing,
    "sinkhorn": sinkhorn,
    "clustered": clustered,
    "clustered_improved": clustered_improved,
    "moba": moba,
    "nsa": nsa,
    # Low-rank attention, Fourier mixing and learned scores.
    "linformer": linformer,
    "nystrom": nystrom,
    "fnet": fnet,
    "synthesizer_dense": synthesizer_dense,
    "synthesizer_random": synthesizer_random,
    "synthesizer_factorized_dense": synthesizer_factorized_dense,
    "synthesizer_factorized_random": synthesizer_factorized_random,
    "mixture": mixture,
    # Linear attention, with a state of constant size.
    "linear": linear,
    "performer": performer,
    "rfa": rfa,
    "retention": retention,
    "gla": gla,
    "gated_delta": gated_delta,
    # State from batch to batch.
    "segment_memory": segment_memory,
    "transformer_xl": transformer_xl,
    "compressive": compressive,
    # Convolutions.
    "conv": conv,
    "lightconv": lightconv,
    "dynamicconv": dynamicconv,
    "convolution": convolution,
    # The difference of two attentions.
    "differential": differential,
}
MIXERS |= {name: checked_dropout(name, entry) for name, entry in MIXERS.items()}
