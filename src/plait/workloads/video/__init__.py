"""Videos: features of their frames in, captions out."""
