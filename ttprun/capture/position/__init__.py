"""Where the script is: its frames, the loops around a step, and how a replay jumps to a place in them."""
