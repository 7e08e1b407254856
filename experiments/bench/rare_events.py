"""Measures the memory of rare events on classes with at most three training examples.

    python experiments/bench/rare_events.py [--seeds=3] [--parts=nets,questions]

The task is the name of a function of the standard library from the words of its arguments and its body, without its own name.
Most names occur in a few files only: a class is rare if it has at most three training examples. All nets have one encoder: a
bag of vectors of words, weighted by the logarithm of their inverse document frequency.

"nets": a dense softmax over the names; a softmax over cosines; the memory in their place, trained by its margin loss; both
cosines and memory, of which the memory, or the sum of both probabilities, predicts; and the nearest neighbour among all
training examples, for the encoder of the softmax over cosines. All are trained for as many epochs.

"questions", which the paper leaves open, each with memories of more and of fewer slots than there are examples: the share of
keys that are never found again, and accuracy without them; the randomness of the slot that is replaced; and averages, the
newest query or a circular buffer in place of the update of the paper.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.data.reading import sources
from hpnlp.data.reading.split import hash_fraction
from hpnlp.ops import embeddings
from hpnlp.ops.embeddings.memory import EMPTY, KeyValueMemory

RARE = 3  # training examples of a rare class, at most
LARGEST = 300  # training examples of a class that are read
WORDS, LENGTH = 6000, 48  # words of the vocabulary, and of an example
DIM, BATCH = 128, 128
MARGIN, TEMPERATURE = 0.1, 0.05
SLOTS = 3, 1  # sizes of the memory, in halves of the number of training examples
SHOWN = 5  # held-out examples that are explained

FLAGS = flags.FLAGS
flags.DEFINE_integer("seeds", 3, "Seeds of each row.")
flags.DEFINE_integer("epochs", 12, "Passes over the training examples, in the part nets; half as many in questions.")
flags.DEFINE_integer("examples", 0, "Training examples to read, for a quick run; 0 for all.")
flags.DEFINE_list("parts", ["nets", "questions"], "Parts to measure.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")

_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def words_of(function: ast.AST) -> list[str]:
    """Words of the identifiers and texts of a function, without its name and docstring."""
    found = []
    for node in ast.walk(function):
        for field in ("id", "attr", "arg", "value"):
            if isinstance(text := getattr(node, field, None), str):
                found += [part.lower() for part in _PARTS.findall(text[:200])]
    return list(dict.fromkeys(found))


def read_functions() -> dict[str, list[list[str]]]:
    """Name -> words of each function with the name, those of names that occur at least twice with different words."""
    by_name: dict[str, dict[tuple[str, ...], None]] = collections.defaultdict(dict)
    for file in sources.find("stdlib", "data.path")[0].files:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(Path(file.path).read_bytes())
            except (SyntaxError, ValueError):
                continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own = {part.lower() for part in _PARTS.findall(node.name)}
                words = tuple(word for word in words_of(node) if word not in own)
                if len(words) >= 3:
                    by_name[node.name][words[:LENGTH]] = None
    return {name: [list(words) for words in found] for name, found in sorted(by_name.items()) if len(found) > 1}


class Data:
    """Arrays of the training and the held-out examples.

    Attributes:
      train, heldout: `(ids [N, L], lengths [N], labels [N])`.
      counts: Training examples of each class.
      idf: Weights of the words.
      names: Names of the classes.
    """

    def __init__(self) -> None:
        sides: dict[str, list[tuple[list[str], int]]] = {"train": [], "heldout": []}
        functions = read_functions()
        self.names = list(functions)
        for label, (name, found) in enumerate(functions.items()):
            order = sorted(found, key=lambda words, name=name: hash_fraction(f"{name}/{' '.join(words)}"))
            count = max(1, len(order) // 5)
            sides["heldout"] += [(words, label) for words in order[:count][:5]]
            sides["train"] += [(words, label) for words in order[count:][:LARGEST]]
        if FLAGS.examples:
            sides["train"] = sides["train"][: FLAGS.examples]
            last = sides["train"][-1][1]
            sides["heldout"] = [(words, label) for words, label in sides["heldout"] if label < last]
        counts = collections.Counter(word for words, _ in sides["train"] for word in words)
        ids = {word: i + 1 for i, (word, _) in enumerate(counts.most_common(WORDS))}  # 0 is any other word
        self.words = sides["heldout"]
        self.train, self.heldout = (self._arrays(sides[side], ids) for side in ("train", "heldout"))
        self.counts = np.bincount(self.train[2], minlength=len(self.names))
        known = counts.keys() & ids.keys()
        self.idf = np.full(WORDS + 1, 0.5, np.float32)  # of other words
        self.idf[[ids[word] for word in known]] = [np.log((1 + len(sides["train"])) / counts[word]) for word in known]
        self.is_rare = self.counts[self.heldout[2]] <= RARE

    def inputs(self, examples: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Arguments of `encode`."""
        return *examples[:2], self.idf

    def _arrays(self, examples: list[tuple[list[str], int]], ids: dict[str, int]) -> tuple[np.ndarray, ...]:
        bags = [[ids.get(word, 0) for word in words] for words, _ in examples]
        arrays = embeddings.pad_bags(bags, width=LENGTH, vocab=WORDS + 1)
        return (*arrays, np.array([label for _, label in examples], np.int32))


def initial_params(key: jax.Array, classes: int) -> dict[str, jax.Array]:
    words, names = jax.random.split(key)
    return {
        "words": DIM**-0.5 * jax.random.normal(words, (WORDS + 1, DIM), jnp.float32),
        "names": DIM**-0.5 * jax.random.normal(names, (classes, DIM), jnp.float32),
        "bias": jnp.zeros(classes),
    }


def encode(params: Any, ids: jax.Array, lengths: jax.Array, idf: jax.Array, mode: str = "unit") -> jax.Array:
    """Vectors `[B, DIM]`, of length 1 by default."""
    options = {"unit": True} if mode == "unit" else {"mode": mode}
    return embeddings.embedding_bag(params["words"], ids, lengths, weights=idf[ids], **options)


def cosine_logits(params: Any, q: jax.Array) -> jax.Array:
    return q @ embeddings.unit_norm(params["names"]).T / TEMPERATURE


def dense_logits(params: Any, ids: jax.Array, lengths: jax.Array, idf: jax.Array) -> jax.Array:
    return encode(params, ids, lengths, idf, "sqrt") @ params["names"].T + params["bias"]


class Net:
    """A net with or without memory, and its training step.

    Attributes:
      losses: "dense", "cosine", "memory" or the last two.
    """

    def __init__(
        self,
        data: Data,
        losses: tuple[str, ...],
        epochs: int,
        slots: int = 0,
        rule: str = "average",
        noise: float = 0.0,
    ) -> None:
        self.data, self.losses, self.slots = data, losses, slots
        self.steps = epochs * (len(data.train[2]) // BATCH)
        idf, cross_entropy = jnp.asarray(data.idf), optax.softmax_cross_entropy_with_integer_labels
        schedule = optax.cosine_decay_schedule(3e-3, self.steps, 0.05)
        self.optimizer = optax.adam(schedule)

        def loss_of(params: Any, memory: KeyValueMemory | None, ids: Any, lengths: Any, labels: Any) -> Any:
            q = encode(params, ids, lengths, idf)
            total = jnp.zeros(())
            if "dense" in losses:
                total += cross_entropy(dense_logits(params, ids, lengths, idf), labels).mean()
            if "cosine" in losses:
                total += cross_entropy(cosine_logits(params, q), labels).mean()
            if "memory" in losses and memory is not None:
                total += embeddings.memory_loss(memory, q, labels, margin=MARGIN).mean() / TEMPERATURE
            return total, q

        @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
        def step(params: Any, state: Any, memory: Any, key: Any, ids: Any, lengths: Any, labels: Any) -> Any:
            gradients, q = jax.grad(loss_of, has_aux=True)(params, memory, ids, lengths, labels)
            updates, state = self.optimizer.update(gradients, state, params)
            if memory is not None:
                memory = embeddings.update_memory(memory, q, labels, key, rule=rule, noise=noise)
            return optax.apply_updates(params, updates), state, memory

        self.step = step

    def train(self, seed: int) -> tuple[Any, KeyValueMemory | None]:
        """Parameters and memory after all epochs."""
        params = initial_params(jax.random.key(seed), len(self.data.names))
        memory = embeddings.empty_memory(self.slots, DIM) if self.slots else None
        state, rng = self.optimizer.init(params), np.random.default_rng(seed)
        keys = jax.random.split(jax.random.key(seed + 1000), self.steps)
        count = len(self.data.train[2])
        order = np.concatenate([rng.permutation(count) for _ in range(1 + self.steps * BATCH // count)])
        for number in range(self.steps):
            chosen = order[number * BATCH : (number + 1) * BATCH]
            params, state, memory = self.step(
                params, state, memory, keys[number], *(x[chosen] for x in self.data.train)
            )
        return params, memory


@jax.jit
def predict_by_memory(params: Any, memory: KeyValueMemory, x: Any) -> jax.Array:
    return embeddings.memory_lookup(memory, encode(params, *x))[1][:, 0]


@jax.jit
def predict_by_dense(params: Any, x: Any) -> jax.Array:
    return dense_logits(params, *x).argmax(axis=1)


@jax.jit
def predict_by_cosine(params: Any, x: Any) -> jax.Array:
    return cosine_logits(params, encode(params, *x)).argmax(axis=1)


@jax.jit
def predict_by_both(params: Any, memory: KeyValueMemory, x: Any) -> jax.Array:
    q = encode(params, *x)
    cosines, classes, _ = embeddings.memory_lookup(memory, q, 8)
    classes = jnp.maximum(classes, 0)
    votes = embeddings.neighbor_probabilities(cosines, classes, len(params["names"]), temperature=TEMPERATURE)
    return (votes + jax.nn.softmax(cosine_logits(params, q))).argmax(axis=1)


@jax.jit
def neighbors_of(params: Any, train: Any, heldout: Any) -> embeddings.Neighbors:
    return embeddings.find_neighbors(encode(params, *heldout), encode(params, *train), 3)


def accuracies(data: Data, predicted: Any) -> dict[str, float]:
    is_right = np.asarray(predicted) == data.heldout[2]
    return {
        "rare_accuracy": float(is_right[data.is_rare].mean()),
        "other_accuracy": float(is_right[~data.is_rare].mean()),
        "accuracy": float(is_right.mean()),
    }


def mean_of(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Means over seeds, and the values of the accuracy on rare classes."""
    means: dict[str, Any] = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return means | {"rare_accuracies": [row["rare_accuracy"] for row in rows]}


def nets(data: Data) -> list[dict[str, Any]]:
    """Rows of the part "nets"."""
    slots, x = SLOTS[0] * len(data.train[2]) // 2, data.inputs(data.heldout)
    results: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
    dense, cosine = (Net(data, (loss,), FLAGS.epochs) for loss in ("dense", "cosine"))
    memory_only, both = (Net(data, losses, FLAGS.epochs, slots) for losses in (("memory",), ("cosine", "memory")))
    for seed in range(FLAGS.seeds):
        params, _ = dense.train(seed)
        results["dense softmax"].append(accuracies(data, predict_by_dense(params, x)))
        params, _ = cosine.train(seed)
        results["softmax over cosines"].append(accuracies(data, predict_by_cosine(params, x)))
        near = neighbors_of(params, data.inputs(data.train), x)
        results["nearest training example"].append(accuracies(data, data.train[2][np.asarray(near.ids)[:, 0]]))
        if seed == 0:
            explain(data, near)
        params, memory = memory_only.train(seed)
        results["memory"].append(accuracies(data, predict_by_memory(params, memory, x)))
        params, memory = both.train(seed)
        results["memory, trained with the softmax"].append(accuracies(data, predict_by_memory(params, memory, x)))
        results["sum of memory and softmax"].append(accuracies(data, predict_by_both(params, memory, x)))
    base = results["dense softmax"]
    shape = {
        "part": "nets",
        "classes": len(data.names),
        "rare": int(data.is_rare.sum()),
        "examples": len(data.train[2]),
    }
    rows = []
    for name, values in results.items():
        points = [100 * (a["rare_accuracy"] - b["rare_accuracy"]) for a, b in zip(values, base, strict=True)]
        rows.append({**shape, "net": name, **mean_of(values), "points": float(np.mean(points))})
    return rows


def explain(data: Data, near: embeddings.Neighbors) -> None:
    """Prints predictions of rare classes with the neighbours that decide them."""
    for number in np.flatnonzero(data.is_rare)[:SHOWN]:
        labels = [data.names[data.train[2][i]] for i in np.asarray(near.ids)[number]]
        shown = ", ".join(f"{name} {s:.2f}" for name, s in zip(labels, near.similarities[number], strict=True))
        print(f"{data.names[data.heldout[2][number]]}: {' '.join(data.words[number][0][:8])} ... -> {shown}")


def without_orphans(memory: KeyValueMemory) -> KeyValueMemory:
    """The memory without the keys that were never found."""
    return dataclasses.replace(memory, values=jnp.where(memory.hits == 0, EMPTY, memory.values))


def questions(data: Data) -> list[dict[str, Any]]:
    """Rows of the part "questions"."""
    count, rows = len(data.train[2]), []
    forms = [("average", 0.0), ("newest", 0.0), ("circular", 0.0)]
    noisy = [("average", 0.1), ("average", float("inf"))]  # no slot is replaced at random while some are empty
    for slots in (halves * count // 2 for halves in SLOTS):
        for rule, noise in forms if slots > count else forms[:1] + noisy + forms[1:]:
            net, results = Net(data, ("memory",), FLAGS.epochs // 2, slots, rule, noise), []
            for seed in range(FLAGS.seeds):
                params, memory = net.train(seed)
                assert memory is not None
                orphaned, used = map(int, embeddings.orphaned_slots(memory))
                x = data.inputs(data.heldout)
                kept = accuracies(data, predict_by_memory(params, without_orphans(memory), x))
                results.append(
                    {
                        **accuracies(data, predict_by_memory(params, memory, x)),
                        "orphaned": orphaned / used,
                        "used": used / slots,
                        "rare_accuracy_without_orphans": kept["rare_accuracy"],
                        "accuracy_without_orphans": kept["accuracy"],
                    }
                )
            setting = {"rule": rule, "noise": "random" if np.isinf(noise) else noise}
            rows.append({"part": "questions", "slots": slots, "examples": count, **setting, **mean_of(results)})
            print(rows[-1], flush=True)
    return rows


def main(_: list[str]) -> None:
    cli.prepare_jax()
    data = Data()
    print(f"{len(data.train[2])} examples of {len(data.names)} classes, {data.is_rare.sum()} held out of rare classes")
    parts = {"nets": nets, "questions": questions}
    rows = [row for name in FLAGS.parts for row in parts[name](data)]
    for row in rows:
        print(row, flush=True)
    print(measure.write_result("rare_events", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
