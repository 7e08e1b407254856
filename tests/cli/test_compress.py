"""`hpnlp compress`: a smaller model that other commands read, its table, and errors."""

import dataclasses
import json
import logging
import math
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.cost import paired_times
from hpnlp.jobs.compression import compress_run
from hpnlp.jobs.compression.compress_run import CompressionSettings, Measurement
from hpnlp.models.huggingface import convert
from hpnlp.ops.weight import dense_tree
from hpnlp.parallel.plan import Plan
from hpnlp.report import comparison_plots, compression
from hpnlp.training import loop
from hpnlp.training.config import with_changes
from hpnlp.training.config_file import load_config, write_config
from hpnlp.training.files import contents
from hpnlp.training.processes import signals
from hpnlp.training.run_directory import load
from hpnlp.training.trainer import make_trainer
from tests import tiny
from tests.messages import raises
from tests.tasks.test_contracts import EXAMPLES


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tiny.copy_run(tmp_path_factory.mktemp("compressed") / "run")


def test_roles_of_special_tokens_stay_through_further_training(run, trained, tmp_path):
    """Those of a checkpoint of another library, which its tokenizer.json does not have."""
    source, target, vocabulary = tmp_path / "source", tmp_path / "small", {f"{i:03x}": i for i in range(263)}
    shutil.copytree(trained, source)
    model = {"type": "WordLevel", "vocab": {**vocabulary, "<end>": 263}, "unk_token": "<end>"}
    added = {"id": 263, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content = {"version": "1.0", "added_tokens": [{**added, "special": True}], "model": model}
    (source / "tokenizer.json").write_text(json.dumps(content))
    (source / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    tokenizer = {"data.tokenizer": str(source / "tokenizer.json")}
    write_config(source, with_changes(load_config(source), tokenizer))
    argv = [f"--from={source}", f"--to={target}", "--recipe=mlp(0.5)", "--finetune=1", "--batches=1", "--rounds=1"]
    outcome = run("compress", *argv)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert load(target).tokenizer.eos_id == load(source).tokenizer.eos_id == 263


def test_a_recipe_gives_a_smaller_model_that_is_evaluated_like_a_run(run, trained, tmp_path):
    target = tmp_path / "small"
    argv = [f"--from={trained}", f"--to={target}", "--recipe=mlp(0.5),int8", "--finetune=1"]
    outcome = run("compress", *argv, "--batches=1", "--batch_sizes=2", "--rounds=1")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert "scoring all held-out examples" not in outcome.out  # each version is scored once, and --batches holds
    assert "original: held-out loss" in outcome.out and "measuring times at 2 sequences" in outcome.out
    assert "`mlp(0.5)`" in outcome.out and "times smaller" in outcome.out
    rows = json.loads((target / "compress.json").read_text())["rows"]
    assert [row["stage"] for row in rows] == ["original", "mlp(0.5)", "finetune(1)", "int8"]
    assert rows[1]["parameters"] < rows[0]["parameters"]
    assert rows[3]["memory_bytes"] < rows[1]["memory_bytes"] / 2.5
    assert rows[3]["disk_bytes"] == (target / WEIGHTS_FILE).stat().st_size
    assert (
        set(rows[0]["seconds"]) == set(rows[1]["wall"]) == {"2"} and rows[1]["wall"]["2"]["verdict"] == "not resolved"
    )
    assert (target / "compress.md").exists() and (target / "compress.png").stat().st_size > 5000
    assert load(target).model.config.mlp_size * 2 == load(trained).model.config.mlp_size
    scored = run("evaluate", target, "--batches=1")
    assert scored.code == 0 and f"{rows[3]['scores']['loss']:.4f}" in scored.out
    planned = run("plan", f"--from={target}")
    assert planned.code == 0 and f"{rows[3]['disk_bytes']:,}" in planned.out, planned
    assert f"{rows[3]['memory_bytes']:,}" in planned.out and "at most" not in planned.out
    planned = run("plan", f"--from={trained}", "--recipe=mlp(0.5),int8")
    for row in (rows[0], rows[1], rows[3]):
        assert f"{row['parameters']:,}" in planned.out and f"{row['memory_bytes']:,}" in planned.out, planned
    assert f"  {rows[0]['disk_bytes']:,}\n" in planned.out and "at most" in planned.out
    shutil.copytree(trained, tmp_path / "longer")  # the config has more steps than the checkpoint
    steps = dataclasses.replace(load(trained).config.train, steps=10**9)
    write_config(tmp_path / "longer", dataclasses.replace(load(trained).config, train=steps))
    assert f"  {rows[0]['disk_bytes']:,}\n" in run("plan", f"--from={tmp_path / 'longer'}", "--recipe=int8").out
    assert not any((target / "finetune" / name).exists() for name in ("checkpoints", "start"))
    assert (target / "finetune" / "metrics.jsonl").exists()
    again = run("compress", *argv)
    assert again.code == 2 and "already holds a compressed model: choose a new directory" in again.err
    twice = run("compress", f"--from={target}", f"--to={tmp_path / 'x'}", "--recipe=int8")
    assert twice.code == 2 and "the model is compressed already" in twice.err
    twice = run("plan", f"--from={target}", "--recipe=int8")
    assert twice.code == 2 and "is compressed already: plan the run that it was made of" in twice.err


@pytest.mark.slow
def test_filters_of_a_convolutional_network_are_removed(run, tmp_path):
    source, target = tmp_path / "images", tmp_path / "small"
    config = EXAMPLES["image_classification"](tmp_path)
    loop.train(dataclasses.replace(config, plan=dataclasses.replace(config.plan, name="single")), source)
    recipe = "filters(0.5),shapes(0.5),int8"
    argv = [f"--from={source}", f"--to={target}", f"--recipe={recipe}", "--finetune=2", "--batches=1", "--rounds=1"]
    outcome = run("compress", *argv, "--batch_sizes=1,2")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    rows = json.loads((target / "compress.json").read_text())["rows"]
    assert [row["stage"] for row in rows] == ["original", "filters(0.5)", "shapes(0.5)", "finetune(2)", "int8"]
    assert rows[0]["parameters"] > 1.5 * rows[1]["parameters"] > 1.5 * rows[2]["parameters"]
    blocks = load(target).model.config.blocks
    assert blocks.startswith("conv(2, taps=") and [s.filters for s in load(target).model.config.shapes()] == [2, 3, 3]
    scored = run("evaluate", target, "--batches=1")
    assert scored.code == 0 and f"{rows[-1]['scores']['loss']:.4f}" in scored.out
    planned = run("plan", f"--from={source}", f"--recipe={recipe}")
    for row in (rows[0], rows[1], rows[2], rows[4]):
        assert f"{row['parameters']:,}" in planned.out and f"{row['memory_bytes']:,}" in planned.out, planned


@pytest.mark.slow
def test_pruned_weights_stay_zero_in_further_training_with_other_settings(run, trained, tmp_path):
    target = tmp_path / "sparse"
    argv = [
        f"--from={trained}",
        f"--to={target}",
        "--recipe=magnitude(0.25)",
        "--finetune=2",
        "--batches=1",
        "--rounds=1",
    ]
    outcome = run("compress", *argv, "--batch_sizes=1", "--config.optimizer.learning_rate=0.1")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    kernel, before = (load(directory).params["layers"]["mlp"]["up"]["kernel"] for directory in (target, trained))
    kept = kernel != 0
    assert 0.2 < kept.mean() < 0.3 and abs(kernel - before)[kept].max() > 0.05
    assert load(target).config.optimizer.learning_rate == 0.1


@pytest.mark.slow
def test_sizes_of_a_run_are_printed_without_messages_of_libraries(run, trained):
    logging.getLogger("absl").setLevel(logging.WARNING)  # as in a new process
    outcome = run("plan", f"--from={trained}", "--recipe=int8")
    assert (outcome.code, outcome.err) == (0, "") and outcome.out.splitlines()[2].startswith("int8 "), outcome
    assert logging.getLogger("absl").level >= logging.ERROR


@pytest.mark.slow
def test_lottery_tickets_have_earlier_values_and_the_zeros_of_later_ones(run, trained, tmp_path):
    late, names = load(trained), ("initial", "random", f"{trained}@2")
    config, tickets = late.config, {}
    for name in names:
        target = tmp_path / name.replace("/", "_")
        argv = [f"--from={trained}", f"--to={target}", "--recipe=magnitude(0.25)", f"--rewind={name}"]
        outcome = run("compress", *argv, "--batches=1", "--rounds=1", "--batch_sizes=1")
        assert (outcome.code, outcome.err) == (0, ""), outcome
        tickets[name] = load(target).params
    trainer = make_trainer(late.model, config.optimizer, Plan("single"), steps=1, batch_size=config.data.batch_size)
    params = [trainer.init(jax.random.key(config.train.seed + seed)).params for seed in (0, 1)]
    for name, early in zip(names, [*params, late.params], strict=True):
        kernel, expected = (tree["layers"]["mlp"]["up"]["kernel"] for tree in (tickets[name], early))
        trained_kernel = np.abs(late.params["layers"]["mlp"]["up"]["kernel"])
        kept = trained_kernel >= np.quantile(trained_kernel, 0.75, axis=(1, 2), keepdims=True)
        np.testing.assert_array_equal(kernel, np.where(kept, expected, 0))
        np.testing.assert_array_equal(tickets[name]["embed"]["table"], early["embed"]["table"])
    argv = [f"--from={trained}", f"--to={tmp_path / 'x'}", "--recipe=magnitude(0.25)", f"--rewind={trained}@77"]
    outcome = run("compress", *argv)
    assert outcome.code == 2 and "no checkpoint 77" in outcome.err and "done" not in outcome.out, outcome


@pytest.mark.slow
def test_iterations_remove_equal_shares_and_go_on_where_they_stopped(run, trained, tmp_path, monkeypatch):
    target, started, train = tmp_path / "iterated", [], loop.train

    def training(config, workdir, score):
        started.append(workdir.name)
        outcome = train(config, workdir, score=score)
        if started == ["iteration-1", "iteration-2"]:
            raise KeyboardInterrupt
        return outcome

    def compress():
        settings = CompressionSettings(finetune=2, iterations=2, rewind="initial", batches=1, batch_sizes=[1], rounds=1)
        return compress_run.compress_run(trained, target, "magnitude(0.25),int8", settings, log=str)

    monkeypatch.setattr(loop, "train", training)
    with pytest.raises(KeyboardInterrupt):
        compress()
    rows = compress()
    stages = [f"magnitude({share})" for share in (0.5, 0.25)]
    after = ["rewind(initial)", "finetune(2)"]
    assert [row.stage for row in rows] == ["original", stages[0], *after, stages[1], *after, "int8"]
    assert started == ["iteration-1", "iteration-2", "iteration-1", "iteration-2"]
    kernel = np.asarray(dense_tree(load(target).params)["layers"]["mlp"]["up"]["kernel"])
    np.testing.assert_allclose((kernel != 0).mean((1, 2)), 0.25, atol=0.01)
    assert not [*(target / "finetune").glob("*/checkpoints")]


@pytest.mark.slow
def test_an_interrupted_compression_starts_again_in_its_directory(trained, tmp_path, monkeypatch):
    def compress(recipe, finetune=0):
        settings = CompressionSettings(finetune=finetune, batches=1, batch_sizes=[1], rounds=1)
        compress_run.compress_run(trained, tmp_path, recipe, settings, log=str)

    resumes = []

    def stopped_training(config, workdir, score):
        resumes.append(contents.has_checkpoints(workdir))
        (workdir / "checkpoints" / "1").mkdir(parents=True, exist_ok=True)
        write_config(workdir, config)
        return SimpleNamespace(interrupted=True)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", stopped_training)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                compress("mlp(0.5,by=magnitude)", finetune=2)
        raises("unfinished training with another recipe, run", compress, "mlp(0.25,by=magnitude)", finetune=2)
        with pytest.raises(KeyboardInterrupt):
            compress("mlp(0.5,by=magnitude)", finetune=2)
    assert resumes == [False, True, True]
    raises("holds an unfinished compression", load, tmp_path)
    (tmp_path / f".{WEIGHTS_FILE}.0.part").touch()  # as if the process was killed while it wrote the file

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(compress_run, "write_config", stop)
        compress("int8")
    assert (tmp_path / WEIGHTS_FILE).exists() and not (tmp_path / "config.json").exists()
    raises("holds an unfinished compression: run its `hpnlp compress` command again", load, tmp_path)
    compress("bf16")
    assert not list(tmp_path.glob(".*.part"))
    assert load(tmp_path).params["layers"]["mlp"]["up"]["kernel"].codes.dtype == "bfloat16"
    raises("already holds a compressed model", compress, "int8")


@pytest.mark.slow
def test_a_compressed_model_is_converted_and_trained_further(run, trained, tmp_path):
    target = tmp_path / "small"
    argv = [
        f"--from={trained}",
        f"--to={target}",
        "--recipe=mlp(0.5),int8",
        "--batches=1",
        "--rounds=1",
        "--batch_sizes=1",
    ]
    assert run("compress", *argv).code == 0
    outcome = run("convert", f"--from={target}", f"--to={tmp_path / 'checkpoint'}")
    assert outcome.code == 0 and "checkpoint: a checkpoint" in outcome.out, outcome
    expected = dense_tree(load(target).params)["layers"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(convert.load(tmp_path / "checkpoint")[1]["layers"]["mlp"]["up"]["kernel"], expected)
    fields = {"model__mlp_dim": 16, "train__init_from": str(target), "optimizer__learning_rate": 0.0, "train__steps": 1}
    loop.train(tiny.make(**fields), tmp_path / "further")
    trained_further = load(tmp_path / "further").params["layers"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(trained_further, expected)


def test_invalid_flags_raise(run, trained, tmp_path):
    for flags, message in (
        ([], "--recipe"),
        (["--recipe=int8", "--batch_sizes=0"], "--batch_sizes=0: expected numbers of sequences"),
        (["--recipe=int8", "--finetune=3"], "--finetune=3 trains after the stages that remove units or weights"),
        (["--recipe=int8", "--rewind=random"], "--rewind=random keeps the zeros of magnitude, which the recipe 'int8'"),
        (["--recipe=mlp(0.5)", "--iterations=3"], "--iterations=3 trains after each one: add --finetune=STEPS"),
        (["--recipe=layers(1)", "--iterations=2", "--finetune=1"], "is layers(1): expected one of heads, mlp"),
        (["--recipe=magnitude(0.5)", "--rewind=3"], "--rewind=3: expected initial, random, or RUN@STEP"),
        (["--recipe=magnitude(0.5)", "--rewind=/no/run@3"], "/no/run holds no run"),
        (["--recipe=magnitude(0.5),mlp(0.5)", "--rewind=initial"], "--rewind=initial: the weights have other shapes"),
        (["--recipe=int8", "--config.model.dim=8"], "model.dim=8 would change the model that is compressed: leave"),
    ):
        outcome = run("compress", f"--from={trained}", f"--to={tmp_path / 'x'}", *flags)
        assert outcome.code == 2 and message in outcome.err, outcome
        assert not (tmp_path / "x").exists()


def test_directories_of_others_are_kept(run, trained, tmp_path):
    """A compression neither deletes nor replaces what it has not made, and training does not overwrite a compressed model."""
    other = tmp_path / "runs"
    shutil.copytree(trained, other / "finetune")
    files = sorted(path for path in other.rglob("*") if path.is_file())
    outcome = run("compress", f"--from={trained}", f"--to={other}", "--recipe=mlp(0.5)", "--finetune=1")
    assert outcome.code == 2 and "already holds other files: choose a new directory" in outcome.err, outcome
    assert sorted(path for path in other.rglob("*") if path.is_file()) == files
    compressed = tmp_path / "compressed"
    shutil.copytree(trained, compressed, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl"))
    (compressed / WEIGHTS_FILE).touch()
    config = (compressed / "config.json").read_bytes()
    raises("holds a compressed model, which the run would", lambda: loop.train(tiny.make(train__steps=2), compressed))
    (compressed / "config.json").unlink()
    (compressed / contents.UNFINISHED_FILE).touch()
    raises("holds an unfinished compression, which the run", lambda: loop.train(tiny.make(train__steps=2), compressed))
    (compressed / "config.json").write_bytes(config)
    with contents.locked(tmp_path / "small"):
        outcome = run("compress", f"--from={trained}", f"--to={tmp_path / 'small'}", "--recipe=int8")
    assert outcome.code == 75 and "another process writes to" in outcome.err, outcome


def test_contents_of_directories_are_told_apart(tmp_path):
    kinds = contents.Contents
    assert contents.contents_of(tmp_path / "absent") is contents.contents_of(tmp_path) is kinds.NOTHING
    (tmp_path / "file").touch()
    assert contents.contents_of(tmp_path) is contents.contents_of(tmp_path / "file") is kinds.OTHER
    (tmp_path / "metrics.jsonl").write_text("{}")
    assert contents.contents_of(tmp_path) is kinds.RUN
    (tmp_path / contents.UNFINISHED_FILE).touch()
    assert contents.contents_of(tmp_path) is kinds.UNFINISHED
    (tmp_path / "config.json").write_text("{}")
    assert contents.contents_of(tmp_path) is kinds.RUN
    (tmp_path / WEIGHTS_FILE).touch()
    assert contents.contents_of(tmp_path) is kinds.COMPRESSED
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert contents.contents_of(tmp_path) is kinds.CHECKPOINT


def test_a_file_as_target_raises_before_the_work(run, trained, tmp_path):
    (tmp_path / "file").touch()
    for target in (tmp_path / "file", tmp_path / "file" / "small"):
        outcome = run("compress", f"--from={trained}", f"--to={target}", "--recipe=int8")
        assert outcome.code == 2 and "file is a file: choose a directory" in outcome.err, outcome
        assert outcome.out == ""


def test_a_member_of_a_script_follows_its_parent(run, monkeypatch):
    parents = []
    monkeypatch.setattr(signals, "follow", parents.append)
    monkeypatch.setenv(signals.PARENT, "123")
    assert run("compress").code == 2 and parents == [123]


def test_the_verdict_says_what_became_worse(tmp_path):
    slower, faster = paired_times.ratio([math.log(2)] * 8), paired_times.ratio([math.log(0.25)] * 8)
    rows = [
        Measurement(stage, 10, 40, disk, {1: 0.01, 8: 0.08}, {"accuracy": accuracy}, None, ratios, ratios)
        for stage, disk, accuracy, ratios in (("original", 400, 0.9, {}), ("int8", 100, 0.85, {1: slower, 8: faster}))
    ]
    assert compression.verdict(rows, "accuracy", True) == (
        "The file is 4 times smaller; the loss of a batch is 2 times slower (2 to 2) at 1 sequence, 4 times faster (4 to 4) "
        "at 8 sequences; accuracy falls from 0.9000 to 0.8500 (worse)."
    )
    smaller = [rows[0], dataclasses.replace(rows[1], disk_bytes=400, memory_bytes=16)]
    assert compression.verdict(smaller, "accuracy", True).startswith(
        "The file is as large as before, and the weights take 0.4 of the memory; the loss"
    )
    uncertain = [rows[0], dataclasses.replace(rows[1], interval=(-0.11, 0.01))]
    difference = "no difference, -0.0500 (-0.1100 to +0.0100)"
    assert compression.verdict(uncertain, "accuracy", True).endswith(f"from 0.9000 to 0.8500: {difference}.")
    table = compression.render(uncertain, "accuracy", True)
    assert "| 0.9000 | - |\n| `int8` |" in table and f"| 0.8500 | {difference} |" in table
    assert table.endswith(f"\n\n{compression.NOTE}\n")
    assert "may be chance" in compression.render(rows, "accuracy", True)
    certain = [rows[0], dataclasses.replace(rows[1], interval=(-0.09, -0.01))]
    assert compression.verdict(certain, "accuracy", True).endswith(" (worse): -0.0500 (-0.0900 to -0.0100).")
    comparison_plots.plot_compression(
        compression.panels(certain, "accuracy"),
        tmp_path / "compress.png",
        compression.score_intervals(certain, "accuracy"),
    )
    broken = dataclasses.replace(rows[0], disk_bytes=800, scores={"accuracy": float("nan")})
    assert compression.verdict([rows[0], broken], "accuracy", True).endswith("accuracy becomes nan (worse).")
    written = json.loads(compression.to_json([broken], "accuracy", "runs/x", "int8"))
    assert written["rows"][0]["scores"] == {"accuracy": None}
    comparison_plots.plot_compression(compression.panels([rows[0], broken], "accuracy"), tmp_path / "compress.png")
