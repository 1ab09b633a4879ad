"""What the commands do; `cli.py` only reads their arguments."""
