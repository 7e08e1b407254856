"""Dynamic loss scaling: float16 gradients neither underflow nor overflow, and nothing else changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.training.optimizers.loss_scale import GROWTH_INTERVAL, MINIMUM, LossScale, initial
from tests.training.test_step import ACCUMULATED, LAYOUTS, MODEL, ONE, Run, batch_of, host, reference_run, trainer_of

HALF = dataclasses.replace(MODEL, dtype="float16")


def scale(value, finite=0):
    return LossScale(jnp.float32(value), jnp.int32(finite))


def begun(first, layout=ONE, model=MODEL, **changes):
    """A run whose initial scale is `first`, 0 for none. Runs that differ in the scale's value share a trainer."""
    if first or model.dtype == "float16":
        changes["loss_scale"] = min(first, 1.0)
    return Run(trainer_of(*layout, model, **changes), model, initial(first, model.dtype))


def test_scale_grows_after_an_interval_without_overflow():
    step = jax.jit(LossScale.after)
    state = scale(8.0, 3)
    for _ in range(GROWTH_INTERVAL - 4):
        state = step(state, True)
    assert state == (8.0, GROWTH_INTERVAL - 1)
    assert step(state, True) == (16.0, 0)
    assert step(state, False) == (4.0, 0)  # and counting starts anew
    assert step(scale(2.0**127, GROWTH_INTERVAL - 1), True) == (2.0**127, 0)  # twice that is infinite
    assert step(scale(1.5), False) == step(scale(MINIMUM), False) == (MINIMUM, 0)


def test_float16_has_a_scale_by_default():
    assert initial(None, "float16") == scale(1024.0)
    assert initial(0.0, "float16") is initial(None, "float32") is initial(None, "bfloat16") is None
    assert initial(8.0, "float32") == scale(8.0)


def zeros(run):
    """Share of zeros in the gradients of the layers' matrices."""
    leaves = jax.tree.leaves(run.gradients()["layers"])
    return np.mean(np.concatenate([leaf.ravel() for leaf in leaves if leaf.ndim == 3]) == 0)


@pytest.mark.slow
def test_small_gradients_do_not_underflow():
    """Tokens of small weight, as in a mean over a large batch: unscaled gradients underflow in float16."""
    batches = [batch_of(seed) for seed in range(20)]
    batches = [batch | {"weights": batch["weights"] * np.float32(2.0**-30)} for batch in batches]
    runs = {"full": begun(0.0), "scaled": begun(2.0**30, model=HALF), "plain": begun(0.0, model=HALF)}
    losses = {name: [run.step(batches[0])["loss"]] for name, run in runs.items()}
    shares = {name: zeros(run) for name, run in runs.items()}
    assert shares["full"] == 0.0 and shares["scaled"] < 0.01 and shares["plain"] > 0.5
    for name, run in runs.items():
        losses[name] += [run.step(batch)["loss"] for batch in batches[1:]]
    np.testing.assert_allclose(losses["scaled"], losses["full"], rtol=0.01)
    assert abs(losses["plain"][-1] - losses["full"][-1]) > 0.05


def test_overflow_changes_nothing_but_the_scale():
    run = begun(2.0**20, model=HALF, skip_nonfinite=False)

    def everything():
        return host(dataclasses.replace(run.state, step=None, scale=None))

    before = everything()
    for step in range(3):
        metrics = run.step(batch_of(0))
        assert metrics["skipped"] == 1.0 and metrics["loss_scale"] == 2.0 ** (20 - step)
        assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["grad_norm"])
    for old, new in zip(before, everything(), strict=True):
        np.testing.assert_array_equal(old, new)
    scales = [run.step(batch_of(0))["loss_scale"] for _ in range(12)]
    assert scales[-1] == scales[-4] >= 512.0 and int(run.state.step) == 15
    moved = [not np.array_equal(old, new) for old, new in zip(before, everything(), strict=True)]
    assert all(moved)


def test_scale_grows_in_training():
    run = begun(64.0)
    run.state = dataclasses.replace(run.state, scale=scale(64.0, GROWTH_INTERVAL - 2))
    assert [run.step(batch_of(0))["loss_scale"] for _ in range(3)] == [64.0, 64.0, 128.0]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [("one", {}), pytest.param("fsdp 4 x tensor 2", ACCUMULATED | {"accumulate": 2}, marks=pytest.mark.slow)],
)
def test_layouts_and_accumulation_scale_alike(layout, changes):
    """Scales are powers of two, exact in float32: after the overflows, losses are those of a run without a scale."""
    run = begun(2.0**126, (LAYOUTS | {"one": ONE})[layout], **changes)
    scales, losses = [], []
    for seed in range(5):
        skipped = 1.0
        while skipped:
            metrics = run.step(batch_of(seed))
            skipped = metrics["skipped"]
            scales.append(metrics["loss_scale"])
        losses.append(metrics["loss"])
    overflows = len(scales) - 5
    assert overflows > 3 and scales == [2.0 ** (126 - min(step, overflows)) for step in range(len(scales))]
    np.testing.assert_allclose(losses, reference_run(*ONE)[0][:5], rtol=1e-5)
