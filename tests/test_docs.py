"""The README and the documentation: their Python runs, their commands parse, and their examples are correct."""

import contextlib
import functools
import itertools
import json
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

from hpnlp import cli
from hpnlp.cli import experiment, fields
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.ops.attention import Causal, Where, attend, reference
from hpnlp.ops.attention.block_sparse import block_mask
from hpnlp.ops.attention.masks.table import MASKS
from hpnlp.parallel.plan import Plan
from hpnlp.training import loop
from hpnlp.training.config import resolve
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from tests import contracts, test_contracts
from tests.contracts import assert_close, once
from tests.mixer_cases.exact import SOFTMAX
from tests.tiny import WORDS, quick_compiler, xla_cache  # noqa: F401  (fixtures)

ROOT = Path(__file__).parents[1]
EXTENDING, TASKS_PAGE = ROOT / "docs/guide/extending.md", ROOT / "docs/guide/tasks.md"
MIXERS_PAGE = ROOT / "docs/guide/mixers.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path, language):
    """Contents of the fenced code blocks of a page."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [content for name, content in fenced if name == language]


def files(path):
    """Python blocks of a page that are files: name -> content. Their first line is a comment with the name."""
    named = [(re.match(r"# (\w+\.py)\n", block), block) for block in blocks(path, "python")]
    return {match[1]: block for match, block in named if match}


@contextlib.contextmanager
def unchanged_tables():
    """Removes the entries that are added to tables, and restores those that are replaced."""
    tables = [*fields.tables().values(), MASKS, SOFTMAX, contracts.REFERENCES]
    before = [(table, dict(table)) for table in tables if isinstance(table, dict)]
    try:
        yield
    finally:
        for table, entries in before:
            table.clear()
            table.update(entries)


@functools.cache
def run_page(path, directory):
    """Names that the Python blocks of a page define, run one after another as a reader would, and once."""
    defined = {"__name__": __name__}  # where a dataclass looks up its module
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for block in blocks(path, "python"):
            if block not in files(path).values():
                exec(compile(block, str(path), "exec"), defined)
    return defined


@pytest.fixture(scope="module")
def directory(tmp_path_factory, quick_compiler):  # noqa: F811
    return tmp_path_factory.mktemp("reader")


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p, "python")], ids=lambda path: path.stem)
def test_python_blocks_run(path, directory):
    run_page(path, directory)


def commands(path):
    """`hpnlp` commands of a page, as lists of words."""
    for block in [*blocks(path, ""), *blocks(path, "sh")]:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "hpnlp" in words:
                yield words[words.index("hpnlp") + 1 :]


def flags(arguments, name):
    return [argument.partition("=")[2] for argument in arguments if argument.startswith(f"--{name}=")]


@pytest.mark.slow
def test_commands_parse(own):
    """Every config field in a command exists and holds the value, and every experiment file is there."""
    parsed = 0
    for name, *arguments in dict.fromkeys(tuple(words) for path in PAGES for words in commands(path) if words):
        (config,) = flags(arguments, "config") or [""]
        others, overrides = experiment.split([name, *arguments])
        if (
            name not in ("train", "plan", "sweep")
            or config.startswith("lm/finetune:")  # of a directory that an earlier command of the page makes
            or not (config or overrides)
        ):
            continue
        file = str(own / config) if config and (own / config).exists() else config
        with unchanged_tables():
            cli.register(str(own / file) for file in flags(others, "register"))
            resolve(experiment.read(experiment.start(file, overrides), overrides))
        parsed += 1
    assert parsed > 20


@pytest.fixture(scope="module")
def own(directory):
    """Directory with the files of the pages on entries of one's own."""
    for name, content in (files(EXTENDING) | files(MIXERS_PAGE)).items():
        (directory / name).write_text(content)
    return directory


@pytest.fixture
def registered(own):
    with unchanged_tables():
        cli.register(str(own / name) for name in files(EXTENDING))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["ema", "log_sparse"])
def test_example_mixers_meet_the_contracts(registered, spec):
    test_contracts.test_mixer_matches_its_reference((spec, 37, "float32", 0, Causal()))
    test_contracts.test_mixer_with_cache_matches_full_pass(spec)


@pytest.mark.slow
def test_example_entries_train_together(registered):
    config = LMConfig(
        layers=2, dim=16, heads=2, vocab=40, mixer="ema(0.8),log_sparse", output="cosine(8.0)", tied=False
    )
    optimizer = OptimizerConfig(name="signum", learning_rate=1e-2, warmup=0)
    trainer = make_trainer(LM(config), optimizer, Plan("single"), steps=9)
    state, batch, losses = trainer.init(jax.random.key(0)), example_batch(4, 12), []
    for step in range(4):
        state, metrics = trainer.step(state, batch, jax.random.key(step))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_example_task_trains(own, registered, tmp_path):
    lines = [json.dumps({"text": f"the {a} sees a {b} near {c}"}) for a, b, c in itertools.permutations(WORDS[:6], 3)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    changed = {"data.path": tmp_path / "texts.jsonl", "data.cache": tmp_path, "train.steps": 2, "model.dim": 16}
    overrides = [f"--config.{name}={value}" for name, value in changed.items()]
    config = resolve(experiment.read(str(own / "word_order.py"), overrides))
    result = loop.train(config, tmp_path / "run")
    assert result.dataset.labels == ("in order", "shuffled") and 0 < result.heldout["accuracy"] <= 1
    ((label, probability),) = run_page(TASKS_PAGE, own)["classify"](tmp_path / "run", ["the fox sees a dog near the"])
    assert label in ("in order", "shuffled") and 0.5 <= probability <= 1


@pytest.fixture(scope="module")
def names(directory):
    """Names of the section on masks of one's own; `test_python_blocks_run` runs the whole page."""
    defined = {"__name__": __name__}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for block in blocks(ROOT / "docs/guide/attention.md", "python"):
            if "near" in block.lower():
                exec(compile(block, "attention.md", "exec"), defined)
    assert (directory / "near.png").stat().st_size > 10_000
    return defined


@pytest.mark.slow
def test_both_forms_of_the_example_mask_are_equal(names):
    near, mask = names["near"], names["Near"](32, 2)
    dense = mask.to_dense(200, 170)
    np.testing.assert_array_equal(dense, Where(near).to_dense(200, 170))
    assert 0 < dense.mean() < 0.2


@pytest.mark.slow
def test_tiles_of_the_example_mask_are_sound(names):
    mask = names["Near"](10, 1)
    dense, tiles = mask.to_dense(203, 170), block_mask.active_tiles(mask, 203, 170, 8, 16)
    covered = np.zeros_like(dense)
    for row, column in zip(tiles.rows, tiles.columns, strict=True):
        covered[row * 8 : (row + 1) * 8, column * 16 : (column + 1) * 16] = True
    assert covered[dense].all() and covered.mean() < 0.5 and not tiles.every.any()


def test_attention_with_the_example_mask_matches_reference(names):
    q, k, v = (jax.random.normal(key, (1, 150, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))
    near = names["Near"](16, 1)
    for mask in (near, Where(names["near"]), Causal() & ~near):
        found, expected = (
            once(jax.value_and_grad(lambda q, f=f, mask=mask: (f(q, k, v, mask) ** 2).sum()), q)
            for f in (attend, reference)
        )
        assert_close(found[1], expected[1])
