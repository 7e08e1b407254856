"""Sequence to sequence against T5 of transformers without its relative positions: hidden states, loss, logits and gradients.

T5 scales its initial values in place of attention scores, and its hidden states in place of those of a separate table: both are
factors of parameters here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.seq2seq import Seq2SeqModel, Seq2SeqModelConfig
from tests.contracts import ONCE
from tests.models.test_encoder_oracle import randomize, torch  # noqa: F401  (fixture)
from tests.models.test_seq2seq import make_batch
from tests.models.test_seq2seq_oracle import inputs_of

pytestmark = pytest.mark.oracle

V, D, H, L = 40, 32, 12, 2  # the heads together are wider than the model
# The MLP of transformers -> whether T5 scales the decoder's hidden states, and the MLP here.
FORMS = {"relu": (True, "relu"), "gated-gelu": (False, "geglu")}


def params_of(values, scaled, gated):
    """Parameters of a Seq2SeqModel, as functions of those of T5 by name."""

    def kernel(name, factor=1.0):
        return {"kernel": values[f"{name}.weight"].T * factor}

    def scale(name, factor=1.0):
        return {"scale": values[f"{name}.weight"] * factor}

    def attention(name):
        return {n: kernel(f"{name}.{n}", H**0.5 if n == "q" else 1.0) for n in "qkv"} | {"out": kernel(f"{name}.o")}

    def layer(name, crosses):
        feed = f"{name}.layer.{1 + crosses}"
        up = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
        mlp = {ours: kernel(f"{feed}.DenseReluDense.{theirs}") for ours, theirs in (up | {"down": "wo"}).items()}
        params = {
            "attention": attention(f"{name}.layer.0.SelfAttention"),
            "mix_norm": scale(f"{name}.layer.0.layer_norm"),
            "feed_norm": scale(f"{feed}.layer_norm"),
            "mlp": mlp,
        }
        if crosses:
            params["read_norm"] = scale(f"{name}.layer.1.layer_norm")
            params["cross_attention"] = attention(f"{name}.layer.1.EncDecAttention")
        return params

    def stack(name, crosses, factor):
        layers = [layer(f"{name}.block.{i}", crosses) for i in range(L)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        return {"layers": stacked, "final_norm": scale(f"{name}.final_layer_norm", factor)}

    return {
        "embed": {"table": values["shared.weight"]},
        "encoder": stack("encoder", False, 1.0),
        "decoder": stack("decoder", True, D**-0.5 if scaled else 1.0),
    }


@pytest.mark.parametrize("form", FORMS)
def test_states_loss_logits_and_gradients_match_t5(form, torch):  # noqa: F811
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    scaled, mlp = FORMS[form]
    config = transformers.T5Config(
        vocab_size=V, d_model=D, d_kv=H, num_heads=4, num_layers=L, num_decoder_layers=L, d_ff=56, dropout_rate=0.0,
        feed_forward_proj=form, tie_word_embeddings=scaled, pad_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    module = randomize(torch, transformers.T5ForConditionalGeneration(config))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "relative_attention_bias" in name:
                parameter.zero_()
    model = Seq2SeqModel(
        Seq2SeqModelConfig(
            dim=D, heads=4, head_dim=H, layers=L, mlp_dim=56, vocab=V, norm="rms", position="none", mlp=mlp
        )
    )
    batch = make_batch(4, vocab=V, source=12, target=8)
    ids, mask = inputs_of(torch, batch)
    target_ids, target_mask = inputs_of(torch, batch, "target_")
    theirs = module(ids, mask, decoder_input_ids=target_ids, decoder_attention_mask=target_mask, use_cache=False)
    losses = torch.nn.functional.cross_entropy(
        theirs.logits.flatten(0, 1),
        torch.from_numpy(batch["target_labels"].astype(np.int64)).flatten(),
        reduction="none",
    )
    loss = (losses * torch.from_numpy(batch["target_weights"]).flatten()).sum()
    loss.backward()

    def run(values):
        params = {"params": params_of(values, scaled, form != "relu")}
        states = model.apply(params, batch, method="encode")[0].states
        return model.apply(params, batch, method="loss").sum, (states, model.apply(params, batch, method="logits"))

    parameters = dict(module.named_parameters())
    values = {name: jnp.asarray(p.detach().numpy()) for name, p in parameters.items() if "relative" not in name}
    (value, (states, logits)), grads = jax.jit(jax.value_and_grad(run, has_aux=True), compiler_options=ONCE)(values)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    for actual, expected, prefix in (
        (states, theirs.encoder_last_hidden_state, ""),
        (logits, theirs.logits, "target_"),
    ):
        real = batch[f"{prefix}segment_ids"] > 0
        np.testing.assert_allclose(np.asarray(actual)[real], expected.detach().numpy()[real], atol=2e-5, rtol=2e-5)
    scale = max(float(jnp.abs(gradient).max()) for gradient in grads.values())
    for name, gradient in grads.items():
        expected = parameters[name].grad.numpy()
        np.testing.assert_allclose(gradient / scale, expected / scale, atol=2e-5, rtol=2e-5, err_msg=name)
