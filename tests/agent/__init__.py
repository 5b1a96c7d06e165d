"""Tests of the agent's edges: real sockets and processes."""
