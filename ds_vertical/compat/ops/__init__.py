"""The compiled ops: built, cached, loaded."""
