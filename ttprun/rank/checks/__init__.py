"""Comparisons: a replacement with the rank that was lost, weights with those of the other ranks."""
