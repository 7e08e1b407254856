"""Estimates of techniques for a device: limits of the roofline, FLOPs of a changed model, and the error from a report."""

import dataclasses
import json
import math
import shutil

import pytest

from hpnlp import measure, planner
from hpnlp.advise import AdviseSettings, Goal, estimates
from hpnlp.advise.candidate import Candidate
from hpnlp.advise.estimates import HERE, estimate, render, write
from hpnlp.compress.files import encoding_of, write_weights
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.planner import devices
from hpnlp.training.config import default, resolve
from hpnlp.training.run_directory import load
from tests import tiny
from tests.advise.test_search import trained  # noqa: F401  (fixture)
from tests.messages import raises

PRUNED = AdviseSettings(only=("layers(1)", "mlp(0.5)", "int8", "bf16", "heads(0.5)", "model.dtype=bfloat16"))


def of_device(monkeypatch, **changes):
    monkeypatch.setitem(planner.DEVICES, "h100", dataclasses.replace(planner.DEVICES["h100"], **changes))


def quiet(source, device="h100", settings=PRUNED, **options):
    return estimate(source, device, settings, log=lambda line: None, **options)


def test_times_are_those_of_products_or_of_memory(trained, monkeypatch):  # noqa: F811
    of_device(monkeypatch, memory_bandwidth=math.inf, flops=dict.fromkeys(("float32", "bfloat16", "int8"), 1e12))
    for row in quiet(trained).rows:
        assert row.ratio == pytest.approx(row.flops)
    of_device(monkeypatch, memory_bandwidth=1e12, fuses_attention=False, flops={"float32": math.inf})
    for row in quiet(trained).rows:
        assert row.ratio == pytest.approx(row.bytes)


def test_flops_are_those_of_the_changed_model():
    config = tiny.make(model__layers=2)
    (row,) = quiet(config, settings=AdviseSettings(only=("layers(1)",), batch_size=2)).rows

    def flops(layers):  # of one token: two for each weight of a matrix, and scores and values of one key
        dim, columns = config.model.dim, config.model.mlp_dim
        return layers * (2 * (4 * dim**2 + 3 * dim * columns) + 4 * dim) + 2 * 264 * dim  # bytes and special tokens

    assert row.flops == pytest.approx(flops(1) / flops(2), rel=1e-6)


def test_the_error_is_that_of_measured_techniques(trained, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(devices, "this_cpu", lambda count: planner.DEVICES["a100"])
    here = quiet(trained, HERE)
    assert here.error is None and "Their error is not known" in render(here)
    factors = [0.8, 1.1, 1.3, 0.9, 1.0, 1.05]
    findings = [
        {"name": row.name, "ratio": {"median": row.ratio * factor}, "candidate": {"techniques": [row.name]}}
        for row, factor in zip(here.rows, factors, strict=True)
    ]
    report = {
        "workload": dataclasses.asdict(here.workload),
        "settings": {"goal": "latency", "changes": {"data.path": "other.csv"}},
        "machine": {**measure.environment(), "backend": "cpu"},
        "findings": findings,
    }
    (tmp_path / "advise.json").write_text(json.dumps(report))
    result = quiet(trained, directory=tmp_path)
    assert result.error == pytest.approx(1.3) and result.measured == len(factors)
    first = result.rows[0]
    assert f"({first.ratio / 1.3:.2f} to {first.ratio * 1.3:.2f})" in render(result)
    paths = write(result, tmp_path)
    assert json.loads(paths[1].read_text())["rows"][0]["name"] == first.name
    other = quiet(trained, directory=tmp_path, settings=dataclasses.replace(PRUNED, batch_size=4))
    assert other.error is None  # the report is of another call
    disk, shorter = {"goal": "disk", "changes": {}}, {"goal": "latency", "changes": {"data.seq_len": 8}}
    for change in {"settings": disk}, {"settings": shorter}, {"machine": {**report["machine"], "backend": "gpu"}}:
        (tmp_path / "advise.json").write_text(json.dumps(report | change))
        assert not estimates._measured_ratios(tmp_path, estimates._Estimator.of(trained, PRUNED))


def test_training_steps_and_their_memory():
    config = tiny.make()
    training = quiet(
        config, settings=AdviseSettings(Goal.TRAINING, only=("model.dtype=bfloat16", "model.mixer=linear"))
    )
    assert {row.name for row in training.rows} == {"model.dtype=bfloat16", "model.mixer=linear"}
    memory = quiet(config, settings=AdviseSettings(Goal.MEMORY, only=("plan.remat=full", "optimizer.accumulate=4")))
    assert all(row.ratio < 1 for row in memory.rows) and " MB for the model as it is" in render(memory)


def test_memory_is_that_of_the_state_as_well():
    config = tiny.make(model__vocab=40_000, data__batch_size=1, optimizer__name="adamw")
    memory = quiet(config, settings=AdviseSettings(Goal.MEMORY, only=("optimizer.name=sgd",)))
    assert memory.seconds > 3 * 4 * 40_000 * config.model.dim  # a table and its two moments
    assert memory.rows[0].ratio < 0.9  # one moment less


def test_a_compressed_run_has_new_weights_where_its_own_do_not_fit(trained, tmp_path):  # noqa: F811
    run = Candidate(("int8",), "int8").applied(load(trained), None)
    source = shutil.copytree(trained, tmp_path / "int8", ignore=shutil.ignore_patterns("checkpoints"))
    write_weights(source / WEIGHTS_FILE, run.params, {"step": run.step}, encoding_of)
    result = quiet(source, settings=AdviseSettings(only=("model.mixer=gla", "model.dtype=bfloat16", "bf16")))
    assert {row.name for row in result.rows} == {"model.mixer=gla", "model.dtype=bfloat16"}
    assert "is compressed already" in result.refused["bf16"]


def test_models_without_a_field_and_runs_on_many_devices():
    values = default("rnn_lm")
    values.update_from_flattened_dict({"plan.name": "zero3", "plan.fsdp": 64, "train.weights": "int8"})
    only = ("model.mixer=linear", "model.dtype=bfloat16", "data.packing=fit")
    result = quiet(resolve(values), settings=AdviseSettings(Goal.TRAINING, only=only, batch_size=2))
    assert [row.name for row in result.rows] == ["model.dtype=bfloat16"]
    assert result.refused["model.mixer=linear"] == "rnn_lm has no model.mixer" and "data.packing=fit" in result.refused


def test_unknown_devices_and_disks_raise(trained):  # noqa: F811
    raises("unknown device 'h300'", quiet, trained, "h300")
    raises("bytes on disk do not depend on the device", quiet, trained, settings=AdviseSettings(Goal.DISK))
