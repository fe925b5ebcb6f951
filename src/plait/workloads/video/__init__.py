"""Video captions: S2VT. The data of its example is in `examples/captions.py`."""
