"""PEFT models: adapters of one base with unlike ranks, dropouts and layers train as each does alone."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F

from plait.fusion import (
    FusedOptimizer,
    FusionError,
    add_trials,
    fuse,
    fuse_optimizers,
    keep_trials,
    replace_trial,
    split_optimizer,
)
from plait.fusion.verify.plain_run import drawing_as

transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft: pip install 'plait[peft]'")

CAUSAL = {"task_type": "CAUSAL_LM"}
STEPS = 20
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{"vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1} | options,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).double()


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=24, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    config.use_cache = False
    return transformers.GPT2LMHeadModel(config).double()


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=24, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.BertForSequenceClassification(config).double()


class Unpacked(torch.autograd.Function):
    """A product with integers of 4 bits, two in a byte."""

    @staticmethod
    def weight(packed):
        return torch.stack([packed // 16, packed % 16], -1).flatten(1).double() / 16 - 0.5

    @staticmethod
    def forward(ctx, x, packed):
        ctx.packed = packed
        return x @ Unpacked.weight(packed).mT

    @staticmethod
    def backward(ctx, dy):
        return dy @ Unpacked.weight(ctx.packed), None


class PackedLinear(torch.nn.Linear):
    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        shape = (layer.out_features, layer.in_features // 2)
        self.weight = torch.nn.Parameter(torch.randint(256, shape, dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        return Unpacked.apply(x, self.weight)


def packed():
    """A model in 4 bits that recomputes its layers, as QLoRA has it."""
    model = llama()
    for path, part in list(model.model.named_modules()):
        if type(part) is torch.nn.Linear:
            model.model.set_submodule(path, PackedLinear(part))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model


def lora(rank=2, targets=("q_proj", "v_proj"), **options):
    return peft.LoraConfig(r=rank, target_modules=list(targets), **{**CAUSAL, **options})


def adapted(base, configs):
    """A PEFT model for each configuration, with weights that all matter."""
    models = []
    for seed, config in enumerate(configs):
        torch.manual_seed(seed)
        model = peft.get_peft_model(copy.deepcopy(base), config).double()
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        models.append(model)
    return models


def loss_of(logits, labels):
    """Cross entropy of the last positions, which are those of the labels; -100 is left out."""
    if logits.dim() == 2:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits[:, -labels.shape[1] :].flatten(0, 1), labels.flatten())


def batches(count, classes, sizes, lengths):
    """For each step and trial (tokens, mask, labels), of the trial's own batch size and length."""
    numbers = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        step = []
        for trial in range(count):
            shape = (sizes[trial % len(sizes)], lengths[trial % len(lengths)])
            tokens = torch.randint(0, 24, shape, generator=numbers)
            labels = torch.randint(0, 2, shape[:1], generator=numbers) if classes else tokens.roll(-1, 1)
            step.append((tokens, torch.ones_like(tokens), labels))
        yield step


def stacked(parts, fill):
    """Parts of unlike sizes in one tensor, with `fill` after them."""
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts))]
    whole = torch.full((len(parts), *shape), fill)
    for slot, part in zip(whole, parts):
        slot[tuple(slice(size) for size in part.shape)] = part
    return whole


def warm_up_of(optimizer, steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


def train(fused, optimizer, steps, warm_up_steps=1):
    warm_up = warm_up_of(optimizer, warm_up_steps)
    fused.train()
    for step in steps:
        tokens, mask, labels = (stacked(parts, fill) for parts, fill in zip(zip(*step), (0, 0, -100)))
        mask[:, :, 0] = 1  # a row of padding must attend to something
        logits = fused(input_ids=tokens, attention_mask=mask).logits
        losses = fused.map(loss_of, logits, labels)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        warm_up.step()


def train_alone(model, optimizer, steps, warm_up_steps=1):
    warm_up = warm_up_of(optimizer, warm_up_steps)
    model.train()
    for tokens, mask, labels in steps:
        loss = loss_of(model(input_ids=tokens, attention_mask=mask).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()


CASES = {
    "lora": (
        llama,
        [
            lora(2, ["v_proj", "o_proj"], lora_alpha=3, lora_dropout=0.2),
            lora(9, ["o_proj", "down_proj"], use_rslora=True),
            lora(4, ["embed_tokens", "q_proj", "lm_head"], lora_alpha=32, lora_dropout=0.1),
        ],
        {},
    ),
    # One of the trials has no padding at all.
    "lora, unlike batches": (
        llama,
        [lora(2), lora(3, lora_alpha=1, lora_dropout=0.1)],
        {"sizes": (2, 3), "lengths": (4, 7)},
    ),
    "dora": (
        llama,
        [lora(2, use_dora=True), lora(5, ["v_proj", "up_proj"], use_dora=True, lora_dropout=0.1)],
        {},
    ),
    "bias": (llama, [lora(2, lora_bias=True), lora(3, ["o_proj"], lora_bias=True)], {}),
    "tokens": (llama, [lora(rank, trainable_token_indices=[1, 5]) for rank in (2, 3)], {}),
    "packed": (packed, [lora(2, lora_dropout=0.1), lora(3, ["v_proj", "down_proj"])], {}),
    "ia3": (
        llama,
        [
            peft.IA3Config(
                target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL
            ),
            peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[], **CAUSAL),
        ],
        {},
    ),
    "prompt": (llama, [peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL)] * 2, {}),
    "prefix": (llama, [peft.PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL)] * 2, {}),
    "gpt2, which drops itself": (
        gpt2,
        [lora(2, ["c_attn"]), lora(3, ["c_attn", "c_proj"], lora_dropout=0.1)],
        {},
    ),
    "a head that is trained": (
        bert,
        [lora(rank, ["query"], task_type="SEQ_CLS") for rank in (2, 4)],
        {"classes": True},
    ),
}


RARE = ("bias", "tokens", "gpt2, which drops itself", "lora", "prefix")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.extended] * (case in RARE)) for case in CASES]
)
def test_adapters_train_together_as_each_does_alone_and_are_saved_as_peft_saves_them(case, tmp_path):
    make, configs, options = CASES[case]
    base, count = make(), len(configs)
    options = {"classes": False, "sizes": (2,), "lengths": (5,)} | options
    models = adapted(base, configs)
    alone = [copy.deepcopy(model) for model in models]
    rates, decays = [0.01 * (n + 1) for n in range(count)], [0.3 * n for n in range(count)]
    fused = fuse(models, range(len(models)))
    optimizer = FusedOptimizer(fused, "adamw", lr=rates, weight_decay=decays)
    train(fused, optimizer, batches(count, **options), warm_up_steps=5)
    assert not fused.unfused
    for number, (model, trained) in enumerate(zip(alone, fused.split())):
        parameters = [p for p in model.parameters() if p.requires_grad]
        plain = torch.optim.AdamW(parameters, rates[number], weight_decay=decays[number])
        with drawing_as(model, number, 0, {}):
            train_alone(model, plain, (step[number] for step in batches(count, **options)), 5)
        torch.testing.assert_close(trained.state_dict(), model.state_dict(), rtol=0, atol=1e-10)
        assert trained.peft_config == model.peft_config
        loaded = []
        for each, folder in ((trained, tmp_path / f"{number}"), (model, tmp_path / f"{number}-alone")):
            each.save_pretrained(folder)
            assert (folder / "adapter_model.safetensors").is_file()
            loaded.append(peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval())
        saved = [
            json.loads((tmp_path / f"{number}{end}/adapter_config.json").read_text())
            for end in ("", "-alone")
        ]
        # PEFT writes sets as lists, in any order.
        for config in saved:
            config.update({name: sorted(value) for name, value in config.items() if isinstance(value, list)})
        assert saved[0] == saved[1]
        tokens = torch.arange(8).view(2, 4)
        torch.testing.assert_close(loaded[0](input_ids=tokens).logits, loaded[1](input_ids=tokens).logits)


def test_adapters_of_smaller_rank_join_and_leave_an_array():
    base = llama()
    models = adapted(base, [lora(4), lora(2, ["q_proj"]), lora(3, ["v_proj"], lora_alpha=5), lora(1)])
    fused = fuse(models[:2])
    optimizer = FusedOptimizer(fused, "adamw", lr=0.01)
    steps = [step[:2] for step in batches(2, False, (2,), (4,))]
    train(fused, optimizer, steps[:3])
    replace_trial(fused, optimizer, 0, models[2], 0)
    add_trials(fused, optimizer, models[3:], [3])
    keep_trials(fused, optimizer, [0, 2])
    train(fused, optimizer, steps[:3])
    for number, model in enumerate(models[2:]):
        plain = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 0.01)
        train_alone(model, plain, (step[number] for step in steps[:3]))
        torch.testing.assert_close(fused.trial(number).state_dict(), model.state_dict(), rtol=0, atol=1e-10)
    with pytest.raises(FusionError, match=r"its rank at '.*q_proj' is 5, expected 4 or less"):
        replace_trial(fused, optimizer, 0, adapted(base, [lora(5)])[0], 0)


def test_optimizers_of_adapters_are_fused_and_split_with_their_states():
    models = adapted(llama(), [lora(4), lora(2, ["q_proj"])])
    steps = list(batches(2, False, (2,), (4,)))
    plain = [torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), 0.01) for m in models]
    for number, (model, optimizer) in enumerate(zip(models, plain)):
        train_alone(model, optimizer, (step[number] for step in steps[:2]))
    fused = fuse(models)
    optimizer = fuse_optimizers(fused, plain, models)
    train(fused, optimizer, steps[2:4])
    split = fused.split()
    for number, (model, lone) in enumerate(zip(split, split_optimizer(optimizer, split))):
        train_alone(model, lone, (step[number] for step in steps[4:6]))
        train_alone(models[number], plain[number], (step[number] for step in steps[2:6]))
        torch.testing.assert_close(model.state_dict(), models[number].state_dict(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("count", [1, 8, 32])
def test_the_base_of_adapters_is_held_once(count):
    base = llama()
    fused = fuse(adapted(base, [lora(4) for _ in range(count)]), verify=False)
    adapter = sum(p.nbytes for p in fused.trial(0).parameters() if p.requires_grad)
    frozen = sum(tensor.nbytes for tensor in (*base.parameters(), *base.buffers()))
    held = sum(tensor.nbytes for tensor in (*fused.module.parameters(), *fused.module.buffers()))
    assert held <= 1.05 * (frozen + count * adapter)


def test_an_optimizer_of_whole_matrices_refuses_padded_ranks():
    fused = fuse(adapted(llama(), [lora(2), lora(3)]))
    with pytest.raises(FusionError, match="adafactor computes with whole matrices.* unlike ranks"):
        FusedOptimizer(fused, "adafactor")


def test_merging_the_adapter_of_a_trial_changes_no_other():
    models = adapted(llama(), [lora(2), lora(3, ["q_proj"])])
    tokens = torch.arange(8).view(2, 4)
    expected = [model(input_ids=tokens).logits for model in models]
    fused = fuse(models)
    split = fused.split()
    fuse([split[0], adapted(llama(), [lora(3)])[0]])  # what it has for that differs from no other model
    for _ in range(2):
        for model, logits in zip(split, expected):
            torch.testing.assert_close(model.merge_and_unload()(input_ids=tokens).logits, logits)
        split = copy.deepcopy(fused.split())


def test_a_state_of_larger_ranks_is_refused():
    fused, other = (fuse(adapted(llama(), [lora(rank) for rank in ranks])) for ranks in ((2, 4), (4, 2)))
    with pytest.raises(FusionError, match=r"q_proj\.lora_A.*of trial 1 has more than rank 2"):
        other.load_state_dict(fused.state_dict())
    fused.load_state_dict(fused.state_dict())


def test_a_loss_may_also_use_the_base_without_the_adapters():
    models = adapted(llama(), [lora(2), lora(3, ["o_proj"])])
    fused, tokens = fuse(models), torch.arange(16).view(2, 2, 4)

    def preference(model, x):
        with torch.no_grad(), model.disable_adapter():
            reference = model(input_ids=x).logits
        return (model(input_ids=x).logits - reference).square().mean()

    expected = torch.stack([preference(model, x) for model, x in zip(models, tokens)])
    torch.testing.assert_close(fused.call(preference, tokens), expected, rtol=0, atol=1e-12)
    with pytest.raises(FusionError, match=r"merge the adapter of one trial: fused\.trial\(0\)"):
        fused.module.merge_adapter()


def in_use(name):
    model = peft.get_peft_model(llama(), lora(2), adapter_name="a")
    model.add_adapter("b", lora(2))
    model.set_adapter(name)
    return model


def ia3(*targets):
    return peft.IA3Config(target_modules=list(targets), feedforward_modules=[], **CAUSAL)


def test_states_of_other_arrays_are_refused_in_words():
    fused = fuse(adapted(llama(), [ia3("q_proj"), ia3("k_proj")]))
    other = fuse(adapted(llama(), [ia3("k_proj"), ia3("q_proj")]))
    fused.load_state_dict(other.state_dict())  # nothing is trained so far
    with torch.no_grad():
        for parameter in fused.module.parameters():
            parameter.mul_(1.5)
    with pytest.raises(FusionError, match=r"q_proj\.ia3_l.*of trial 0 is trained, and this"):
        other.load_state_dict(fused.state_dict())
    with pytest.raises(FusionError, match="found the state of 2 trials, expected 1; fuse as many"):
        fuse(adapted(llama(), [ia3("q_proj")])).load_state_dict(fused.state_dict())
    with pytest.raises(FusionError, match="found the state of a single model, expected that of a fused"):
        other.load_state_dict(other.trial(0).state_dict())


def test_text_is_generated_by_a_trial_and_not_by_the_module_of_all():
    model = adapted(llama(), [lora(2)])[0]
    fused = fuse([model, *adapted(llama(), [lora(3)])], verify=False)
    tokens = torch.arange(8).view(2, 4)
    texts = [
        each.generate(input_ids=tokens, max_new_tokens=2, pad_token_id=0) for each in (model, fused.trial(0))
    ]
    assert torch.equal(*texts)
    with pytest.raises(FusionError, match=r"found the module of all trials.*fused\.trial\(0\)\.generate"):
        fused.module.generate(input_ids=tokens)
    with pytest.raises(FusionError, match=r"found the module of all trials.*trial\(0\)\.save_pretrained"):
        fused.module.save_pretrained("adapter")
    for name in ("generate", "merge_and_unload", "config"):
        with pytest.raises(
            AttributeError, match=f"no '{name}', which its models have: use that of one trial"
        ):
            getattr(fused, name)


def wrapped_twice():
    base = llama()
    return [peft.get_peft_model(base, lora(rank)) for rank in (2, 3)]


def named(model, base):
    model.peft_config["default"].base_model_name_or_path = base
    return model


REFUSED = {
    "one base object": (wrapped_twice, r"are adapters of one base object.*copy\.deepcopy\(base\)"),
    "another vocabulary": (
        lambda: adapted(llama(), [lora()]) + adapted(llama(vocab_size=30), [lora()]),
        r"the bases of models 0 and 1 differ: 'model.embed_tokens.weight' is \(24, 16\).*one vocabulary",
    ),
    "another base": (
        lambda: [*map(named, adapted(llama(), [lora(), lora()]), ("one", "two"))],
        "model 0 adapts 'one' and model 1 'two'",
    ),
    "another method": (
        lambda: adapted(llama(), [lora(), lora(use_dora=True)]),
        "model 0 is an adapter by LORA and model 1 one by DORA",
    ),
    "other modules": (
        lambda: adapted(llama(), [lora(modules_to_save=names) for names in (None, ["lm_head"])]),
        r"modules_to_save is None in model 0 and \['lm_head'\] in model 1",
    ),
    "ranks of a method that cannot be padded": (
        lambda: adapted(
            llama(), [peft.AdaLoraConfig(init_r=r, total_step=9, target_modules=["q_proj"]) for r in (2, 3)]
        ),
        "init_r is 2 in model 0 and 3 in model 1; fused adapters by ADALORA have the same",
    ),
    "other tokens": (
        lambda: adapted(llama(), [lora(trainable_token_indices=[n]) for n in (1, 2)]),
        r"trainable_token_indices is \[1\] in model 0 and \[2\] in model 1",
    ),
    "biases of other layers": (
        lambda: adapted(llama(), [lora(2, [name], bias="lora_only") for name in ("q_proj", "v_proj")]),
        "bias='lora_only' and unlike target_modules",
    ),
    "adapters in use": (
        lambda: [in_use("a"), in_use("b")],
        r"the adapters in use are \['a'\] in model 0 and \['b'\] in model 1.*call set_adapter",
    ),
    "no adapter": (lambda: [*adapted(llama(), [lora()]), llama()], "model 1 is a LlamaForCausalLM"),
    "tokens of prompts": (
        lambda: adapted(llama(), [peft.PromptTuningConfig(num_virtual_tokens=n, **CAUSAL) for n in (2, 3)]),
        "num_virtual_tokens is 2 in model 0 and 3 in model 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_cannot_be_one_array_are_refused_in_words(case):
    make, message = REFUSED[case]
    with pytest.raises(FusionError, match=message):
        fuse(make())
