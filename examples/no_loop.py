"""Train the objects of a script on two workers, without a loop: python examples/no_loop.py"""

import functools

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import plait


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images / 16)
        return logits


digits = load_digits()
images = TensorDataset(torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target))
train_set, test_set = random_split(images, [0.8, 0.2], torch.Generator().manual_seed(0))

result = plait.train(
    model=Net,
    data=(train_set, test_set),
    loss=nn.CrossEntropyLoss(label_smoothing=0.1),
    optimizer=functools.partial(torch.optim.AdamW, lr=0.01),
    epochs=3,
    workers=2,
)
run = plait.open_run(result.run)
losses = [value for _, value in run.history("loss")]
print(f"training loss from {losses[0]:.2f} to {losses[-1]:.2f}")
print(f"accuracy {run.evaluate(metrics=['accuracy'])['accuracy']:.1%}")
