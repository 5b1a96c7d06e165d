"""What differs between devices: which errors they raise, and how they are stopped, checked, cleaned and started again.

`device_errors.py` is one table from error texts to faults, without torch; `interface.py` is the seam, and finds the
device of this process. Each accelerator has one file that implements it.
"""
