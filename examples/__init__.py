"""Examples. Not part of the distribution."""
