"""The way back: a script runs from its top, and becomes what a record says. Begin with replay.py.

merge.py says what another run takes of a record, and what of its own set-up.
"""
