"""The encoder against BERT of transformers and torch.nn.TransformerEncoder: hidden states, losses and gradients."""

import jax
import numpy as np
import pytest

from hpnlp.models.encoder import Encoder, EncoderConfig
from tests.contracts import ONCE

pytestmark = pytest.mark.oracle

B, T, V, D, L = 3, 12, 40, 32, 2
SIZES = {"dim": D, "heads": 4, "layers": L, "mlp_dim": 56, "vocab": V, "norm": "layer", "mlp": "gelu_exact"}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
BERT = {"norm_placement": "post", "embed_norm": True, "norm_eps": 1e-12, "position": "learned", "max_len": 16}
BERT |= {"token_types": 2}
LENGTHS = np.array([12, 7, 2])


@pytest.fixture(scope="module")
def torch():
    library = pytest.importorskip("torch")
    library.set_num_threads(1)
    library.manual_seed(0)
    return library


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    real = np.arange(T)[None] < LENGTHS[:, None]
    return {
        "tokens": np.where(real, rng.integers(1, V, (B, T)), 0).astype(np.int32),
        "segment_ids": real.astype(np.int32),
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "token_types": (np.arange(T)[None] >= LENGTHS[:, None] // 2).astype(np.int32) * real,
    }


def randomize(torch, module):
    """Draws all parameters, norms and biases too, of order 0.2."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.normal_(1.0 if "orm" in name and name.endswith("weight") else 0.0, 0.2)
    return module.eval()


def dense(get, name):
    return {"kernel": get(f"{name}.weight").T, "bias": get(f"{name}.bias")}


def norm(get, name):
    return {"scale": get(f"{name}.weight"), "bias": get(f"{name}.bias")}


def stacked(layers):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


def bert_params(get):
    """Parameters of an Encoder from those of BertModel, or gradients from gradients. get: name -> array."""

    def layer(i):
        name = f"encoder.layer.{i}"
        attention = {
            n: dense(get, f"{name}.attention.self.{m}") for n, m in zip("qkv", ("query", "key", "value"), strict=True)
        }
        return {
            "attention": attention | {"out": dense(get, f"{name}.attention.output.dense")},
            "mix_norm": norm(get, f"{name}.attention.output.LayerNorm"),
            "mlp": {"up": dense(get, f"{name}.intermediate.dense"), "down": dense(get, f"{name}.output.dense")},
            "feed_norm": norm(get, f"{name}.output.LayerNorm"),
        }

    names = {"embed": "word", "positions": "position", "token_types": "token_type"}
    tables = {ours: {"table": get(f"embeddings.{name}_embeddings.weight")} for ours, name in names.items()}
    return tables | {"embed_norm": norm(get, "embeddings.LayerNorm"), "layers": stacked([layer(i) for i in range(L)])}


def values_of(module, prefix=""):
    parameters = dict(module.named_parameters())
    return lambda name: parameters[prefix + name].detach().numpy().copy()


def gradients_of(module, prefix=""):
    parameters = dict(module.named_parameters())
    return lambda name: parameters[prefix + name].grad.numpy().copy()


def assert_trees_close(actual, expected, tolerance=2e-5):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance, err_msg=jax.tree_util.keystr(path))


def ours(config, params, batch):
    """`(mean loss, accuracy, hidden states, logits, gradients)`."""
    model = Encoder(config)

    def loss(params):
        out = model.apply({"params": params}, batch, method="loss")
        h = model.apply({"params": params}, batch, True, method="states")[0]
        logits = model.apply({"params": params}, batch, method="logits")
        return out.sum / out.weight, (out.aux["accuracy"], h, logits)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=ONCE)
    (value, (accuracy, h, logits)), gradients = run(params)
    return value, accuracy[0] / accuracy[1], h, logits, gradients


@pytest.fixture(scope="module")
def bert_config(torch):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return transformers.BertConfig(
        vocab_size=V, hidden_size=D, num_hidden_layers=L, num_attention_heads=4, intermediate_size=56,
        max_position_embeddings=16, type_vocab_size=2, num_labels=5, attn_implementation="eager",
    )  # fmt: skip


def inputs_of(torch, batch):
    names = {"input_ids": "tokens", "attention_mask": "segment_ids", "token_type_ids": "token_types"}
    return {name: torch.from_numpy(batch[ours].astype(np.int64)) for name, ours in names.items()}


def test_sequences_match_bert(torch, bert_config, batch):
    from transformers import BertForSequenceClassification

    module = randomize(torch, BertForSequenceClassification(bert_config))
    labels = np.array([4, 0, 2])
    theirs = module(**inputs_of(torch, batch), labels=torch.from_numpy(labels), output_hidden_states=True)
    theirs.loss.backward()
    config = EncoderConfig(**SIZES | BIASES | BERT, pooling="first", transform="tanh", classes=5)

    def tree(access):
        head = {"head": access(module)("classifier.weight"), "output": {"bias": access(module)("classifier.bias")}}
        return (
            bert_params(access(module, "bert."))
            | head
            | {"transform": {"dense": dense(access(module, "bert."), "pooler.dense")}}
        )

    labelled = batch | {"labels": labels.astype(np.int32), "weights": np.ones(B, np.float32)}
    loss, accuracy, h, logits, gradients = ours(config, tree(values_of), labelled)
    np.testing.assert_allclose(loss, theirs.loss.detach(), rtol=2e-5)
    np.testing.assert_allclose(accuracy, (theirs.logits.argmax(dim=1).numpy() == labels).mean())
    real = batch["segment_ids"] > 0
    np.testing.assert_allclose(
        np.asarray(h)[real], theirs.hidden_states[-1].detach().numpy()[real], atol=2e-5, rtol=2e-5
    )
    np.testing.assert_allclose(logits, theirs.logits.detach(), atol=2e-5, rtol=2e-5)
    assert_trees_close(gradients, tree(gradients_of))


def test_masked_words_match_bert(torch, bert_config, batch):
    """With the tied table, the transform before it and the bias of words."""
    from transformers import BertForMaskedLM

    module = randomize(torch, BertForMaskedLM(bert_config))
    rng = np.random.default_rng(1)
    weights = (rng.random((B, T)) < 0.4) & (batch["segment_ids"] > 0)
    labels = rng.integers(0, V, (B, T))
    targets = torch.from_numpy(np.where(weights, labels, -100))
    theirs = module(**inputs_of(torch, batch), labels=targets)
    theirs.loss.backward()
    config = EncoderConfig(**SIZES | BIASES | BERT, transform="gelu_norm", tied=True)

    def tree(access):
        get = access(module, "cls.predictions.")
        transform = {"dense": dense(get, "transform.dense"), "norm": norm(get, "transform.LayerNorm")}
        return bert_params(access(module, "bert.")) | {"transform": transform, "output": {"bias": get("bias")}}

    labelled = batch | {"labels": labels.astype(np.int32), "weights": weights.astype(np.float32)}
    loss, accuracy, _, logits, gradients = ours(config, tree(values_of), labelled)
    np.testing.assert_allclose(loss, theirs.loss.detach(), rtol=2e-5)
    np.testing.assert_allclose(accuracy, (theirs.logits.argmax(dim=2).numpy() == labels)[weights].mean(), rtol=1e-6)
    real = batch["segment_ids"] > 0
    np.testing.assert_allclose(np.asarray(logits)[real], theirs.logits.detach().numpy()[real], atol=2e-5, rtol=2e-5)
    assert_trees_close(gradients, tree(gradients_of))
