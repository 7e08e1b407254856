"""A small text, model and run for tests. The module is also an experiment file for tests of commands."""

import functools
import os
import random
import shutil
import signal
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from hpnlp import report
from hpnlp.training import loop
from hpnlp.training.config import default, resolve
from hpnlp.training.trainer import make_trainer

EXPERIMENT = str(Path(__file__))
SENTENCE = "the quick brown fox jumps over a lazy dog while seven wizards brew potions in old copper kettles"
WORDS = SENTENCE.split()


def get_config():
    config = default()
    config.data.update(path=os.environ["HPNLP_TEST_TEXT"], seq_len=16, batch_size=8)
    config.model.update(layers=2, dim=16, heads=2, mlp_dim=32, unroll=1)
    config.optimizer.update(warmup=0, learning_rate=3e-3)
    config.train.update(steps=12, log_every=3, checkpoint_every=5, sample=0)
    config.plan.name = "single"  # programs for eight devices take longer to compile
    return config


def make(**overrides):
    """The Config with overrides, given as section__field=value."""
    values = get_config()
    values.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    return resolve(values)


@pytest.fixture(scope="session", autouse=True)
def text(tmp_path_factory):
    """A directory of small text files. Environment variables pass it and a cache directory to processes that tests start."""
    root = tmp_path_factory.mktemp("tiny")
    draw = random.Random(0)
    for i in range(12):
        lines = [" ".join(draw.choices(WORDS, k=8)) for _ in range(20)]
        (root / "text").mkdir(exist_ok=True)
        (root / "text" / f"{i:02}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPNLP_TEST_TEXT", str(root / "text"))
        patch.setenv("HPNLP_CACHE", str(root / "cache"))
        yield root / "text"


def interrupt(config, workdir, step):
    """Runs `loop.train` until a SIGTERM after the line of `step` is written."""

    class Writer(loop.JsonlWriter):
        def write(self, number, values):
            super().write(number, values)
            if number == step and "loss" in values:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "JsonlWriter", Writer)
        assert loop.train(config, workdir).interrupted


def copy_run(workdir):
    """Copies a run of two steps, with its report, that the session trains once."""
    source = Path(os.environ["HPNLP_TEST_TEXT"]).parent / "run"
    if not source.exists():
        config = make(train__steps=2)
        report.write(source, config, loop.train(config, source), "--config=tests/tiny.py")
    return shutil.copytree(source, workdir)


shared_trainer = functools.lru_cache(maxsize=32)(make_trainer)


@pytest.fixture(scope="module", autouse=True)
def shared_trainers():
    """Runs of equal models, optimizers and plans share a trainer in all files, so that its programs are traced once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_trainer", shared_trainer)
        yield


@pytest.fixture(scope="session")
def xla_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module", autouse=True)
def quick_compiler(xla_cache):
    """Disables LLVM's optimizations, which take longer than they save, and caches compiled programs for the session."""
    options = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(xla_cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_disable_most_optimizations": True,
    }
    previous = {name: jax.config.values[name] for name in options}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        reset_cache()  # the cache reads its options only once
        yield
    for name, value in previous.items():
        jax.config.update(name, value)
    reset_cache()
