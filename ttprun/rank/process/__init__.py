"""The process: signals, memory, heartbeat, stack, random states."""
