"""What runs inside a rank: the hooks around the user's script, and its part in a recovery.

It puts capture, groups and tensors together. Rooms, lowest first; each imports only from those before it
(`tests/test_floors.py`):

heartbeat, held_signals  this process as the system sees it
proof, verification      comparisons with the lost rank and with the other ranks
step                     what happens at each optimizer step
replay                   how a replacement gets to the lost rank's place, and what the others do meanwhile
framework                recovery by a framework's own callbacks (--mindio)
bootstrap                how the hooks get into a process, and how a run begins and ends

Read `introspect/current_rank.py` first (what a rank knows), then `step/step_hooks.py`, `groups/process_group.py` (what
happens at each collective), `replay/order_thread.py` (what happens when another rank is lost) and
`replay/replay_run.py`.
"""
