"""Data that comes with the library."""
