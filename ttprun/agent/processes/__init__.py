"""Processes of ranks and standbys: how they are started, watched and ended, and the memory that outlives them."""
