"""Runs as they would go: the production core in modelled time, beside rival methods."""
