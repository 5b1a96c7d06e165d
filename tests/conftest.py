"""What all tests share.

Property tests draw the same examples each time, so that a run says something of the change and not of its luck;
`pytest --hypothesis-profile explore tests/recovery` looks for new ones.
"""

import signal

from hypothesis import settings

# A shell has what it starts in the background ignore this, and so would whatever the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("same", max_examples=150, derandomize=True, database=None, deadline=None)
settings.register_profile("explore", max_examples=5_000, database=None, deadline=None)
settings.load_profile("same")
