"""What only breaks things on purpose: faults by name, when they strike, what they do, and whole drills."""
