"""Shared by all packages: errors, names, files, versioned artefacts, typed events, logging.

It is independent of models, processes and devices.
"""
