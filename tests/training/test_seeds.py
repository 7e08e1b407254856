"""Runs of several seeds as one program: each equals the run of its seed alone, and runs that cannot be so."""

import json
import re
import shutil
import signal

import jax
import numpy as np
import pytest

from hpnlp.cli import train as command
from hpnlp.jobs import seeds
from hpnlp.jobs.seeds import train_seeds
from hpnlp.training import loop
from hpnlp.training.run_directory import load
from hpnlp.types import InputError
from tests import tiny
from tests.messages import raises


@pytest.mark.slow
def test_members_equal_runs_of_their_seeds(tmp_path):
    """With dropout and clipping, which differ between members; `loop.train` only adds the scores.

    By SGD: Adam would divide gradients that are 0 but for rounding by their size.
    """
    fields = {"train__steps": 4, "train__log_every": 1, "model__dropout": 0.2, "optimizer__clip_norm": 0.5}
    fields |= {"optimizer__name": "sgd", "optimizer__learning_rate": 0.3}
    paths = train_seeds(tiny.make(**fields), [3, 1], tmp_path).paths
    assert [path.name for path in paths] == ["seed_3", "seed_1"]
    for path, seed in zip(paths, (3, 1), strict=True):
        config = tiny.make(**fields, train__seed=seed)
        alone = loop.train(config, tmp_path / f"alone_{seed}")
        for actual, expected in zip(jax.tree.leaves(load(path).params), jax.tree.leaves(alone.params), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-6)
        lines, others = (
            [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
            for where in (path, tmp_path / f"alone_{seed}")
        )
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        np.testing.assert_allclose([x["loss"] for x in lines], [x["loss"] for x in others], rtol=1e-5)
        again = loop.train(config, path)
        assert again.step == 4 and again.heldout["loss"] == pytest.approx(alone.heldout["loss"], rel=1e-4)
    assert load(paths[0]).config.train.seed == 3
    shutil.rmtree(tmp_path / "seed_1")
    for others in ([3, 2], [3, 1]):
        message = (
            f"seed_3 has step 4, seed_{others[1]} has no checkpoint: .* with --seeds=3 and --seeds={others[1]}, or"
        )
        with pytest.raises(InputError, match=message):
            train_seeds(tiny.make(**fields), others, tmp_path)
    # The command of the message, and longer training of both.
    train_seeds(tiny.make(**fields), [1], tmp_path)
    longer = tiny.make(**fields | {"train__steps": 5})
    raises("--accept_changes to resume", train_seeds, longer, [3, 1], tmp_path)
    assert train_seeds(longer, [3, 1], tmp_path, accept_changes=True).step == 5


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1, None])
def test_members_resume(tmp_path, monkeypatch, capsys, killed):
    """After a signal (None), and after a kill between the saves of two members, at the first and at a later checkpoint."""
    fields = {"train__steps": 6, "train__log_every": 1, "train__checkpoint_every": 2, "model__dropout": 0.2}
    config = tiny.make(**fields)
    expected = train_seeds(config, [3, 1], tmp_path / "whole").paths
    saves, save = [], seeds._Member.save

    def interrupted_save(member, state):
        saves.append(int(state.step))
        if killed is not None and len(saves) == 2 * killed + 2:
            raise KeyboardInterrupt
        save(member, state)
        if killed is None and len(saves) == 1:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(seeds._Member, "save", interrupted_save)
    if killed is None:
        result = train_seeds(config, [3, 1], tmp_path)
        assert result.interrupted == "SIGTERM" and 2 <= result.step <= 3
        assert f"SIGTERM: saved step {result.step}; the same command goes on from there" in capsys.readouterr().out
    else:
        with pytest.raises(KeyboardInterrupt):
            train_seeds(config, [3, 1], tmp_path)
    monkeypatch.setattr(seeds._Member, "save", save)
    result = train_seeds(config, [3, 1], tmp_path)
    assert result.step == 6 and result.interrupted == ""
    first = {None: "going on from step [23]: ", 0: "starting: ", 1: "going on from step 2: "}[killed]
    assert re.search(f"{first}2 seeds as one program, 6 steps of 8 x", capsys.readouterr().out)
    for path, other in zip(result.paths, expected, strict=True):
        assert (path / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
        jax.tree.map(np.testing.assert_array_equal, load(path).params, load(other).params)
    assert train_seeds(config, [3, 1], tmp_path).step == 6
    assert capsys.readouterr().out.startswith("finished before, at step 6: 2 seeds as one program")


@pytest.mark.slow
def test_signals_at_any_time_save_the_last_step(tmp_path, monkeypatch):
    """Also those that arrive between steps; and a member that has gone on alone is not changed."""
    fields = {"train__log_every": 1, "train__checkpoint_every": 2, "train__keep": 3}
    config, write, saved = tiny.make(train__steps=8, **fields), seeds.JsonlWriter.write, []

    def interrupted_write(writer, step, values):
        write(writer, step, values)
        if step == 5:  # after the check for signals, and no checkpoint is due
            signal.raise_signal(signal.SIGTERM)

    def recording_save(member, state):
        saved.append([max(map(int, _steps(tmp_path / name)), default=0) for name in ("seed_3", "seed_1")])
        save(member, state)

    save = seeds._Member.save
    monkeypatch.setattr(seeds.JsonlWriter, "write", interrupted_write)
    monkeypatch.setattr(seeds._Member, "save", recording_save)
    result = train_seeds(config, [3, 1], tmp_path)
    monkeypatch.undo()
    assert (result.step, result.interrupted) == (6, "SIGTERM")
    # A checkpoint is begun when those of the step before are complete, so that a kill leaves one of a common step.
    assert saved[::2] == [[0, 0], [2, 2], [4, 4]]
    assert _steps(tmp_path / "seed_3") == _steps(tmp_path / "seed_1") == ["2", "4", "6"]
    with pytest.raises(InputError, match=r"train.steps: 8 -> 9\): choose another workdir, or pass --accept_changes"):
        train_seeds(tiny.make(train__steps=9, **fields), [3, 1], tmp_path)
    alone = tiny.make(train__steps=8, train__seed=3, **fields)
    assert loop.train(alone, tmp_path / "seed_3").step == 8
    raises("do not go on from one step: seed_3 has step 8, seed_1 has step 6", train_seeds, config, [3, 1], tmp_path)
    assert _steps(tmp_path / "seed_3") == ["4", "6", "8"]
    loop.train(tiny.make(train__steps=8, train__seed=1, **fields), tmp_path / "seed_1")
    more = tiny.make(train__steps=9, **fields)
    assert train_seeds(more, [3, 1], tmp_path, accept_changes=True).step == 9
    assert train_seeds(more, [3, 1], tmp_path).step == 9
    raises("train.steps=8: the run in .*seed_3 has reached", train_seeds, config, [3, 1], tmp_path, accept_changes=True)


def _steps(path):
    return sorted(step.name for step in (path / "checkpoints").iterdir() if step.name.isdecimal())


def test_invalid_arguments_raise(tmp_path):
    for numbers, fields, message in (
        ([], {}, r"seeds=\[\]: expected different numbers from 0 to 4294967295, at least one"),
        ([-1], {}, r"seeds=\[-1\]: expected different numbers from 0"),
        ([0], {"train__patience": 2, "train__eval_every": 1}, "train.patience=2: seeds .* have the same steps.*leave"),
        ([0], {"optimizer__average": "ntasgd(2)", "train__eval_every": 1}, r"optimizer.average='ntasgd\(2\)': seeds"),
        ([0], {"train__writers": "tensorboard"}, "train.writers='tensorboard': seeds .* write metrics.jsonl only"),
        ([0], {"model__mlp": "top_k(4,2)"}, r"model.mlp='top_k\(4,2\)': the loops .*: train the seeds one after"),
        ([0], {"train__debug_nans": True}, "train.debug_nans=True: seeds"),
        ([0, 1], {"train__seed": 7}, r"train.seed=7, seeds=\[0, 1\]: both set the seeds of the runs: leave out"),
        ([0], {"optimizer__accumulate": 3}, "data.batch_size=8 does not split into 1 device's"),
    ):
        raises(message, train_seeds, tiny.make(**fields), numbers, tmp_path)


def test_members_stop_where_runs_of_their_seeds_would():
    """Not at single steps that are skipped, such as the last one, nor at those that lower a loss scale."""
    skipped, scale = np.array([0.0, 1.0]), np.array([1.0, 2.0**15])
    skips = np.array([0, loop.MAX_NONFINITE_STEPS - 2])
    skips = loop.count_skips(skips, {"skipped": skipped})
    np.testing.assert_array_equal(skips, [0, loop.MAX_NONFINITE_STEPS - 1])
    for line in ({"skipped": skipped, "loss_scale": scale}, {"skipped": 0 * skipped}):
        np.testing.assert_array_equal(loop.count_skips(skips, line), [0, 0])
    for skip_nonfinite, after in ((True, skips), (False, 0 * skips)):
        config = tiny.make(optimizer__skip_nonfinite=skip_nonfinite)
        seeds._check_skips(after, [3, 1], config)
        with pytest.raises(InputError, match="the loss of seed 1 or its gradient is not finite: lower"):
            seeds._check_skips(loop.count_skips(after, {"skipped": skipped}), [3, 1], config)


def test_seeds_that_are_no_numbers_raise():
    raises("--seeds=0,x: 'x' is no whole number: write --seeds=0,1,2", command._numbers, ["0", "x"])
