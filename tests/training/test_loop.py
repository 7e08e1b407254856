"""The training loop: interrupted runs resume and leave the same files as an undisturbed run."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.errors import TemporaryError
from hpnlp.models.decode import GREEDY, Generation, Sampling, sample_text
from hpnlp.report import render, summarize
from hpnlp.tasks.lm import LanguageModel
from hpnlp.training import config as configs
from hpnlp.training import loop, start
from hpnlp.training.config_file import load_config
from hpnlp.training.files import metrics
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.files.claim import claimed
from hpnlp.training.processes import attempts
from hpnlp.training.processes.attempts import Attempt
from hpnlp.training.run_directory import load
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests import tiny
from tests.messages import raises
from tests.traces import TRACES

# All runs have the same programs, which are compiled once. Of twelve steps, 4, 8 and 12 are evaluated, 5, 10, 12 and those with
# an improved evaluation are saved, and 3, 6, 9 and 12 are displayed.
CONFIG = {"plan__name": "data", "plan__fsdp": 2, "train__eval_every": 4, "train__eval_batches": 1}


def train(workdir, accept_changes=False, **overrides):
    return loop.train(tiny.make(**CONFIG | overrides), workdir, accept_changes=accept_changes)


def read(workdir, name="metrics.jsonl"):
    return (workdir / name).read_bytes()


def metrics_of(workdir):
    return [json.loads(line) for line in read(workdir).splitlines()]


def saved_steps(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def catch_trainer(patch, step=None):
    """List to which the trainer of each further run, a new one, is appended; `step` replaces its jitted step."""
    caught = []

    def make(*args, **kwargs):
        trainer = make_trainer(*args, **kwargs)
        if step is not None:
            trainer = dataclasses.replace(trainer, step=dataclasses.replace(trainer.step, jitted=step))
        caught.append(trainer)
        return trainer

    patch.setattr(start, "make_trainer", make)
    return caught


UNDISTURBED_TRACES = {}  # name of a function -> how often JAX traced it in the run of `undisturbed`


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """`(directory, result, trainer)` of a run from its first to its last step."""
    workdir, before = tmp_path_factory.mktemp("undisturbed"), TRACES.copy()
    with pytest.MonkeyPatch.context() as patch:
        caught = catch_trainer(patch)
        result = train(workdir)
    UNDISTURBED_TRACES.update({name: count - before[name] for name, count in TRACES.items()})
    return workdir, result, *caught


def assert_as_undisturbed(workdir, result, undisturbed):
    expected_dir, expected, _ = undisturbed
    assert read(workdir) == read(expected_dir)
    assert (result.step, result.interrupted, result.heldout) == (12, False, expected.heldout)
    for actual, other in zip(jax.tree.leaves(result.params), jax.tree.leaves(expected.params), strict=True):
        assert np.asarray(actual).tobytes() == np.asarray(other).tobytes()


class Crash(BaseException):
    pass


def crash(*args):
    raise Crash


def call_at(monkeypatch, step, action):
    """Calls `action` once, when the line of `step` has been written."""

    class Writer(loop.JsonlWriter):
        def write(self, number, values):
            super().write(number, values)
            if number == step:
                action()

    monkeypatch.setattr(loop, "JsonlWriter", Writer)


def test_run_writes_a_line_per_step_and_the_newest_checkpoints(undisturbed):
    workdir, result, _ = undisturbed
    lines = metrics_of(workdir)
    training, scores = [line for line in lines if "loss" in line], [line for line in lines if "loss" not in line]
    assert [line["step"] for line in training] == list(range(1, 13))
    assert [(line["step"], line["heldout_loss"] > 0) for line in scores] == [(4, True), (8, True), (12, True)]
    assert all({"loss", "grad_norm", "learning_rate", "target_tokens", "skipped"} <= line.keys() for line in training)
    assert training[-1]["loss"] < training[0]["loss"] - 0.2
    assert saved_steps(workdir) == [10, 12]
    assert result.scored_step == 12  # the best
    assert configs.from_json(read(workdir, "config.json").decode()) == tiny.make(**CONFIG)
    assert {"setup", "data", "step", "checkpoint", "eval", "baselines"} == result.seconds.keys()


def test_process_of_an_earlier_attempt_commits_nothing(tmp_path, monkeypatch):
    """The newer attempt begins after the line of step 5 is written, when its checkpoint is about to be."""
    monkeypatch.setenv(attempts.VARIABLE, "1:a")
    call_at(monkeypatch, 5, lambda: attempts.record(tmp_path, Attempt(2, "b")))
    with pytest.raises(TemporaryError, match="belongs to attempt 1:a of .*, and the newest is 2:b"):
        train(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").glob("[0-9]*") if path.name.isdecimal()] == ["4"]
    assert metrics_of(tmp_path)[-1]["step"] == 5
    with pytest.raises(TemporaryError, match="attempt 1:b of .* is over: attempt 2:b has begun"):
        monkeypatch.setenv(attempts.VARIABLE, "1:b")
        train(tmp_path)


def test_baselines_can_be_left_out(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(LanguageModel, "baseline", lambda task, dataset: measured.append(dataset))
    catch_trainer(monkeypatch, crash)
    for name, wanted in (("with", True), ("without", False)):
        with pytest.raises(Crash):
            train(tmp_path / name, train__baselines=wanted)
        assert len(measured) == 1


def test_learning_rates_follow_the_batch_size(tmp_path, monkeypatch):
    """The trainer has the scaled rates; the config keeps the unscaled ones."""
    changes, rates = {"optimizer__base_batch": 2, "optimizer__scaling": "sqrt"}, []
    catch_trainer(monkeypatch, crash)
    make = start.make_trainer
    monkeypatch.setattr(
        start, "make_trainer", lambda model, *rest, **k: rates.append(rest[0]) or make(model, *rest, **k)
    )
    with pytest.raises(Crash):
        train(tmp_path, **changes)
    config = tiny.make(**CONFIG | changes).optimizer
    assert rates[0].learning_rate == pytest.approx(2 * config.learning_rate)  # of 8 rows
    assert load_config(tmp_path).optimizer == config


def test_heldout_bits_are_per_byte_of_text(undisturbed):
    _, result, _ = undisturbed
    corpus = result.dataset
    tokens = sum(batch["weights"].sum() for batch in corpus.heldout(batch_size=8))
    bits = result.heldout["loss"] * tokens / np.log(2)
    assert result.heldout["bits_per_byte"] == pytest.approx(bits / len(corpus.read_heldout()), rel=1e-6)


def test_nothing_is_compiled_after_the_first_step(undisturbed):
    _, _, trainer = undisturbed
    names = [function.jitted.__name__ for function in (trainer.step, trainer.evaluate_next)]
    assert [UNDISTURBED_TRACES[name] for name in names] == [1, 1]


def test_run_stopped_by_signals_resumes_exactly(undisturbed, tmp_path, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for number, step in [(signal.SIGTERM, 3), (signal.SIGINT, 9)]:  # step 4 is evaluated
        with monkeypatch.context() as patch:
            call_at(patch, step, lambda number=number: os.kill(os.getpid(), number))
            result = train(tmp_path)
        # Lines are written after a checkpoint in progress.
        assert result.interrupted and result.step in (step + 1, step + 2)
        assert saved_steps(tmp_path)[-1] == result.step
        assert f"{number.name}: saved step {result.step}; the same command goes on" in capsys.readouterr().out
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert_as_undisturbed(tmp_path, train(tmp_path), undisturbed)
    assert f"going on from step {result.step}" in capsys.readouterr().out


OFFLOADED, ON_DEVICE = {"plan__offload_parameters": True}, {"plan__offload_parameters": False}


@pytest.mark.parametrize(
    ("first", "then", "ema"), [(OFFLOADED, OFFLOADED, 0.9), (OFFLOADED, ON_DEVICE, 0.9), (ON_DEVICE, OFFLOADED, 0.0)]
)
@pytest.mark.slow  # the step with offloading is tested in test_step_memory.py
def test_run_with_offloaded_layers_resumes(tmp_path, monkeypatch, first, then, ema):
    """Bit for bit, or up to rounding if offloading changes. The trained and the saved parameters generate text."""
    undivided, resumed, ema = tmp_path / "undivided", tmp_path / "resumed", {"optimizer__ema": ema}
    expected = train(undivided, **ema, **OFFLOADED)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(expected.params["layers"])} == {"pinned_host"}
    with monkeypatch.context() as patch:
        call_at(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(resumed, **ema, **first).interrupted
    result = train(resumed, accept_changes=first != then, **ema, **then)
    if first == then:
        assert_as_undisturbed(resumed, result, (undivided, expected, None))
    for actual, line in zip(metrics_of(resumed), metrics_of(undivided), strict=True):
        assert actual == pytest.approx(line, rel=1e-4)
    run, greedy = load(resumed), {"tokens": 5, "sampling": GREEDY}
    made = [
        np.concatenate(list(Generation(result.model, params, [np.array([65])], **greedy)), axis=1)
        for params in (result.params, run.params)
    ]
    np.testing.assert_array_equal(*made)


def test_damaged_tokenizer_is_replaced_if_the_run_has_not_begun(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text('{"type": "by')
    catch_trainer(monkeypatch, crash)
    with pytest.raises(Crash):
        train(tmp_path)
    assert json.loads(read(tmp_path, "tokenizer.json"))["type"] == "bytes"


def test_run_that_has_not_begun_may_change_its_config(tmp_path, monkeypatch):
    """As after a misspelt field that raises only when the model is built."""
    raises("unknown sampler 'unigrm'", train, tmp_path, model__output="sampled(8,unigrm)", data__tokenizer="words(40)")
    catch_trainer(monkeypatch, crash)
    with pytest.raises(Crash):
        train(tmp_path)
    assert json.loads(read(tmp_path, "config.json"))["model"]["output"] == "full"
    assert json.loads(read(tmp_path, "tokenizer.json"))["type"] == "bytes"


def test_lines_after_the_last_checkpoint_are_written_again(undisturbed, tmp_path, monkeypatch):
    """Also after an incomplete line."""
    with monkeypatch.context() as patch, pytest.raises(Crash):
        call_at(patch, 9, crash)
        train(tmp_path)
    assert metrics_of(tmp_path)[-1]["step"] == 9 and saved_steps(tmp_path)[-1] == 8
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 9, "lo')
    assert_as_undisturbed(tmp_path, train(tmp_path), undisturbed)


def test_finished_run_stays_unchanged(undisturbed, monkeypatch):
    workdir, expected, _ = undisturbed
    before = read(workdir)
    caught = catch_trainer(monkeypatch)
    result = train(workdir)
    assert (result.step, result.heldout, read(workdir)) == (12, expected.heldout, before)
    assert result.seconds["setup"] > expected.seconds["setup"]  # the restart's set-up is added
    assert caught[0].step.jitted._cache_size() == 0


def test_other_config_raises_unless_accepted(undisturbed):
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


def test_runs_do_not_go_back(undisturbed, tmp_path):
    workdir = shutil.copytree(undisturbed[0], tmp_path / "run")
    raises("train.steps=1: the run in .* has reached step 12", train, workdir, accept_changes=True, train__steps=1)


def test_unreadable_last_checkpoint_raises(tmp_path, monkeypatch):
    class Losing(Checkpointer):
        def wait(self):
            super().wait()
            for path in self.directory.glob("12/params/manifest.ocdbt"):
                path.unlink()

    monkeypatch.setattr(loop, "Checkpointer", Losing)
    raises("checkpoint 12 was written to .* and cannot be read back", train, tmp_path)


def test_invalid_config_leaves_no_files(tmp_path):
    raises("does not divide 8 devices", train, tmp_path, plan__data=3)
    raises("data.batch_size=9 does not split", train, tmp_path, data__batch_size=9)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    for fields in ({"data__batch_size": 9}, {"distill__teacher": str(tmp_path)}):
        with pytest.raises(InputError):
            train(tmp_path / "new", **fields)
        assert not (tmp_path / "new").exists()


def test_sequences_longer_than_learned_positions_raise(tmp_path):
    raises(r"data.seq_len=16 is longer than", train, tmp_path, model__position="learned", model__max_len=8)


def test_early_stop_is_final(tmp_path, capsys):
    """The first evaluation always counts as an improvement; no later one improves by 100 nats."""
    options = {"train__patience": 2, "train__min_delta": 100.0, "train__eval_every": 2, "train__checkpoint_every": 0}
    for attempt in range(2):
        result = train(tmp_path, **options)
        assert (result.step, result.scored_step, result.interrupted) == (6, 2, False)
        assert result.heldout["bits_per_byte"] > 0
        assert ("no improvement in 2 evaluations: stopping at step 6" in capsys.readouterr().out) == (attempt == 0)
        assert saved_steps(tmp_path) == [2, 6]  # the best, and the last
    checkpoints = Checkpointer(tmp_path, read_only=True)
    assert (checkpoints.best(), checkpoints.latest()) == (2, 6)
    checkpoints.close()


@pytest.mark.slow
def test_profile_writes_a_trace(tmp_path):
    train(tmp_path, train__profile="2:3", train__patience=1, train__min_delta=100.0, train__eval_every=2)
    assert list(tmp_path.glob("profile/**/*.xplane.pb"))


@pytest.mark.slow
def test_profile_of_finished_steps_is_ignored(undisturbed, tmp_path, monkeypatch):
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
    bad = dict.fromkeys(("loss", "grad_norm"), np.float32(np.nan))
    return dataclasses.replace(state, step=jnp.asarray(np.asarray(state.step) + np.int32(1))), bad | {"skipped": 1.0}


def test_nonfinite_steps_stop_the_run(tmp_path, monkeypatch, capfd):
    catch_trainer(monkeypatch, not_finite)
    monkeypatch.setattr(loop, "MAX_NONFINITE_STEPS", 8)
    raises("has not been finite for 8 steps, up to 8: lower", train, tmp_path, train__eval_every=0)
    assert [(line["step"], line["loss"]) for line in metrics_of(tmp_path)] == [(step, None) for step in range(1, 9)]
    assert saved_steps(tmp_path) == [5]
    assert re.search(
        r"^step 5: \d of the last \d steps skipped: they were not finite$", capfd.readouterr().out, re.MULTILINE
    )


def test_nonfinite_steps_do_not_count_while_the_loss_scale_falls(tmp_path, monkeypatch):
    def falling(state, batch, key):
        state, bad = not_finite(state, batch, key)
        return state, bad | {"loss_scale": max(1.0, 16.0 / 2.0 ** (int(state.step) - 1))}

    catch_trainer(monkeypatch, falling)
    monkeypatch.setattr(loop, "MAX_NONFINITE_STEPS", 4)
    with pytest.raises(InputError, match="has not been finite for 4 steps, up to 8:"):  # from 5 on it is 1
        train(tmp_path, train__eval_every=0)


def test_first_nonfinite_step_stops_a_run_without_skipping(tmp_path, monkeypatch):
    catch_trainer(monkeypatch, not_finite)
    raises("has not been finite for 1 steps, up to 1:", train, tmp_path, optimizer__skip_nonfinite=False)
    assert saved_steps(tmp_path) == []


def test_nonfinite_evaluation_is_never_the_best(tmp_path, monkeypatch):
    scores = iter([np.nan, 2.0, np.inf, 3.0, 4.0, 5.0, 2.0])  # the last one of all held-out examples
    monkeypatch.setattr(loop, "evaluate", lambda *args: loop.Evaluation({"loss": next(scores)}, {}))
    train(tmp_path, train__eval_every=2, train__checkpoint_every=0)
    assert saved_steps(tmp_path) == [4, 12]


def test_evaluation_without_a_target_token_raises(tmp_path):
    row = json.dumps({"ask": "why " * 200, "say": "so"})
    (tmp_path / "held.jsonl").write_text(row)
    data = {"data__heldout_path": str(tmp_path / "held.jsonl"), "data__text_field": "say", "data__prompt_field": "ask"}
    (tmp_path / "x.jsonl").write_text("\n".join([json.dumps({"ask": "", "say": "so " * 9})] * 40))
    data["data__path"] = str(tmp_path / "x.jsonl")
    raises("train.eval_batches=1: no token of the held-out text .* raise it, 0", train, tmp_path / "run", **data)


@pytest.mark.slow
def test_debug_nans_stops_at_the_operation(tmp_path):
    fields = {"optimizer__learning_rate": 1e30, "optimizer__clip_norm": 0.0, "model__layers": 1}
    with pytest.raises(FloatingPointError, match="nan"):
        train(tmp_path, train__debug_nans=True, plan__name="single", plan__fsdp=1, **fields)
    assert not jax.config.jax_debug_nans


def test_disk_errors_name_the_fix(tmp_path):
    for code, message in (
        (errno.ESTALE, r"cannot use x.json \(Stale file handle\): run the same command again"),
        (errno.ENOSPC, "cannot write to .*: the disk is full: free some space and run the same command again"),
        (errno.EACCES, r"cannot write to x.json \(Permission denied\): correct its permissions and run the same"),
    ):
        with pytest.raises(InputError, match=message) as caught, claimed(tmp_path, tiny.make(), False):
            raise OSError(code, os.strerror(code), "x.json")
        assert isinstance(caught.value, TemporaryError) == (code in (errno.ENOSPC, errno.ESTALE))


def test_errors_of_standard_output_are_raised_unchanged(tmp_path, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        full.write("text that does not fit")
        with pytest.raises(OSError, match="No space left"), claimed(tmp_path, tiny.make(), False):
            full.flush()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def config_as(kind, path):
    """Makes an invalid config.json at `path`."""
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
        ("binary", r"cannot read .*config.json \(it is not UTF-8 text\): restore it"),
        ("field", r".*: config.json was written with 3 fields and holds 1: restore model.dim, "),
    ],
)
def test_unreadable_config_raises(tmp_path, kind, message):
    config_as(kind, tmp_path / "config.json")
    raises(message, load, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}")
    message = "config.json is a directory: move it away" if kind == "directory" else message
    with pytest.raises(InputError, match=message), claimed(tmp_path, tiny.make(), True):
        pass


@pytest.mark.parametrize(
    ("output", "probable", "counted"),
    [
        pytest.param("class", True, False, marks=pytest.mark.slow),
        pytest.param("margin(2,8)", False, True, marks=pytest.mark.slow),
    ],
    ids=["class", "margin"],
)
def test_reports_leave_out_numbers_that_the_output_layer_lacks(tmp_path, output, probable, counted):
    """No bits per byte without probabilities, and no number of operations if it depends on the batch."""
    fields = {"model__output": output, "model__tied": False, "plan__name": "single", "plan__fsdp": 1}
    result = train(tmp_path, train__steps=2, **fields)
    assert ("bits_per_byte" in result.heldout) == probable
    assert (result.flops_per_step is not None) == counted
    config = tiny.make(**CONFIG | {"model__output": output})
    numbers = summarize(config, result)
    assert (numbers["flops_per_second"] is None, numbers["heldout_bits_per_byte"] is None) == (
        not counted,
        not probable,
    )
    sample_text(result.model, result.params, result.dataset.tokenizer, 5)
    text = render(tmp_path, config, numbers, "")
    assert ("--temperature=0`" in text) != probable and ("nats" in text) == probable
    if not probable:
        with pytest.raises(InputError, match="has no probabilities to draw from; set temperature to 0"):
            next(iter(Generation(result.model, result.params, [np.array([1])], tokens=2, sampling=Sampling(0.5))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "output", ["hierarchical", "class(by=similar)", "sampled(8,unigram)", "binary_ecc", "vmf", "adaptive(div_value=2)"]
)
def test_output_layers_with_word_counts_train_and_resume(tmp_path, output):
    """Through evaluation and sampling, and again from the saved run."""
    fields = {"model__output": output, "model__tied": False, "data__tokenizer": "words(40)", "train__steps": 3}
    fields |= {"plan__name": "single", "plan__fsdp": 1}
    result = train(tmp_path, **fields)
    assert np.isfinite(result.heldout["loss"])
    sample_text(result.model, result.params, result.dataset.tokenizer, 5)
    assert train(tmp_path, **fields).heldout == result.heldout
