"""What a framework finds in the place of mindio_ttp under plain torchrun: calls that do nothing, and never repair."""
