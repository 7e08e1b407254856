"""The README and the documentation: their Python runs, their commands parse, and their example mask is a correct one."""

import functools
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

from hpnlp.cli import experiment
from hpnlp.ops.attention import Causal, Where, attend, reference
from hpnlp.ops.attention.block_sparse import block_mask
from hpnlp.training.config import resolve
from tests.contracts import assert_close, once
from tests.tiny import quick_compiler, xla_cache  # noqa: F401  (fixtures)

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path, language):
    """Contents of the fenced code blocks of a page."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [content for name, content in fenced if name == language]


@functools.cache
def run_page(path, directory):
    """Names that the Python blocks of a page define, run one after another as a reader would, and once."""
    defined = {"__name__": __name__}  # where a dataclass looks up its module
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for block in blocks(path, "python"):
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
    for block in blocks(path, ""):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "hpnlp" in words:
                yield words[words.index("hpnlp") + 1 :]


def test_commands_parse():
    """Every config field in a command exists and holds the value, and every experiment file is there."""
    parsed = 0
    for path in PAGES:
        for name, *arguments in commands(path):
            config = next((a.partition("=")[2] for a in arguments if a.startswith("--config=")), None)
            if name not in ("train", "plan", "sweep") or config is None or config.endswith((":DIR", ":runs/bytes")):
                continue
            resolve(experiment.read(str(ROOT / config), [a for a in arguments if a.startswith("--config.")]))
            parsed += 1
    assert parsed > 15


@pytest.fixture(scope="module")
def names(directory):
    defined = run_page(ROOT / "docs/guide/attention.md", directory)
    assert (directory / "near.png").stat().st_size > 10_000
    return defined


def test_both_forms_of_the_example_mask_are_equal(names):
    near, mask = names["near"], names["Near"](32, 2)
    dense = mask.to_dense(200, 170)
    np.testing.assert_array_equal(dense, Where(near).to_dense(200, 170))
    assert 0 < dense.mean() < 0.2


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
