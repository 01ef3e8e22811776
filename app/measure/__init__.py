"""Serving seen from outside: `kvrelay bench`, and what `bench/` shares with it."""
