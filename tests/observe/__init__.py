"""Tests of what a run leaves to read: directory, status, events. No torch."""
