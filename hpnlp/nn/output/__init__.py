"""Output layers: hidden states to a loss over a vocabulary, and to predictions. `model.output` names an entry of OUTPUTS."""

from __future__ import annotations

from hpnlp.nn.output.base import OutputLayer
from hpnlp.spec import lookup, parse_one
from hpnlp.table import Table

OUTPUTS: Table[type[OutputLayer]] = Table(
    {
        "full": "hpnlp.nn.output.full:FullOutput",
        "sampled": "hpnlp.nn.output.sampled:SampledOutput",
        "importance": "hpnlp.nn.output.sampled:ImportanceOutput",
        "nce": "hpnlp.nn.output.sampled:NCEOutput",
        "negative_sampling": "hpnlp.nn.output.sampled:NegativeSamplingOutput",
        "margin": "hpnlp.nn.output.ranking:MarginOutput",
        "vmf": "hpnlp.nn.output.ranking:VMFOutput",
        "adaptive": "hpnlp.nn.output.classes:AdaptiveOutput",
        "class": "hpnlp.nn.output.classes:ClassOutput",
        "hierarchical": "hpnlp.nn.output.tree:HierarchicalOutput",
        "binary": "hpnlp.nn.output.codes:BinaryOutput",
        "binary_hybrid": "hpnlp.nn.output.codes:BinaryHybridOutput",
        "binary_ecc": "hpnlp.nn.output.codes:BinaryECCOutput",
    }
)


def is_normalized(spec: str) -> bool:
    """Whether the reported loss of an output layer is -log p(label) of a distribution over the vocabulary.

    Args:
      spec: `model.output`.

    Returns:
      False for negative sampling and margin losses, which give no probabilities, and for vmf, whose density is over directions
      and not over tokens; otherwise True.
    """
    return lookup(OUTPUTS, parse_one(spec, "model.output").name, "output layer").is_normalized
