"""The only package that imports DeepSpeed, and that states facts of its version 0.19.8."""
