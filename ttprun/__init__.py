"""ttprun: runs a PyTorch script as torchrun does, and replaces a lost rank in the middle of a step."""

__version__ = "0.1.0"
