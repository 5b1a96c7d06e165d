"""Tests of the pure decision logic: no process, no clock, no torch."""
