"""Helpers of the tests of corpora."""

import numpy as np

from hpnlp.data import DataConfig


def config(path, **options) -> DataConfig:
    return DataConfig(**{"path": str(path), "seq_len": 32, "batch_size": 4, "heldout": 0.2, **options})


def take(batches, count: int) -> list[dict[str, np.ndarray]]:
    return [next(batches) for _ in range(count)]


def assert_equal(batches: list[dict[str, np.ndarray]], expected: list[dict[str, np.ndarray]]) -> None:
    for batch, expected_batch in zip(batches, expected, strict=True):
        assert batch.keys() == expected_batch.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], expected_batch[name])


def predicted(batches, tokenizer) -> bytes:
    """The text that consecutive batches predict."""
    return b"".join(tokenizer.decode(batch["labels"][batch["weights"] > 0]) for batch in batches)
