"""Between launchers: how they meet, follow one that leads, wait for slots, and who leads when the leader is lost."""
