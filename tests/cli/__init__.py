"""Tests of the command line: real parsers, real files, real sockets; no rank is started."""
