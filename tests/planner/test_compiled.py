"""Steps compiled for devices that do not exist, beside their plans."""

import os
from types import SimpleNamespace

import jax
import pytest
from jax.experimental import topologies

from hpnlp.data.stream import DataConfig
from hpnlp.models.lm import LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.planner import compiled, costs
from hpnlp.planner.collectives import total
from hpnlp.planner.estimate import planned_trainer
from hpnlp.planner.memory import held_bytes
from hpnlp.training.config import Config
from tests.messages import raises
from tests.planner.common import planned


@pytest.mark.slow
def test_compiled_step_matches_its_plan():
    estimate = planned(Plan("data", data=2, fsdp=2, tensor=2, zero=3))
    step = compiled.compile_step(estimate, "compiled", "h100")
    assert step.arguments == pytest.approx(held_bytes(planned_trainer(estimate.config, 8).state_shapes), rel=0.05)
    assert step.collectives is not None
    assert total(step.collectives) == pytest.approx(total(estimate.collectives), rel=0.02)


@pytest.mark.parametrize(
    ("device", "count", "name", "host"),
    [
        ("v5e", 1, "v5e:1x1", (1, 1, 1)),
        ("v5e", 2, "v5e:1x2", (1, 2, 1)),
        ("v5e", 7, "v5e:1x7", (1, 1, 1)),
        ("v5e", 8, "v5e:2x4", (2, 2, 1)),
        ("v5p", 1, "v5p:1x1x1", (1, 1, 1)),
        ("v5p", 12, "v5p:2x2x3", (2, 2, 1)),
        ("v5p", 512, "v5p:8x8x8", (2, 2, 1)),
    ],
)
def test_tpu_slice_has_sides_that_its_hosts_divide(monkeypatch, device, count, name, host):
    arguments = {}

    def describe(**kwargs):
        arguments.update(kwargs)
        return SimpleNamespace(devices=[object()] * count)

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(os, "environ", {"TPU_WORKER_HOSTNAMES": "mine"})
    assert len(compiled.tpu_devices(device, count)) == count
    assert arguments == {"platform": "tpu", "topology_name": name, "chips_per_host_bounds": host}
    # Variables that are set stay.
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "mine" and os.environ["TPU_SKIP_MDS_QUERY"] == "1"


def test_missing_tpu_slice_raises(monkeypatch):
    def fail(**_):
        raise RuntimeError("no such\nlayout")

    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    monkeypatch.setattr(os, "environ", {})
    message = r"no TPU slice v5e:1x3 \(no such layout\): install libtpu \(pip install '.\[tpu-aot\]'"
    raises(message, compiled.tpu_devices, "v5e", 3)


def test_unreadable_program_is_compared_without_communication(monkeypatch):
    """jaxlib cannot read the programs of a newer libtpu."""

    def fail(_):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    model = LMConfig(layers=1, dim=32, heads=2, vocab=264)
    config = Config(model=model, data=DataConfig(seq_len=32, batch_size=2), plan=Plan("single"))
    estimate = costs(config, 1)
    monkeypatch.setattr(jax.stages.Compiled, "as_text", fail)
    table = compiled.compare(estimate, "compiled", "cpu")
    assert "\ntemporaries, bytes " in table and table.endswith(
        "The communication was not compared: it cannot be read from the text of the compiled program."
    )
    assert "communication, bytes" not in table
