"""Measurements: policies against autoregressive decoding, the cost of a pass by width, and where they were made."""
