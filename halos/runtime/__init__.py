"""Drivers of the core: they own clocks, threads and links; the core owns the decisions."""
