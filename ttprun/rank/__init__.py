"""What runs inside a rank: the hooks around the user's script, and its part in a recovery.

Read `session.py` first (what a rank knows), then `boundary.py` (what happens at each optimizer step),
`process_group.py` (what happens at each collective), `recovery.py` (what happens when another rank is lost) and
`replay.py` (how a replacement gets to where the lost rank stood).
"""
