"""Bytes between SSD, host and device: queues, buffers, files."""
