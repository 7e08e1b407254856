"""Distillation: specs of losses, what models report, the loss against its definition, schedules, layouts and other tasks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.compress.distilling.distill_config import DistillConfig
from hpnlp.compress.distilling.distillation import OWN, TEACHER, Distillation, Distilled, Extras, make_extras
from hpnlp.compress.distilling.distillation_losses import check_terms, chosen_layers, largest, term_names
from hpnlp.compress.distilling.distillation_terms import RECIPES, layer_pairs, parse_terms
from hpnlp.compress.weight_training import with_weight_training
from hpnlp.data.examples.kind import TEACHER_WEIGHTS
from hpnlp.models import variables
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.lm import LM, LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.classification import ClassifierConfig
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests.contracts import once
from tests.messages import raises
from tests.training.test_statistics import B, T, batch_of

STUDENT = LMConfig(layers=2, dim=16, heads=4, kv_heads=2, mlp_dim=32, vocab=24, max_len=T, unroll=1)
TEACHER_CONFIG = dataclasses.replace(STUDENT, layers=4, dim=24, head_dim=8, norm="layer", mixer="window(4,0),full")
ALL = "labels(0.5),logits(temperature=2, weight=0.25),regression(0.1),cosine(2),hidden(((0, 0), (2, 1), (4, 2))),"
ALL += "hidden(last, loss=feature_map, projection=linear),embedding(),attention(),attention(((3, 2),), loss=kl)"


def distilled(text, student=STUDENT, teacher=TEACHER_CONFIG, steps=10, stored=0, inner=None):
    terms = parse_terms(text)
    check_terms(terms, student, teacher)
    return Distillation(inner or LM(student), make_extras(terms, student, teacher), LM(teacher), terms, steps, stored)


def values_of(model, seed=0):
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda x: draw.normal(0, 0.3, x.shape).astype(np.float32), variables.axes_and_shapes(model)[1])


def loss_of(model, weights, batch, deterministic=False):
    rngs = {"output": jax.random.key(0)}
    return model.apply(variables.collections(weights), batch, deterministic, rngs=rngs, method="loss")


def hidden_states(model, weights, batch):
    """States before the first layer and after each layer, by models with fewer layers and without the final norm."""
    result = []
    for count in range(model.config.layers + 1):
        config = dataclasses.replace(model.config, layers=max(count, 1))
        layers = jax.tree.map(lambda x, n=config.layers: x[:n], weights["layers"])
        if count == 0:
            layers = jax.tree.map(jnp.zeros_like, layers)  # a layer that adds nothing
        params = {**weights, "layers": layers}
        captured = {}

        def keep(x, captured=captured):
            captured["x"] = x
            return x

        class Shorter(LM):
            def setup(self):
                super().setup()
                self.final_norm = keep

        params = {name: tree for name, tree in params.items() if name != "final_norm"}
        Shorter(config).apply({"params": params}, batch, True, method="loss")
        result.append(captured["x"])
    return result


def test_models_report_states_of_every_layer():
    model, batch = LM(dataclasses.replace(STUDENT, layers=3)), batch_of(0)
    first = {name: x[:1, :4] for name, x in batch.items()}

    def results(weights):
        def taps(batch, *names):
            return model.apply({"params": weights}, batch, True, *names, method="loss").taps

        assert not taps(batch)
        logits = model.apply({"params": weights}, batch["tokens"][:1, :4], method="logits")
        some = taps(batch, ("embedding", "hidden", "last", "logits"))
        return some, hidden_states(model, weights, batch), taps(first, ("logits",))["logits"], logits

    taps, expected, shorter, logits = once(results, values_of(model))
    np.testing.assert_allclose(taps["embedding"], expected[0], atol=1e-5)
    np.testing.assert_allclose(taps["layers"]["all"]["hidden"], np.stack(expected[1:]), atol=1e-4)
    np.testing.assert_allclose(shorter, logits, atol=1e-4)


def expected_loss(model, weights, batch):
    """The loss by the definitions, from what the models report."""
    own = {name: tree for name, tree in weights.items() if name not in (OWN, "frozen", "buffers")}
    names = ("attention", "embedding", "hidden", "last", "logits")
    student = once(lambda w: model.inner.apply({"params": w}, batch, True, names, method="loss"), own)
    teacher = once(lambda w: model.teacher.apply(w, batch, True, names, method="loss").taps, weights["frozen"][TEACHER])
    student_taps = jax.tree.map(np.asarray, student.taps)
    order = [m.config.stack_order() for m in (model.inner, model.teacher)]
    w, real = np.asarray(batch["weights"]), np.asarray(batch["segment_ids"]) > 0
    s, t = student_taps["logits"], np.asarray(teacher["logits"])

    def log_softmax(x):
        return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))

    def state(which, layer):
        taps = (student_taps, teacher)[which]
        return np.asarray(taps["embedding"] if layer == 0 else order[which].layer(taps["layers"], layer - 1)["hidden"])

    def projected(name, x):
        return x @ weights[OWN][name]

    def normed(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)

    def scores(which, layer):
        taps, config = (student_taps, teacher)[which], (model.inner, model.teacher)[which].config
        arrays = order[which].layer(taps["layers"], layer - 1)
        q, k = np.asarray(arrays["queries"]), np.repeat(np.asarray(arrays["keys"]), 2, axis=2)
        return np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(config.head_size)

    p, q = log_softmax(t / 2), log_softmax(s / 2)
    h, g = projected("cosine", student_taps["last"]), np.asarray(teacher["last"])
    cosine = (h * g).sum(-1) / np.linalg.norm(h, axis=-1) / np.linalg.norm(g, axis=-1)
    error = lambda name, a, b: np.square(projected(name, state(0, b)) - state(1, a)).mean(-1)[real].mean()  # noqa: E731
    features = [
        np.square(normed(projected("hidden_2", state(0, b))) - normed(state(1, a))).mean(-1)[real].mean()
        for a, b in ((3, 1), (4, 2))
    ]
    visible = np.tri(T, dtype=bool)[None] & real[:, :, None] & real[:, None, :]
    visible = np.broadcast_to(visible[:, None], (B, 4, T, T))
    attention = [np.square(scores(0, b) - scores(1, a))[visible].mean() for a, b in ((2, 1), (4, 2))]
    near = visible & (np.arange(T)[:, None] - np.arange(T)[None] <= 4)  # layer 3 of the teacher has a window
    logs = [log_softmax(np.where(near, x, -1e30)) for x in (scores(1, 3), scores(0, 2))]
    kl = np.where(near, np.exp(logs[0]) * (logs[0] - logs[1]), 0).sum(-1)[near.any(-1)].mean()
    terms = {
        "labels": float(student.sum / student.weight),
        "logits": (w * 4 * (np.exp(p) * (p - q)).sum(-1)).sum() / w.sum(),
        "regression": (w * 0.5 * np.square(s - t).sum(-1)).sum() / w.sum(),
        "cosine": (1 - cosine)[real].mean(),
        "hidden": sum(error("hidden", a, b) for a, b in ((0, 0), (2, 1), (4, 2))),
        "hidden_2": sum(features),
        "embedding": error("embedding", 0, 0),
        "attention": sum(attention),
        "attention_2": kl,
    }
    factors = dict(zip(terms, (0.5, 0.25, 0.1, 2, 1, 1, 1, 1, 1), strict=True))
    return terms, sum(factors[name] * value for name, value in terms.items()), w.sum()


def test_loss_is_the_weighted_sum_of_its_terms():
    model, batch = distilled(ALL), batch_of(0)
    weights = values_of(model)
    out = jax.jit(functools.partial(loss_of, model))(weights, batch)
    terms, total, weight = expected_loss(model, weights, batch)
    for name, value in terms.items():
        own_sum, count = out.aux[f"distill_{name}"]
        np.testing.assert_allclose(own_sum / count, value, rtol=2e-4, err_msg=name)
    np.testing.assert_allclose(out.sum / weight, total, rtol=2e-4)
    evaluated = once(lambda w: loss_of(model, w, batch, True), weights)
    student = once(
        lambda w: LM(STUDENT).apply({"params": w}, batch, True, method="loss"), model.student_weights(weights)
    )
    assert evaluated.sum == student.sum and not evaluated.aux


def test_a_student_like_its_teacher_has_no_loss():
    model = distilled("logits(),cosine(),hidden(),attention(),embedding()", teacher=STUDENT)
    weights = jax.tree.map(jnp.asarray, values_of(model))
    weights = {**model.student_weights(weights), "frozen": {TEACHER: {"params": model.student_weights(weights)}}}
    loss, gradient = once(
        jax.value_and_grad(lambda w: loss_of(model, {**weights, **w}, batch_of(0)).sum), model.student_weights(weights)
    )
    assert abs(float(loss)) < 1e-3
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(gradient)) < 1e-3


def test_padding_counts_in_no_term_of_all_tokens():
    model, batch = distilled("logits(tokens=all),regression(tokens=all)"), batch_of(0)
    out = once(lambda w: loss_of(model, w, batch), values_of(model))
    tokens = int((np.asarray(batch["segment_ids"]) > 0).sum())
    assert tokens < batch["tokens"].size
    assert [float(out.aux[f"distill_{name}"][1]) for name in ("logits", "regression")] == [tokens, tokens]


def test_schedules_choose_terms_and_layers():
    model = distilled("hidden(first, progressive=True, end=0.5),logits(weight=2, begin=0.5)", steps=8)
    weights, batch, sums = values_of(model), batch_of(0), []
    apply = jax.jit(functools.partial(loss_of, model))
    for done in (0.0, 0.25, 0.5, 0.99):
        weights["buffers"] = {OWN: {"done": np.float32(done)}}
        sums.append(apply(weights, batch))
    own = dict(sums[0].aux)
    means = {name: float(value / count) for name, (value, count) in own.items()}
    weight = float(sums[0].weight)
    first = [float(out.sum) / weight for out in sums]
    assert first[0] + first[1] == pytest.approx(means["distill_hidden"], rel=1e-4) and min(first[:2]) > 0
    assert first[2] == pytest.approx(2 * means["distill_logits"], rel=1e-5) == pytest.approx(first[3], rel=1e-5)
    buffers = model.advance(weights["buffers"], {}, jnp.int32(5), jax.random.key(0))
    assert float(buffers[OWN]["done"]) == 6 / 8


@functools.cache
def steps_of(plan=Plan("single"), devices=1, text=ALL, **changes):  # noqa: B008  (frozen)
    model = distilled(text)
    config = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup=0, **changes)
    trainer = make_trainer(model, config, plan, steps=3, devices=jax.devices()[:devices])
    weights = values_of(model)
    trainer, metrics = trainer.with_frozen(weights["frozen"]), []
    params, buffers = variables.split(weights)
    state = trainer.init(jax.random.key(0), jax.device_get(variables.join(params, buffers)))
    for seed in range(2):
        batch = jax.device_put(batch_of(seed), trainer.batch_sharding)
        state, values = trainer.step(state, batch, jax.random.key(1))
        metrics.append({name: float(value) for name, value in values.items()})
    return metrics


@pytest.mark.slow  # tests/training/test_frozen.py trains with a teacher under a plan
@pytest.mark.parametrize(
    ("plan", "devices", "text"),
    [(Plan("zero3"), 4, ALL), (Plan("tensor", tensor=2, data=1), 2, "labels(),logits(),hidden()")],
    ids=lambda value: getattr(value, "name", ""),
)
def test_training_does_not_depend_on_the_layout(plan, devices, text):
    for own, expected in zip(steps_of(plan, devices, text), steps_of(text=text), strict=True):
        assert own == pytest.approx(expected, rel=2e-5)


def test_weights_that_are_trained_otherwise_learn_from_a_teacher():
    inner = with_weight_training(LM(STUDENT), "ternary", 10)
    model, plain = distilled("logits(),hidden()", inner=inner), distilled("logits(),hidden()")
    weights, batch = values_of(plain), batch_of(0)
    ternary = {**weights, **jax.jit(inner.finished)(plain.student_weights(weights))}
    losses = [once(lambda w, m=m: loss_of(m, w, batch).sum, w) for m, w in ((model, weights), (plain, ternary))]
    np.testing.assert_allclose(*losses, rtol=1e-5)


ENCODER = EncoderConfig(layers=2, dim=16, heads=2, mlp_dim=32, vocab=24, max_len=T)
ENCODERS = {
    "masked_lm": ENCODER,
    "tagging": dataclasses.replace(ENCODER, classes=3),
    "classification": ClassifierConfig(**dataclasses.asdict(ENCODER) | {"classes": 3, "pooling": "mean"}),
    "mobile": dataclasses.replace(ENCODER, block="bottleneck(8, 2)", norm_placement="post", norm="affine", mlp="relu"),
}


@pytest.mark.parametrize("name", ["classification", "mobile"])  # with a pooled state, and with bottlenecks
def test_encoders_report_what_recipes_compare(name):
    student, teacher = ENCODERS[name], dataclasses.replace(ENCODERS[name], layers=3, mlp_dim=48)
    terms = parse_terms("distilbert,tinybert_intermediate,logits(tokens=all)")
    check_terms(terms, student, teacher)
    model = Distillation(Encoder(student), make_extras(terms, student, teacher), Encoder(teacher), terms)
    weights = variables.axes_and_shapes(model)[1]
    out = jax.eval_shape(lambda w, b: loss_of(model, w, b), weights, model.example_batch(2, T))
    assert {f"distill_{name}" for name in term_names(terms)} <= out.aux.keys() and out.sum.shape == ()


def classifier(unlabelled, text="hinton"):
    config = ENCODERS["classification"]
    terms = parse_terms(text)
    return Distillation(Encoder(config), Extras(), Encoder(config), terms, unlabelled=unlabelled)


def labelled_batch(weights):
    batch = {name: batch_of(0)[name] for name in ("tokens", "segment_ids", "positions")}
    batch |= {"segment_ids": np.minimum(batch["segment_ids"], 1), "labels": np.arange(B, dtype=np.int32) % 3}
    return batch | {"weights": np.array(weights, np.float32), TEACHER_WEIGHTS: np.ones(B, np.float32)}


@pytest.mark.parametrize("known", [[1, 0, 1, 0], [0, 0, 0, 0]], ids=["mixed", "none"])
def test_examples_without_labels_count_for_all_terms_but_the_labels(known):
    """The gradient of a bias by hand: T (softmax(s / T) - softmax(t / T)) / 2 and (softmax(s) - label) / 2."""
    weights_of_labels = np.resize(known, B)
    model, batch = classifier(True), labelled_batch(weights_of_labels)
    weights = values_of(model)

    def results(weights):
        params = {name: tree for name, tree in weights.items() if name != "frozen"}

        def total(params):
            out = loss_of(model, {**weights, **params}, batch)
            return out.sum, out

        gradient, out = jax.grad(total, has_aux=True)(params)
        taps = [
            m.apply({"params": w}, {n: batch[n] for n in m.batch_axes()}, True, ("logits",), method="loss").taps[
                "logits"
            ]
            for m, w in ((model.inner, params), (model.teacher, weights["frozen"][TEACHER]["params"]))
        ]
        return gradient["output"], out, taps

    gradient, out, (s, t) = once(results, weights)
    softmax = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)  # noqa: E731
    soft = softmax(s / 2) - softmax(t / 2)  # T^2 weight / T, of T = 2 and a weight of 0.5
    hard = 0.5 * (softmax(s) - np.eye(3)[batch["labels"]]) * weights_of_labels[:, None]
    (bias,) = jax.tree.leaves(gradient)
    np.testing.assert_allclose(bias, (soft + hard).sum(0), rtol=1e-4, atol=1e-6)
    p, q = np.log(softmax(t / 2)), np.log(softmax(s / 2))
    losses = 2 * (np.exp(p) * (p - q)).sum(-1)
    losses -= 0.5 * weights_of_labels * np.log(softmax(s))[np.arange(B), batch["labels"]]
    np.testing.assert_allclose(out.sum, losses.sum(), rtol=1e-4)
    assert float(out.weight) == B and "accuracy" not in out.aux
    assert model.training_arrays == (TEACHER_WEIGHTS,) and model.example_batch(2, T)[TEACHER_WEIGHTS].shape == (2,)


def test_batches_with_all_labels_have_the_same_loss_bit_for_bit():
    batch, text = labelled_batch(np.ones(B)), "hinton,cosine()"
    models = classifier(False, text), classifier(True, text)
    weights = values_of(models[0])
    plain, other = once(lambda w: [loss_of(model, w, batch) for model in models], weights)
    assert plain.sum == other.sum and plain.weight == other.weight
    jax.tree.map(np.testing.assert_array_equal, {**other.aux, "accuracy": plain.aux["accuracy"]}, plain.aux)


def test_stored_logits_replace_the_teacher():
    batch, full = batch_of(0), distilled("hinton")
    weights = jax.tree.map(jnp.asarray, values_of(full))
    teach = lambda w: full.teacher.apply(w, batch, True, ("logits",), method="loss").taps["logits"]  # noqa: E731
    values = once(teach, weights["frozen"][TEACHER])
    student = {name: tree for name, tree in weights.items() if name != "frozen"}
    sum_of = lambda model, *arguments: once(functools.partial(loss_of, model), *arguments).sum  # noqa: E731
    expected = sum_of(full, weights, batch)
    stored, ids = largest(np.asarray(values), 24)
    assert ids is None
    model = distilled("hinton", stored=24)
    assert "frozen" not in variables.axes_and_shapes(model)[1] and model.training_arrays == ("teacher_logits",)
    np.testing.assert_allclose(sum_of(model, student, {**batch, "teacher_logits": stored}), expected, rtol=1e-3)
    some, ids = largest(np.asarray(values), 20)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(values), ids, -1).max(-1), values.max(-1))
    model = distilled("hinton", stored=20)
    actual = sum_of(model, student, {**batch, "teacher_logits": some, "teacher_ids": ids})
    others = np.full(values.shape, -6e4, np.float16)  # probabilities of 0
    np.put_along_axis(others, ids, some, -1)
    full = distilled("hinton", stored=24)
    np.testing.assert_allclose(actual, sum_of(full, student, {**batch, "teacher_logits": others}), rtol=1e-4)
    assert model.example_batch(2, T)["teacher_ids"].shape == (2, T, 20)


def test_layers_are_paired_and_chosen():
    assert layer_pairs("uniform", 12, 4) == ((3, 1), (6, 2), (9, 3), (12, 4))
    assert layer_pairs("uniform", 6, 4) == ((2, 1), (3, 2), (5, 3), (6, 4))
    assert layer_pairs("last", 5, 2) == ((4, 1), (5, 2)) and layer_pairs("first", 5, 2) == ((1, 1), (2, 2))
    assert chosen_layers("alternate", 12, 6) == [0, 2, 4, 6, 8, 10] and chosen_layers("bottom", 5, 2) == [0, 1]


def test_extras_are_written_and_found_again():
    extras = Extras((("embedding", (4, 8)), ("hidden", (4, 8))), True)
    assert Extras.from_json(extras.to_json()) == extras
    model = Distilled(LM(STUDENT), extras)
    shapes = variables.axes_and_shapes(model)[1]
    assert Extras.from_weights(shapes) == extras
    student = values_of(LM(STUDENT))
    added = extras.added(student)
    assert jax.tree.structure(added) == jax.tree.structure(shapes)
    assert jax.tree.structure(model.student_weights(added)) == jax.tree.structure(student)


def test_every_recipe_parses():
    for name, text in RECIPES.items():
        assert parse_terms(name) == parse_terms(text)
    assert [term.kind for term in parse_terms("tinybert_prediction,labels(0.1)")] == ["logits", "labels"]


def test_invalid_losses_raise():
    for text, message in (
        ("logit()", "unknown loss 'logit': did you mean 'logits'"),
        ("labels()", "no loss by a teacher: add one"),
        ("logits()*2", "set weight=2"),
        ("tinybert(2)", "takes no arguments"),
        ("logits(temperature=0)", "temperature=0: expected a finite number over 0"),
        ("logits(tokens=labeled)", "did you mean 'labelled'"),
        ("logits(begin=0.5, end=0.5)", "0 <= begin < end <= 1"),
        ("hidden(middle)", "known: first, last, uniform"),
        ("hidden((1, 2))", "expected pairs"),
        ("hidden(projection=deep)", "known: auto"),
        ("logits(),labels(),labels()", "labels more than once"),
    ):
        raises(message, parse_terms, text)


def test_models_that_do_not_fit_raise():
    for text, student, teacher, message in (
        ("hidden(((5, 1),))", {}, {}, "layer 5 of the teacher with layer 1 .* layers 0 to 4"),
        ("attention(((0, 1),))", {}, {}, "layers 1 to 4 of the teacher"),
        ("hidden()", {"layers": 6}, {}, "has 4: name the pairs"),
        ("hidden(projection=none)", {}, {}, "model.dim=16 with the teacher's of 24: set projection=linear"),
        ("attention()", {"heads": 2}, {}, "has 4 heads, layer 1 of the student 2: set model.heads=4"),
        ("attention()", {"mixer": "conv"}, {}, "layer 1 of the student: model.mixer='conv' .* no queries and keys"),
        ("hidden()", {"residual": "reversible"}, {}, "the student, whose model.residual='reversible'"),
    ):
        with pytest.raises(InputError, match=message):
            distilled(text, dataclasses.replace(STUDENT, **student), dataclasses.replace(TEACHER_CONFIG, **teacher))


def test_invalid_configs_raise():
    for fields, message in (
        ({"cache": "x"}, "without a teacher"),
        ({"init": "bottom"}, "without a teacher"),
        ({"teacher": "x", "cache_top_k": 3}, "set distill.cache, a directory"),
        ({"teacher": "x", "cache": "y", "losses": "hidden()"}, "has hidden, which needs states"),
        ({"teacher": "x", "cache": "y", "cache_top_k": 3, "losses": "regression()"}, "needs all logits"),
    ):
        raises(message, DistillConfig, **fields)


def test_plans_that_divide_what_is_compared_raise():
    for plan, devices, text, message in (
        (Plan(pipeline=2), 2, "logits()", "plan.pipeline=2: a teacher needs all layers"),
        (Plan(sequence=2), 2, "logits()", "plan.sequence=2"),
        (Plan(tensor=2), 2, "attention()", "plan.tensor=2 divides heads"),
    ):
        with pytest.raises(InputError, match=message):
            make_trainer(distilled(text), OptimizerConfig(), plan, steps=1, devices=jax.devices()[:devices])


def test_rows_raise():
    model = distilled("logits()", dataclasses.replace(STUDENT, tied=False))
    with pytest.raises(InputError, match="optimizer.rows=True"):
        make_trainer(model, OptimizerConfig(name="sgd", rows=True), Plan("single"), steps=1, devices=1)
