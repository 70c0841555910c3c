"""The room that computes: models, data, the inner loop. Knows torch, devices and disks."""
