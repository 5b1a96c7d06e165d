"""Process groups over a backend that can be replaced, and the journal of their collectives."""
