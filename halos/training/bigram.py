"""The yardstick that any trained model must beat: tokens predicted from the one before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halos.training.data import Dataset, TokenFile

LARGEST_VOCABULARY = 4096
CHUNK = 2**22


def bigram_loss(dataset: Dataset, alpha: float = 0.1) -> float | None:
    """Cross-entropy of the held-out tokens in nats a token, under bigrams of the training tokens::

        p(b | a) = (count(a, b) + alpha) / (count(a) + alpha * V)

    ``None`` if the vocabulary is larger than ``LARGEST_VOCABULARY``, whose pairs are too many to
    count. Takes 8 V^2 bytes a few times over, and about 10 ns a token.
    """
    if dataset.vocab_size > LARGEST_VOCABULARY:
        return None
    smoothed = pair_counts(dataset.train) + alpha
    nats = np.log(smoothed.sum(axis=1, keepdims=True)) - np.log(smoothed)
    held_out = pair_counts(dataset.validation)
    return float((held_out * nats).sum() / held_out.sum())


def pair_counts(file: TokenFile) -> npt.NDArray[np.int64]:
    """How often token b follows token a, as [a, b]."""
    size = file.vocab_size
    counts = np.zeros(size * size, dtype=np.int64)
    for start in range(0, len(file.tokens) - 1, CHUNK):
        tokens = file.tokens[start : start + CHUNK + 1].astype(np.int64)
        file.check(tokens)
        counts += np.bincount(tokens[:-1] * size + tokens[1:], minlength=size * size)
    return counts.reshape(size, size)
