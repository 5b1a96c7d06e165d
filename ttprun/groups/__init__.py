"""Process groups that survive a lost peer: over a backend that can be replaced, with a journal of their collectives.

What they need of whoever uses them: host.py. May import: introspect, device, protocol.
Begin with process_group.py (what happens at each collective), then journal.py.
"""
