"""Models brought to measurements, and the error that is left."""
