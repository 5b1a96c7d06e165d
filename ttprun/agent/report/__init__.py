"""What others see of a run: its status, its topology, what is not proved."""
