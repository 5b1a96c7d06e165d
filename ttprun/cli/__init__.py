"""The command line, one file a command. Read `main.py` first; only `run` imports torch."""
