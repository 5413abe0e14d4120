"""Folders of runs below an nvme_path: claimed, locked, found, removed."""
