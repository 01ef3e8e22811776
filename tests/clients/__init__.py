"""Clients that others wrote, unmodified, each in an environment of its own, against a running kvrelay."""
