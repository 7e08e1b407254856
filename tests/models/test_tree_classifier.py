"""Tree classifiers: equality with the node-by-node reference, independence of padding and of other trees, and errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.models import variables
from hpnlp.models.classifiers.tree_classifier import TreeClassifier, TreeClassifierConfig
from hpnlp.nn.tree_lstm import batch_schedule
from hpnlp.ops.trees import reference_tree_lstm, tree_graph
from tests.contracts import ONCE, assert_close, once
from tests.messages import raises

VOCAB, CLASSES, B, T = 12, 3, 8, 9


def make(**fields):
    sizes = {"vocab": VOCAB, "classes": CLASSES, "dim": 8, "max_children": 4}
    return TreeClassifier(TreeClassifierConfig(**sizes | fields))


def global_parents(parents):
    """Parents of the nodes of all trees, numbered through."""
    trees, length = parents.shape
    return np.where(parents >= 0, parents + length * np.arange(trees)[:, None], -1).reshape(-1)


def make_batch(trees=B, seed=0):
    rng = np.random.default_rng(seed)
    parents = np.full((trees, T), -1)
    segments = np.zeros((trees, T), np.int32)
    for tree, count in enumerate(rng.integers(1, T + 1, trees)):
        segments[tree, :count] = 1
        for node in range(1, count):
            parents[tree, node] = rng.integers(max(0, node - 3), node)
    graph = tree_graph(global_parents(parents))
    shaped = {
        name: array.reshape(trees, T)
        for name, array in {"slots": graph.slot, "heights": graph.height, "arities": graph.arity}.items()
    }
    arrays = {
        "tokens": rng.integers(0, VOCAB, (trees, T)).astype(np.int32),
        "segment_ids": segments,
        "positions": np.tile(np.arange(T, dtype=np.int32), (trees, 1)),
        "parents": parents.astype(np.int32),
        **shaped,
        "heights": np.where(segments > 0, shaped["heights"], -1).astype(np.int32),
        "labels": rng.integers(0, CLASSES, trees).astype(np.int32),
        "weights": (np.arange(trees) % 4 != 3).astype(np.float32),
    }
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def weights_of(model, seed=0):
    initial = jax.jit(model.init, compiler_options=ONCE)(jax.random.key(seed), make_batch())["params"]
    initial = jax.tree.map(lambda x: x.unbox(), initial, is_leaf=lambda x: hasattr(x, "unbox"))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + np.float32(0.3) * rng.standard_normal(x.shape).astype(np.float32), initial)


def test_forget_bias_is_1():
    initial = jax.jit(make().init, compiler_options=ONCE)(jax.random.key(0), make_batch())["params"]
    assert jax.tree.leaves(initial["layer_0"]["bias"])[0].tolist() == [0] * 8 + [1] * 8 + [0] * 16


def test_losses_match_the_reference():
    model, batch = make(layers=2, pooling="max"), make_batch(trees=3, seed=3)
    params = weights_of(model)
    graph = tree_graph(global_parents(np.asarray(batch["parents"])))
    # The reference computes padding as trees of one node each, so its nodes are left out.
    graph = dataclasses.replace(graph, height=np.asarray(batch["heights"]).reshape(-1))

    def expected(params):
        h = params["embed"]["table"][batch["tokens"]].reshape(-1, 8)
        for index in range(2):
            layer = params[f"layer_{index}"]
            y = reference_tree_lstm(h, layer["kernel"], layer["children"], layer["bias"], graph).h
            h = h + y if index else y
        h = h.reshape(3, T, 8)
        pooled = jnp.where(batch["segment_ids"][..., None] > 0, h, jnp.float32(-jnp.inf)).max(axis=1)
        logits = pooled @ params["head"].T + params["output"]["bias"][None]
        nll = jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, batch["labels"][:, None], 1)[:, 0]
        return (nll * batch["weights"]).sum()

    def actual(params):
        return model.apply(variables.collections(params), batch).sum

    assert_close(*(once(jax.value_and_grad(f), params) for f in (actual, expected)))


def test_padding_changes_nothing():
    """Tokens of padding, and trees without a weight."""
    model, batch = make(pooling="first", layers=1), make_batch()
    params = weights_of(model)
    run = jax.jit(
        jax.value_and_grad(lambda p, batch: model.apply(variables.collections(p), batch).sum), compiler_options=ONCE
    )
    other = dict(batch)
    other["tokens"] = jnp.where(batch["segment_ids"] * batch["weights"].astype(int)[:, None] > 0, batch["tokens"], 3)
    assert np.any(other["tokens"] != batch["tokens"])
    assert_close(run(params, other), run(params, batch))


def test_schedule_has_room_for_the_widest_trees():
    """A star and a chain: as many nodes of one height, and as many heights, as there may be."""
    batch = make_batch()
    star = {"parents": [-1, *[0] * 8], "slots": [0, *range(8)], "heights": [1, *[0] * 8], "arities": [8, *[0] * 8]}
    chain = {
        "parents": list(range(-1, 8)), "slots": [0] * 9, "heights": list(range(8, -1, -1)), "arities": [1] * 8 + [0],
    }  # fmt: skip
    for tree in (star, chain):
        batch |= {name: jnp.tile(jnp.array(values, jnp.int32)[None], (B, 1)) for name, values in tree.items()}
        schedule = once(lambda batch: batch_schedule(batch, 8), batch)
        assert int(schedule.row.max()) < schedule.rows and len(np.unique(schedule.row)) == B * T
        assert int(schedule.levels) == max(tree["heights"]) + 1
        node = np.asarray(schedule.node)
        assert np.array_equal(node[np.asarray(schedule.row)], np.arange(B * T))


def test_invalid_configs_raise():
    raises("model.dtype", TreeClassifierConfig, dtype="int8")
