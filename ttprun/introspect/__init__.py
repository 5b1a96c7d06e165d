"""Looks at a running Python program that it cannot notice: frames, variables, objects, bytes, random states, children.

Also the manners of whoever works inside somebody else's process: no exception of ours comes out (fail_open.py), and
an exception of the script's signal handlers is not ours to swallow (signal_handlers.py).
May import: device, frameworks. Begin with safe_reads.py, then ownership.py.
"""
