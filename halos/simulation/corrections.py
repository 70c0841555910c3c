"""What others do about stale changes, as tensor states of a server. One that wins moves to core."""

from __future__ import annotations

from collections.abc import Mapping

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


class DelayCorrected(TorchState):
    """Blends in the parent's model as it would be with what was done here since the cut.

    With a weight of 1 this is the delay-corrected merge of LOSCAR-SGD (2605.20866)::

        theta = (1 - alpha)*theta + alpha*(model + theta - theta_at_cut)
    """

    def blend(self, model: Payload, *, merge_weight: float, carry: bool) -> None:
        assert isinstance(model, Fragments) and self.at_cut is not None
        done = zip(model.tensors, self.theta, self.at_cut.tensors, strict=True)
        ahead = Fragments([q + (theta - cut) for q, theta, cut in done])
        super().blend(ahead, merge_weight=merge_weight, carry=carry)


STATES: Mapping[str, type[TorchState]] = {
    "none": TorchState,
    "momentum": AgainstMomentum,
    "delay": DelayCorrected,
}
