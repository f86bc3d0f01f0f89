"""How fast this code is on this machine, and against what."""
