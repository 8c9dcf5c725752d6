"""Settings for a model on a machine: measured once, kept in a small file."""
