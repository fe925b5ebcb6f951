"""The models of `model_zoo.py`: image models, models as people write them, models of transformers."""
