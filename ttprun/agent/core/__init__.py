"""The deciding thread: the supervisor, its parts, the ranks' slots, and what crosses the state machine's border."""
