"""Programs that are compiled for devices that are not there."""

import os
from types import SimpleNamespace

import jax
import pytest
from jax.experimental import topologies

from hpnlp.data.stream import DataConfig
from hpnlp.models.lm import LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.planner import compiled, costs
from hpnlp.training.config import Config
from hpnlp.types import InputError


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
def test_a_slice_is_asked_for_whose_hosts_divide_it(monkeypatch, device, count, name, host):
    asked = {}

    def described(**what):
        asked.update(what)
        return SimpleNamespace(devices=[object()] * count)

    monkeypatch.setattr(topologies, "get_topology_desc", described)
    monkeypatch.setattr(os, "environ", {"TPU_WORKER_HOSTNAMES": "mine"})
    assert len(compiled.tpus(device, count)) == count
    assert asked == {"platform": "tpu", "topology_name": name, "chips_per_host_bounds": host}
    # What somebody has set stays so.
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "mine" and os.environ["TPU_SKIP_MDS_QUERY"] == "1"


def test_a_slice_that_there_is_not_is_told(monkeypatch):
    def described(**_):
        raise RuntimeError("no such\nlayout")

    monkeypatch.setattr(topologies, "get_topology_desc", described)
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(InputError, match=r"no TPU slice v5e:1x3 \(no such layout\): pip install '.\[tpu-aot\]'"):
        compiled.tpus("v5e", 3)


def test_a_program_whose_text_cannot_be_had_is_compared_in_memory(monkeypatch):
    """As where jaxlib reads what a newer libtpu has written."""

    def unreadable(_):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    config = Config(model=LMConfig(layers=1, dim=32, heads=2, vocab=264), data=DataConfig(seq_len=32, batch_size=2))
    found = costs(Config(model=config.model, data=config.data, plan=Plan("single")), 1)
    monkeypatch.setattr(jax.stages.Compiled, "as_text", unreadable)
    said = compiled.compare(found, "compiled", "cpu")
    assert "\ntemporaries, bytes " in said and said.endswith(
        "What is sent could not be compared: the compiled program's text does not tell it."
    )
    assert "all that is sent" not in said
