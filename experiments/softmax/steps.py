"""Measures time and memory of a training step of each output layer, at the sizes of `words.py`.

    python experiments/softmax/steps.py [--only=docs,code,whitespace] [--rounds=5]

The step is the one that the training loop calls: model, AdamW, clipping and metrics, on a batch of the corpus. Layers are
interleaved, and the median of the ratios is reported. Above 131,072 words each layer is measured separately, because two do not
fit into the memory of a small machine, and the full one, which takes many seconds, only twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.cli import experiment
from hpnlp.data.stream import Corpus, prepare
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training.config import resolve
from hpnlp.training.run_directory import make_model
from hpnlp.training.trainer import make_trainer

HERE = Path(__file__).parent
WORDS = str(HERE / "words.py")

FLAGS = flags.FLAGS
flags.DEFINE_list("only", ["docs", "code", "whitespace"], "Corpora to measure.")
flags.DEFINE_integer("rounds", 5, "Measurements of each step; the median is reported.")
flags.DEFINE_string("out", str(HERE.parent / "results"), "Where the results go, one file per corpus.")


Step = tuple[Callable[[], Any], measure.ProgramMemory, int]


def step_of(corpus_name: str, overrides: Mapping[str, Any], corpus: Corpus) -> Step:
    """A call of the compiled step on a batch, its memory, and the number of parameters of the model."""
    config = resolve(experiment.read(f"{WORDS}:{corpus_name}", [f"--{name}={v}" for name, v in overrides.items()]))
    model = make_model(config, Vocabulary(corpus.tokenizer))
    trainer = make_trainer(model, config.optimizer, config.plan, steps=config.train.steps)
    key = jax.random.key(0)
    held = [trainer.init(key)]
    batch = jax.device_put(next(corpus.train(seed=0)), trainer.batch_sharding)
    compiling = dataclasses.replace(trainer.step, jitted=functools.partial(measure.compile, trainer.step.jitted))
    program = compiling(held[0], batch, key)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(held[0].params))

    def call() -> Any:
        held[0], metrics = program(held[0], batch, key)
        return metrics

    return call, program.memory, parameters


def bench(corpus_name: str, rounds: int) -> list[dict[str, Any]]:
    corpus = prepare(resolve(experiment.read(f"{WORDS}:{corpus_name}")).data)
    vocab = corpus.tokenizer.vocab_size
    members = {member["model.output"]: member for member in experiment.load(WORDS).get_sweep(corpus_name)}
    sizes: dict[str, Any] = {}  # layer -> (memory, parameters)
    if vocab <= 2**17:
        steps = {layer: step_of(corpus_name, overrides, corpus) for layer, overrides in members.items()}
        times = measure.timeit({layer: call for layer, (call, *_) in steps.items()}, rounds=rounds)
        sizes = {layer: size for layer, (_, *size) in steps.items()}
        ratios = {layer: times[layer].over(times["full"]) for layer in members}
    else:
        times = {}
        for layer, overrides in members.items():
            call, *sizes[layer] = step_of(corpus_name, overrides, corpus)
            times |= measure.timeit({layer: call}, rounds=2 if layer == "full" else rounds)
            del call  # frees its parameters and Adam moments
        ratios = {layer: times[layer].median / times["full"].median for layer in members}
    return [row(layer, vocab, times[layer], ratios[layer], *sizes[layer]) for layer in members]


def row(
    layer: str, vocab: int, time: measure.Timing, ratio: float, memory: measure.ProgramMemory, parameters: int
) -> dict[str, Any]:
    megabytes = {"argument": memory.argument / 1e6, "temp": memory.temp / 1e6}
    shown = f"{layer:22} {1e3 * time.median:8.1f} ms, {ratio:.4f} of full"
    print(
        f"{shown}, {megabytes['argument']:.0f} MB of arguments, {megabytes['temp']:.0f} MB of temporaries", flush=True
    )
    return {
        "what": f"training step of {layer}, V {vocab:,}",
        "output": layer,
        "ratios": {"time over full": ratio},
        "s": time.median,
        "all_s": list(time.all),
        "megabytes": megabytes,
        "parameters": parameters,
    }


def main(_: Any) -> None:
    cli.prepare_jax()
    for corpus_name in FLAGS.only:
        rows = bench(corpus_name, FLAGS.rounds)
        print(measure.write_result(f"softmax_steps_{corpus_name}", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
