"""Parameters and FLOPs of the three conventions match counts by hand and the products of the traced program."""

import flax.linen as nn
import jax
import pytest

from hpnlp import measure
from hpnlp.planner.estimate import planned_model
from hpnlp.scaling_laws.flops import CONVENTIONS, ModelSize, model_size
from hpnlp.training.config import default, resolve
from tests.messages import raises


def config(**fields):
    values = default()
    values.data.update(tokenizer="bytes", seq_len=64)
    values.model.update(dim=32, layers=2, heads=2, mlp_dim=64, position="learned", max_len=64, norm="rms", **fields)
    return resolve(values)


@pytest.mark.parametrize("tied", [True, False])
def test_conventions_count_the_head_once_and_tables_where_named(tied):
    size = model_size(config(tied=tied))
    vocab = size.head // 32
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 64)  # attention and a gated MLP
    assert size.layers == matrices + 2 * 2 * 32 + 32  # two norms in each layer, and the final one
    assert size.tables == (1 if tied else 2) * vocab * 32 + 64 * 32
    n = {name: convention.parameters(size) for name, convention in CONVENTIONS.items()}
    assert n == {"kaplan": size.layers, "porian": size.layers + size.head, "chinchilla": size.layers + size.tables}
    flops = {name: convention.flops_per_token(size) for name, convention in CONVENTIONS.items()}
    assert flops["kaplan"] == 6 * n["kaplan"]
    assert flops["porian"] == 6 * n["porian"] + 6 * 2 * 32 * 64
    assert flops["chinchilla"] == 6 * n["chinchilla"] + 12 * 2 * 32 * 64


def test_products_of_the_program_lie_between_causal_and_dense_attention():
    resolved = config(tied=True)
    model, size = planned_model(resolved), model_size(resolved)
    batch = model.example_batch(2, 64)
    params = nn.meta.unbox(jax.eval_shape(lambda: model.init(jax.random.key(0), batch))["params"])
    counted = measure.count_flops(
        jax.grad(lambda params, batch: model.apply({"params": params}, batch, True, method="loss").sum), params, batch
    )
    products = ModelSize(size.layers - 5 * 32, size.head, size.head, size.attention_width, 64)  # without the norms
    causal, dense = (CONVENTIONS[name].flops_per_token(products) for name in ("porian", "chinchilla"))
    assert 0.95 * causal < counted / 128 < 1.05 * dense  # the backward pass of attention computes the scores again


def test_experts_count_by_the_share_that_a_token_uses():
    used, total = (model_size(config(mlp=f"top_k({arguments})")) for arguments in ("experts=8,k=2", "experts=8,k=8"))
    assert used.idle == 2 * 6 * 3 * 32 * 64 and total.idle == 0
    assert used.layers + used.idle == total.layers
    flops = [CONVENTIONS["porian"].flops_per_token(size) for size in (used, total)]
    assert flops[1] - flops[0] == 6 * used.idle


def test_models_without_logits_of_all_words_raise():
    raises(r"model\.output='full'", lambda: model_size(config(output="sampled(64)", tied=False)))
