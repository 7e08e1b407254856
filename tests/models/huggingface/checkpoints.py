"""Makes, changes and compares small checkpoints, for tests."""

import json

import flax.linen as nn
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hpnlp.models import variables
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.types import InputError

SMALL = {"dim": 8, "heads": 2, "layers": 2, "vocab": 12, "max_len": 16, "mlp_dim": 24}
GPT2 = {"norm": "layer", "position": "learned", "qkv_bias": True, "out_bias": True, "mlp_bias": True}


def make(**fields):
    """(config, random weights)."""
    config = LMConfig(**SMALL | fields)
    initial = jax.eval_shape(lambda: nn.meta.unbox(LM(config).init(jax.random.key(0), example_batch(1, 2))))
    shapes = variables.join(initial["params"], initial.get("buffers"))
    rng = np.random.default_rng(0)
    return config, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


def assert_same(params, expected):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def edit(directory, absent=(), **changes):
    """Changes values of config.json and removes the keys `absent`."""
    raw = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key not in absent}))


def edit_tensors(directory, change):
    """Calls `change` with the tensors of the checkpoint, and saves them again."""
    path = directory / "model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)


def assert_raises(pattern, call, *args, **options):
    """Checks that the call raises an InputError with a message of one line."""
    with pytest.raises(InputError, match=pattern) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
