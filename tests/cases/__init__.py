"""What has gone wrong in other systems of this kind, tried on this one: a module for each case."""
