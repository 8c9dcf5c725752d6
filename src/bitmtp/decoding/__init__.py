"""State, step and policies: the heart of the system. Start reading at ``decoder.py``."""
