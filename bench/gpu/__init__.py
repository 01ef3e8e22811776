"""Runs once on a machine with a GPU: `pack.sh` gathers what it needs where there is a network."""
