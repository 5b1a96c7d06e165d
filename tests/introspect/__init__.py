"""Tests of ttprun/introspect."""
