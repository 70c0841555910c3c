"""halos trains one language model on accelerators in several places, over slow networks.

The public API is :func:`join` and the :class:`Run` that it returns; see ``halos.joining``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# gRPC reads it when it is first imported. What its core tells below errors, we tell in words.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

if TYPE_CHECKING:
    from halos.joining import join
    from halos.run import Run

__all__ = ["Run", "join"]


def __getattr__(name: str) -> Any:
    """Import what computes only when it is used: a command that does not answers at once."""
    if name == "join":
        from halos.joining import join

        return join
    if name == "Run":
        from halos.run import Run

        return Run
    raise AttributeError(f"module 'halos' has no attribute {name!r}")
