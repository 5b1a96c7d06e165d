"""The record that a rank leaves of each boundary, in shared memory outside its process."""
