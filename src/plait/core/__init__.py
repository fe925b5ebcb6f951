"""What every package shares: errors, names, files, versioned artefacts, typed events, logging.

Nothing here knows of models, processes or devices.
"""
