"""Tests of what runs inside a rank: with torch on CPU, in one or two processes."""
