"""What differs between devices: which errors they raise, and how they are stopped, checked, cleaned and started again.

`device_errors.py` is one table from error texts to faults, without torch; `interface.py` is the seam, and each device
has one file that implements it. `registry.py` finds the device of this process.
"""
