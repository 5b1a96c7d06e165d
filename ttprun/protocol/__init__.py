"""What the agent and its ranks share: shared memory, and messages over sockets."""
