"""The folder that a checked launch has on its PYTHONPATH, so that its ranks load the `sitecustomize` in it."""
