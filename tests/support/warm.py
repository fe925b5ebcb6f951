"""What the ranks of test worlds would each load and trace again; the fork server imports it once for all.

It is for worlds alone: importing it traces models, which takes seconds.
"""

# Torch's optimizers load the first; tracing with free sizes loads the others.
import sympy.tensor.tensor  # noqa: F401
import torch._dynamo
import torch.export._trace  # noqa: F401

from support.pipelines import Case, build, traced_model

for name in ("cnn", "lstm", "transformer"):
    traced_model(Case(name, ()), build(Case(name, ())))
