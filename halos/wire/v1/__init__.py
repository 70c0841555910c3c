"""Generated from protos/ by `make protos`; only :mod:`halos.wire.serde` imports it."""
