"""Convolutional network: classifies images of pixel tokens by standard, depthwise-separable or inverted blocks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hpnlp.cost.parts import part
from hpnlp.data.tokenizers.pixels import VALUES, PixelTokenizer
from hpnlp.model_interfaces.model_parallel import ModelParallel
from hpnlp.model_interfaces.ranges import LIMITS, classes_option, rate_option
from hpnlp.models.backbone import DTYPES
from hpnlp.models.prediction import Batch, classification_metrics
from hpnlp.models.shared.model import BaseModel
from hpnlp.models.stacks.unstacked import Unstacked
from hpnlp.nn.convnet import BLOCKS, BlockShape, ConvModule
from hpnlp.nn.image_norms import make_norm
from hpnlp.nn.layers import embed_init, param
from hpnlp.nn.output.full import FullOutput
from hpnlp.parallel.memory import remat
from hpnlp.spec import build, lookup, parse, shortened
from hpnlp.types import InputError, LossOut, Statistics, check_options, option

MAX_BLOCKS = 1000


@dataclasses.dataclass(frozen=True)
class ConvNetConfig(Unstacked):
    """A convolutional network with one label for each image."""

    has_convolutions: ClassVar[bool] = True
    description: ClassVar[str] = "a convolutional network"
    no_stages: ClassVar[str] = "whose stages would differ"
    undivided: ClassVar[str] = "whose images are not divided"

    blocks: str = option(
        "conv(32),separable(64),separable(128,stride=2),separable(128),separable(256,stride=2),separable(256)",
        'Blocks from the image to the classifier, entries of nn.convnet.BLOCKS: "conv(filters, stride=1, kernel=3)", '
        '"separable(...)" (MobileNet), "inverted(..., expand=6)" (MobileNetV2; hidden=N sets the inner channels). Each has '
        'widths of its own; taps="3 4 5" keeps some positions of its window; "*n" repeats an entry.',
    )
    width: float = option(
        1.0, "Width multiplier: factor of the filters of all blocks, rounded to whole numbers.", above=0, most=100
    )
    image_norm: str = option(
        "batch",
        'Normalisation after each product: "batch(decay=0.9)", with moving averages in evaluations, or "group(8)" groups of '
        "channels of one image.",
    )
    side: int = option(
        0, "Side of the square images in pixels, 0 for the square root of data.seq_len.", least=0, most=2**14
    )
    classes: int = classes_option()
    dropout: float = rate_option("Share of the pooled features that are dropped before the classifier in training.")
    dtype: str = option("float32", "Dtype of the activations; parameters stay float32.")

    def __post_init__(self) -> None:
        check_options(self, "model")
        lookup(DTYPES, self.dtype, "model.dtype")
        make_norm(self.image_norm)
        self.shapes()

    @functools.cached_property
    def entries(self) -> tuple[Any, ...]:
        """The entries of `blocks`, with repeats written out: instances of the classes in BLOCKS."""
        specs = parse(self.blocks, "model.blocks") if self.blocks.strip() else ()
        if not 1 <= sum(spec.repeat for spec in specs) <= MAX_BLOCKS:
            raise InputError(f"model.blocks={shortened(self.blocks, 80)}: expected 1 to {MAX_BLOCKS} blocks")
        entries = []
        for spec in specs:
            try:
                entry = build(dataclasses.replace(spec, repeat=1), BLOCKS, "block")
            except InputError as error:
                raise InputError(f"model.blocks: {spec}: {error}") from error
            entries += [entry] * spec.repeat
        return tuple(entries)

    def shapes(self) -> list[BlockShape]:
        """Shapes of the blocks, from the channels of the block before each of them.

        Returns:
          The shape of each block.

        Raises:
          InputError: A block cannot have its shape, or has too many channels.
        """
        shapes, channels = [], 1
        for number, entry in enumerate(self.entries, 1):
            try:
                shape = entry.shape(channels, self.width)
            except InputError as error:
                raise InputError(f"model.blocks: block {number}: {error}") from error
            if max(shape.filters, shape.hidden) > LIMITS["dim"]:
                raise InputError(f"model.blocks: block {number} has over {LIMITS['dim']} channels: choose fewer")
            shapes.append(shape)
            channels = shape.filters
        return shapes

    def multiply_adds(self) -> list[int]:
        """Multiplications of each block for an image of `side`, without normalisations and activations.

        Returns:
          A number for each block.
        """
        counts, side = [], self.side
        for entry, shape in zip(self.entries, self.shapes(), strict=True):
            inner, side = side, -(-side // shape.stride)
            counts.append(entry.multiply_adds(shape, side**2, inner**2))
        return counts

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.entries)

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return PixelTokenizer.vocab_size

    def fixed_length(self) -> int:
        """Pixels of an image."""
        return self.side**2

    def check_accumulation(self, accumulate: int) -> None:
        """Accepts all: the loss is a sum over images, each part normalised by its own moments."""

    def training_flops(self, batch_size: int, length: int) -> float:
        """FLOPs of a training step that count for its MFU: three times those of the products.

        Args:
          batch_size: Images of a batch.
          length: Pixels of an image.

        Returns:
          The number of FLOPs.
        """
        return 6.0 * batch_size * (sum(self.multiply_adds()) + self.shapes()[-1].filters * self.classes)


class ConvNet(BaseModel, nn.Module):
    """Blocks of convolutions, the mean over the pixels, and a softmax over classes.

    A batch is a mapping with tokens, segment_ids and positions, int32 `[B, T]`, T = side^2, in raster order; labels, int32
    `[B]`, and weights, float32 `[B]`. A token is the value 0 to 255 of a pixel; others, as padding, count as 0. segment_ids and
    positions are not read.

    Parameters and buffers of block i are under "block_i", the classifier's table is "head", its bias is under "output".

    Attributes:
      config: Sizes and parts of the model.
      model_parallel: Loss over several devices; None for one device. All else is left to the compiler, which divides the batch.
      remat: As for a Backbone: other policies than "none" keep the images between blocks only.

    References:
      Howard et al. 2017, "MobileNets".
      Sandler et al. 2018, "MobileNetV2: inverted residuals and linear bottlenecks".
    """

    config: ConvNetConfig
    model_parallel: ModelParallel | None = None
    remat: str = "none"

    @property
    def is_normalized(self) -> bool:
        """The loss is -log p(label) of a distribution over the classes."""
        return True

    def setup(self) -> None:
        c, module = self.config, ConvModule
        policy = remat.policy(self.remat)
        if policy is not None:
            module = nn.remat(ConvModule, policy=policy, prevent_cse=True, static_argnums=(3,))
        pairs = zip(c.entries, c.shapes(), strict=True)
        self.blocks = [module(entry, shape, c.image_norm, name=f"block_{i}") for i, (entry, shape) in enumerate(pairs)]
        self.table = param(self, "head", embed_init, (c.classes, c.shapes()[-1].filters), ("labels", "embed"))
        self.output = FullOutput(vocab=c.classes, dim=c.shapes()[-1].filters, axis="labels", use_bias=True)

    def features(self, batch: Batch, deterministic: bool) -> tuple[Float[Array, "B D"], Statistics]:
        """Features of images.

        Args:
          batch: Tokens, and weights unless `deterministic`.
          deterministic: Normalise by moving averages; otherwise by the moments of the batch.

        Returns:
          `(mean over the pixels of the last block, statistics by block and normalisation)`.

        Raises:
          InputError: The batch has another number of pixels than the model.
        """
        tokens, side = batch["tokens"], self.config.side
        if tokens.shape[1] != side**2:
            raise InputError(
                f"images of {tokens.shape[1]} pixels: model.side={side} expects {side**2}: set data.seq_len to the pixels "
                "of the images, and model.side=0"
            )
        values = jnp.where((tokens >= 0) & (tokens < VALUES), tokens, 0).astype(jnp.float32)
        x = (values * np.float32(2 / (VALUES - 1)) - 1).reshape(-1, side, side, 1).astype(DTYPES[self.config.dtype])
        weights = None if deterministic else (batch["weights"] != 0).astype(jnp.float32)
        statistics = {}
        for block in self.blocks:
            x, sums = block(x, weights, deterministic)
            if sums:
                statistics[block.name] = sums
        # In float32: a sum of 1,000 pixels in bfloat16 loses most digits.
        return x.astype(jnp.float32).mean(axis=(1, 2)).astype(x.dtype), statistics

    def loss(self, batch: Batch, deterministic: bool = True) -> LossOut:
        """The loss of a batch.

        Args:
          batch: Images, labels and weights.
          deterministic: Normalise by moving averages, and drop nothing; otherwise the rng "dropout" is used.

        Returns:
          The loss summed over images, in nats, with "accuracy" and, in evaluations, "confusion"
          (`prediction.classification_metrics`), and the statistics of batch normalisations.
        """
        h, statistics = self.features(batch, deterministic)
        if not deterministic and self.config.dropout:
            keep = jax.random.bernoulli(self.make_rng("dropout"), 1 - self.config.dropout, h.shape)
            h = jnp.where(keep, h / np.float32(1 - self.config.dropout), jnp.zeros((), h.dtype)).astype(h.dtype)
        operands = self.table, h, batch["labels"], batch["weights"]
        with part("output"):
            if self.model_parallel is None:
                out, best = self.output.loss(*operands), self.output.best(self.table, h)[1]
            else:
                out = self.model_parallel.loss(self.output, *operands, None)
                best = self.model_parallel.best(self.output, self.table, h)
        metrics = classification_metrics(batch, best, self.config.classes, deterministic)
        return LossOut(out.sum, out.weight, {**out.aux, **metrics}, statistics)

    def logits(self, batch: Batch) -> Float[Array, "B C"]:
        """Logits of the labels of a batch, on one device.

        Args:
          batch: Images.

        Returns:
          Float32 logits of each image.
        """
        return self.output.logits(self.table, self.features(batch, deterministic=True)[0])

    @nn.nowrap
    def advance(self, buffers: Any, statistics: Statistics, step: jax.Array, rng: jax.Array) -> Any:
        """Moving averages of the batch normalisations after a step.

        Args:
          buffers: The model's buffers.
          statistics: As `loss` returns them, summed over the whole batch.
          step: Number of steps done; not read.
          rng: Key; not read.

        Returns:
          A tree like `buffers`.
        """
        norm = make_norm(self.config.image_norm, parent=None)
        return {
            block: {name: norm.advance(buffers[block][name], sums) for name, sums in of_block.items()}
            for block, of_block in statistics.items()
        }

    def rows(self, batch: Batch) -> dict[tuple[str, ...], jax.Array]:
        """No table is looked up.

        Args:
          batch: As for `loss`.

        Raises:
          InputError: Always.
        """
        raise InputError(
            "optimizer.rows=True trains only the rows that a batch looks up, and a convolutional network has no table of rows: "
            "set optimizer.rows=False"
        )

    @nn.nowrap
    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch of zeros with the shapes and dtypes of a batch of data.

        Args:
          batch_size: Number of images, B.
          length: Not read: images have `side`^2 pixels.

        Returns:
          The batch, all of whose tokens have segment id 1, and whose weights are 1.
        """
        tokens = jnp.zeros((batch_size, self.config.side**2), jnp.int32)
        return {
            "tokens": tokens,
            "segment_ids": jnp.ones_like(tokens),
            "positions": tokens,
            "labels": jnp.zeros((batch_size,), jnp.int32),
            "weights": jnp.ones((batch_size,), jnp.float32),
        }

    @nn.nowrap
    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch: ("batch",) for labels and weights, otherwise ("batch", "length")."""
        axes: Mapping[str, tuple[str, ...]] = dict.fromkeys(("tokens", "segment_ids", "positions"), ("batch", "length"))
        return {**axes, "labels": ("batch",), "weights": ("batch",)}

    def __call__(self, batch: Batch) -> LossOut:
        return self.loss(batch)


def filled(config: ConvNetConfig, classes: int, seq_len: int) -> ConvNetConfig:
    """A config with the sizes that depend on the data.

    Args:
      config: The config.
      classes: Number of labels.
      seq_len: Pixels of an image.

    Returns:
      The config with `classes` and `side`.

    Raises:
      InputError: The images are not square, or have another side than the config.
    """
    side = math.isqrt(seq_len)
    if side**2 != seq_len:
        raise InputError(
            f"data.seq_len={seq_len} is no square number: images of side n have n^2 pixels, such as {side**2} or "
            f"{(side + 1) ** 2}"
        )
    if config.side not in (0, side):
        raise InputError(
            f"model.side={config.side}, and data.seq_len={seq_len} is an image of side {side}: set model.side=0, or "
            f"data.seq_len={config.side**2}"
        )
    return dataclasses.replace(config, side=side, classes=classes)
