"""What `Pipeline` is made of: stages of a model that is traced and cut, or the whole model in one process."""
