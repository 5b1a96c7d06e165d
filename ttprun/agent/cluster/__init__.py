"""Several nodes: the agent that leads, those that follow, spares, and who leads when the leader is lost."""
