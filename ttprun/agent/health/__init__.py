"""Ranks that hang, ranks without hooks, and what keeps a job from being protected."""
