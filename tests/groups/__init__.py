"""Tests of ttprun/groups."""
