"""Measures the tricks that make small models fast, from a naive loop to one compiled program, one step at a time.

    python experiments/bench/speed_tricks.py [--rounds=7] [--tables=ladder,dots,vector,bags,dispatch,products,data,sizes]

"ladder": one step of gradient descent on `sum_ij y_j . (W x_i)` with 10 vectors x and 10 vectors y of 100 features, the
exercise of a lecture on efficiency (Neubig 2017, CS 11-747, slow-impl.py). The first form computes W x again for each of the
100 pairs, and copies both vectors to the device each time; each further form changes one thing. Losses and updated matrices
are compared before anything is reported.

"dots": dot products of pairs of vectors, by a call for each, by a loop in one program, and together. "vector": dot products of
one vector with the rows of a matrix, by multiplication and sum, and by a product of matrix and vector. "bags": sums of the
embeddings of bags of words, by a call for each, by a loop, padded, and by segment sums. "dispatch": operations one by one,
compiled, and many in one call. "products": one large matrix product against many small ones. "data": batches read, moved and
used one after another, asynchronously, ahead by a thread, and from the device. "sizes": products of n x n matrices on each
device and in numpy, with and without moving the operands.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import speed_tables
from absl import flags

from hpnlp import cli, measure
from hpnlp.cli.errors import run_script
from hpnlp.spec import lookup
from hpnlp.training.processes.allocator import keep_freed_memory

PAIRS, DIM, RATE = 10, 100, np.float32(1e-3)  # of the ladder
STEPS = 100  # of the form of the ladder that does many steps in one call
# Factors that the literature claims for a trick: table, form -> (factor, source).
CLAIMED = {
    ("bags", "padded"): 1.79,
    ("vector", "product of matrix and vector"): 1.4,
}

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 7, "Measurements of each function.")
flags.DEFINE_list(
    "tables", ["ladder", "dots", "vector", "bags", "dispatch", "products", "data", "sizes"], "Tables to measure."
)
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")

Functions = dict[str, Callable[[], Any]]


# The ladder.


def copied(vector: list[float]) -> jax.Array:
    """A vector on the device, from a list of numbers on the host."""
    return jnp.asarray(np.array(vector, np.float32))


def pair_by_pair(w: jax.Array, x: list[Any], y: list[Any]) -> jax.Array:
    """W x for each pair, inputs copied each time."""
    total = jnp.zeros(())
    for a in x:
        for b in y:
            total = total + jnp.dot(w @ copied(a), copied(b))
    return total


def without_repetition(w: jax.Array, x: list[Any], y: list[Any]) -> jax.Array:
    """W x once for each x."""
    total = jnp.zeros(())
    for a in x:
        product = w @ copied(a)
        for b in y:
            total = total + jnp.dot(product, copied(b))
    return total


def copied_before(w: jax.Array, x: list[jax.Array], y: list[jax.Array]) -> jax.Array:
    """The same, from inputs on the device."""
    total = jnp.zeros(())
    for a in x:
        product = w @ a
        for b in y:
            total = total + jnp.dot(product, b)
    return total


def stacked(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Two matrix products, for all x and all pairs."""
    return ((x @ w.T) @ y.T).sum()


def summed_first(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The sum over y before the products: one dot product for each x."""
    return ((x @ w.T) @ y.sum(axis=0)).sum()


def update(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """`(w, x, y) -> (w after a step of gradient descent, loss)`."""

    def step(w: jax.Array, x: Any, y: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x, y)
        return w - RATE * gradient, value

    return step


def ladder_inputs() -> tuple[jax.Array, list[Any], list[Any]]:
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((DIM, DIM)) / DIM**0.5, jnp.float32)
    return w, *(rng.random((PAIRS, DIM)).tolist() for _ in range(2))


def many_steps(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    """STEPS steps in one call."""
    return jax.lax.scan(lambda w, _: update(summed_first)(w, x, y), w, None, STEPS)


def ladder_rows() -> list[dict[str, Any]]:
    """Rows of the table "ladder"."""
    w, x, y = ladder_inputs()
    lists = [[copied(a) for a in vectors] for vectors in (x, y)]
    arrays = [jnp.stack(vectors) for vectors in lists]
    # Form -> (step, inputs, what changed, steps of a call).
    forms: dict[str, tuple[Callable[..., Any], Any, int]] = {
        "pair by pair": (update(pair_by_pair), (x, y), 1),
        "no repeated product": (update(without_repetition), (x, y), 1),
        "inputs copied once, before": (update(copied_before), lists, 1),
        "stacked: two matrix products": (update(stacked), arrays, 1),
        "sum over y first": (update(summed_first), arrays, 1),
        "one compiled program": (jax.jit(update(summed_first)), arrays, 1),
        f"{STEPS} steps in one call": (jax.jit(many_steps), arrays, STEPS),
    }
    expected = forms["pair by pair"][0](w, x, y)
    for name, (step, inputs, count) in forms.items():
        result = step(w, *inputs)
        check_equal(name, result if count == 1 else (step_after_one(arrays, w), result[1][0]), expected)
    # A peer: the compiler removes the repeated products of the naive loop, which it takes long to read.
    forms["pair by pair, compiled"] = (jax.jit(update(copied_before_pairs)), lists, 1)
    check_equal("pair by pair, compiled", forms["pair by pair, compiled"][0](w, *lists), expected)
    calls = {name: functools.partial(step, w, *inputs) for name, (step, inputs, _) in forms.items()}
    times = measure.timeit(calls, rounds=FLAGS.rounds)

    def factor(slow: str, fast: str) -> float:
        """The factor of the time of a step."""
        return times[slow].over(times[fast]) * forms[fast][2] / forms[slow][2]

    flops = {
        name: measure.count_flops(lambda w, step=step, inputs=inputs: step(w, *inputs), w) / count
        for name, (step, inputs, count) in forms.items()
    }
    rows, before = [], "pair by pair"
    for name in forms:
        is_peer = name == "pair by pair, compiled"
        rows.append(
            {
                "table": "ladder",
                "form": name,
                "seconds": times[name].median / forms[name][2],
                "flops": flops[name],
                "factor": factor(before, name),
                "over_first": factor("pair by pair", name),
                "is_peer": is_peer,
            }
        )
        before = before if is_peer else name
    return rows


def copied_before_pairs(w: jax.Array, x: list[jax.Array], y: list[jax.Array]) -> jax.Array:
    """W x for each pair, from inputs on the device."""
    total = jnp.zeros(())
    for a in x:
        for b in y:
            total = total + jnp.dot(w @ a, b)
    return total


def step_after_one(arrays: list[jax.Array], w: jax.Array) -> jax.Array:
    """The matrix after one step of the form with many."""
    return jax.lax.scan(lambda w, _: update(summed_first)(w, *arrays), w, None, 1)[0]


def check_equal(name: str, actual: Any, expected: Any) -> None:
    """Raises ValueError unless the results of two forms agree. A list has the rows of an array."""
    if isinstance(actual, list) != isinstance(expected, list):
        actual, expected = (np.stack(x) if isinstance(x, list) else x for x in (actual, expected))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if not np.allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()):
            raise ValueError(f"{name}: differs by {np.abs(a - b).max()} of {np.abs(b).max()}")


# Single tricks: the first function of each is the slow form.


def compared(table: str, functions: Functions, **fields: Any) -> list[dict[str, Any]]:
    """Rows of functions that give the same result, timed side by side; the factor is over the first of them."""
    first = next(iter(functions))
    expected = functions[first]()
    for name, function in functions.items():
        check_equal(f"{table}, {name}", function(), expected)
    times = measure.timeit(functions, rounds=FLAGS.rounds, warmup=2)
    return [
        {
            "table": table,
            "form": name,
            **fields,
            "seconds": t.median,
            "factor": 1 / t.over(times[first]),
            **({"claimed": CLAIMED[table, name]} if (table, name) in CLAIMED else {}),
        }
        for name, t in times.items()
    ]


def both_passes(table: str, single: Functions, forms: dict[str, Any], *arrays: jax.Array, **fields: Any) -> Any:
    """Rows of the forward pass of all forms, and of the passes forward and backward of those that are one program.

    Args:
      table: Name of the table.
      single: The form of a call for each part, and its name.
      forms: Name -> function of the arrays.
      arrays: Arrays.
      fields: Fields of the rows.
    """
    compiled = {name: functools.partial(jax.jit(form), *arrays) for name, form in forms.items()}
    gradients = {name: gradients_of(form, *arrays) for name, form in forms.items()}
    return [
        *compared(table, single | compiled, **fields, passes="forward"),
        *compared(table, gradients, **fields, passes="forward and backward"),
    ]


def dot_rows() -> list[dict[str, Any]]:
    """Dot products of the same pairs of rows."""
    rows = []
    for pairs, dim in ((1024, 128), (256, 512)):
        rng = np.random.default_rng(0)
        a, b = (jnp.asarray(rng.standard_normal((pairs, dim)) / dim**0.25, jnp.float32) for _ in range(2))
        forms = {
            "a loop in one program": lambda a, b: jax.lax.map(lambda pair: jnp.dot(*pair), (a, b)),
            "together": lambda a, b: jnp.einsum("nd,nd->n", a, b),
            "together, product and sum": lambda a, b: (a * b).sum(axis=-1),
            "diagonal of one product": lambda a, b: jnp.diagonal(a @ b.T),
        }
        held, dot = list(zip(a, b, strict=True)), jax.jit(jnp.dot)
        single: Functions = {"a call for each pair": lambda held=held, dot=dot: [dot(*pair) for pair in held]}
        rows += both_passes("dots", single, forms, a, b, pairs=pairs, dim=dim)
    return rows


def vector_rows() -> list[dict[str, Any]]:
    """Dot products of one vector with each row of a matrix."""
    rows = []
    for count, dim in ((1024, 128), (16_384, 512)):
        rng = np.random.default_rng(0)
        matrix = jnp.asarray(rng.standard_normal((count, dim)) / dim**0.25, jnp.float32)
        vector = jnp.asarray(rng.standard_normal(dim) / dim**0.25, jnp.float32)
        forms = {
            "multiplication and sum": lambda matrix, vector: (matrix * vector).sum(axis=-1),
            "product of matrix and vector": lambda matrix, vector: matrix @ vector,
        }
        single: Functions = {
            "multiplication, then sum": lambda matrix=matrix, vector=vector: (matrix * vector).sum(axis=-1)
        }
        rows += both_passes("vector", single, forms, matrix, vector, rows=count, dim=dim)
    return rows


def gradients_of(form: Callable[..., jax.Array], *arrays: jax.Array) -> Callable[[], Any]:
    """A call of the compiled loss `sum(sin(form))` with its gradients."""
    gradient = jax.jit(jax.value_and_grad(lambda *a: jnp.sin(form(*a)).sum(), tuple(range(len(arrays)))))
    return lambda: gradient(*arrays)


def bag_rows() -> list[dict[str, Any]]:
    """Sums of the embeddings of bags of words, for similar lengths and for lengths with a long tail."""
    rng, bags, words, dim = np.random.default_rng(0), 512, 20_000, 128
    table = jnp.asarray(rng.standard_normal((words, dim)), jnp.float32)
    rows = []
    for lengths, numbers in {
        "8 to 12 words": rng.integers(8, 13, bags),
        "1 to 200 words, geometric": np.minimum(rng.geometric(0.05, bags), 200),
    }.items():
        longest, total = int(numbers.max()), int(numbers.sum())
        is_word = np.arange(longest) < numbers[:, None]
        ids = np.where(is_word, rng.integers(0, words, (bags, longest)), 0).astype(np.int32)
        mask, flat = jnp.asarray(is_word, jnp.float32), jnp.asarray(ids[is_word])
        owner, ids = jnp.asarray(np.repeat(np.arange(bags), numbers), jnp.int32), jnp.asarray(ids)
        forms = {
            "a loop in one program": lambda table, ids=ids, mask=mask: jax.lax.map(
                lambda bag: bag[1] @ table[bag[0]], (ids, mask)
            ),
            "padded": lambda table, ids=ids, mask=mask: jnp.einsum("bld,bl->bd", table[ids], mask),
            "segment sums": lambda table, flat=flat, owner=owner: jax.ops.segment_sum(
                table[flat], owner, bags, indices_are_sorted=True
            ),
        }
        held, bag_sum = list(zip(ids, mask, strict=True)), jax.jit(lambda table, ids, mask: mask @ table[ids])
        single: Functions = {
            "a call for each bag": lambda held=held, bag_sum=bag_sum: [bag_sum(table, *bag) for bag in held]
        }
        share = 1 - total / (bags * longest)
        rows += both_passes("bags", single, forms, table, lengths=lengths, bags=bags, dim=dim, padding=share)
    return rows


def dispatch_rows() -> list[dict[str, Any]]:
    """Time for each of a chain of small operations on 16 numbers."""
    x, count = jnp.ones(16), 100

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(10):
            x = jnp.sin(x) * np.float32(1.01)
        return x

    chained, once = jax.jit(chain), jax.jit(lambda x: jnp.sin(x) * np.float32(1.01))
    looped = jax.jit(lambda x: jax.lax.scan(lambda x, _: (jnp.sin(x) * np.float32(1.01), None), x, None, count)[0])

    def repeated(function: Callable[[Any], Any], calls: int) -> Callable[[], Any]:
        return lambda: functools.reduce(lambda x, _: function(x), range(calls), x)

    forms: Functions = {
        "operation by operation": repeated(chain, count // 10),
        "a compiled call for each two operations": repeated(once, count),
        "a compiled call for each 20": repeated(chained, count // 10),
        f"one call for all {2 * count}": lambda: looped(x),
    }
    return compared("dispatch", forms, operations=2 * count)


def product_rows() -> list[dict[str, Any]]:
    """Products of rows with one matrix: a call for each row, several products in one program, and one product."""
    rows = []
    for count, dim in ((128, 64), (128, 512)):
        rng = np.random.default_rng(0)
        x, w = (jnp.asarray(rng.standard_normal(s) / dim**0.5, jnp.float32) for s in ((count, dim), (dim, dim)))

        @functools.partial(jax.jit, static_argnums=2)
        def divided(x: jax.Array, w: jax.Array, size: int) -> jax.Array:
            blocks = jax.lax.map(lambda block: block @ w, x.reshape(-1, size, x.shape[1]))
            return blocks.reshape(x.shape)

        sizes = {f"products of {size} rows" if size > 1 else "a loop over rows": size for size in (1, 8, 32)}
        product, held = jax.jit(jnp.matmul), list(x)
        functions: Functions = {
            "a call for each row": lambda product=product, held=held, w=w: [product(row, w) for row in held]
        }
        functions |= {name: functools.partial(divided, x, w, size) for name, size in sizes.items()}
        functions[f"one product of {count} rows"] = functools.partial(product, x, w)
        rows += compared("products", functions, rows=count, dim=dim)
    return rows


class Stream:
    """Steps on batches that the host makes, in several orders of reading, moving and computing. All give the same matrix."""

    batches, batch, dim = 16, 1024, 256

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.text = rng.integers(0, self.dim, 1 << 20)
        self.w = jnp.asarray(rng.standard_normal((self.dim, self.dim)) / self.dim**0.5, jnp.float32)
        self.step = jax.jit(update(self.loss))
        self.resident = jax.device_put(np.stack([self.read(number) for number in range(self.batches)]))
        self.steps = jax.jit(lambda w, data: jax.lax.scan(lambda w, x: (self.step(w, x, None)[0], None), w, data)[0])

    def read(self, number: int) -> np.ndarray:
        """Numbers of the bytes of pieces of text, `[B, D]`, as a data loader in Python makes them."""
        starts = np.random.default_rng(number).integers(0, len(self.text) - 256, self.batch).tolist()
        counts = [np.bincount(self.text[start : start + 256], minlength=self.dim) for start in starts]
        return np.stack(counts).astype(np.float32)

    def moved(self, number: int) -> jax.Array:
        return jax.device_put(self.read(number))

    @staticmethod
    def loss(w: jax.Array, x: jax.Array, _: None) -> jax.Array:
        for _layer in range(3):
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    def in_turn(self) -> jax.Array:
        w = self.w
        for number in range(self.batches):
            x = jax.block_until_ready(self.moved(number))
            w = jax.block_until_ready(self.step(w, x, None)[0])
        return w

    def asynchronous(self) -> jax.Array:
        w = self.w
        for number in range(self.batches):
            w, _ = self.step(w, self.moved(number), None)
        return w

    def ahead(self) -> jax.Array:
        w = self.w
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = [pool.submit(self.moved, number) for number in range(2)]
            for number in range(self.batches):
                x = waiting.pop(0).result()
                if number + 2 < self.batches:
                    waiting.append(pool.submit(self.moved, number + 2))
                w, _ = self.step(w, x, None)
        return w


def data_rows() -> list[dict[str, Any]]:
    """Rows of the table "data"."""
    stream = Stream()
    functions: Functions = {
        "read, move, compute in turn": stream.in_turn,
        "computed asynchronously": stream.asynchronous,
        "read and moved ahead by a thread": stream.ahead,
        "on the device before, one call": lambda: stream.steps(stream.w, stream.resident),
    }
    return compared("data", functions, batches=stream.batches, batch=stream.batch)


def size_rows() -> list[dict[str, Any]]:
    """Products of two n x n matrices, in numpy and on each kind of device."""
    rows = []
    devices = {device.platform: device for device in (*jax.devices("cpu")[:1], *jax.devices()[:1])}
    product = jax.jit(jnp.matmul)
    for size in (8, 32, 128, 256, 512, 1024, 2048):
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal((size, size)).astype(np.float32) for _ in range(2))
        functions: Functions = {"numpy": functools.partial(np.matmul, a, b)}
        for name, device in devices.items():
            held = [jax.device_put(x, device) for x in (a, b)]
            functions[f"{name}, operands there"] = functools.partial(product, *held)
            functions[f"{name}, operands moved"] = lambda a=a, b=b, device=device: np.asarray(
                product(*(jax.device_put(x, device) for x in (a, b)))
            )
        times = measure.timeit(functions, rounds=FLAGS.rounds, warmup=2)
        rows += [
            {
                "table": "sizes",
                "form": name,
                "size": size,
                "seconds": t.median,
                "gflops": 2e-9 * size**3 / t.median,
                "over_numpy": t.over(times["numpy"]),
            }
            for name, t in times.items()
        ]
    return rows


TABLES: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
    "ladder": ladder_rows,
    "dots": dot_rows,
    "vector": vector_rows,
    "bags": bag_rows,
    "dispatch": dispatch_rows,
    "products": product_rows,
    "data": data_rows,
    "sizes": size_rows,
}


def main(_: list[str]) -> None:
    measures = [lookup(TABLES, name, "table of --tables") for name in FLAGS.tables]
    cli.prepare_jax()
    keep_freed_memory()
    rows: list[dict[str, Any]] = []
    for measured in measures:
        of_table = measured()
        print(f"{speed_tables.speed_tricks(of_table)}\n", flush=True)
        rows += of_table
    print(measure.write_result("speed_tricks", rows, FLAGS.out))


if __name__ == "__main__":
    run_script(main)
