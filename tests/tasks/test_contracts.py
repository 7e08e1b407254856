"""Contracts of every entry of TASKS: it trains under several plans, resumes exactly, plans, reports and compares.

A new task needs an entry in EXAMPLES.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import random
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest

from hpnlp import planner, report, tasks
from hpnlp.data.examples.kinds.unlabelled import converted
from hpnlp.data.tokenizers.pixels import to_text
from hpnlp.jobs.predictor import Predictor
from hpnlp.models import variables
from hpnlp.parallel.plan import Plan
from hpnlp.planner import render
from hpnlp.tasks import TASKS
from hpnlp.tasks.predictions import TrainedModel
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training import config as configs
from hpnlp.training import loop
from hpnlp.training.evaluation import on_devices
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.run_directory import check_task, load, make_model
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests import tiny
from tests.messages import raises

PLANS = {"tensor": Plan(tensor=2)}
SLOW_PLANS = {"zero3_sequence": Plan("zero3", sequence=2), "3d": Plan("3d")}


TRANSFORMER = {"layers": 2, "dim": 16, "heads": 2, "mlp_dim": 32, "unroll": 1}
COLORS = ("red", "green", "blue")


def tiny_config(task, path, **data):
    """The default config of a task for four steps at a high rate."""
    values = configs.default(task)
    values.data.update(path=str(path), batch_size=8, **data)
    values.optimizer.update(warmup=0, learning_rate=1e-2)
    values.train.steps = 4
    return values


def written(directory, records, name="examples"):
    path = directory / f"{name}.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def texts_of_three_vocabularies(least, most):
    """Texts of one of three vocabularies, which overlap; the label is the vocabulary."""
    draw = random.Random(0)
    for number in range(120):
        count = least if least == most else draw.randint(least, most)
        yield {"text": " ".join(draw.choices(tiny.WORDS[number % 3 * 4 :][:8], k=count)), "label": COLORS[number % 3]}


def language_model(directory):
    return tiny.make(train__steps=4, train__sample=8)


def recurrent_language_model(directory):
    """Two kinds of cells, all kinds of dropout, and states that are carried from batch to batch."""
    values = tiny_config("rnn_lm", os.environ["HPNLP_TEST_TEXT"], seq_len=16, order="stream")
    values.model.update(cells="lstm(12),gru(16)", initial="learned", activation_penalty=0.1)
    values.model.update(input_dropout=0.1, layer_dropout=0.1, output_dropout=0.1, embedding_dropout=0.1)
    values.model.update(hidden_dropout=0.1, candidate_dropout=0.1, zoneout=0.1, weight_drop=0.1, temporal_penalty=0.1)
    values.train.sample = 8
    return configs.resolve(values)


def classification(directory):
    records = list(texts_of_three_vocabularies(6, 6))
    data = {"challenge_path": str(written(directory, records[:9], "others")), "heldout": 0.2}
    values = tiny_config("classification", written(directory, records), tokenizer="words(30)", seq_len=16, **data)
    values.model.update(TRANSFORMER)
    return configs.resolve(values)


def recurrent_classification(directory):
    """Batches of two lengths; several kinds of dropout."""
    path = written(directory, texts_of_three_vocabularies(1, 30))
    values = tiny_config("rnn_classification", path, tokenizer="words(30)", seq_len=24, buckets=2, heldout=0.2)
    values.model.update(cells="lstm(12)", embed_dim=16, hidden_dropout=0.1, output_dropout=0.1, dropout=0.1)
    return configs.resolve(values)


def hashed_classification(directory):
    """Batches of two lengths."""
    path = written(directory, texts_of_three_vocabularies(1, 30))
    values = tiny_config("hashed_classification", path, seq_len=24, buckets=2, heldout=0.2)
    values.model.update(encoder="prado(bigram=8, skip1bigram=4)", projection=64, bottleneck=8, dropout=0.1)
    values.train.weights = "quantized(8)"
    return configs.resolve(values)


def tagging(directory):
    """Words of one vocabulary; the label is the length of the word before."""
    draw, records = random.Random(0), []
    for _ in range(120):
        words = draw.choices(tiny.WORDS[:8], k=6)
        labels = ["first", *("long" if len(word) > 4 else "short" for word in words[:-1])]
        records.append({"words": words, "labels": labels})
    values = tiny_config("tagging", written(directory, records), tokenizer="words(30)", seq_len=16)
    values.model.update(TRANSFORMER)
    return configs.resolve(values)


def masked_language_model(directory):
    values = configs.for_task(tiny.get_config(), "masked_lm")
    values.data.mask_span = 2.0
    values.train.steps = 4
    values.optimizer.learning_rate = 1e-2
    return configs.resolve(values)


def sequence_to_sequence(directory):
    """Words of one vocabulary; the target has them in reverse order."""
    draw = random.Random(0)

    def reversals(count, least, most):
        for _ in range(count):
            words = draw.choices(tiny.WORDS[:8], k=least if least == most else draw.randint(least, most))
            yield {"source": " ".join(words), "target": " ".join(reversed(words))}

    path = written(directory, reversals(120, 1, 4))
    data = {"challenge_path": str(written(directory, reversals(6, 5, 5), "longer")), "target_len": 8}
    values = tiny_config("seq2seq", path, tokenizer="words(30)", seq_len=16, **data)
    values.model.update(TRANSFORMER)
    return configs.resolve(values)


def dual_encoder(directory):
    """Texts of words of one vocabulary; the partner has a word of another one for each of them."""
    draw, records = random.Random(0), []
    for _ in range(120):
        numbers = draw.sample(range(6), k=3)
        texts = [" ".join(tiny.WORDS[offset + number] for number in numbers) for offset in (0, 6)]
        records.append({"text": texts[0], "pair": texts[1]})
    values = tiny_config("dual_encoder", written(directory, records), tokenizer="words(30)", seq_len=16)
    values.model.update(TRANSFORMER, learn_temperature=True)
    return configs.resolve(values)


def image_classification(directory):
    """Images of 8 x 8 pixels with a bright square in one of three corners, which is the label."""
    draw, records = random.Random(0), []
    for number in range(120):
        image = np.array([draw.randrange(100) for _ in range(64)]).reshape(8, 8)
        row, column = ((0, 0), (0, 5), (5, 0))[number % 3]
        image[row : row + 3, column : column + 3] += 150
        records.append({"text": to_text(image), "label": ("left", "right", "low")[number % 3]})
    values = tiny_config("image_classification", written(directory, records), seq_len=64, heldout=0.2)
    values.model.blocks = "conv(4),separable(6,stride=2),inverted(6,expand=2)"
    return configs.resolve(values)


def tree_classification(directory):
    """Random trees with a word at each node; the label is the word of the root, of three."""
    draw, records = random.Random(0), []
    for number in range(120):
        count = draw.randint(3, 12)
        parents = [-1, *(draw.randrange(max(0, node - 2), node) for node in range(1, count))]
        nodes = [COLORS[number % 3], *draw.choices(tiny.WORDS[:8], k=count - 1)]
        records.append({"nodes": nodes, "parents": parents, "label": nodes[0]})
    data = {"tokenizer": "words(40, by=whitespace)", "seq_len": 10, "heldout": 0.2, "max_children": 4}
    values = tiny_config("tree_classification", written(directory, records), **data)
    values.model.update(layers=1, dim=16, dropout=0.1)
    return configs.resolve(values)


def word_embeddings(directory):
    values = tiny_config("word_embeddings", os.environ["HPNLP_TEST_TEXT"], tokenizer="words(60)", seq_len=16)
    values.model.update(vocab=64, dim=16, window=2, subsample=0.05, output="negative_sampling(8, sampler=unigram)")
    values.optimizer.rows = True
    return configs.resolve(values)


def labelled_bags(directory):
    """Two or three texts of words of one of three vocabularies, which overlap; the label is the vocabulary."""
    draw, records = random.Random(0), []
    for number in range(120):
        texts = [" ".join(draw.choices(tiny.WORDS[number % 3 * 4 :][:8], k=3)) for _ in range(2 + number % 2)]
        records.append({"texts": texts, "label": COLORS[number % 3]})
    data = {"tokenizer": "words(30)", "seq_len": 16, "heldout": 0.2, "max_texts": 3}
    values = tiny_config("labelled_bags", written(directory, records), **data)
    values.model.update(dim=16, dropout=0.1, frequency_power=0.5, memory="bags(64,k=2)")
    values.optimizer.update(name="sgd", momentum=0.0, learning_rate=0.3)
    return configs.resolve(values)


def realm(directory):
    """Documents with a key of two words and a value, and texts with the key."""
    draw, records = random.Random(0), []
    for first, second in itertools.combinations(tiny.WORDS[:8], 2):
        value = draw.choice(tiny.WORDS[8:12])
        record = {"text": f"{first} {second} {value}", "answer": value, "document": f"{second} {first} {value}"}
        records += [record] * 3
    data = {"tokenizer": "words(30)", "seq_len": 8, "document_len": 8, "answer_len": 2, "heldout": 0.2}
    values = tiny_config("realm", written(directory, records), **data)
    values.model.update(TRANSFORMER, candidates=3, documents_per_step=16, learn_temperature=True)
    return configs.resolve(values)


# Name of a task -> its tiny config, made from a directory for its data.
EXAMPLES = {
    "lm": language_model,
    "classification": classification,
    "dual_encoder": dual_encoder,
    "hashed_classification": hashed_classification,
    "image_classification": image_classification,
    "labelled_bags": labelled_bags,
    "masked_lm": masked_language_model,
    "realm": realm,
    "rnn_classification": recurrent_classification,
    "rnn_lm": recurrent_language_model,
    "seq2seq": sequence_to_sequence,
    "tagging": tagging,
    "tree_classification": tree_classification,
    "word_embeddings": word_embeddings,
}
# Plans that a task's model does not fit -> the message.
REFUSED = {
    ("seq2seq", "zero3_sequence"): "the memory is not divided: set plan.sequence=1",
    ("realm", "zero3_sequence"): "are not divided: set plan.sequence=1",
    ("realm", "3d"): "are not divided: set plan.pipeline=1",
    ("image_classification", "zero3_sequence"): "images are not divided: set plan.sequence=1",
    ("tree_classification", "zero3_sequence"): "trees are not divided: set plan.sequence=1",
    ("rnn_lm", "zero3_sequence"): "reads tokens one after another: set plan.sequence=1",
    ("rnn_classification", "zero3_sequence"): "reads tokens one after another: set plan.sequence=1",
    ("hashed_classification", "zero3_sequence"): "texts are not divided: set plan.sequence=1",
    ("rnn_lm", "3d"): "layers are not stacked: set plan.pipeline=1",
    ("word_embeddings", "zero3_sequence"): "whose windows are not divided: set plan.sequence=1",
    ("labelled_bags", "zero3_sequence"): "texts are not divided: set plan.sequence=1",
    ("word_embeddings", "3d"): "which have no layers: set plan.pipeline=1",
}
REFUSED |= {
    (task, name): "the model has none of them: set plan.tensor=1"
    for task in (
        "hashed_classification",
        "image_classification",
        "labelled_bags",
        "rnn_classification",
        "tree_classification",
    )
    for name in ("tensor", "3d")
}


# The tasks whose contracts `make test` checks. The others differ from these by their data and models, which have tests of
# their own.
QUICK = ("lm", "classification")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in TASKS]
)
def config(request, tmp_path_factory):
    made = EXAMPLES[request.param](tmp_path_factory.mktemp("data"))
    train = dataclasses.replace(made.train, eval_every=2, checkpoint_every=2, log_every=1)
    return dataclasses.replace(made, train=train, plan=Plan("single"))


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """`(directory, result, report)` of a run that was not disturbed."""
    workdir = tmp_path_factory.mktemp("finished") / config.task
    result = loop.train(config, workdir)
    return workdir, result, report.write(workdir, config, result)


def test_run_reports_its_primary_metric(config, finished):
    workdir, result, written = finished
    task = tasks.find(config.task)
    assert np.isfinite(result.heldout[task.metric]) and np.isfinite(result.heldout["loss"])
    assert all(written[f"heldout_{name}"] == value for name, value in result.heldout.items())
    amounts = task.scored_amounts(config, result.dataset, None)
    assert amounts and all(
        written[f"heldout_{unit}"] == amounts[unit] for unit in amounts.keys() & {"bytes", "examples"}
    )
    assert all(f"{name}_{task.metric}" in result.heldout for name in task.further_heldout(config, result.dataset))
    assert written["config"]["task"] == config.task
    computed = 4 * config.data.batch_size * config.data.seq_len
    is_divided = getattr(config.data, "buckets", 1) > 1  # batches are shorter than seq_len
    assert 0 < result.tokens < computed if is_divided else result.tokens == computed
    assert written["tokens"] == round((1 - written["padding"]) * result.tokens)
    text = (workdir / "report.md").read_text()
    assert report.verdict(written) in text and text.count("\n| ") > 8
    assert (workdir / "loss.png").exists()
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    expected = [2, 4] if config.train.eval_every else []
    assert [line["step"] for line in lines if f"heldout_{task.metric}" in line] == expected


def losses_of(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_loss_falls(finished):
    workdir, *_ = finished
    losses = losses_of(workdir)
    assert losses[-1] < losses[0]


def test_run_stopped_by_a_signal_resumes_exactly(config, finished, tmp_path, monkeypatch):
    workdir, result, _ = finished

    tiny.interrupt(config, tmp_path / "run", 1)
    resumed = loop.train(config, tmp_path / "run")
    for name in ("metrics.jsonl", "config.json", "tokenizer.json"):
        assert (tmp_path / "run" / name).read_bytes() == (workdir / name).read_bytes()
    assert resumed.heldout == result.heldout
    assert (resumed.tokens, resumed.flops_per_step) == (result.tokens, result.flops_per_step)
    for actual, expected in zip(jax.tree.leaves(resumed.params), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_run_is_read_back(config, finished):
    workdir, result, _ = finished
    assert configs.from_json((workdir / "config.json").read_text()) == config
    run = load(workdir, step=4)
    assert run.model.config == result.model.config
    assert run.vocabulary.sizes == tasks.find(config.task).vocabulary(result.dataset).sizes


@pytest.mark.filterwarnings("ignore:.* texts were cut")  # as in training
def test_predictions_are_those_of_the_stored_examples(config, finished):
    """Records without labels, in batches of their own lengths, against the model's outputs for the batches of training."""
    workdir, result, _ = finished
    task, predictor = tasks.find(config.task), Predictor(workdir)
    if task.input_kind(config.data) is None or config.task == "masked_lm":
        with pytest.raises(
            InputError, match=f"a run of task='{config.task}' has no labels, targets or pairs to predict"
        ):
            predictor.predict(["a text"])
        return
    kind, dataset = result.dataset.kind, result.dataset
    labels = dataset.labels if kind.has_labels else ()
    trained = TrainedModel(config, predictor.run.model, predictor.run.params, dataset.tokenizer, labels)
    records = [json.loads(line) for line in Path(config.data.path).read_text().splitlines()]
    values = {
        tuple(kind.texts(converted(kind, record) | kind.placeholders(converted(kind, record)))): record
        for record in records
    }
    stored = dataset.stored["heldout"]
    texts = [tuple(text.decode() for text in parts)[: kind.parts] for parts in stored.texts()]
    if config.task == "seq2seq":
        texts = [(source, source) for source, _ in texts]
    chosen = [values[text] for text in texts]
    batch = kind.batch(stored, range(stored.count), stored.count, dataset.tokenizer, dataset.seq_len)
    expected = task.predict(trained, batch, [converted(kind, record) for record in chosen])
    unlabelled = [{column.name: record[column.name] for column in kind.inputs} for record in chosen]
    actual = predictor.predict(unlabelled, batch_size=4)
    assert {type(prediction) for prediction in actual} == {task.prediction}
    assert len(actual) == stored.count > 4
    for here, there in zip(actual, expected, strict=True):
        here, there = dataclasses.asdict(here), dataclasses.asdict(there)
        assert here.keys() == there.keys()
        for name, value in here.items():
            if isinstance(value, dict):
                assert value == pytest.approx(there[name], abs=1e-5)
            elif isinstance(value, list) and name != "probabilities" or isinstance(value, str):
                assert value == there[name]
            else:
                np.testing.assert_allclose(value, there[name], atol=1e-5)


def test_unknown_task_raises():
    raises("unknown task 'other': known: .*if it is an entry of your own, pass --register=", configs.default, "other")
    assert all(task.name == name for name, task in TASKS.items())


def test_models_that_lack_members_of_the_protocol_raise(monkeypatch):
    class Scored(nn.Module):
        config: object
        model_parallel: object = None
        remat: str = "none"

        @property
        def is_normalized(self):
            raise AssertionError("read outside of a method")

        def loss(self, batch, deterministic=True):
            return None

    class Own(type(TASKS["lm"])):
        def model(self, config, sizes):
            return Scored(config.model)

    monkeypatch.setitem(TASKS, "own", Own())
    missing = (
        "auxiliary_loss, rows, example_batch, batch_axes, advance.*: add the members, as hpnlp.types.Model describes"
    )
    with pytest.raises(InputError, match=f"task='own' has a model of the class Scored, which lacks .*{missing}"):
        tasks.make_model(configs.Config(task="own"), Sizes(8))


def last_steps(config, workdir, dataset, plan):
    """Losses of steps 3 and 4 under another plan, from the checkpoint of step 2, and the buffers after them."""
    vocabulary = tasks.find(config.task).vocabulary(dataset)
    size, steps = config.data.batch_size, config.train.steps
    trainer = make_trainer(
        make_model(config, vocabulary), config.optimizer.for_batch(size), plan, steps=steps, batch_size=size
    )
    with contextlib.closing(Checkpointer(workdir, read_only=True)) as checkpoints:
        state, data, _ = checkpoints.restore(trainer.state_shapes, 2)
    batches = dataset.train(seed=config.train.seed)
    batches.set_state(data)
    losses = []
    for _ in range(2):
        batch = on_devices(trainer, next(batches), config)
        state, metrics = trainer.step(state, batch, jax.random.key(config.train.seed))
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.buffers)


@pytest.mark.parametrize("plan", [*PLANS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PLANS)])
def test_plans_match_one_device(config, finished, plan):
    """Models whose sequences are not divided refuse a plan that divides them, and train under zero3 alone."""
    workdir, result, _ = finished
    actual = functools.partial(last_steps, config, workdir, result.dataset)
    chosen = (PLANS | SLOW_PLANS)[plan]
    if message := REFUSED.get((config.task, plan)):
        raises(message, actual, chosen)
        if plan != "zero3_sequence":
            return
        chosen = Plan("zero3")
    losses, buffers = actual(chosen)
    np.testing.assert_allclose(losses, losses_of(workdir)[2:], rtol=1e-5)
    _, expected = variables.split(load(workdir, step=4).params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), buffers, expected)


def test_step_is_planned(config):
    on_several = dataclasses.replace(config, plan=Plan("data"))
    costs, device = planner.costs(on_several, 8), planner.DEVICES["h100"]
    assert costs.parameters > 0 and costs.bytes > 0 and costs.total_seconds(device) > 0
    text = render.table(costs, device, "h100")
    assert ("the similarities of pairs" in text) == (config.task == "dual_encoder") and "MFU" in text


def weight_of(batch):
    return float(next(batch[name].sum() for name in ("weights", "target_weights") if name in batch))


def test_held_out_examples_are_read_once_whatever_the_batch(config, finished):
    task, dataset = tasks.find(config.task), finished[1].dataset

    def weight(limit):
        return sum(map(weight_of, task.heldout(config, dataset, limit=limit)))

    halves = [
        weight_of(batch)
        for index in range(2)
        for batch in task.heldout(config, dataset, limit=None, process_index=index, process_count=2)
    ]
    assert sum(halves) == weight(None) >= weight(1) > 0


def test_runs_compare(config, finished, tmp_path):
    workdir, *_ = finished
    other = tmp_path / "other"
    other.mkdir()
    task = tasks.find(config.task)
    written = json.loads((workdir / "report.json").read_text())
    metric = f"heldout_{task.metric}"
    ranked = [name for name in written if name.startswith("heldout_") and isinstance(written[name], float)]
    sign = 1 if task.higher_is_better else -1
    worse = {name: written[name] - sign * 0.25 * (abs(written[name]) or 1.0) for name in ranked}
    (other / "report.json").write_text(json.dumps(written | worse))
    rows = report.compare([other, workdir], tmp_path / "compare.png").splitlines()
    assert metric in written and [row.split("|")[1].strip() for row in rows[2:4]] == [str(workdir), str(other)]


def test_runs_of_other_tasks_are_refused(config, finished, tmp_path):
    workdir, *_ = finished
    other = next(name for name in TASKS if name != config.task)
    made = EXAMPLES[other](tmp_path)
    with pytest.raises(InputError, match=f"holds a run of task='{config.task}', and this config has task='{other}'"):
        loop.train(made, workdir, accept_changes=True)
    warm = dataclasses.replace(made, train=dataclasses.replace(made.train, init_from=str(workdir)))
    with pytest.raises(InputError, match=f"holds a model of task='{config.task}', and this config has task='{other}'"):
        loop.train(warm, tmp_path / "run")
    with pytest.raises(InputError, match=f"generate works on runs of task='{other}': name one of these"):
        check_task(workdir, config, (other,), "generate")
