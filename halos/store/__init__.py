"""The room that keeps: snapshots on disk, and the form in which state is written there."""
