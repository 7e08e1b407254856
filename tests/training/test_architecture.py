"""The record of a model's fields beside its parameters, and the changes of config.json that it refuses."""

import dataclasses

import pytest

from hpnlp.atomic_file import replace_bytes
from hpnlp.training.config import resolve, to_json
from hpnlp.training.config_file import load_config, write_config
from hpnlp.training.files.claim import claimed
from hpnlp.training.starts import architecture
from hpnlp.types import InputError
from tests.messages import raises


@pytest.fixture
def run(tmp_path):
    """`run(**fields)` writes config.json with these fields of the model, beside the record of a model with 2 heads."""
    base = {"dim": 16, "heads": 2, "layers": 1, "mlp_dim": 32}
    write_config(tmp_path, resolve({"model": base}))

    def write(**fields):
        replace_bytes(tmp_path / "config.json", to_json(resolve({"model": base | fields})).encode())
        return tmp_path

    return write


def test_changed_fields_of_the_model_raise(run):
    for fields, message in (
        ({"heads": 4}, "config.json has model.heads=4, and its parameters were trained with model.heads=2"),
        ({"mixer": "window(4,0)"}, "has model.mixer='window.4,0.', and .* trained with model.mixer='full'"),
    ):
        raises(message, load_config, run(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"dropout": 0.5, "dtype": "bfloat16", "unroll": 1},
        {"kv_heads": 2, "head_dim": 8},
        {"max_len": 64},
        {"mixer": "full*2"},
    ],
    ids=["not of the result", "written out", "unused", "the same mixers"],
)
def test_changes_that_compute_the_same_are_read(run, fields):
    config = load_config(run(**fields))
    assert all(getattr(config.model, name) == value for name, value in fields.items())


@pytest.mark.parametrize(
    ("mlp", "form"),
    [
        ("top_k(4,2,balance=0.1,z=0.2,impl=dense,exchange_capacity=2.0)", "block"),
        ("top_k(4,2)", "block(mlp='gshard(4)'),block(mlp='top_k(4,2)')"),
    ],
    ids=["model.mlp", "model.form"],
)
def test_arguments_of_routers_for_training_only_may_change(tmp_path, mlp, form):
    def config(mlp, form):
        return resolve({"model": {"dim": 16, "heads": 2, "layers": 2, "mlp_dim": 8, "mlp": mlp, "form": form}})

    free = "exchange_capacity=1.5"
    trained = config("top_k(4,2)", form.replace("gshard(4)", f"gshard(4,threshold=0.1,{free})"))
    write_config(tmp_path, trained)
    changed = config(mlp, form)
    replace_bytes(tmp_path / "config.json", to_json(changed).encode())
    assert load_config(tmp_path).model == changed.model
    replace_bytes(tmp_path / "config.json", to_json(config("top_k(4,2,gates=softmax)", form)).encode())
    raises("model.mlp='top_k.4,2,gates=softmax.'", load_config, tmp_path)


def test_records_of_other_versions_are_read(run):
    workdir = run()
    record = workdir / architecture.RECORD
    record.write_text(
        record.read_text().replace('"heads": 2', '"heads": 2, "later": 3').replace('"norm_eps"', '"earlier"')
    )
    assert load_config(run(norm_eps=0.1)).model.norm_eps == 0.1
    raises("model.heads=4", lambda: load_config(run(heads=4)))
    record.write_text("[")
    raises("cannot read .*model.json .*restore it, or remove it", load_config, workdir)
    record.unlink()
    assert load_config(run(heads=4)).model.heads == 4


def test_changes_are_accepted_by_the_run_itself_alone(run):
    workdir = run(heads=4)
    (workdir / "metrics.jsonl").write_text("{}\n")
    config = load_config(workdir, is_checked=False)
    with pytest.raises(InputError, match="model.heads=4"), claimed(workdir, config, False):
        pass
    with claimed(workdir, config, True):
        write_config(workdir, config)
    assert dataclasses.asdict(load_config(workdir)) == dataclasses.asdict(config)
