"""How the hooks get into a process, and how a run of the script begins and ends in it."""
