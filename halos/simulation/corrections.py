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
    """Goes on from the root's model with all that was done here since the push was cut
    (LOSCAR-SGD, 2605.20866)::

        theta = theta_global + (theta_local - theta_snapshot)
    """

    def blend(self, model: Payload, *, merge_weight: float, carry: bool) -> None:
        assert isinstance(model, Fragments) and self.base is not None and self.at_cut is not None
        snapshot, self.at_cut = self.at_cut, None
        before = self.theta.read()
        parts = zip(
            before.tensors, model.tensors, snapshot.tensors, self.theta.write(), strict=True
        )
        for theta, q, cut, out in parts:
            torch.sub(theta, cut, out=out)
            out.add_(q)
        for q, out in zip(model.tensors, self.base.write(), strict=True):
            out.copy_(q)


STATES: Mapping[str, type[TorchState]] = {
    "none": TorchState,
    "momentum": AgainstMomentum,
    "delay": DelayCorrected,
}
