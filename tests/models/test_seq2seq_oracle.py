"""Sequence to sequence against BART of transformers: loss, logits, gradients, and the outputs of its beam search."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.decode import GREEDY
from hpnlp.models.decoding.beam_search import BeamOptions
from hpnlp.models.seq2seq import Seq2SeqModel, Seq2SeqModelConfig
from hpnlp.models.seq2seq_decode import generate, search
from tests.contracts import ONCE
from tests.models.test_decoder_oracle import params_of as decoder_params_of
from tests.models.test_encoder_oracle import (
    BIASES,
    assert_trees_close,
    dense,
    gradients_of,
    norm,
    randomize,
    stacked,
    torch,  # noqa: F401  (fixture)
    values_of,
)
from tests.models.test_seq2seq import make_batch

pytestmark = pytest.mark.oracle

V, D, L, EOS, PAD, U = 40, 32, 2, 2, 1, 12


def params_of(get, get_of):
    """Parameters of a Seq2SeqModel from those of BART, or gradients from gradients. get_of: prefix -> (name -> array)."""
    decoder = decoder_params_of(get_of("model.decoder."))
    del decoder["embed"]
    encoder = get_of("model.encoder.")

    def layer(i):
        name = f"layers.{i}"
        projections = {n: dense(encoder, f"{name}.self_attn.{n}_proj") for n in "qkv"}
        return {
            "attention": projections | {"out": dense(encoder, f"{name}.self_attn.out_proj")},
            "mix_norm": norm(encoder, f"{name}.self_attn_layer_norm"),
            "mlp": {"up": dense(encoder, f"{name}.fc1"), "down": dense(encoder, f"{name}.fc2")},
            "feed_norm": norm(encoder, f"{name}.final_layer_norm"),
        }

    return {
        "embed": {"table": get("model.shared.weight")},
        "decoder": decoder,
        "encoder": {
            "positions": {"table": encoder("embed_positions.weight")[2:]},  # BART's positions begin at 2
            "embed_norm": norm(encoder, "layernorm_embedding"),
            "layers": stacked([layer(i) for i in range(L)]),
        },
    }


@pytest.fixture(scope="module")
def bart(torch):  # noqa: F811
    """`(BART, the same model here, its parameters, a batch)`."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.BartConfig(
        vocab_size=V, d_model=D, encoder_layers=L, decoder_layers=L, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=56, decoder_ffn_dim=56, dropout=0.0, max_position_embeddings=16, activation_function="gelu",
        pad_token_id=PAD, eos_token_id=EOS, bos_token_id=0, decoder_start_token_id=EOS, forced_eos_token_id=None,
        attn_implementation="eager",
    )  # fmt: skip
    module = randomize(torch, transformers.BartForConditionalGeneration(config))
    model = Seq2SeqModel(
        Seq2SeqModelConfig(
            dim=D, heads=4, layers=L, mlp_dim=56, vocab=V, max_len=16, target_len=16, norm="layer", norm_eps=1e-5,
            norm_placement="post", embed_norm=True, position="learned", mlp="gelu_exact", **BIASES,
        )
    )  # fmt: skip
    batch = make_batch(4, vocab=V, source=12, target=8)
    batch["tokens"] = np.where(batch["segment_ids"], batch["tokens"], PAD)
    return module, model, as_params(module, values_of), batch


def as_params(module, reader):
    names = {name for name, _ in module.named_parameters()}

    def get_of(prefix):
        read = reader(module, prefix)
        shared = reader(module)
        return lambda name: read(name) if prefix + name in names else shared("model.shared.weight")

    return params_of(reader(module), get_of)


def inputs_of(torch, batch, prefix=""):  # noqa: F811
    return torch.from_numpy(batch[f"{prefix}tokens"].astype(np.int64)), torch.from_numpy(
        batch[f"{prefix}segment_ids"].astype(np.int64)
    )


def test_loss_logits_and_gradients_match_bart(torch, bart):  # noqa: F811
    module, model, params, batch = bart
    ids, mask = inputs_of(torch, batch)
    target_ids, target_mask = inputs_of(torch, batch, "target_")
    theirs = module(ids, mask, decoder_input_ids=target_ids, decoder_attention_mask=target_mask, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        theirs.flatten(0, 1), torch.from_numpy(batch["target_labels"].astype(np.int64)).flatten(), reduction="none"
    )
    loss = (losses * torch.from_numpy(batch["target_weights"]).flatten()).sum()
    module.zero_grad()
    loss.backward()

    def run(params):
        out = model.apply({"params": params}, batch, method="loss")
        return out.sum, model.apply({"params": params}, batch, method="logits")

    (value, logits), grads = jax.jit(jax.value_and_grad(run, has_aux=True), compiler_options=ONCE)(params)
    real = batch["target_segment_ids"] > 0
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(logits)[real], theirs.detach().numpy()[real], atol=2e-5, rtol=2e-5)
    expected = as_params(module, gradients_of)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    assert_trees_close(*(jax.tree.map(lambda x: x / scale, tree) for tree in (grads, expected)))


def generated(torch, module, batch, **options):  # noqa: F811
    """Ids of transformers without the start, padded to U, and scores."""
    ids, mask = inputs_of(torch, batch)
    with torch.no_grad():
        out = module.generate(
            ids, attention_mask=mask, max_new_tokens=U, do_sample=False, return_dict_in_generate=True, output_scores=True,
            **options,
        )  # fmt: skip
    sequences = out.sequences.numpy()[:, 1:]
    padded = np.full((len(sequences), U), PAD)
    padded[:, : sequences.shape[1]] = sequences
    return padded, getattr(out, "sequences_scores", None)


def test_greedy_outputs_match_transformers(torch, bart):  # noqa: F811
    module, model, params, batch = bart
    expected, _ = generated(torch, module, batch, num_beams=1)
    pieces = generate(model, params, batch, start_id=EOS, eos_id=EOS, pad_id=PAD, tokens=U, sampling=GREEDY)
    actual = np.concatenate([*pieces], axis=1)
    np.testing.assert_array_equal(actual, expected[:, : actual.shape[1]])
    assert np.all(expected[:, actual.shape[1] :] == PAD)


def test_beam_search_outputs_match_transformers(torch, bart):  # noqa: F811
    """All beams, in order, under several penalties and rules of the end; some sequences end early, and some do not."""
    module, model, params, batch = bart
    eos = [EOS, 5, 9, 11, 17, 23]  # so many that continuations of several lengths compete
    lengths = []
    for penalty, stopping in itertools.product((1.0, 0.0, 2.0, -0.5), (False, True, "never")):
        expected, scores = generated(
            torch, module, batch, num_beams=4, num_return_sequences=4, length_penalty=penalty, early_stopping=stopping,
            eos_token_id=eos,
        )  # fmt: skip
        options = BeamOptions(width=4, length_penalty=penalty, early_stopping=stopping)
        beams = search(model, params, batch, start_id=EOS, eos_id=eos, pad_id=PAD, tokens=U, beams=options)
        message = f"length_penalty={penalty}, early_stopping={stopping}"
        np.testing.assert_array_equal(np.asarray(beams.ids).reshape(-1, U), expected, err_msg=message)
        np.testing.assert_allclose(np.asarray(beams.scores).reshape(-1), scores, rtol=1e-4, err_msg=message)
        lengths += [*(expected != PAD).sum(axis=1)]
    assert len(set(lengths)) > 2


def test_samples_are_drawn_from_the_distribution_of_the_model(torch, bart):  # noqa: F811
    """Frequencies of the first id of 2000 samples of one source against BART's probabilities."""
    module, model, params, batch = bart
    count = 2000
    sources = {name: np.repeat(batch[name][:1], count, axis=0) for name in ("tokens", "segment_ids", "positions")}
    first = next(iter(generate(model, params, sources, start_id=EOS, eos_id=EOS, pad_id=PAD, tokens=1)))[:, 0]
    ids, mask = inputs_of(torch, batch)
    with torch.no_grad():
        logits = module(ids[:1], mask[:1], decoder_input_ids=torch.tensor([[EOS]])).logits[0, 0]
    expected = torch.softmax(logits, -1).numpy()
    error = np.abs(np.bincount(first, minlength=V) / count - expected)
    assert np.all(error < 5 * np.sqrt(expected * (1 - expected) / count) + 1e-3)
    assert jnp.asarray(first).max() < V
