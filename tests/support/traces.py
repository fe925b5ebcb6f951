"""Traces of the models that most pipelines in test worlds train; importing it makes them."""

from support.pipelines import Case, build, traced_model

for name in ("cnn", "lstm", "transformer", "masked"):
    traced_model(Case(name, ()), build(Case(name, ())))
