"""What only a resume with another number of ranks, or with other arguments, needs."""
