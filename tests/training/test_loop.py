"""The loop: whatever interrupts a run, what it leaves in its directory is what an undisturbed run leaves."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.decode import Generation, sample_text
from hpnlp.report import render, summarize
from hpnlp.training import config as configs
from hpnlp.training import loop, metrics
from hpnlp.training.checkpoint import Checkpointer
from hpnlp.training.run_directory import claimed, load, load_config
from hpnlp.types import InputError
from tests import tiny

# Every run here has the same programs, compiled once. Twelve steps: evaluated after 4 and 8, saved after 5, 10 and 12
# (and where an evaluation was better), shown after 3, 6, 9 and 12.
CONFIG = {"plan__fsdp": 2, "train__eval_every": 4, "train__eval_batches": 1}


def train(workdir, accept_changes=False, **overrides):
    return loop.train(tiny.make(**CONFIG | overrides), workdir, accept_changes=accept_changes)


def read(workdir, name="metrics.jsonl"):
    return (workdir / name).read_bytes()


def metrics_of(workdir):
    return [json.loads(line) for line in read(workdir).splitlines()]


def saved_steps(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def catch_trainer(patch, step=None):
    """A list that gets the trainer of each run from now on. step: replaces its jitted step."""
    caught, make_trainer = [], loop.make_trainer

    def make(*args, **kwargs):
        trainer = make_trainer(*args, **kwargs)
        if step is not None:
            trainer = dataclasses.replace(trainer, step=dataclasses.replace(trainer.step, jitted=step))
        caught.append(trainer)
        return trainer

    patch.setattr(loop, "make_trainer", make)
    return caught


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """`(directory, result, trainer)` of a run from its first to its last step."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        caught = catch_trainer(patch)
        return workdir, train(workdir), *caught


def assert_as_undisturbed(workdir, result, undisturbed):
    expected_dir, expected, _ = undisturbed
    assert read(workdir) == read(expected_dir)
    assert (result.step, result.interrupted, result.heldout) == (12, False, expected.heldout)
    for found, other in zip(jax.tree.leaves(result.params), jax.tree.leaves(expected.params), strict=True):
        assert np.asarray(found).tobytes() == np.asarray(other).tobytes()


def call_at(monkeypatch, step, action):
    """Calls `action` once, when the line of `step` has been written."""

    class Writer(loop.JsonlWriter):
        def write(self, number, values):
            super().write(number, values)
            if number == step:
                action()

    monkeypatch.setattr(loop, "JsonlWriter", Writer)


def test_leaves_a_line_for_each_step_and_the_newest_checkpoints(undisturbed):
    workdir, result, _ = undisturbed
    lines = metrics_of(workdir)
    training, scores = [line for line in lines if "loss" in line], [line for line in lines if "loss" not in line]
    assert [line["step"] for line in training] == list(range(1, 13))
    assert [(line["step"], line["heldout_loss"] > 0) for line in scores] == [(4, True), (8, True)]
    assert all({"loss", "grad_norm", "learning_rate", "target_tokens", "skipped"} <= line.keys() for line in training)
    assert training[-1]["loss"] < training[0]["loss"] - 0.2
    assert saved_steps(workdir) == [8, 10, 12]  # 8 is the best
    assert configs.from_json(read(workdir, "config.json").decode()) == tiny.make(**CONFIG)
    assert {"setup", "data", "step", "checkpoint", "eval"} == result.seconds.keys()


def test_learning_rates_follow_the_batch(undisturbed, tmp_path):
    """In the metrics; the config stays as it was written."""
    changes = {"optimizer__base_batch": 2, "optimizer__scaling": "sqrt", "train__steps": 1}
    train(tmp_path, **changes)
    rates = [metrics_of(workdir)[0]["learning_rate"] for workdir in (tmp_path, undisturbed[0])]
    assert rates[0] == pytest.approx(2 * rates[1])  # of 8 rows
    assert load_config(tmp_path).optimizer == tiny.make(**CONFIG | changes).optimizer


def test_heldout_bits_are_those_of_the_bytes(undisturbed):
    _, result, _ = undisturbed
    corpus = result.corpus
    tokens = sum(batch["weights"].sum() for batch in corpus.heldout(batch_size=8))
    bits = result.heldout["loss"] * tokens / np.log(2)
    assert result.heldout["bits_per_byte"] == pytest.approx(bits / len(corpus.read_heldout()), rel=1e-6)


def test_nothing_is_compiled_after_the_first_step(undisturbed):
    _, _, trainer = undisturbed
    assert trainer.step.jitted._cache_size() == trainer.evaluate.jitted._cache_size() == 1


def test_signal_saves_and_the_same_command_goes_on(undisturbed, tmp_path, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for number, step in [(signal.SIGTERM, 3), (signal.SIGINT, 9)]:  # after 3 comes a step that is evaluated
        with monkeypatch.context() as patch:
            call_at(patch, step, lambda number=number: os.kill(os.getpid(), number))
            result = train(tmp_path)
        assert result.interrupted and result.step in (step + 1, step + 2)  # lines wait for a checkpoint in the making
        assert saved_steps(tmp_path)[-1] == result.step
        assert f"{number.name}: saved step {result.step}; the same command goes on" in capsys.readouterr().out
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert_as_undisturbed(tmp_path, train(tmp_path), undisturbed)
    assert f"going on from step {result.step}" in capsys.readouterr().out


AWAY, HERE = {"plan__offload_parameters": True}, {"plan__offload_parameters": False}


@pytest.mark.parametrize(
    ("first", "then", "ema"),
    [
        (AWAY, AWAY, 0.0),
        pytest.param(AWAY, AWAY, 0.9, marks=pytest.mark.slow),
        pytest.param(AWAY, HERE, 0.9, marks=pytest.mark.slow),
        pytest.param(HERE, AWAY, 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_layers_rest_on_the_host_goes_on(tmp_path, monkeypatch, first, then, ema):
    """Bit for bit; to rounding where they rest elsewhere from then on. What it has trained and saved makes text."""
    whole, parted, ema = tmp_path / "whole", tmp_path / "parted", {"optimizer__ema": ema}
    expected = train(whole, **ema, **AWAY)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(expected.params["layers"])} == {"pinned_host"}
    with monkeypatch.context() as patch:
        call_at(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(parted, **ema, **first).interrupted
    result = train(parted, accept_changes=first != then, **ema, **then)
    if first == then:
        assert_as_undisturbed(parted, result, (whole, expected, None))
    for found, line in zip(metrics_of(parted), metrics_of(whole), strict=True):
        assert found == pytest.approx(line, rel=1e-4)
    run, greedy = load(parted), {"tokens": 5, "temperature": 0.0}
    made = [
        np.concatenate(list(Generation(result.model, params, [np.array([65])], **greedy)), axis=1)
        for params in (result.params, run.params)
    ]
    np.testing.assert_array_equal(*made)


def test_says_what_was_left_out(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_text("a line of text\n" * 9)
    (tmp_path / "text" / "windows.txt").write_text("a line", "utf-16")
    train(tmp_path / "run", train__steps=1, train__eval_every=0, data__path=str(tmp_path / "text"))
    assert re.search(
        r"documents, .* held out; .*left out: 1 in UTF-16, to be converted by iconv -f UTF-16 -t UTF-8, \(windows.txt\)$",
        capsys.readouterr().out,
        re.MULTILINE,
    )


def test_half_a_tokenizer_of_a_run_that_had_not_begun_is_written_again(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"type": "by')
    train(tmp_path, train__steps=1, train__eval_every=0)
    assert json.loads(read(tmp_path, "tokenizer.json"))["type"] == "bytes"


def test_run_that_had_not_begun_may_come_back_as_another(tmp_path):
    """As after a typing error that is only found where the model is built."""
    with pytest.raises(InputError, match="unknown sampler 'unigrm'"):
        train(tmp_path, model__output="sampled(8,unigrm)", data__tokenizer="words(40)", train__steps=1)
    train(tmp_path, model__output="sampled(8)", train__steps=1, train__eval_every=0)
    assert json.loads(read(tmp_path, "config.json"))["model"]["output"] == "sampled(8)"
    assert json.loads(read(tmp_path, "tokenizer.json"))["type"] == "bytes"


class Crash(BaseException):
    pass


def crash():
    raise Crash


@pytest.mark.parametrize("tail", [pytest.param(b"", marks=pytest.mark.slow), b'{"step": 9, "lo'])
def test_what_was_written_after_the_last_checkpoint_is_written_again(undisturbed, tmp_path, monkeypatch, tail):
    with monkeypatch.context() as patch, pytest.raises(Crash):
        call_at(patch, 9, crash)
        train(tmp_path)
    assert metrics_of(tmp_path)[-1]["step"] == 9 and saved_steps(tmp_path)[-1] == 8
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    assert_as_undisturbed(tmp_path, train(tmp_path), undisturbed)


def test_finished_run_stays_as_it_is(undisturbed, monkeypatch):
    workdir, expected, _ = undisturbed
    before = read(workdir)
    caught = catch_trainer(monkeypatch)
    result = train(workdir)
    assert (result.step, result.heldout, read(workdir)) == (12, expected.heldout, before)
    assert result.seconds["setup"] > expected.seconds["setup"]  # that of the restart is added
    assert caught[0].step.jitted._cache_size() == 0


def test_other_config_is_refused_unless_accepted(undisturbed):
    workdir, expected, _ = undisturbed
    with pytest.raises(InputError) as caught:
        train(workdir, train__keep=3, train__eval_batches=2)
    message = str(caught.value)
    assert f"{workdir} was made by another config (train.eval_batches: 1 -> 2; train.keep: 2 -> 3)" in message
    assert "--accept_changes" in message
    assert json.loads(read(workdir, "config.json"))["train"]["keep"] == 2
    for keep in (3, 2):
        assert train(workdir, accept_changes=True, train__keep=keep).heldout == expected.heldout
        assert json.loads(read(workdir, "config.json"))["train"]["keep"] == keep


def test_one_process_at_a_time(tmp_path):
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process trains in .*: wait for it, or choose another workdir"):
            train(tmp_path)


def test_workdir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="cannot write to workdir .*: choose another --workdir"):
            train(workdir)


def test_workdir_whose_checkpoints_could_not_be_read_back(tmp_path):
    for name in ("[proj]", "\udcff"):
        with pytest.raises(InputError, match="choose another one"):
            train(tmp_path / name / "run")
    assert not list(tmp_path.iterdir())


def test_last_checkpoint_is_read_back_before_the_run_is_called_done(tmp_path, monkeypatch):
    class Losing(Checkpointer):
        def wait(self):
            super().wait()
            for path in self.directory.glob("12/params/manifest.ocdbt"):
                path.unlink()

    monkeypatch.setattr(loop, "Checkpointer", Losing)
    with pytest.raises(InputError, match="checkpoint 12 was written to .* and cannot be read back"):
        train(tmp_path)


def test_run_that_does_not_fit_leaves_no_trace_in_the_next(tmp_path):
    with pytest.raises(InputError, match="does not divide 8 devices"):
        train(tmp_path, plan__data=3)
    with pytest.raises(InputError, match="data.batch_size=9 does not split"):
        train(tmp_path, data__batch_size=9)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_sequences_longer_than_the_model_allows(tmp_path):
    with pytest.raises(InputError, match=r"data.seq_len=16 is longer than model.max_len=8"):
        train(tmp_path, model__position="learned", model__max_len=8)


def test_stops_early_and_stays_so(tmp_path, capsys):
    """The first evaluation is always better than none; no later one is by 100 nats."""
    options = {"train__patience": 2, "train__min_delta": 100.0, "train__eval_every": 2, "train__checkpoint_every": 0}
    for attempt in range(2):
        result = train(tmp_path, **options)
        assert (result.step, result.interrupted) == (6, False)
        assert result.heldout["bits_per_byte"] > 0
        assert ("no improvement in 2 evaluations: stopping at step 6" in capsys.readouterr().out) == (attempt == 0)
        assert saved_steps(tmp_path) == [2, 6]  # the best, and the last
    checkpoints = Checkpointer(tmp_path, read_only=True)
    assert (checkpoints.best(), checkpoints.latest()) == (2, 6)
    checkpoints.close()


@pytest.mark.parametrize("steps", [pytest.param("2:3", marks=pytest.mark.slow), "3:12"])
def test_profile_writes_a_trace(tmp_path, steps):
    train(tmp_path, train__profile=steps, train__patience=1, train__min_delta=100.0, train__eval_every=2)
    assert list(tmp_path.glob("profile/**/*.xplane.pb"))


@pytest.mark.slow
def test_profile_of_steps_that_are_done_is_no_error(undisturbed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Crash):
        call_at(patch, 9, crash)
        train(tmp_path, train__profile="3:11")
    result = train(tmp_path, train__profile="3:11")
    assert result.step == 12 and read(tmp_path) == read(undisturbed[0])


def test_further_writers_get_the_same_lines(tmp_path, monkeypatch):
    written = []

    class Spy:
        def write(self, step, values):
            written.append({"step": step, **values})

        def close(self):
            written.append("closed")

    monkeypatch.setitem(metrics.WRITERS, "spy", lambda workdir, last_step: Spy())
    train(tmp_path, train__writers="spy", train__patience=1, train__min_delta=100.0)
    assert written == [*metrics_of(tmp_path), "closed"]


def not_finite(state, batch, key):
    bad = dict.fromkeys(("loss", "grad_norm"), jnp.float32(np.nan))
    return dataclasses.replace(state, step=state.step + 1), bad | {"skipped": jnp.float32(1)}


def test_hopeless_run_stops(tmp_path, monkeypatch, capfd):
    catch_trainer(monkeypatch, not_finite)
    monkeypatch.setattr(loop, "MAX_NONFINITE_STEPS", 8)
    with pytest.raises(InputError, match="has not been finite for 8 steps, up to 8: lower optimizer.learning_rate"):
        train(tmp_path, train__eval_every=0)
    assert [(line["step"], line["loss"]) for line in metrics_of(tmp_path)] == [(step, None) for step in range(1, 9)]
    assert saved_steps(tmp_path) == [5]
    assert re.search(
        r"^step 5: \d of the last \d steps skipped: they were not finite$", capfd.readouterr().out, re.MULTILINE
    )


def test_run_is_not_hopeless_while_its_loss_scale_falls(tmp_path, monkeypatch):
    def falling(state, batch, key):
        state, bad = not_finite(state, batch, key)
        return state, bad | {"loss_scale": jnp.maximum(1.0, 16.0 / 2.0 ** (state.step - 1))}

    catch_trainer(monkeypatch, falling)
    monkeypatch.setattr(loop, "MAX_NONFINITE_STEPS", 4)
    with pytest.raises(InputError, match="has not been finite for 4 steps, up to 8:"):  # from 5 on it is 1
        train(tmp_path, train__eval_every=0)


def test_first_step_that_is_not_finite_stops_a_run_that_skips_none(tmp_path, monkeypatch):
    catch_trainer(monkeypatch, not_finite)
    with pytest.raises(InputError, match="has not been finite for 1 steps, up to 1:"):
        train(tmp_path, optimizer__skip_nonfinite=False)
    assert saved_steps(tmp_path) == []


def test_score_that_is_not_finite_is_never_the_best(tmp_path, monkeypatch):
    scores = iter([np.nan, 2.0, np.inf, 3.0])
    monkeypatch.setattr(loop, "heldout_loss", lambda *args: {"loss": next(scores)})
    train(tmp_path, train__eval_every=2, train__steps=8, train__checkpoint_every=0)
    assert saved_steps(tmp_path) == [4, 8]


def test_evaluation_without_a_predicted_token(tmp_path):
    row = json.dumps({"ask": "why " * 200, "say": "so"})
    (tmp_path / "held.jsonl").write_text(row)
    data = {"data__heldout_path": str(tmp_path / "held.jsonl"), "data__text_field": "say", "data__prompt_field": "ask"}
    (tmp_path / "x.jsonl").write_text("\n".join([json.dumps({"ask": "", "say": "so " * 9})] * 40))
    data["data__path"] = str(tmp_path / "x.jsonl")
    with pytest.raises(InputError, match="train.eval_batches=1: no token of the held-out text .* raise it, 0 for all"):
        train(tmp_path / "run", **data)


def test_debug_nans_stops_at_the_operation(tmp_path):
    with pytest.raises(FloatingPointError, match="nan"):
        train(tmp_path, train__debug_nans=True, optimizer__learning_rate=1e30, optimizer__clip_norm=0.0)
    assert not jax.config.jax_debug_nans


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "cannot write to .*: the disk is full: free some space and run the same command again"),
        (
            errno.EACCES,
            r"cannot write to x.json \(Permission denied\): correct its permissions and run the same command",
        ),
        (errno.EROFS, r"cannot write to x.json \(Read-only file system\): correct"),
    ],
)
def test_directory_that_takes_no_more(tmp_path, code, message):
    with pytest.raises(InputError, match=message), claimed(tmp_path, tiny.make(), False):
        raise OSError(code, os.strerror(code), "x.json")


def test_errors_of_standard_output_are_not_the_workdirs(tmp_path, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        full.write("what nobody takes")
        with pytest.raises(OSError, match="No space left"), claimed(tmp_path, tiny.make(), False):
            full.flush()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def config_as(kind, path):
    """Makes a config.json at `path` that is none."""
    if kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.write_bytes({"binary": b"\xff\x00\xfe", "field": b'{"fields": 3, "train": {"steps": 3}}'}[kind])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("directory", r"cannot read .*config.json \(Is a directory\): restore it, or name another workdir"),
        ("loop", r"cannot read .*config.json \(Too many levels of symbolic links\): restore it"),
        ("binary", r"cannot read .*config.json \(it is not UTF-8 text\): restore it"),
        ("field", r".*: config.json was written with 3 fields and holds 1: restore model.dim, "),
    ],
)
def test_config_that_cannot_be_read(tmp_path, kind, message):
    config_as(kind, tmp_path / "config.json")
    with pytest.raises(InputError, match=message):
        load(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}")
    message = "config.json is a directory: move it away" if kind == "directory" else message
    with pytest.raises(InputError, match=message), claimed(tmp_path, tiny.make(), True):
        pass


def test_workdir_that_is_a_file_holds_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file holds no run"):
        load(tmp_path / "file")


@pytest.mark.parametrize(
    ("output", "probable", "counted"), [("class", True, False), ("margin(2,8)", False, True)], ids=["class", "margin"]
)
def test_reports_say_only_what_the_output_layer_knows(tmp_path, output, probable, counted):
    """No bits a byte of a loss that is of no probabilities, and no operations that the batch decides the number of."""
    result = train(tmp_path, model__output=output, model__tied=False, train__steps=2)
    assert ("bits_per_byte" in result.heldout) == probable
    assert (result.flops_per_step is not None) == counted
    numbers = summarize(tiny.make(**CONFIG), result)
    assert (numbers["flops_per_second"] is None, numbers["heldout_bits_per_byte"] is None) == (
        not counted,
        not probable,
    )
    sample_text(result.model, result.params, result.corpus.tokenizer, 5)
    text = render(tmp_path, tiny.make(**CONFIG | {"model__output": output}), numbers, "")
    assert ("--temperature=0`" in text) != probable and ("nats" in text) == probable
    if not probable:
        with pytest.raises(InputError, match="gives no probabilities to draw from; take 0"):
            next(iter(Generation(result.model, result.params, [np.array([1])], tokens=2, temperature=0.5)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "output",
    [
        "hierarchical",
        "hierarchical(similar)",
        "class(by=mass)",
        "class(by=similar)",
        "sampled(8,unigram)",
        "nce(8)",
        "binary_ecc",
        "vmf",
        "adaptive(div_value=2)",
    ],
)
def test_words_with_their_counts(tmp_path, output):
    """From the text to a report and a sample; and again from what the run has saved."""
    fields = {"model__output": output, "model__tied": False, "data__tokenizer": "words(40)", "train__steps": 3}
    result = train(tmp_path, **fields)
    assert np.isfinite(result.heldout["loss"])
    sample_text(result.model, result.params, result.corpus.tokenizer, 5)
    assert train(tmp_path, **fields).heldout == result.heldout
