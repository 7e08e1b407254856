"""Mixtures of experts of transformers with copied weights, and the published formulas of other routers in float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops import moe
from tests.contracts import assert_close, once

pytestmark = pytest.mark.oracle

N, D, F, E = 40, 16, 24, 8


def expert_stacks(experts):
    gate_up, down = (np.asarray(x.detach()) for x in (experts.gate_up_proj, experts.down_proj))
    width = gate_up.shape[1] // 2
    return {
        "gate": gate_up[:, :width].swapaxes(1, 2),
        "up": gate_up[:, width:].swapaxes(1, 2),
        "down": down.swapaxes(1, 2),
    }


def outputs_and_gradients(torch, block, x):
    """Output of a torch block, and the gradients of a weighted sum by x and by the router's weights."""
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs = torch.tensor(x[None], requires_grad=True)
    y = block(inputs)
    y = y[0] if isinstance(y, tuple) else y
    torch.sum(y * torch.tensor(np.sin(np.arange(y.numel())).reshape(y.shape).astype(np.float32))).backward()
    return y.detach().numpy()[0], inputs.grad.numpy()[0], block.gate.weight.grad.numpy().T


@pytest.mark.parametrize(
    ("name", "fields", "gates", "k"),
    [
        ("mixtral", {"num_local_experts": E, "intermediate_size": F}, moe.Gates("softmax_k"), 2),
        (
            "qwen3_moe",
            {"num_experts": E, "moe_intermediate_size": F, "norm_topk_prob": True},
            moe.Gates("softmax", True),
            3,
        ),
        ("olmoe", {"num_experts": E, "intermediate_size": F, "norm_topk_prob": False}, moe.Gates("softmax"), 3),
    ],
)
def test_layers_with_weights_of_transformers_match(name, fields, gates, k):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name, hidden_size=D, num_experts_per_tok=k, **fields)
    block = {
        "mixtral": transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock,
        "qwen3_moe": transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock,
        "olmoe": transformers.models.olmoe.modeling_olmoe.OlmoeSparseMoeBlock,
    }[name](config)
    x = np.random.default_rng(1).normal(size=(N, D)).astype(np.float32)
    expected = outputs_and_gradients(torch, block, x)
    experts, router = expert_stacks(block.experts), block.gate.weight.detach().numpy().T
    weights = np.sin(np.arange(N * D)).reshape(N, D).astype(np.float32)

    def run(x, router):
        routing = moe.route(jnp.dot(x, router, precision="highest"), k, gates, jnp.ones(len(x), bool))
        y = moe.expert_mlp(x, routing, experts, jax.nn.silu)
        return jnp.sum(y * weights), y

    (_, y), gradients = once(lambda *a: jax.value_and_grad(run, (0, 1), has_aux=True)(*a), x, router)
    for actual, value in zip((y, *gradients), expected, strict=True):
        assert_close(actual, value)


def test_bias_balanced_groups_match_deepseek():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    module = transformers.models.deepseek_v3.modeling_deepseek_v3
    config = transformers.AutoConfig.for_model(
        "deepseek_v3", hidden_size=D, moe_intermediate_size=F, n_routed_experts=E, num_experts_per_tok=3, n_group=4,
        topk_group=2, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    block = module.DeepseekV3MoE(config)
    x = np.random.default_rng(2).normal(size=(N, D)).astype(np.float32)
    bias = np.random.default_rng(3).normal(size=E).astype(np.float32) - 2.0  # scores with biases below 0
    block.gate.e_score_correction_bias.copy_(torch.tensor(bias))
    expected, gradient, router_gradient = outputs_and_gradients(torch, block, x)
    shared = block.shared_experts(torch.tensor(x)).detach().numpy()
    experts, router = expert_stacks(block.experts), block.gate.weight.detach().numpy().T

    def run(x, router):
        logits = jnp.dot(x, router, precision="highest")
        gates = moe.Gates("sigmoid", normalize=True, scale=2.5)
        routing = moe.route(logits, 3, gates, jnp.ones(N, bool), bias=bias, groups=4, kept_groups=2)
        return moe.expert_mlp(x, routing, experts, jax.nn.silu)

    weights = np.sin(np.arange(N * D)).reshape(N, D).astype(np.float32)
    y, d_router = once(lambda x, r: (run(x, r), jax.grad(lambda r: jnp.sum(run(x, r) * weights))(r)), x, router)
    assert_close(y + shared, expected)
    assert_close(d_router, router_gradient)


def test_groups_by_their_best_expert_match_deepseek_v2():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    module = transformers.models.deepseek_v2.modeling_deepseek_v2
    config = transformers.AutoConfig.for_model(
        "deepseek_v2", hidden_size=D, n_routed_experts=E, num_experts_per_tok=3, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", routed_scaling_factor=16.0, num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    router = module.DeepseekV2TopkRouter(config)
    weight = np.random.default_rng(7).normal(size=(E, D)).astype(np.float32)
    x = np.random.default_rng(8).normal(size=(N, D)).astype(np.float32)
    router.weight.data.copy_(torch.tensor(weight))
    _, gates, chosen = (value.detach().numpy() for value in router(torch.tensor(x)))
    logits, rule = x @ weight.T, moe.Gates("softmax", scale=16.0)

    def by_expert(experts, gates):
        table = np.zeros((N, E))
        np.put_along_axis(table, experts, gates, axis=1)
        return table

    for score, matches in (("best", True), ("best_two", False)):
        routing = moe.route(logits, 3, rule, np.ones(N, bool), groups=4, kept_groups=2, group_score=score)
        actual = by_expert(*(np.asarray(value).reshape(N, 3) for value in (routing.experts, routing.gates)))
        assert np.allclose(actual, by_expert(chosen, gates), atol=1e-5) == matches


@pytest.mark.parametrize("capacity", [1, 2, 5, 64])
def test_switch_with_capacity_matches_transformers(capacity):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    module = transformers.models.switch_transformers.modeling_switch_transformers
    config = transformers.AutoConfig.for_model(
        "switch_transformers", d_model=D, d_ff=F, num_experts=E, expert_capacity=capacity, router_jitter_noise=0.0,
        dropout_rate=0.0,
    )  # fmt: skip
    block = module.SwitchTransformersSparseMLP(config).eval()
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = np.random.default_rng(4).normal(size=(N, D)).astype(np.float32)
    y = block(torch.tensor(x[None]))
    expected = (y[0] if isinstance(y, tuple) else y).detach().numpy().reshape(N, D)
    state = {name: value.detach().numpy() for name, value in block.named_parameters()}
    stack = {
        ours: np.stack([state[f"experts.expert_{e}.{theirs}.weight"].T for e in range(E)])
        for ours, theirs in (("up", "wi"), ("down", "wo"))
    }
    logits = x @ state["router.classifier.weight"].T
    routing = moe.route(logits, 1, moe.Gates("softmax"), np.ones(N, bool))
    groups, counts = np.zeros(N, np.int32), np.full(N, N, np.int32)
    routing = moe.within_capacity(routing, groups, counts, N, 1, capacity * E / N, E)
    assert_close(moe.expert_mlp(x, routing, stack, jax.nn.relu), expected)


def test_balance_loss_of_one_layer_matches_transformers():
    """transformers does not divide by k, so that its balanced loss is k; several layers are pooled there."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    loss = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    logits = np.random.default_rng(5).normal(size=(N, E)).astype(np.float32)
    real = np.random.default_rng(6).random(N) < 0.7
    mask = torch.tensor(real[None].astype(np.int64))
    expected = np.float32(loss((torch.tensor(logits),), E, 2, mask) / 2)
    gates = moe.Gates("softmax_k")
    routing = moe.route(logits, 2, gates, real)
    sums = moe.routing_sums(logits, moe.normalized_scores(logits, gates), real, routing, routing)
    assert_close(moe.balance_loss(sums), expected)
