"""Benchmarks. Each prints a table and says what it compared with: `python -m bench [NAME...]`."""
