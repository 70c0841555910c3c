"""What others do about stale changes, as a tensor state of a server; were it to win, it would move
to core."""

from __future__ import annotations

import torch

from halos.core.fragments import Fragments
from halos.core.state import TorchState
from halos.core.tensors import Payload


class AgainstMomentum(TorchState):
    """Takes out of a change what runs against the outer momentum (after HeLoCo, 2606.00271).

    A stale change points to where the model no longer is; its part against the direction that all
    went into since is not applied::

        g' = g - min(0, <g, m> / <m, m>) * m      for each fragment
    """

    def apply(self, pseudo_gradient: Payload) -> None:
        assert isinstance(pseudo_gradient, Fragments)
        corrected = []
        for g, m in zip(pseudo_gradient.tensors, self.momentum, strict=True):
            size = torch.dot(m, m)
            against = torch.dot(g, m) / size if size > 0 else torch.zeros(())
            corrected.append(g - against * m if against < 0 else g)
        super().apply(Fragments(corrected))
