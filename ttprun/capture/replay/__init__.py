"""The way back: a script runs from its top, and becomes what a record says. Begin with replay.py."""
