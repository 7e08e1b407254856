"""Draws the vectors of a run of labelled bags in the plane, with the regions of the labels and the neighbours of some texts.

    python experiments/embeddings/picture.py --workdir=runs/titles --out=titles.png [--method=pca]

The picture has the texts of the labels with most held-out texts: dots for training texts, triangles for held-out ones. Colours
of the background are decision boundaries: the label that most of the nearest training texts in the plane have. With the full
vectors, the script prints the share of held-out texts whose label the nearest training texts predict, and the neighbours that
explain some of the predictions.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from absl import flags

from hpnlp import cli
from hpnlp.cli.errors import run_script
from hpnlp.data.examples.dataset import HELDOUT
from hpnlp.models.variables import collections
from hpnlp.ops.embeddings import find_neighbors, neighbor_probabilities
from hpnlp.report.plots import drawable
from hpnlp.tasks import find
from hpnlp.training import run_directory
from hpnlp.types import InputError

GRID = 300  # points of a side of the background
EXPLAINED = 4  # held-out texts whose neighbours are printed

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", "runs/titles", "Directory of a run of task=labelled_bags.")
flags.DEFINE_string("out", "titles.png", "Picture to write.")
flags.DEFINE_enum("method", "pca", ["pca", "tsne"], "Projection to the plane; t-SNE needs scikit-learn.")
flags.DEFINE_integer("labels", 8, "Number of labels.", lower_bound=2, upper_bound=20)
flags.DEFINE_integer("neighbors", 5, "Number of neighbours that predict a label.", lower_bound=1)


class Texts:
    """Vectors of the texts of one set of examples.

    Attributes:
      vectors: `[N, D]`.
      labels: `[N]` classes.
      titles: N texts.
    """

    def __init__(self, dataset: Any, name: str, embed: Any, batch_size: int) -> None:
        stored, vectors, labels, self.titles = dataset.stored[name], [], [], []
        for start in range(0, stored.count, batch_size):
            numbers = np.arange(start, min(start + batch_size, stored.count))
            batch = dataset.kind.batch(stored, numbers, batch_size, dataset.tokenizer, dataset.seq_len)
            texts, _, exists = map(np.asarray, embed(batch))
            vectors.append(texts[exists])
            labels.append(np.repeat(batch["labels"], exists.sum(axis=1)))
            self.titles += [title for n in numbers for title in stored.text(int(n), 0).decode().splitlines()]
        self.vectors, self.labels = np.concatenate(vectors), np.concatenate(labels)

    def of(self, chosen: np.ndarray) -> np.ndarray:
        """Selects the texts that have one of these labels, as a mask."""
        return np.isin(self.labels, chosen)


def pca(x: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both sets of vectors on the two directions in which the first varies most."""
    mean = x.mean(axis=0)
    directions = np.linalg.svd(x - mean, full_matrices=False)[2][:2].T
    return (x - mean) @ directions, (others - mean) @ directions


def tsne(x: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both sets of vectors in the plane, in which near ones stay near (van der Maaten and Hinton 2008)."""
    from sklearn.manifold import TSNE

    points = TSNE(metric="cosine", init="random", random_state=0).fit_transform(np.concatenate([x, others]))
    return points[: len(x)], points[len(x) :]


def nearest_label(points: np.ndarray, labels: np.ndarray, at: np.ndarray, k: int) -> np.ndarray:
    """The most frequent label of the k nearest points of each place."""
    found = []
    for part in np.array_split(at, 1 + len(at) // 4096):
        distance = np.square(part[:, None] - points[None]).sum(axis=2)
        near = labels[np.argpartition(distance, k, axis=1)[:, :k]]
        found.append([np.bincount(row).argmax() for row in near])
    return np.concatenate(found)


def draw(train: Any, heldout: Any, names: list[str], path: Path) -> float:
    """Draws two sets of `(points, labels)`; the share of held-out points in the region of their label."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    everything = np.concatenate([train[0], heldout[0]])
    low, high = everything.min(axis=0), everything.max(axis=0)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    axes_of = [np.linspace(a, b, GRID) for a, b in zip(low, high, strict=True)]
    grid = np.stack(np.meshgrid(*axes_of), axis=-1).reshape(-1, 2)
    regions = nearest_label(train[0], train[1], grid, FLAGS.neighbors).reshape(GRID, GRID)
    colors = [plt.get_cmap("tab10" if len(names) <= 10 else "tab20")(i) for i in range(len(names))]
    figure, axes = plt.subplots(figsize=(9, 7), layout="constrained")
    bounds = {"vmin": -0.5, "vmax": len(names) - 0.5}
    axes.pcolormesh(
        *axes_of, regions, cmap=ListedColormap(colors), alpha=0.2, shading="nearest", rasterized=True, **bounds
    )
    for label, name in enumerate(names):
        axes.scatter(*train[0][train[1] == label].T, s=10, color=colors[label], label=name)
        axes.scatter(
            *heldout[0][heldout[1] == label].T, s=36, marker="^", color=colors[label], edgecolor="black", lw=0.6
        )
    name = {"pca": "principal component", "tsne": "dimension of t-SNE"}[FLAGS.method]
    axes.set(xticks=[], yticks=[], xlabel=f"first {name}", ylabel=f"second {name}")
    axes.set_title("texts by label, and the label of the nearest training texts; triangles are held out")
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=120)
    return float(np.mean(nearest_label(train[0], train[1], heldout[0], FLAGS.neighbors) == heldout[1]))


def explain(train: Texts, heldout: Texts, names: tuple[str, ...]) -> None:
    """Prints the accuracy of the nearest neighbours, and those of some texts."""
    near = find_neighbors(heldout.vectors, train.vectors, FLAGS.neighbors)
    labels = train.labels[np.asarray(near.ids)]
    shares = np.asarray(neighbor_probabilities(near.similarities, labels, len(names), temperature=0.1))
    best = shares.argmax(axis=1)
    print(
        f"label of a held-out text by its {FLAGS.neighbors} nearest training texts: {np.mean(best == heldout.labels):.3f}"
    )
    for number in np.linspace(0, len(best) - 1, EXPLAINED).astype(int):
        print(f"\n{heldout.titles[number]} ({names[heldout.labels[number]]}): {names[best[number]]}")
        for similarity, i in zip(near.similarities[number], near.ids[number], strict=True):
            print(f"  {float(similarity):.2f} {names[train.labels[int(i)]]}: {train.titles[int(i)]}")


def main(_: list[str]) -> None:
    path = cli.plot_path(FLAGS.out, "titles.png")
    if FLAGS.method == "tsne" and importlib.util.find_spec("sklearn") is None:
        raise InputError("--method=tsne needs scikit-learn: pip install scikit-learn, or pass --method=pca")
    cli.prepare_jax()
    run = run_directory.load(Path(FLAGS.workdir))
    if run.config.task != "labelled_bags":
        raise InputError(
            f"--workdir={FLAGS.workdir} holds a run of task={run.config.task!r}: name one of labelled_bags"
        )
    dataset: Any = find(run.config.task).dataset(run.config.data, run.vocabulary)
    apply = jax.jit(functools.partial(run.model.apply, method="embed_bags"))
    embed = functools.partial(apply, collections(run.params))
    sets = {name: Texts(dataset, name, embed, run.config.data.batch_size) for name in ("train", HELDOUT)}
    train, heldout = sets.values()
    explain(train, heldout, dataset.labels)
    chosen = np.argsort(-np.bincount(heldout.labels, minlength=len(dataset.labels)), kind="stable")[: FLAGS.labels]
    keep, scored = train.of(chosen), heldout.of(chosen)
    points = {"pca": pca, "tsne": tsne}[FLAGS.method](train.vectors[keep], heldout.vectors[scored])
    number = {int(label): i for i, label in enumerate(chosen)}
    labels = [np.array([number[int(x)] for x in found]) for found in (train.labels[keep], heldout.labels[scored])]
    names = [drawable(dataset.labels[label]) for label in chosen]
    share = draw((points[0], labels[0]), (points[1], labels[1]), names, path)
    print(f"\n{path}: {share:.3f} of the held-out texts of {len(names)} labels lie in the region of their label")


if __name__ == "__main__":
    run_script(main)
