"""What each machine does: its processes, standbys, memory and records."""
