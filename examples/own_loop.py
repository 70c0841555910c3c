"""A loop and a module of one's own, as a worker of a run. On one machine, each in a terminal:

halos coordinator examples/own_loop.toml       # prints the address that the server joins
halos server --region eu --join ADDRESS        # prints the address that the workers join
python examples/own_loop.py ADDRESS            # twice: the run has two workers
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import halos


class Recurrent(nn.Module):
    """Bytes to logits of the byte after each. The coordinator makes one too: see own_loop.toml."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.memory(self.embedding(tokens))[0])


def train(run: halos.Run, model: nn.Module) -> None:
    for tokens, targets in run.batches():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) / run.accumulation
        loss.backward()
        run.step(loss)


def main(address: str) -> None:
    model = Recurrent(width=64)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    with halos.join(address, model=model, optimizer=optimizer) as run:
        train(run, model)
        print("The run is over." if run.finished else "Left the run.")


if __name__ == "__main__":
    main(sys.argv[1])
