"""Switches what makes kvrelay seen on and off while it runs, for bench/observed.py."""
