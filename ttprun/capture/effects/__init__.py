"""What the script does to the outside: files, output, and what it takes from there (time, entropy)."""
