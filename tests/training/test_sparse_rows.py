"""Row-sparse training: rows that a batch looks up are updated as in the full table, and no others are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpnlp.models.lm import LM, LMConfig
from hpnlp.ops.table_rows import TableRows
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig, make_optimizer
from hpnlp.training.optimizers import sparse_rows
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError, WordStats
from tests.messages import raises
from tests.tiny import shared_trainer
from tests.training.test_step import KEY, assert_leaves_close, batch_of, host

T, VOCAB = 16, 528
PLAIN = OptimizerConfig(
    "adagrad", learning_rate=1e-2, schedule="constant", warmup=0, eps=1e-3, weight_decay=0.0, clip_norm=0.5
)
CASES = (
    ("sampled(64)", 1),
    pytest.param("sampled(64)", 4, marks=pytest.mark.slow),
    pytest.param("hierarchical(balanced)", 1, marks=pytest.mark.slow),
)


def trainer_of(output="sampled(64)", plan=None, devices=1, **changes):
    model = LMConfig(layers=1, dim=32, heads=2, mlp_dim=32, vocab=VOCAB, max_len=T, output=output, tied=False)
    lm = LM(model, WordStats(np.arange(VOCAB, 0, -1)))
    optimizer = dataclasses.replace(PLAIN, **changes)
    return shared_trainer(lm, optimizer, plan or Plan(), devices=tuple(jax.devices()[:devices]), steps=50)


@functools.cache
def initial_state(output, name):
    return jax.device_get(trainer_of(output, name=name).init(jax.random.key(0)))


def run(steps=3, batch=batch_of, output="sampled(64)", name="adagrad", **changes):
    """`(metrics of each step, last state)`; the initial state is the same on every layout."""
    trainer, metrics = trainer_of(output, name=name, **changes), []
    shardings = jax.tree.map(lambda leaf: leaf.sharding, trainer.state_shapes)
    state = jax.device_put(initial_state(output, name), shardings)
    for seed in range(steps):
        put = jax.device_put(batch(seed), trainer.batch_sharding)
        state, values = trainer.step(state, put, KEY)
        metrics.append({name: float(value) for name, value in values.items()})
    return metrics, jax.device_get(state)


@pytest.mark.slow
@pytest.mark.parametrize(("output", "accumulate"), CASES)
def test_adagrad_on_rows_matches_adagrad(output, accumulate):
    """Without weight decay, Adagrad leaves rows without gradient unchanged. Gradients of repeated ids are summed."""
    actual, expected = (run(output=output, rows=yes, accumulate=accumulate) for yes in (True, False))
    for a, b in zip(actual[0], expected[0], strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert max(step["grad_norm"] for step in actual[0]) > PLAIN.clip_norm
    assert_leaves_close(actual[1], expected[1], 1e-5)


@pytest.mark.slow
def test_layouts_match_one_device():
    plan = Plan(data=2, fsdp=2, tensor=2)
    actual, expected = (run(rows=True, plan=p, devices=n) for p, n in ((plan, 8), (None, 1)))
    for a, b in zip(actual[0], expected[0], strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert_leaves_close(actual[1], expected[1], 1e-5)


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_rows_outside_of_the_batch_stay_unchanged(name):
    """Rows and their statistics; weight decay and momentum included."""
    first, after = (run(steps, name=name, rows=True, weight_decay=0.1)[1] for steps in (0, 2))
    tokens = np.unique([batch_of(seed)["tokens"] for seed in range(2)])
    waited = np.ones(VOCAB, bool)
    waited[tokens] = False
    tables = 0
    for (path, new), old in zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(first), strict=True):
        if sparse_rows.keys(path)[-2:] == ("embed", "table"):
            tables += 1
            np.testing.assert_array_equal(new[waited], old[waited])
            assert (new[tokens] != old[tokens]).any(axis=1).all()
    assert tables == 3  # the table and its two moments
    head = (after.params["head"] != first.params["head"]).any(axis=1)
    assert 64 <= head.sum() < VOCAB


def test_nonfinite_step_changes_nothing():
    def bad(seed):
        return {**batch_of(seed), "weights": np.full((8, T), np.nan, np.float32)}

    (_, before), (metrics, after) = (run(n, bad, name="adamw", rows=True, weight_decay=0.1) for n in (0, 1))
    assert metrics[0]["skipped"] == 1.0 and after.step == 1
    for old, new in zip(host(before.params), host(after.params), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_invalid_ids_change_no_row(token):
    """The loss of such a batch is NaN, and its step is skipped."""

    def wrong(seed):
        batch = batch_of(seed)
        batch["tokens"][0, 4] = token
        batch["weights"][:] = 1
        return batch

    (_, before), (metrics, after) = (run(n, wrong, name="adamw", rows=True, weight_decay=0.1) for n in (0, 1))
    assert metrics[0]["skipped"] == 1.0
    for old, new in zip(host(before.params), host(after.params), strict=True):
        np.testing.assert_array_equal(old, new)


def test_step_allocates_no_array_of_the_size_of_a_table():
    """Temporary memory does not grow with the vocabulary."""
    model = LMConfig(layers=1, dim=16, heads=2, mlp_dim=32, vocab=100_000, max_len=T, output="sampled(64)", tied=False)
    trainer = make_trainer(LM(model), dataclasses.replace(PLAIN, name="adamw", rows=True), Plan("single"), steps=9)
    shapes = {name: jax.ShapeDtypeStruct((8, T), x.dtype) for name, x in batch_of(0).items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.set_mesh(trainer.step.mesh):
        memory = trainer.step.jitted.lower(trainer.state_shapes, shapes, key).compile().memory_analysis()
    table = model.vocab * model.dim * 4
    assert memory.argument_size_in_bytes > 6 * table
    assert memory.alias_size_in_bytes >= 6 * table
    assert memory.temp_size_in_bytes < table / 2


def test_unsupported_combinations_raise():
    raises("optimizer.rows=True: adafactor does not .* choose .*adamw", OptimizerConfig, "adafactor", rows=True)
    raises(r"optimizer.ema=0.9 with optimizer.rows=True.*leave out one", OptimizerConfig, rows=True, ema=0.9)
    tied = LM(LMConfig(layers=1, dim=32, heads=2, vocab=264, max_len=T))
    with pytest.raises(InputError, match="optimizer.rows=True.*set model.tied=False"):
        make_trainer(tied, dataclasses.replace(PLAIN, rows=True), Plan("single"), steps=9)


@pytest.mark.parametrize(("ids", "size"), [([3, 0, 3, 11], 12), ([2, 2, 1, 0, 2], 3), ([4] * 9, 5), ([0], 1)])
def test_lookups_match_the_full_table(ids, size):
    ids, table = np.array(ids, np.int32), np.arange(3 * size, dtype=np.float32).reshape(size, 3)
    missing = np.array([i for i in range(-1, size + 2) if i not in ids], np.int32)
    state = {"mu": {"table": table}, "count": np.int32(3)}
    shapes = {("table",): table.shape}

    @jax.jit
    def look_up_and_negate(ids, state):
        kept = sparse_rows.distinct(ids, size)
        at = {("table",): kept}
        taken = sparse_rows.gather(state, at, shapes)["mu"]["table"]
        back = sparse_rows.scatter(state, {"mu": {"table": -taken}, "count": jnp.int32(4)}, at, shapes)
        return kept, TableRows(kept, taken)[ids], TableRows(kept, taken)[missing], back

    kept, rows, absent, back = jax.device_get(look_up_and_negate(ids, state))
    assert kept.shape == (min(len(ids), size),)
    np.testing.assert_array_equal(kept[: len(set(ids))], sorted(set(ids)))
    np.testing.assert_array_equal(rows, table[ids])
    assert np.isnan(absent).all()
    expected = np.where(np.isin(np.arange(size), ids)[:, None], -table, table)
    np.testing.assert_array_equal(back["mu"]["table"], expected)
    assert back["count"] == 4


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "twin"), [("adamw", "SparseAdam"), ("adagrad", "Adagrad")])
def test_steps_match_torch(name, twin):
    """Sparse gradients of a torch embedding, with repeated ids."""
    torch = pytest.importorskip("torch")
    torch.sparse.check_sparse_tensor_invariants.enable()  # otherwise torch warns that they are not checked
    rng = np.random.default_rng(0)
    table = rng.standard_normal((9, 4)).astype(np.float32)
    config = dataclasses.replace(PLAIN, name=name, learning_rate=0.1, clip_norm=0.0, eps=1e-10, rows=True)
    optimizer = make_optimizer(config, 10)
    theirs = torch.nn.Embedding(9, 4, sparse=True, _weight=torch.from_numpy(table.copy()))
    options = {"betas": (config.b1, config.b2)} if name == "adamw" else {}
    stepper = getattr(torch.optim, twin)(theirs.parameters(), lr=0.1, eps=1e-10, **options)
    params = {"table": jnp.asarray(table)}
    state, shapes = (params, optimizer.init(params)), {("table",): table.shape}
    for step in range(5):
        ids = rng.integers(0, 9, 5).astype(np.int32)
        slopes = rng.standard_normal((5, 4)).astype(np.float32)
        at = {("table",): sparse_rows.distinct(jnp.asarray(ids), 9)}
        params, opt_state = sparse_rows.gather(state, at, shapes)

        def loss(p, at=at, ids=ids, slopes=slopes):
            return jnp.sum(sparse_rows.as_tables(p, at)["table"][ids] * slopes)

        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        state = sparse_rows.scatter(state, (optax.apply_updates(params, updates), opt_state), at, shapes)
        stepper.zero_grad()
        (theirs(torch.from_numpy(ids.astype(np.int64))) * torch.from_numpy(slopes)).sum().backward()
        stepper.step()
        np.testing.assert_allclose(state[0]["table"], theirs.weight.detach().numpy(), atol=1e-5, err_msg=str(step))
