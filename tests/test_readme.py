"""What the README shows in Python runs, and does what it says."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from hpnlp.ops.attention import Causal, Where, attend, reference
from hpnlp.ops.attention.block_sparse import block_mask
from tests.contracts import assert_close, once
from tests.tiny import quick_compiler, xla_cache  # noqa: F401  (fixtures)

BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (Path(__file__).parents[1] / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module")
def names(tmp_path_factory, quick_compiler):  # noqa: F811
    """All that its blocks define, run one after another as a reader would."""
    defined = {"__name__": __name__}  # where a dataclass looks up its module
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("reader"))
        for block in BLOCKS:
            exec(compile(block, "README.md", "exec"), defined)
        assert Path("near.png").stat().st_size > 10_000
    return defined


def test_a_mask_of_ones_own_says_the_same_in_both_forms(names):
    near, mask = names["near"], names["Near"](32, 2)
    dense = mask.to_dense(200, 170)
    np.testing.assert_array_equal(dense, Where(near).to_dense(200, 170))
    assert 0 < dense.mean() < 0.2


def test_its_tiles_are_sound_and_leave_most_out(names):
    mask = names["Near"](10, 1)
    dense, tiles = mask.to_dense(203, 170), block_mask.live(mask, 203, 170, 8, 16)
    covered = np.zeros_like(dense)
    for row, column in zip(tiles.rows, tiles.columns, strict=True):
        covered[row * 8 : (row + 1) * 8, column * 16 : (column + 1) * 16] = True
    assert covered[dense].all() and covered.mean() < 0.5 and not tiles.every.any()


def test_it_attends_as_the_reference_does_alone_and_combined(names):
    q, k, v = (jax.random.normal(key, (1, 150, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))
    near = names["Near"](16, 1)
    for mask in (near, Where(names["near"]), Causal() & ~near):
        found, expected = (
            once(jax.value_and_grad(lambda q, f=f, mask=mask: (f(q, k, v, mask) ** 2).sum()), q)
            for f in (attend, reference)
        )
        assert_close(found[1], expected[1])
