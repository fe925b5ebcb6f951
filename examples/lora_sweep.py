"""Adapters of unlike ranks, scales and layers on one frozen model, trained in one loop; PEFT saves each.

python examples/lora_sweep.py FOLDER    (needs pip install 'plait[peft]')
"""

import copy
import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import plait

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, use_cache=False)).double()
settings = [
    {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]},
    {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    {"r": 16, "use_rslora": True, "target_modules": "all-linear"},
]
# A copy for each, since get_peft_model changes the model that it is given; `fused` holds the base once.
models = [get_peft_model(copy.deepcopy(base), LoraConfig(**each, task_type="CAUSAL_LM")) for each in settings]
fused = plait.fuse([model.double() for model in models])
optimizer = plait.FusedOptimizer(fused, "adamw", lr=[0.03, 0.01, 0.003])
for _ in range(20):
    tokens = (torch.randint(64, (3, 8, 1)) + torch.arange(12)) % 64  # each adapter has data of its own
    logits = fused(input_ids=tokens).logits
    losses = fused.map(lambda x, y: cross_entropy(x[:, :-1].mT, y[:, 1:]), logits, tokens)
    optimizer.zero_grad()
    losses.sum().backward()
    optimizer.step()
for each, adapter, loss in zip(settings, fused.split(), losses.tolist()):
    adapter.save_pretrained(f"{sys.argv[1]}/rank-{each['r']}")
    print(f"rank {each['r']}: loss {loss:.12f}")
