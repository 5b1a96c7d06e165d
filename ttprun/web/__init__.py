"""The page of a run, its metrics and its report: what the run directory's files say, for browsers and other programs.

A process of its own serves it (`server.py`), so that nothing here can delay a rank or its supervisor. It reads files
and changes nothing, and a job trains without this package. Begin with `beside`, and in the process with `server.build`.
"""
