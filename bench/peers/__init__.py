"""kvrelay and what else serves or runs the same model on this machine, in turns: see README.md."""
