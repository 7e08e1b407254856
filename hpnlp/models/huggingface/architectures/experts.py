"""Mixtures of experts with the attention of Llama: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, and dots.llm1, as DeepSeek-V3.

transformers does not divide the balance loss by the experts per token: its coefficient is `balance / k`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hpnlp.models.huggingface.architectures.llama import LLAMA, like_llama
from hpnlp.models.huggingface.config_values import checked_value
from hpnlp.models.huggingface.family import Family, ModelConfig
from hpnlp.models.huggingface.networks import Network, model_networks, network_fields
from hpnlp.models.huggingface.sliding_windows import WindowLayers
from hpnlp.nn.feed_forward.canonical import experts_text
from hpnlp.nn.feed_forward.experts import ExpertLayer
from hpnlp.nn.feed_forward.routers import BiasBalanced, TopK
from hpnlp.types import InputError

Router = TypeVar("Router", bound=ExpertLayer)

_MATRICES = {name: f"{name}_proj" for name in ("gate", "up", "down")}


def _tensors(block: str = "mlp", matrices: Mapping[str, str] = _MATRICES) -> dict[str, str]:
    """Tensor -> path of the parameter, for the router and the experts of the module `block` of a layer."""
    prefix = f"model.layers.{{}}.{block}."
    experts = {f"{prefix}experts.{{}}.{stored}.weight": f"layers/mlp/{name}" for name, stored in matrices.items()}
    return {f"{prefix}gate.weight": "layers/mlp/router", **experts}


def _shared(block: str) -> dict[str, tuple[str, ...]]:
    """Module -> module of the model, for the shared experts."""
    return {
        f"model.layers.{{}}.mlp.{block}.{stored}": (f"layers/mlp/shared_experts/{name}",)
        for name, stored in _MATRICES.items()
    }


@dataclasses.dataclass(frozen=True)
class _TopK:
    """Reads and writes the keys of config.json for experts that are chosen by their logits.

    Attributes:
      experts: Key of the number of experts.
      columns: Key of the columns of an expert.
      shared: Key of the columns of the shared experts, which have a gate; "" for none.
      normalizes: Whether the gates of a token sum to 1; None for families whose config.json has norm_topk_prob.
      has_dense_layers: Whether mlp_only_layers and decoder_sparse_step name layers with an MLP.
    """

    experts: str
    columns: str
    shared: str = ""
    normalizes: bool | None = None
    has_dense_layers: bool = False

    def read(self, raw: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Reads the fields mlp, mlp_dim and form."""
        columns, k = (checked_value(raw, key, int, source) for key in (self.columns, "num_experts_per_tok"))
        # transformers has renamed the key in some families, and reads both.
        number = next((key for key in ("num_experts", "num_local_experts") if key in raw), self.experts)
        normalizes = self.normalizes
        if normalizes is None:
            normalizes = checked_value(raw, "norm_topk_prob", bool, source)
        values = {
            "experts": checked_value(raw, number, int, source),
            "k": k,
            "kind": LLAMA.activations[raw["hidden_act"]],
            "gates": "softmax_k" if normalizes else "softmax",
            "balance": float(f"{_not_negative(raw, 'router_aux_loss_coef', source) * k:.12g}"),
        }
        if self.shared:
            width = checked_value(raw, self.shared, int, source)
            if width % columns:
                raise InputError(
                    f"{source}: {self.shared} is {width}, no multiple of {self.columns}={columns}: choose a model whose shared "
                    "expert is as wide as several of its experts"
                )
            values |= {"shared": width // columns, "shared_gate": True}
        return _fields(raw, source, "top_k", values, columns, self._dense_layers(raw, source))

    def _dense_layers(self, raw: Mapping[str, Any], source: str) -> list[bool]:
        """Whether each layer has an MLP."""
        layers = checked_value(raw, "num_hidden_layers", int, source)
        if not self.has_dense_layers:
            return [False] * layers
        step, listed = checked_value(raw, "decoder_sparse_step", int, source), raw["mlp_only_layers"] or []
        if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
            raise InputError(f"{source}: mlp_only_layers is {listed!r:.80}: expected a list of indices of layers")
        return [layer in listed or (layer + 1) % step > 0 for layer in range(layers)]

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Writes what `read` reads; networks that the family lacks are changed."""
        networks = model_networks(config)
        experts, columns = _experts(networks, TopK)
        k = max(experts.k, 2) if self.normalizes else experts.k  # gates of one expert that sum to 1 are refused
        values = _common_json(networks, experts, columns) | {
            self.experts: max(experts.experts, k),
            self.columns: columns,
            "num_experts_per_tok": k,
        }
        values["router_aux_loss_coef"] = float(f"{experts.balance / experts.k:.12g}")
        if self.normalizes is None:
            values["norm_topk_prob"] = experts.gates == "softmax_k" or experts.normalize
        if self.shared:
            values[self.shared] = max(experts.shared, 1) * columns
        if self.has_dense_layers:
            dense = [layer for layer, network in enumerate(networks) if not network.has_experts]
            values |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
        return values


class _BiasBalanced:
    """Reads and writes the keys of config.json for experts that are chosen as in DeepSeek-V3."""

    def read(self, raw: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Reads the fields mlp, mlp_dim and form."""
        keys = {
            "experts": "n_routed_experts",
            "k": "num_experts_per_tok",
            "shared": "n_shared_experts",
            "groups": "n_group",
            "kept_groups": "topk_group",
        }
        values = {name: checked_value(raw, key, int, source) for name, key in keys.items()}
        values["scale"] = checked_value(raw, "routed_scaling_factor", float, source)
        values["kind"] = LLAMA.activations[raw["hidden_act"]]
        dense, layers = raw["first_k_dense_replace"], checked_value(raw, "num_hidden_layers", int, source)
        if type(dense) is not int or dense < 0:
            raise InputError(f"{source}: first_k_dense_replace is {dense!r}: expected a whole number of at least 0")
        columns = checked_value(raw, "moe_intermediate_size", int, source)
        return _fields(raw, source, "bias_balanced", values, columns, [layer < dense for layer in range(layers)])

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Writes what `read` reads; networks that the family lacks are changed."""
        networks = model_networks(config)
        experts, columns = _experts(networks, BiasBalanced)
        first = next((layer for layer, network in enumerate(networks) if network.has_experts), len(networks))
        return _common_json(networks, experts, columns) | {
            "moe_intermediate_size": columns,
            "n_routed_experts": experts.experts,
            "n_shared_experts": max(experts.shared, 1),
            "n_group": experts.groups,
            "topk_group": experts.kept_groups,
            "routed_scaling_factor": experts.scale,
            "first_k_dense_replace": first,
            "sliding_window": None,  # `windows_json` replaces it where layers have windows
        }


def _fields(
    raw: Mapping[str, Any], source: str, router: str, values: dict[str, Any], columns: int, dense: Sequence[bool]
) -> dict[str, Any]:
    """The fields mlp, mlp_dim and form of a model whose layers have experts or, where `dense` is True, an MLP."""
    experts = Network(experts_text(router, values), columns)
    mlp = experts
    if any(dense):
        mlp = Network(values["kind"], checked_value(raw, "intermediate_size", int, source))
    try:
        return network_fields([mlp if is_dense else experts for is_dense in dense])
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _experts(networks: Sequence[Network], router: type[Router]) -> tuple[Router, int]:
    """`(experts, columns)` of the first layer with this router; the defaults of the router for a model without."""
    for network in networks:
        if isinstance(module := network.module, router):
            return module, network.columns
    return router(hidden=1, parent=None), networks[0].columns


def _common_json(networks: Sequence[Network], experts: ExpertLayer, columns: int) -> dict[str, Any]:
    """The keys that all families have."""
    activations = {kind: name for name, kind in reversed(LLAMA.activations.items())}
    return {
        "hidden_act": activations.get(experts.kind, "silu"),
        "intermediate_size": next((network.columns for network in networks if not network.has_experts), columns),
        "num_experts_per_tok": experts.k,
    }


def _not_negative(raw: Mapping[str, Any], key: str, source: str) -> float:
    """A number of at least 0."""
    value = raw[key]
    if type(value) not in (int, float) or not 0.0 <= value < math.inf:
        raise InputError(f"{source}: {key} is {value!r}: expected a number of at least 0")
    return float(value)


def _family(
    model_type: str,
    architecture: str,
    *absent: str,
    keys: _TopK | _BiasBalanced,
    tensors: dict[str, str] | None = None,
    **additions: Any,
) -> Family:
    """A family with experts. tensors: those of router and experts, and others; None for the names of most families."""
    additions["defaults"] = {"router_aux_loss_coef": 0.001} | additions["defaults"]
    tensors = _tensors() if tensors is None else tensors
    family = like_llama(
        model_type, architecture, "mlp_bias", "intermediate_size", *absent, tensors=tensors, **additions
    )
    flipped = tuple(name for name, path in tensors.items() if path.startswith("layers/"))
    return dataclasses.replace(family, flipped=flipped, read=keys.read, write=keys.write)


# Settings under which no layer of Qwen's families has a window.
_NO_WINDOWS = {"use_sliding_window": (False,), "layer_types": (None, "full_attention")}
_QWEN_DEFAULTS = {"use_sliding_window": False, "layer_types": None, "decoder_sparse_step": 1, "mlp_only_layers": None}
_QWEN_DEFAULTS |= {"norm_topk_prob": False}

# Name -> family.
EXPERT_FAMILIES = {
    "mixtral": _family(
        "mixtral",
        "MixtralForCausalLM",
        "attention_bias",
        keys=_TopK("num_local_experts", "intermediate_size", normalizes=True),
        windows=WindowLayers.ALL,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "layer_types": None,
        },
        tensors=_tensors("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
    ),
    "qwen2_moe": _family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "attention_bias",
        keys=_TopK("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size", has_dense_layers=True),
        windows=WindowLayers.NONE,
        fields={"qkv_bias": ("qkv_bias",)},
        defaults=_QWEN_DEFAULTS | {"num_key_value_heads": 16, "qkv_bias": True},
        accepted=_NO_WINDOWS,
        modules=_shared("shared_expert"),
        tensors=_tensors() | {"model.layers.{}.mlp.shared_expert_gate.weight": "layers/mlp/shared_gate_kernel"},
    ),
    "qwen3_moe": _family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        keys=_TopK("num_experts", "moe_intermediate_size", has_dense_layers=True),
        windows=WindowLayers.NONE,
        fixed={"qk_norm": True},
        defaults=_QWEN_DEFAULTS | {"num_key_value_heads": 4},
        accepted=_NO_WINDOWS,
    ),
    "olmoe": _family(
        "olmoe",
        "OlmoeForCausalLM",
        keys=_TopK("num_experts", "intermediate_size"),
        windows=WindowLayers.NONE,
        fixed={"joint_qk_norm": True},
        defaults={"norm_topk_prob": False, "clip_qkv": None, "router_aux_loss_coef": 0.01, "rms_norm_eps": 1e-5},
        accepted={"clip_qkv": (None,)},
    ),
    "dots1": _family(
        "dots1",
        "Dots1ForCausalLM",
        keys=_BiasBalanced(),
        windows=WindowLayers.SOME,
        fixed={"qk_norm": True},
        defaults={
            "num_key_value_heads": 32,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "use_sliding_window": True,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "layer_types": None,
        },
        accepted={"norm_topk_prob": (True,)},
        modules=_shared("shared_experts"),
        tensors=_tensors() | {"model.layers.{}.mlp.gate.e_score_correction_bias": "buffers/layers/mlp/bias"},
    ),
}
