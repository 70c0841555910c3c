"""A small model of transformers on data of one's own, as a worker of a run:

    halos coordinator examples/transformers_model.toml
    halos server --region eu --join ADDRESS
    python examples/transformers_model.py ADDRESS        # twice

The model is what transformers_model.toml says; every worker gets the same one.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.utils.data import Dataset

import halos


class Sums(Dataset[dict[str, Tensor]]):
    """All sums of two numbers of two digits, as in "47+85=132"."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        a, b = divmod(index, 100)
        tokens = torch.tensor(list(f"{a:02}+{b:02}={a + b:03}".encode()))
        return {"input_ids": tokens, "labels": tokens}  # transformers shifts labels by itself


def train(run: halos.Run) -> None:
    for batch in run.batches(Sums()):
        loss = run.model(**batch).loss / run.accumulation
        loss.backward()
        run.step(loss)


def main(address: str) -> None:
    with halos.join(address) as run:
        train(run)
        print("The run is over." if run.finished else "Left the run.")


if __name__ == "__main__":
    main(sys.argv[1])
