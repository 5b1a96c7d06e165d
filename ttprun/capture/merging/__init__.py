"""What another run takes of a record, and what of its own set-up. Begin with merge.py."""
