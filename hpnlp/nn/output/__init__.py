"""Output layers: hidden states to a loss over a vocabulary, and to predictions. `model.output` names an entry of OUTPUTS."""

from __future__ import annotations

from hpnlp.nn.output.base import OutputLayer
from hpnlp.nn.output.classes import AdaptiveOutput, ClassOutput
from hpnlp.nn.output.codes import BinaryECCOutput, BinaryHybridOutput, BinaryOutput
from hpnlp.nn.output.full import FullOutput
from hpnlp.nn.output.ranking import MarginOutput, VMFOutput
from hpnlp.nn.output.sampled import ImportanceOutput, NCEOutput, NegativeSamplingOutput, SampledOutput
from hpnlp.nn.output.tree import HierarchicalOutput
from hpnlp.spec import lookup, parse_one

OUTPUTS: dict[str, type[OutputLayer]] = {
    "full": FullOutput,
    "sampled": SampledOutput,
    "importance": ImportanceOutput,
    "nce": NCEOutput,
    "negative_sampling": NegativeSamplingOutput,
    "margin": MarginOutput,
    "vmf": VMFOutput,
    "adaptive": AdaptiveOutput,
    "class": ClassOutput,
    "hierarchical": HierarchicalOutput,
    "binary": BinaryOutput,
    "binary_hybrid": BinaryHybridOutput,
    "binary_ecc": BinaryECCOutput,
}


def is_normalized(spec: str) -> bool:
    """Whether the reported loss of an output layer is -log p(label) of a distribution over the vocabulary.

    Args:
      spec: `model.output`.

    Returns:
      False for negative sampling and margin losses, which give no probabilities, and for vmf, whose density is over directions
      and not over tokens; otherwise True.
    """
    return lookup(OUTPUTS, parse_one(spec, "model.output").name, "output layer").is_normalized
