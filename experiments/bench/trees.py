"""Measures Tree-LSTMs over random forests, and padding, buckets and packing of the standard library's functions.

    python experiments/bench/trees.py [--trees=200] [--dim=128] [--rounds=7] [--tables=trees,lengths]

"trees": forward and backward of a binary Tree-LSTM over random binary trees of 5 to 40 leaves, whose leaves have inputs, with
the schedule made anew in each call. Its peers are a loop over nodes of jitted JAX calls, which `jax.grad` differentiates or
whose backward pass is a loop of jitted calls, too; a loop over nodes in torch; and torch with one operation for each level
written by hand, in two forms (states of all levels concatenated, or written into one array), each with one thread and with all.
All start from the same weights; unless losses and gradients agree, nothing is reported.

"lengths": the training step of a language model on functions, which are cut at 256 tokens, in batches of 4,096 tokens: padded
to 256, padded to the widths of four buckets, and packed into rows with segments. Tokens per second do not count padding.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from hpnlp import cli, measure
from hpnlp.cli.errors import run_script
from hpnlp.data import buckets
from hpnlp.data.examples import ClassificationConfig, prepare_examples
from hpnlp.models.lm import LM, LMConfig
from hpnlp.ops.trees import make_schedule, nary_tree_lstm, tree_graph
from hpnlp.parallel.plan import Plan
from hpnlp.spec import lookup
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError

try:
    import torch
except ImportError:  # the table "lengths" does not need it
    torch = None  # pyright: ignore

WIDTH, TOKENS, BUCKETS = 256, 4096, 4  # of the table "lengths"

FLAGS = flags.FLAGS
flags.DEFINE_integer("trees", 200, "Number of trees.")
flags.DEFINE_integer("dim", 128, "Features of inputs and states.")
flags.DEFINE_integer("rounds", 7, "Measurements of each function.")
flags.DEFINE_integer("loop_trees", 10, "Trees of the loops over nodes, whose time is scaled up.")
flags.DEFINE_list("tables", ["trees", "lengths"], "Tables to measure.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")


def binary_parents(rng: np.random.Generator, leaves: int) -> np.ndarray:
    """Parents of a random binary tree: its leaves are split at a random place, again and again."""
    parents: list[int] = []
    pending = [(leaves, -1)]
    while pending:
        count, parent = pending.pop()
        parents.append(parent)
        if count > 1:
            left = int(rng.integers(1, count))
            pending += [(count - left, len(parents) - 1), (left, len(parents) - 1)]
    return np.array(parents)


def random_forest(count: int, seed: int = 0) -> np.ndarray:
    """Parents of trees of 5 to 40 leaves, one after another."""
    rng = np.random.default_rng(seed)
    trees = [binary_parents(rng, int(rng.integers(5, 41))) for _ in range(count)]
    starts = np.cumsum([0, *map(len, trees)])
    return np.concatenate([np.where(tree >= 0, tree + start, -1) for tree, start in zip(trees, starts, strict=False)])


def make_arrays(parents: np.ndarray, dim: int) -> tuple[np.ndarray, ...]:
    """Inputs of the nodes, and the weights."""
    rng = np.random.default_rng(1)
    shapes = (len(parents), dim), (dim, 4 * dim), (2, dim, 5 * dim), (4 * dim,)
    return tuple((rng.normal(size=shape) * dim**-0.5).astype(np.float32) for shape in shapes)


def ours(parents: np.ndarray, arrays: tuple[np.ndarray, ...], *, has_schedule: bool = False) -> Callable[[], Any]:
    """The batched operation; with `has_schedule`, its schedule is made before."""
    roots = np.flatnonzero(parents < 0)

    @jax.jit
    def run(arrays: Any, schedule: Any) -> Any:
        def loss(arrays: Any) -> jax.Array:
            x, w, u, b = arrays
            return jnp.square(nary_tree_lstm(x, w, u, b, schedule, inputs="leaves").h[roots]).sum()

        return jax.value_and_grad(loss)(arrays)

    held, made = jax.device_put(arrays), make_schedule(tree_graph(parents), [(0, 0), (0, 2)])
    on_device = jax.device_put(made)

    def call() -> Any:
        return run(held, on_device if has_schedule else make_schedule(tree_graph(parents), [(0, 0), (0, 2)]))

    return call


def loops_in_jax(parents: np.ndarray, arrays: tuple[np.ndarray, ...]) -> dict[str, Callable[[], Any]]:
    """One jitted call for each node: differentiated by `jax.grad`, and with a backward pass that is written by hand."""
    graph = tree_graph(parents)
    order = np.argsort(graph.height, kind="stable").tolist()
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            children[parent].append(node)
    x, w, u, b = jax.device_put(arrays)

    @jax.jit
    def leaf(weights: Any, x: jax.Array) -> Any:
        i, _, o, update = jnp.split(x @ weights[0] + weights[2], 4)
        c = jax.nn.sigmoid(i) * jnp.tanh(update)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    @jax.jit
    def inner(weights: Any, left: Any, right: Any) -> Any:
        i, o, update, f1, f2 = jnp.split(left[0] @ weights[1][0] + right[0] @ weights[1][1], 5)
        bi, bf, bo, bu = jnp.split(weights[2], 4)
        c = jax.nn.sigmoid(i + bi) * jnp.tanh(update + bu)
        c = c + jax.nn.sigmoid(f1 + bf) * left[1] + jax.nn.sigmoid(f2 + bf) * right[1]
        return jax.nn.sigmoid(o + bo) * jnp.tanh(c), c

    leaf_back = jax.jit(lambda weights, x, d: jax.vjp(leaf, weights, x)[1](d))
    inner_back = jax.jit(lambda weights, left, right, d: jax.vjp(inner, weights, left, right)[1](d))
    add = jax.jit(functools.partial(jax.tree.map, jnp.add))
    square = jax.jit(lambda h: (jnp.square(h).sum(), 2 * h))
    rows, zero = list(x), jnp.zeros(x.shape[1])

    roots = np.flatnonzero(parents < 0).tolist()

    def forward(weights: Any) -> dict[int, Any]:
        states: dict[int, Any] = {}
        for node in order:
            below = children[node]
            states[node] = inner(weights, *(states[k] for k in below)) if below else leaf(weights, rows[node])
        return states

    def loss(weights: Any) -> jax.Array:
        states = forward(weights)
        return functools.reduce(jnp.add, (square(states[root][0])[0] for root in roots))

    def by_hand() -> Any:
        weights, d = (w, u, b), {}
        states = forward(weights)
        total, d_weights, dx = jnp.zeros(()), (jnp.zeros_like(w), jnp.zeros_like(u), jnp.zeros_like(b)), {}
        for node in roots:
            value, dh = square(states[node][0])
            total, d[node] = total + value, (dh, zero)
        for node in reversed(order):
            if below := children[node]:
                dw, d[below[0]], d[below[1]] = inner_back(weights, *(states[k] for k in below), d[node])
            else:
                dw, dx[node] = leaf_back(weights, rows[node], d[node])
            d_weights = add(d_weights, dw)
        return total, d_weights

    return {
        "loop over nodes, jitted, jax.grad": lambda: jax.value_and_grad(loss)((w, u, b)),
        "loop over nodes, jitted, backward by hand": by_hand,
    }


class TorchTrees:
    """Forms of the same network in torch."""

    def __init__(self, parents: np.ndarray, arrays: tuple[np.ndarray, ...]) -> None:
        graph = tree_graph(parents)
        self.x, self.w, self.u, self.b = (torch.tensor(array, requires_grad=True) for array in arrays)
        self.dim = self.x.shape[1]
        self.levels = [np.flatnonzero(graph.height == h) for h in range(graph.height.max() + 1)]
        # Nodes in the order of levels: rows of the concatenated states.
        self.row = np.empty(len(parents), np.int64)
        self.row[np.concatenate(self.levels)] = np.arange(len(parents))
        self.children = np.full((len(parents), 2), -1)
        edges = np.flatnonzero(parents >= 0)
        self.children[parents[edges], graph.slot[edges]] = edges
        self.roots = torch.from_numpy(self.row[np.flatnonzero(parents < 0)])
        self.leaves = torch.from_numpy(self.levels[0])
        self.below = [torch.from_numpy(self.row[self.children[nodes]]) for nodes in self.levels[1:]]

    def loss_and_gradients(self, form: str, threads: int) -> Any:
        """Evaluates the method `form`."""
        torch.set_num_threads(threads)
        tensors = self.x, self.w, self.u, self.b
        loss = getattr(self, form)()
        return loss, torch.autograd.grad(loss, tensors)

    def leaf_states(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        i, _, o, update = torch.addmm(self.b, x, self.w).chunk(4, 1)
        c = torch.sigmoid(i) * torch.tanh(update)
        return torch.sigmoid(o) * torch.tanh(c), c

    def inner_states(self, h: torch.Tensor, c: torch.Tensor, weights: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """h: `[W, 2H]`. c: `[W, 2, H]`."""
        matrix, bias = weights
        z = torch.addmm(bias, h, matrix)
        i, o, f1, f2 = torch.sigmoid(z[:, : 4 * self.dim]).chunk(4, 1)
        c = i * torch.tanh(z[:, 4 * self.dim :]) + f1 * c[:, 0] + f2 * c[:, 1]
        return o * torch.tanh(c), c

    def weights(self) -> Any:
        """Weights of inner nodes, with the sigmoid gates side by side."""
        dim, u = self.dim, self.u.reshape(2 * self.dim, -1)
        i, f, o, update = self.b.chunk(4)
        matrix = torch.cat([u[:, : 2 * dim], u[:, 3 * dim :], u[:, 2 * dim : 3 * dim]], 1)
        return matrix, torch.cat([i, o, f, f, update])

    def concatenated(self) -> torch.Tensor:
        """Children are taken from the states of all lower levels, which are concatenated at each level."""
        weights = self.weights()
        h, c = self.leaf_states(self.x[self.leaves])
        for below in self.below:
            next_h, next_c = self.inner_states(h[below].flatten(1), c[below], weights)
            h, c = torch.cat([h, next_h]), torch.cat([c, next_c])
        return h[self.roots].square().sum()

    def in_place(self) -> torch.Tensor:
        """States are written into one array."""
        weights, count = self.weights(), len(self.row)
        leaf_h, leaf_c = self.leaf_states(self.x[self.leaves])
        h, c = self.x.new_zeros(count, self.dim), self.x.new_zeros(count, self.dim)
        h[: len(leaf_h)], c[: len(leaf_c)] = leaf_h, leaf_c
        start = len(leaf_h)
        for below in self.below:
            next_h, next_c = self.inner_states(h[below].flatten(1), c[below], weights)
            h[start : start + len(below)], c[start : start + len(below)] = next_h, next_c
            start += len(below)
        return h[self.roots].square().sum()

    def by_node(self) -> torch.Tensor:
        """One node after another."""
        weights, states = self.weights(), {}
        for nodes in self.levels:
            for node in nodes.tolist():
                left, right = self.children[node]
                if left < 0:
                    states[node] = self.leaf_states(self.x[node][None])
                    continue
                (h1, c1), (h2, c2) = states[left], states[right]
                states[node] = self.inner_states(torch.cat([h1, h2], 1), torch.stack([c1, c2], 1), weights)
        order = np.argsort(self.row)
        return sum((states[order[root]][0].square().sum() for root in self.roots.tolist()), torch.zeros(()))


def check(name: str, actual: Any, expected: Any) -> None:
    """Raises ValueError unless losses and gradients agree."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x.detach() if isinstance(x, torch.Tensor) else x) for x in (a, b))
        if not np.allclose(a, b, rtol=2e-3, atol=2e-4 * np.abs(b).max()):
            raise ValueError(f"{name}: differs by {np.abs(a - b).max()} of {np.abs(b).max()}")


def tree_rows() -> list[dict[str, Any]]:
    """Rows of the table "trees"."""
    parents = random_forest(FLAGS.trees)
    few = random_forest(FLAGS.trees)[: int(np.flatnonzero(parents < 0)[FLAGS.loop_trees])]
    arrays, few_arrays = make_arrays(parents, FLAGS.dim), make_arrays(few, FLAGS.dim)
    functions = {
        "ours": ours(parents, arrays),
        "ours, schedule made before": ours(parents, arrays, has_schedule=True),
    }
    start = time.perf_counter()
    expected = jax.block_until_ready(functions["ours"]())
    first_call = time.perf_counter() - start
    with_torch = TorchTrees(parents, arrays)
    for threads in sorted({1, measure.environment()["cores"]}):
        for name in ("concatenated", "in_place"):
            function = functools.partial(with_torch.loss_and_gradients, name, threads)
            check(name, function(), expected)
            functions[f"torch by level, {name.replace('_', ' ')}, threads: {threads}"] = function
    loops = {
        **loops_in_jax(few, few_arrays),
        "loop over nodes, torch": functools.partial(TorchTrees(few, few_arrays).loss_and_gradients, "by_node", 1),
    }
    loss, gradients = ours(few, few_arrays)()
    for name, function in loops.items():
        check(name, function(), (loss, gradients if "torch" in name else gradients[1:]))
    # The threads of torch stay busy for a while after their work, and would slow the next round, whose first call comes after
    # a pause, from which threads wake up slowly.
    functions = {"first": functions["ours"], **functions, "pause": lambda: time.sleep(0.2)}
    times = measure.timeit(functions, rounds=FLAGS.rounds, warmup=2)
    del times["first"], times["pause"]
    over = {name: times["ours"].over(t) for name, t in times.items()}
    # Apart from the others, because a round of them takes seconds; with "ours" again, for the ratios.
    factor, slow = len(parents) / len(few), measure.timeit({"ours": functions["ours"]} | loops, rounds=3)
    over |= {name: slow["ours"].over(slow[name]) / factor for name in loops}
    times |= {name: slow[name] for name in loops}
    shape = {"table": "trees", "trees": FLAGS.trees, "nodes": len(parents), "dim": FLAGS.dim, "first_call": first_call}
    return [
        {
            **shape,
            "form": name,
            "seconds": t.median * (factor if name in loops else 1),
            "ours_over": over[name],
        }
        for name, t in times.items()
    ]


def length_rows() -> list[dict[str, Any]]:
    """Rows of the table "lengths"."""
    examples = prepare_examples(ClassificationConfig(path="stdlib_functions", tokenizer="bpe(4096)", seq_len=WIDTH))
    stored = examples.stored["train"]
    texts = [stored.part(number, 0)[: WIDTH + 1].astype(np.int32) for number in range(0, stored.count, 4)]
    lengths = np.array([len(text) - 1 for text in texts])  # the last token is a label only
    texts = [text for text, length in zip(texts, lengths, strict=True) if length]
    lengths = lengths[lengths > 0]
    widths = buckets.bucket_widths(lengths, BUCKETS, multiple=32)
    by_form = {
        "padded": buckets.padded_batches(lengths, WIDTH, TOKENS),
        "buckets": buckets.bucketed_batches(lengths, widths, TOKENS),
        "packed": buckets.packed_batches(lengths, WIDTH, TOKENS),
    }
    config = LMConfig(layers=2, dim=128, heads=4, vocab=examples.tokenizer.vocab_size)
    trainer = make_trainer(LM(config), OptimizerConfig(warmup=0), Plan("single"), steps=1000, devices=jax.devices()[:1])
    state, key = trainer.init(jax.random.key(0)), jax.random.key(0)

    def arrays_of(batch: buckets.Rows) -> dict[str, Any]:
        rows = TOKENS // batch.width
        inputs = buckets.batch_arrays([text[:-1] for text in texts], batch, rows, examples.tokenizer.pad_id)
        labels = buckets.batch_arrays([text[1:] for text in texts], batch, rows, examples.tokenizer.pad_id)["tokens"]
        weights = (inputs["segment_ids"] > 0).astype(np.float32)
        return jax.device_put({**inputs, "labels": labels, "weights": weights}, trainer.batch_sharding)

    def epoch(batches: list[dict[str, Any]]) -> Callable[[], Any]:
        def run() -> Any:
            nonlocal state
            for batch in batches:
                state, metrics = trainer.step(state, batch, key)
            return metrics["loss"]

        return run

    # A sixth of the batches, in random order, so that a round takes seconds.
    chosen = {name: batches[: max(4, len(batches) // 6)] for name, batches in by_form.items()}
    tokens = {
        name: sum(int(lengths[n]) for batch in batches for row in batch.rows for n in row)
        for name, batches in chosen.items()
    }
    functions = {name: epoch([arrays_of(batch) for batch in batches]) for name, batches in chosen.items()}
    times = measure.timeit(functions, rounds=FLAGS.rounds)
    return [
        {
            "table": "lengths",
            "form": name,
            "texts": len(texts),
            "mean_length": float(lengths.mean()),
            "widths": widths if name == "buckets" else [WIDTH],
            "padding": buckets.padding_share(lengths, batches),
            "tokens_per_second": tokens[name] / times[name].median,
            "tokens_per_second_over_padded": tokens[name] / tokens["padded"] * times["padded"].over(times[name]),
        }
        for name, batches in by_form.items()
    ]


def main(_: list[str]) -> None:
    cli.prepare_jax()
    measures = [
        lookup({"trees": tree_rows, "lengths": length_rows}, name, "table of --tables") for name in FLAGS.tables
    ]
    if torch is None and tree_rows in measures:
        raise InputError("--tables=trees needs torch: pip install torch, or pass --tables=lengths")
    rows = [row for measured in measures for row in measured()]
    for row in rows:
        print(row, flush=True)
    print(measure.write_result("trees", rows, FLAGS.out))


if __name__ == "__main__":
    run_script(main)
