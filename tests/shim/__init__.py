"""Tests of the shim: real interpreters."""
