"""Updates of the weights of stages: their versions, loss scales, tied and frozen weights."""
