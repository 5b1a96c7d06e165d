"""How lost ranks get their state back: by replay, by going back to what was stored, or by a framework's callbacks."""
