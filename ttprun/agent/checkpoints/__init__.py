"""Checkpoints on disk and snapshots in shared memory: when they are due, and what they are made of."""
