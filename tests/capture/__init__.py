"""Tests of ttprun/capture."""
