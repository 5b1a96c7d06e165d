"""Save directories: real files, locks, full disks and processes that are killed in the middle of a commit."""
