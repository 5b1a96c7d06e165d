"""Tests of ttprun/tensors."""
