"""Faults, and trials of a script that is broken by them."""
