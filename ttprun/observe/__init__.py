"""What a run leaves for people and programs to read: the run directory, its status and its events. No torch here."""
