"""Adapters of unlike ranks, scales and layers on one frozen model, trained in one loop; PEFT saves each.

python examples/lora_sweep.py [FOLDER]    (needs pip install 'plait[peft]')
"""

import copy
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import plait

folder = sys.argv[1] if len(sys.argv) > 1 else "adapters"
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, use_cache=False)).double()
configs = [
    LoraConfig("CAUSAL_LM", r=2, lora_alpha=4, target_modules=["q_proj"]),
    LoraConfig("CAUSAL_LM", r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
    LoraConfig("CAUSAL_LM", r=16, use_rslora=True, target_modules="all-linear"),
]
# A copy for each, since get_peft_model changes the model that it is given; `fused` holds the base once.
models = [get_peft_model(copy.deepcopy(base), config).double() for config in configs]
fused = plait.fuse(models)
optimizer = plait.FusedOptimizer(fused, "adamw", lr=[0.03, 0.01, 0.003])
for _ in range(20):
    tokens = (torch.randint(64, (3, 8, 1)) + torch.arange(12)) % 64  # each adapter has data of its own
    logits = fused(input_ids=tokens).logits
    losses = fused.map(lambda x, y: cross_entropy(x[:, :-1].mT, y[:, 1:]), logits, tokens)
    optimizer.zero_grad()
    losses.sum().backward()
    optimizer.step()
for config, adapter, loss in zip(configs, fused.split(), losses.tolist()):
    PeftModel.save_pretrained(adapter, f"{folder}/rank-{config.r}")
    print(f"rank {config.r}: loss {loss:.12f}")
