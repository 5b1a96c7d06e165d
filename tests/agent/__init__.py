"""The agent's parts, with real processes and sockets."""
