"""Drills: what is asked for, what differs, and which fault came to what."""
