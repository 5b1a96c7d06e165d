"""This process, as the system and torch see it: signals, memory, heartbeat, stack, random states."""
