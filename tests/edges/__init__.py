"""What lies between the agent and its ranks: real processes, sockets and shared memory, no torch."""
