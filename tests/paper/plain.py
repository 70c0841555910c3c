"""DESIGN 4's pseudocode once more, word by word in plain floats: what production is held to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PlainNesterov:
    """Liu et al. 2024 (arXiv 2401.09135), algorithm 3, with ``lr`` N times the quoted rate."""

    theta: float
    rate: float
    beta: float = 0.0
    N: int = 1
    c: float = 0.0
    m: float = 0.0
    buffer: float = 0.0
    t: int = 0

    def receive(self, g: float) -> None:
        lr, beta, N, c = self.N * self.rate, self.beta, self.N, self.c
        self.buffer += g
        self.t += 1
        if self.t % N == 0:
            self.m = beta * self.m + self.buffer / N
            self.theta -= lr * ((1 - c * N + c) * beta * self.m + g / N)
            self.buffer = 0.0
        else:
            self.theta -= lr * (c * beta * self.m + g / N)


@dataclass
class PlainLocalServer:
    """A local parameter server: accumulates, pushes ``u``, blends the answer in."""

    outer: PlainNesterov
    K: int
    alpha: float
    carry: bool
    base: float
    version: int = 0
    merged_version: int = 0
    at_cut: float | None = None

    def receive(self, g: float) -> float | None:
        """A worker's update. Returns the push that it brings about, if any."""
        self.outer.receive(g)
        self.version += 1
        if self.version < self.merged_version + self.K or self.at_cut is not None:
            return None
        self.at_cut = self.outer.theta
        return self.base - self.outer.theta

    def merge(self, q: float) -> None:
        """The global model arrives."""
        assert self.at_cut is not None
        before = self.outer.theta
        self.outer.theta = (1 - self.alpha) * self.outer.theta + self.alpha * q
        self.base = self.outer.theta
        if self.carry:
            self.base = self.outer.theta + (self.at_cut - before)
        self.merged_version = self.version
        self.at_cut = None
