"""The launcher around the ranks: torch's elastic agent, signals, settings, the exit code. Begin with `launch.py`."""
