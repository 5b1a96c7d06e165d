"""`python -m ttprun`: the same as `ttprun`."""

from ttprun.cli.main import program

if __name__ == "__main__":  # multiprocessing imports this module again in what it spawns
    program()
